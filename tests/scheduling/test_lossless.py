"""Losslessness under scheduling, by enumeration of drafts, schedule and verification together.

Two requests share the capacity of a step. Their second confidences depend on their first draft, so that each one's
verified length depends on both drafts. What is compared is the joint law of both requests' next γ+1 tokens.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.scheduling.forest import chain_forest
from dspark_jax.scheduling.prefix_scheduler import early_stop, global_best
from dspark_jax.scheduling.throughput import StepTable
from dspark_jax.verification.rejection import acceptance_log_probability, residual_log_law
from tests.scheduling.two_requests import (
    CASES,
    GAMMA,
    REQUESTS,
    VOCABULARY,
    best,
    confident,
    early,
    filled,
    fixed,
    lengths_of,
    normalized,
    pair,
    table,
)

# Every draft (x1, x2) of one request, and every pair of drafts of both.
DRAFTS = np.indices((VOCABULARY,) * GAMMA).reshape(GAMMA, -1).T
PAIRS = np.indices((len(DRAFTS),) * REQUESTS).reshape(REQUESTS, -1).T


@dataclasses.dataclass
class Request:
    """Laws after every prefix, `p[d]` and `q[d]` of shape [V]*(d+1); c_1, and c_2 by the first draft."""

    p: list[np.ndarray]
    q: list[np.ndarray]
    first: float
    second: np.ndarray

    @property
    def plain(self) -> np.ndarray:
        """The target's law of the next γ+1 tokens."""
        return self.p[0][:, None, None] * self.p[1][:, :, None] * self.p[2]

    @property
    def drawn(self) -> np.ndarray:
        """The probability of each draft."""
        return (self.q[0][:, None] * self.q[1]).ravel()

    @property
    def survival(self) -> np.ndarray:
        """a of each draft, [drafts, γ]."""
        return np.stack([np.full(len(DRAFTS), self.first), self.first * self.second[DRAFTS[:, 0]]], axis=1)

    def completed(self, accepted: tuple[int, ...], extra: np.ndarray) -> np.ndarray:
        """The law of γ+1 tokens: those accepted, then one by `extra`, then by the target's own law."""
        following = [self.p[1][:, :, None] * self.p[2], self.p[2], np.ones_like(self.p[2])][len(accepted)]
        law = np.zeros_like(self.plain)
        law[accepted] = extra.reshape(-1, *(1,) * (GAMMA - len(accepted))) * following[accepted]
        return law


@functools.cache
def random_request(seed: int) -> Request:
    rng = np.random.default_rng(seed)
    p, q = ([rng.dirichlet(np.ones(VOCABULARY), size=(VOCABULARY,) * d) for d in range(GAMMA + 1)] for _ in "pq")
    return Request(p, q[:GAMMA], rng.uniform(0.2, 1), rng.uniform(size=VOCABULARY))


def rejection(request: Request, x: tuple[int, ...], length: int) -> np.ndarray:
    """Law of a request's next γ+1 tokens, given its draft and the verified length, by the library's own formulas."""
    law, reached = np.zeros_like(request.plain), 1.0
    for slot in range(length):
        log_p, log_q = (jnp.log(laws[slot][x[:slot]]) for laws in (request.p, request.q))
        accept = float(jnp.exp(acceptance_log_probability(log_p, log_q))[x[slot]])
        residual = normalized(np.exp(residual_log_law(log_p, log_q)))
        law += reached * (1 - accept) * request.completed(x[:slot], residual)
        reached *= accept
    return law + reached * request.completed(x[:length], request.p[length][x[:length]])


def block(request: Request, x: tuple[int, ...], length: int) -> np.ndarray:
    """The same by block verification's formulas, as `verify_block` documents them."""
    running = [1.0]
    for slot in range(length):
        running.append(min(running[-1] * request.p[slot][x[: slot + 1]] / request.q[slot][x[: slot + 1]], 1.0))
    law, left = np.zeros_like(request.plain), 1.0
    for count in range(length, -1, -1):
        extra, stands = request.p[count][x[:count]], running[count]
        if count < length:
            residual = np.maximum(running[count] * extra - request.q[count][x[:count]], 0)
            stands = residual.sum() / (residual.sum() + 1 - running[count]) if count else 1.0
            extra = normalized(residual) if residual.any() else extra
        law += left * stands * request.completed(x[:count], extra)
        left *= 1 - stands
    return law


@functools.cache
def given_draft(verifier, seed: int) -> np.ndarray:
    """[drafts, lengths, V^(γ+1)]."""
    request = random_request(seed)
    with jax.enable_x64(True):
        laws = [[verifier(request, tuple(x), length).ravel() for length in range(GAMMA + 1)] for x in DRAFTS]
    return np.array(laws)


def joint_survival(case: int) -> np.ndarray:
    """[pairs, R, γ]."""
    return np.stack([random_request(seed).survival[PAIRS[:, r]] for r, seed in enumerate(pair(case))], axis=1)


def scheduled(policy, tokens=0) -> tuple[np.ndarray, np.ndarray]:
    survival = jnp.asarray(np.stack([joint_survival(case) for case in range(CASES)]), jnp.float32)
    tokens = jnp.asarray(np.broadcast_to(tokens, survival.shape[:2]), jnp.int32)
    return jax.device_get(lengths_of(policy, survival, table(), tokens))


