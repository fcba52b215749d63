"""Laws of what trees emit, by exact enumeration through a model and its verification."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import DecodeConfig, TreeSpec, Verifier, request_keys, sampling_params
from dspark_jax.decode_state import Requests
from dspark_jax.drafters.dspark import DrafterParams
from dspark_jax.drafters.markov import MarkovHead
from dspark_jax.drafting.pctree import pctree
from dspark_jax.layers.linear import Embedding, Linear
from dspark_jax.layers.norm import Norm
from dspark_jax.proposals import Proposal, ancestors
from dspark_jax.rounds import prefill, propose_round, target_noise
from dspark_jax.targets.decoder import forward_tree, target_logits
from dspark_jax.verification.walk import walk
from tests.models import drafter_config, pair_config, random_drafter, random_target, target_config
from tests.test_sampling import reference_law
from tests.test_trees import document_logits


@functools.partial(jax.jit, static_argnames="config")
def proposal_and_logits(target, drafter, config, state):
    proposal = propose_round(drafter, config, state, target_noise(config, state))
    seen = ancestors(proposal.parents, config.depth)
    nodes = (proposal.tokens, proposal.depths, seen)
    out = forward_tree(target, config.target, *nodes, state.lengths - 1, state.cache)
    return proposal, target_logits(target, config.target, out.hidden)


class Enumerated:
    """A target of four tokens in float64, a drafter's tree (Eagle3's chain) after a prompt, and the target's law at
    every node.
    """

    VOCABULARY, DEPTH, PROMPT = 4, 3, (1, 3, 0)

    def __init__(self, setting, head: str = "rnn"):
        self.setting = setting
        config = target_config(self.VOCABULARY)
        if head == "eagle3":
            draft, tree = pair_config(config, block_size=self.DEPTH), None
        else:
            draft, tree = drafter_config(config, head, block_size=self.DEPTH), TreeSpec(k=2, width=2, budget=8)
        self.target = random_target(config, 5, jnp.float64)
        self.drafter = random_drafter(draft, self.target)
        self.config = DecodeConfig(
            target=config,
            drafter=draft,
            tree=tree,
            max_new_tokens=8,
            verifier=Verifier.TARGET_WALK,
        )

    def tree(self) -> tuple[Proposal, np.ndarray]:
        """The tree after the prompt, and the target's law after each of its nodes, by tree verification."""
        one = jnp.ones(1, jnp.int32)
        requests = Requests(request_keys(0, 1), sampling_params(1, *self.setting), 8 * one, jnp.zeros(1, jnp.float32))
        prompt = jnp.asarray([self.PROMPT[:-1]], jnp.int32)
        state = jax.jit(prefill, static_argnames="config")(
            self.target, self.drafter, self.config, requests, prompt, len(self.PROMPT[:-1]) * one
        )
        # The anchor is given, not drawn.
        state = state.replace(tokens=state.tokens.at[0, len(self.PROMPT) - 1].set(self.PROMPT[-1]))
        proposal, logits = proposal_and_logits(self.target, self.drafter, self.config, state)
        return proposal, np.array([reference_law(row, *self.setting) for row in np.asarray(logits)[0]])

    def law(self) -> np.ndarray:
        """The target's law of DEPTH + 1 tokens, from every continuation as a plain document."""
        paths = np.array(list(itertools.product(range(self.VOCABULARY), repeat=self.DEPTH)), np.int32)
        rows = np.concatenate([np.tile(self.PROMPT, (len(paths), 1)), paths], axis=1).astype(np.int32)
        logits = np.asarray(document_logits(self.target, self.config.target, jnp.asarray(rows)))
        logits = logits[:, len(self.PROMPT) - 1 :]
        law = np.zeros((self.VOCABULARY,) * (self.DEPTH + 1))
        for path, row in zip(paths, logits, strict=True):
            steps = [reference_law(x, *self.setting) for x in row]
            law[tuple(path)] = np.prod([steps[i][token] for i, token in enumerate(path)]) * steps[-1]
        return law


