"""Coupled sampling under any schedule, by enumeration of finitely many noises: exact, whatever the policy looks at."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.proposals import chain
from dspark_jax.verification.walk import walk
from tests.scheduling.two_requests import (
    GAMMA,
    REQUESTS,
    VOCABULARY,
    best,
    early,
    filled,
    lengths_of,
    normalized,
    pair,
    table,
)

WALK = jax.jit(walk, static_argnums=2)


class SharedNoise:
    """One request under coupled sampling, for each of finitely many noises of its next γ+1 positions."""

    def __init__(self, seed: int, values: int = 3):
        rng = np.random.default_rng(seed)
        self.noise, self.weights = rng.gumbel(size=(values, VOCABULARY)), normalized(rng.random(values))
        self.logits = [rng.normal(size=(VOCABULARY,) * (d + 1)) for d in range(GAMMA + 1)]
        self.combinations = np.indices((values,) * (GAMMA + 1)).reshape(GAMMA + 1, -1).T
        self.drawn = self.weights[self.combinations].prod(axis=1)
        # The drafts are the drafter's choices under the same noise.
        self.drafts = np.zeros((len(self.drawn), 0), int)
        for logits in self.logits[:GAMMA]:
            chosen = self.choose(logits + rng.normal(size=logits.shape), self.drafts, self.combinations)
            self.drafts = np.concatenate([self.drafts, chosen[:, None]], axis=1)
        # Worse than any confidence head: each confidence looks at its own token.
        confidences = rng.choice([0.05, 0.4, 0.95], (GAMMA, VOCABULARY))
        self.survival = np.cumprod(confidences[np.arange(GAMMA), self.drafts], axis=1)

    def choose(self, logits: np.ndarray, prefix: np.ndarray, combinations: np.ndarray) -> np.ndarray:
        """argmax(ℓ + g) at the position after each prefix, under each combination of noises."""
        return np.argmax(logits[tuple(prefix.T)] + self.noise[combinations[:, prefix.shape[1]]], axis=1)

    @property
    def plain(self) -> np.ndarray:
        """The target's law under this noise, position by position."""
        law = np.ones(())
        for logits in self.logits:
            chosen = np.eye(VOCABULARY)[np.argmax(logits[..., None, :] + self.noise, axis=-1)]
            law = law[..., None] * np.einsum("m,...mv->...v", self.weights, chosen)
        return law

    def emitted(self, rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """γ+1 tokens for each of `rows`, combinations of noises: one round of such lengths, then plain sampling.

        Later rounds see the same noise, which is keyed by position.
        """
        drafts, combinations = self.drafts[rows], self.combinations[rows]
        chosen = [self.choose(logits, drafts[:, :d], combinations) for d, logits in enumerate(self.logits)]
        tokens = np.pad(drafts, ((0, 0), (1, 0)))
        proposal = chain(jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths, jnp.int32))
        verdict = jax.device_get(WALK(proposal, jnp.asarray(np.stack(chosen, axis=1), jnp.int32), GAMMA))
        assert (verdict.accepted <= lengths).all()
        out = verdict.tokens.copy()
        for position in range(1, GAMMA + 1):
            later = self.choose(self.logits[position], out[:, :position], combinations)
            out[:, position] = np.where(position <= verdict.accepted, out[:, position], later)
        return out @ VOCABULARY ** np.arange(GAMMA + 1)[::-1]


@pytest.mark.parametrize("policy", [best, early, filled])
def test_coupled_sampling_takes_any_policy(policy):
    varied = 0
    for case in range(4):
        requests = [SharedNoise(seed) for seed in pair(case)]
        rows = np.indices([len(request.drawn) for request in requests]).reshape(REQUESTS, -1)
        survival = np.stack([request.survival[row] for request, row in zip(requests, rows, strict=True)], axis=1)
        steps = jax.tree.map(lambda x, case=case: x[case : case + 1], table())
        tokens = jnp.full((1, len(survival)), 5, jnp.int32)
        lengths, _ = lengths_of(policy, jnp.asarray(survival[None], jnp.float32), steps, tokens)
        lengths = np.asarray(lengths)[0]
        varied += np.ptp(lengths, axis=0).any()
        emitted = [request.emitted(rows[r], lengths[:, r]) for r, request in enumerate(requests)]
        law = np.zeros((VOCABULARY ** (GAMMA + 1),) * REQUESTS)
        np.add.at(law, tuple(emitted), requests[0].drawn[rows[0]] * requests[1].drawn[rows[1]])
        np.testing.assert_allclose(law, np.outer(*(request.plain.ravel() for request in requests)), atol=1e-12)
    assert varied > 0