def joint_law(verifier, case: int, lengths: np.ndarray) -> np.ndarray:
    """[V^(γ+1), V^(γ+1)]: what both requests emit; `lengths` [pairs, R]."""
    laws = [given_draft(verifier, seed)[PAIRS[:, r], lengths[:, r]] for r, seed in enumerate(pair(case))]
    drawn = np.prod([random_request(seed).drawn[PAIRS[:, r]] for r, seed in enumerate(pair(case))], axis=0)
    return np.einsum("i,ij,ik->jk", drawn, *laws)


def errors(verifier, lengths: np.ndarray) -> np.ndarray:
    """Total variation between the emitted joint law and the target's, for each case."""
    found = []
    for case in range(CASES):
        first, second = (random_request(seed).plain.ravel() for seed in pair(case))
        found.append(0.5 * np.abs(joint_law(verifier, case, lengths[case]) - np.outer(first, second)).sum())
    return np.array(found)


def token_dependent(lengths: np.ndarray) -> int:
    """In how many cases a request's length depends on the first draft of the other request, and of its own."""
    by_draft = lengths.reshape(CASES, VOCABULARY, VOCABULARY, VOCABULARY, VOCABULARY, REQUESTS)[:, :, 0, :, 0]
    own, other = np.ptp(by_draft[..., 0], axis=1).any(axis=1), np.ptp(by_draft[..., 0], axis=2).any(axis=1)
    return int((own & other).sum())


@pytest.mark.parametrize("verifier", [rejection, block])
@pytest.mark.parametrize("policy", [early, fixed, confident])
def test_non_anticipating_policies_keep_the_joint_law(policy, verifier):
    lengths, _ = scheduled(policy)
    if policy is early:
        assert token_dependent(lengths) > 3, "the schedule must depend on drafts for the test to mean anything"
    assert errors(verifier, lengths).max() < 1e-9


@pytest.mark.parametrize("verifier", [rejection, block])
def test_a_capacity_known_before_the_round_keeps_the_joint_law(verifier):
    """Every capacity, hence every law of capacities; also that of independent older confidences."""
    for tokens in range(REQUESTS, REQUESTS * (GAMMA + 1) + 1):
        lengths, _ = scheduled(filled, tokens)
        assert errors(verifier, lengths).max() < 1e-9
        if tokens == REQUESTS * (GAMMA + 1) - 1:
            assert token_dependent(lengths) > 3
    _, old = scheduled(filled)
    assert len(np.unique(old)) > 2
    older = [random_request(100 + case).drawn for case in range(CASES)]
    weights = np.stack([(w[:, None] * w[None]).ravel() for w in older])
    laws = np.zeros((CASES, VOCABULARY ** (GAMMA + 1), VOCABULARY ** (GAMMA + 1)))
    for tokens in np.unique(old):
        lengths, _ = scheduled(filled, tokens)
        share = np.where(old == tokens, weights, 0).sum(axis=1)
        laws += [share[case] * joint_law(verifier, case, lengths[case]) for case in range(CASES)]
    for case, law in enumerate(laws):
        plain = (random_request(seed).plain.ravel() for seed in pair(case))
        np.testing.assert_allclose(law, np.outer(*plain), atol=1e-9)


@pytest.mark.parametrize("verifier", [rejection, block])
def test_the_global_best_is_biased(verifier):
    lengths, now = scheduled(best)
    assert (errors(verifier, lengths) > 1e-3).sum() > 3
    # A capacity from the confidences of this very round is the global best by another name.
    np.testing.assert_array_equal(scheduled(filled, now)[0], lengths)


def test_a_retrospective_length_has_the_bias_of_the_papers_appendix_a():
    """Target (0.7, 0.3), draft (0.5, 0.5): verifying only where a confident second slot follows gives (0.85, 0.15)."""
    p, q = np.array([0.7, 0.3]), np.array([0.5, 0.5])
    log_p, log_q = jnp.log(jnp.asarray(p)), jnp.log(jnp.asarray(q))
    accept = np.exp(acceptance_log_probability(log_p, log_q))
    residual = normalized(np.exp(residual_log_law(log_p, log_q)))

    def law(lengths):
        emitted = np.zeros(2)
        for x, length in enumerate(lengths):
            verified = accept[x] * np.eye(2)[x] + (1 - accept[x]) * residual
            emitted += q[x] * (verified if length else p)
        return emitted

    steps = StepTable(jnp.asarray([1, 3], jnp.int32), jnp.asarray([1, 0.65], jnp.float32))
    survival = jnp.asarray([[[0.4, 0.4]], [[0.4, 0.0]]], jnp.float32)
    forests = jax.jit(jax.vmap(chain_forest))(survival, jnp.ones((2, 1), bool))
    retrospective = jax.jit(jax.vmap(global_best, (0, None)))(forests, steps).lengths[:, 0]
    assert retrospective.tolist() == [2, 0]
    np.testing.assert_allclose(law(retrospective), [0.85, 0.15], atol=1e-6)
    stopped = jax.jit(jax.vmap(early_stop, (0, None)))(forests, steps).lengths[:, 0]
    assert stopped.tolist() == [0, 0]
    for lengths in (stopped, [1, 1]):
        np.testing.assert_allclose(law(lengths), p, atol=1e-6)