@pytest.mark.parametrize(
    ("setting", "head"),
    [
        *(((temperature, 0, top_p, 0.0), "rnn") for temperature, top_p in ((1.0, 1.0), (0.7, 0.8), (0.0, 1.0))),
        ((1.0, 0, 0.9, 0.0), "eagle3"),
    ],
)
def test_the_target_walk_keeps_the_law(setting, head):
    """Every sequence that the target can draw, walked down the tree and completed by the target's own law."""
    with jax.enable_x64(True):
        case = Enumerated(setting, head)
        expected = case.law()
        proposal, laws = case.tree()
        drawn = np.array(list(itertools.product(range(case.VOCABULARY), repeat=case.DEPTH + 1)), np.int32)
        many = jax.tree.map(lambda x: jnp.broadcast_to(x, (len(drawn), *x.shape[1:])), proposal)
        chosen = jnp.take_along_axis(jnp.asarray(drawn), many.depths, axis=1)
        verdict = jax.device_get(walk(many, chosen, case.DEPTH))
    law, lengths = np.zeros_like(expected), set()
    for row, sequence in enumerate(drawn):
        accepted = verdict.accepted[row]
        lengths.add(int(accepted))
        emitted = tuple(verdict.tokens[row, : accepted + 1])
        assert emitted == tuple(sequence[: accepted + 1])
        # Later draws are never looked at: each emitted prefix counts once.
        if any(sequence[accepted + 1 :]):
            continue
        weight = np.prod([laws[node][token] for node, token in zip(verdict.nodes[row], emitted, strict=False)])
        rest = expected[emitted]
        if weight > 0:
            law[emitted] += weight * rest / rest.sum()
    assert lengths == {0, 1, 2, 3}
    np.testing.assert_allclose(law, expected, atol=1e-12)


def shared_noise_laws(keyed_by_position: bool) -> tuple[np.ndarray, np.ndarray]:
    """Exact laws of two tokens, plain and speculative, over every draw of a finite noise [position 1, position 2].

    The round's tree is built and walked under the noise of both positions. Where it accepts nothing, the second token
    comes from a next round, with the same noise for its position or with fresh noise.
    """
    vocabulary, rng = 3, np.random.default_rng(3)
    noises = rng.gumbel(size=(12, vocabulary))
    first, second = rng.normal(size=vocabulary), rng.normal(size=(vocabulary, vocabulary))
    base, bias = rng.normal(size=(2, vocabulary)), rng.normal(size=(vocabulary, vocabulary))
    draws = np.array(list(itertools.product(range(len(noises)), repeat=2)))
    noise = noises[draws]
    target = target_config(vocabulary)
    config = drafter_config(
        target, hidden_size=vocabulary, block_size=2, markov_rank=vocabulary, enable_confidence_head=False
    )
    # With identities for the head and W1 the hidden states are the base logits, and W2's columns the biases.
    identity = Linear(weight=jnp.eye(vocabulary))
    head = MarkovHead(Embedding(weight=jnp.eye(vocabulary)), Linear(weight=jnp.asarray(bias)))
    params = DrafterParams(None, identity, Norm(jnp.ones(vocabulary)), (), Norm(jnp.ones(vocabulary)), identity, head)
    count = len(draws)
    proposal = pctree(
        params,
        config,
        TreeSpec(k=2, width=2, budget=3, spine=False),
        jnp.broadcast_to(jnp.asarray(base), (count, 2, vocabulary)),
        jnp.zeros(count, jnp.int32),
        jnp.asarray(noise),
        lambda logits, noise: logits + noise,
        jnp.zeros(count, jnp.float32),
    )
    tokens, depths = np.asarray(proposal.tokens), np.asarray(proposal.depths)
    after = np.where(depths[..., None] == 0, first, second[tokens])
    by_node = np.take_along_axis(noise, np.minimum(depths, 1)[..., None], axis=1)
    verdict = jax.device_get(walk(proposal, jnp.asarray((after + by_node).argmax(-1).astype(np.int32)), 2))

    plain, speculative = np.zeros((vocabulary, vocabulary)), np.zeros((vocabulary, vocabulary))
    for row in range(count):
        own = (first + noise[row, 0]).argmax()
        plain[own, (second[own] + noise[row, 1]).argmax()] += 1 / count
        token, *rest = verdict.tokens[row, : verdict.accepted[row] + 1]
        assert token == own
        for later in noises[draws[row, 1:]] if keyed_by_position else noises:
            weight = 1 / count if keyed_by_position else 1 / count / len(noises)
            speculative[token, rest[0] if rest else (second[token] + later).argmax()] += weight
    return plain, speculative


def test_shared_noise_must_be_keyed_by_position():
    """Fresh shared noise in every round is biased, since a tree's selection looks at deeper noise; keyed is exact."""
    with jax.enable_x64(True):
        plain, keyed = shared_noise_laws(True)
        np.testing.assert_allclose(keyed, plain, atol=1e-12)
        plain, fresh = shared_noise_laws(False)
    assert fresh.sum() == pytest.approx(1) and np.abs(fresh - plain).sum() / 2 > 0.01
