"""Block verification by enumeration: every draft, every event, and the law of what comes out.

The acceptance probabilities and residual laws are read off `verify_block` itself, by bisection over the uniforms and
the noises that it is given, so that the enumeration is of what the function does and not of a formula for it.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.proposals import Proposal, chain
from dspark_jax.verification.block import verify_block
from dspark_jax.verification.rejection import reject
from tests.verification.test_lossless import EveryDraft

VOCABULARY, GAMMA = 4, 3
DRAFTS = np.array(list(itertools.product(range(VOCABULARY), repeat=GAMMA)))
# Every call is padded to this many requests: one program for all cases of a verifier and a dtype.
ROWS = len(DRAFTS) * (GAMMA + 1) * VOCABULARY
ALMOST_ONE = 1 - 2.0**-53
BLOCK, REJECT = jax.jit(verify_block), jax.jit(reject)


@dataclasses.dataclass
class Verdicts:
    tokens: np.ndarray
    accepted: np.ndarray


def log(x: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(x)


def verify(verifier, drafts, lengths, p, q, uniform, noise, dtype=np.float64) -> Verdicts:
    """Verifies any number of chains up to ROWS, and checks the form of the verdicts."""
    count, gamma = drafts.shape

    def pad(x, dtype):
        return jnp.asarray(np.concatenate([x, np.repeat(x[-1:], ROWS - count, axis=0)]).astype(dtype))

    tokens = pad(np.concatenate([np.zeros((count, 1)), drafts], axis=1), np.int32)
    proposal = chain(tokens, pad(lengths, np.int32), pad(log(q), dtype))
    verdict = jax.device_get(verifier(proposal, pad(log(p), dtype), pad(uniform, dtype), pad(noise, dtype)))
    assert verdict.tokens.shape == verdict.nodes.shape == (ROWS, gamma + 1)
    assert (verdict.accepted >= 0).all() and (verdict.accepted[:count] <= lengths).all()
    index = np.arange(gamma + 1)
    emitted = index[:-1] < verdict.accepted[:count, None]
    np.testing.assert_array_equal(verdict.tokens[:count, :-1][emitted], drafts[emitted])
    stands = index <= verdict.accepted[:, None]
    np.testing.assert_array_equal(verdict.nodes[stands], np.broadcast_to(index, stands.shape)[stands])
    return Verdicts(verdict.tokens[:count], verdict.accepted[:count])


@dataclasses.dataclass
class Case:
    """Target and draft laws after every prefix: `p[d]` and `q[d]` are [V]*(d+1)."""

    p: list[np.ndarray]
    q: list[np.ndarray]

    def rows(self, laws: list[np.ndarray]) -> np.ndarray:
        """[drafts, slots, V]: the laws along every possible draft."""
        return np.stack([[law[tuple(x[:depth])] for depth, law in enumerate(laws)] for x in DRAFTS])

    def drawn(self) -> np.ndarray:
        """The probability of every draft."""
        return np.array([np.prod([law[tuple(x[: depth + 1])] for depth, law in enumerate(self.q)]) for x in DRAFTS])

    def continuations(self) -> list[np.ndarray]:
        """Entry d: P(tokens d.. | the first d tokens), [V]*(γ+1); entry 0 is the law to be kept."""
        laws = [np.ones((VOCABULARY,) * (GAMMA + 1))]
        for law in reversed(self.p):
            laws.insert(0, law.reshape(law.shape + (1,) * (GAMMA + 1 - law.ndim)) * laws[0])
        return laws


def random_law(rng, depth: int, sparse: float) -> np.ndarray:
    law = rng.dirichlet(np.ones(VOCABULARY), size=(VOCABULARY,) * depth)
    keep = rng.random(law.shape) >= sparse
    np.put_along_axis(keep, rng.integers(VOCABULARY, size=(*law.shape[:-1], 1)), True, axis=-1)
    law = np.where(keep, law, 0)
    return law / law.sum(axis=-1, keepdims=True)


def random_case(seed: int, sparse: float = 0.0, close: float = 0.0) -> Case:
    """Random laws. `sparse`: the share of tokens with probability 0; `close`: how much of q is p."""
    rng = np.random.default_rng(seed)
    p = [random_law(rng, depth, sparse) for depth in range(GAMMA + 1)]
    q = [close * p[depth] + (1 - close) * random_law(rng, depth, sparse) for depth in range(GAMMA)]
    return Case(p, q)


CASES = {
    **{f"far {seed}": (seed, 0.0, 0.0) for seed in range(4)},
    **{f"close {seed}": (seed, 0.0, 0.7) for seed in range(4)},
    **{f"sparse {seed}": (seed, 0.4, 0.0) for seed in range(3)},
    "sparse and close": (9, 0.5, 0.5),
}


def accepted_law(verifier, case: Case, lengths: np.ndarray) -> np.ndarray:
    """P(τ = 0..γ | draft), [drafts, γ+1], for a verifier that accepts the longest prefix i with u_i < h_i."""
    slots = np.repeat(np.eye(GAMMA, dtype=bool)[None], len(DRAFTS), axis=0).reshape(-1, GAMMA)
    drafts, bounds = np.repeat(DRAFTS, GAMMA, axis=0), np.repeat(lengths, GAMMA)
    p, q = (np.repeat(case.rows(laws), GAMMA, axis=0) for laws in (case.p, case.q))
    noise = np.zeros_like(p)
    slot = np.tile(np.arange(GAMMA), len(DRAFTS))
    low, high = np.zeros(len(slots)), np.ones(len(slots))
    for _ in range(58):
        middle = (low + high) / 2
        uniform = np.where(slots, np.minimum(middle, ALMOST_ONE)[:, None], ALMOST_ONE)
        hit = verify(verifier, drafts, bounds, p, q, uniform, noise).accepted > slot
        low, high = np.where(hit, middle, low), np.where(hit, high, middle)
    accept = high.reshape(len(DRAFTS), GAMMA)
    refused_later = np.cumprod((1 - accept)[:, ::-1], axis=1)[:, ::-1]
    refused_later = np.concatenate([refused_later, np.ones((len(DRAFTS), 1))], axis=1)
    return np.concatenate([np.ones((len(DRAFTS), 1)), accept], axis=1) * refused_later


def extra_law(verifier, case: Case, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """P(last token | draft, τ), [drafts, γ+1, V], and [drafts, γ+1]: whether that τ can be brought about."""
    shape = (len(DRAFTS), GAMMA + 1, VOCABULARY)
    draft, tau, token = (index.ravel() for index in np.indices(shape))
    drafts, bounds = DRAFTS[draft], lengths[draft]
    p, q = case.rows(case.p)[draft], case.rows(case.q)[draft]
    uniform = np.where(np.arange(1, GAMMA + 1) == tau[:, None], 0.0, ALMOST_ONE)

    def last(noise):
        every_node = np.broadcast_to(noise[:, None], (len(draft), GAMMA + 1, VOCABULARY))
        verdict = verify(verifier, drafts, bounds, p, q, uniform, every_node)
        return verdict.tokens[np.arange(len(draft)), verdict.accepted], verdict.accepted

    best, accepted = last(np.zeros((len(draft), VOCABULARY)))
    low, high = np.zeros(len(draft)), np.full(len(draft), 60.0)
    index = np.arange(VOCABULARY)
    for step in range(60):
        # The first step asks whether the token can come out at all.
        middle = high if step == 0 else (low + high) / 2
        noise = np.where(index == token[:, None], middle[:, None], np.where(index == best[:, None], 0.0, -1e6))
        hit = (last(noise)[0] == token) | (token == best)
        if step == 0:
            possible = hit
        else:
            low, high = np.where(hit, low, middle), np.where(hit, middle, high)
    ratio = np.where(token == best, 1.0, np.where(possible, np.exp(-high), 0.0)).reshape(shape)
    return ratio / ratio.sum(axis=-1, keepdims=True), (accepted == tau).reshape(shape)[..., 0]


def emitted_law(verifier, case: Case, lengths: np.ndarray) -> np.ndarray:
    """Law of the next γ+1 tokens: draft, verify, then the target's own law for what is missing."""
    taus = accepted_law(verifier, case, lengths)
    extras, reachable = extra_law(verifier, case, lengths)
    drawn, later = case.drawn(), case.continuations()
    law = np.zeros((VOCABULARY,) * (GAMMA + 1))
    for i, draft in enumerate(DRAFTS):
        for tau in range(lengths[i] + 1):
            weight = drawn[i] * taus[i, tau]
            if weight < 1e-16:
                continue
            assert reachable[i, tau]
            for token in range(VOCABULARY):
                head = (*draft[:tau], token)
                rest = later[tau + 1][head] if tau < GAMMA else 1.0
                law[head] += weight * extras[i, tau, token] * rest
    return law


def total_variation(case: Case, lengths, verifier=BLOCK) -> float:
    with jax.enable_x64(True):
        law = emitted_law(verifier, case, lengths)
    assert law.sum() == pytest.approx(1, abs=1e-12)
    return 0.5 * np.abs(law - case.continuations()[0]).sum()


def whole() -> np.ndarray:
    return np.full(len(DRAFTS), GAMMA)


def stopping(seed: int) -> np.ndarray:
    """Lengths of which slot k's is decided by a coin for each x_{<k}; slot 0 is always verified."""
    rng = np.random.default_rng(seed)
    coins = [rng.random((VOCABULARY,) * depth) < (0.6 if depth else 1) for depth in range(GAMMA)]
    goes_on = np.array([[bool(coin[tuple(x[:depth])]) for depth, coin in enumerate(coins)] for x in DRAFTS])
    return np.cumprod(goes_on, axis=1).sum(axis=1)


def reference(p, q, draft, length: int) -> tuple[np.ndarray, np.ndarray]:
    """h_1..h_length and the unnormalised law after each number of accepted drafts (Sun et al., block verification)."""
    weight, accept, laws = 1.0, [], []
    for i in range(length + 1):
        if i:
            weight = min(weight * p[i - 1, draft[i - 1]] / q[i - 1, draft[i - 1]], 1.0)
        left = np.maximum(weight * p[i] - q[i], 0) if i < length else p[i]
        laws.append(left)
        mass = left.sum() + 1 - weight
        accept.append(weight if i == length else left.sum() / mass if mass > 0 else 1.0)
    return np.array(accept[1:]), np.array(laws)


@pytest.mark.parametrize("name", CASES)
def test_block_verification_keeps_the_targets_law(name):
    assert total_variation(random_case(*CASES[name]), whole()) < 1e-12


def test_drafting_one_after_the_other_keeps_the_targets_law():
    """An Eagle3 drafter's own laws of every draft, and its target's, through the verifier."""
    with jax.enable_x64(True):
        drafted = EveryDraft("eagle3", VOCABULARY, (1.0, 0, 1.0, 0.0), vocabulary=VOCABULARY)
    np.testing.assert_array_equal(drafted.rows, DRAFTS)

    def laws(logs) -> list[np.ndarray]:
        rows = np.exp(np.asarray(logs)).reshape(*(VOCABULARY,) * GAMMA, -1, VOCABULARY)
        # After d tokens the law is that of any draft that begins with them.
        return [rows[(slice(None),) * d + (0,) * (GAMMA - d) + (d,)] for d in range(rows.shape[-2])]

    assert total_variation(Case(laws(drafted.log_p), laws(drafted.proposal.log_q)), whole()) < 1e-12


@pytest.mark.parametrize("name", ["far 1", "close 2", "sparse 0"])
@pytest.mark.parametrize("seed", [3, 4])
def test_a_length_decided_by_earlier_tokens_keeps_the_targets_law(name, seed):
    lengths = stopping(seed)
    assert set(lengths.tolist()) == set(range(1, GAMMA + 1))
    assert total_variation(random_case(*CASES[name]), lengths) < 1e-12


@pytest.mark.parametrize("length", range(GAMMA))
def test_a_shorter_block_keeps_the_targets_law(length):
    assert total_variation(random_case(5), np.full(len(DRAFTS), length)) < 1e-12


@pytest.mark.parametrize("name", ["far 1", "close 2"])
def test_a_length_that_looks_at_its_own_token_does_not(name):
    lengths = np.cumprod(DRAFTS < 2, axis=1).sum(axis=1)
    assert total_variation(random_case(*CASES[name]), lengths) > 0.01


@pytest.mark.parametrize("verifier", [BLOCK, REJECT], ids=["block", "rejection"])
def test_verifying_only_the_token_that_fits_turns_70_into_85_percent(verifier):
    """p = (0.7, 0.3), q = (0.5, 0.5); the draft is verified if it is the first token, else p is sampled afresh."""

    def two_tokens(law, depth):
        return np.broadcast_to(np.array([*law, 0.0, 0.0]), (VOCABULARY,) * (depth + 1))

    case = Case(
        [two_tokens((0.7, 0.3), depth) for depth in range(GAMMA + 1)],
        [two_tokens((0.5, 0.5), depth) for depth in range(GAMMA)],
    )
    with jax.enable_x64(True):
        cut = emitted_law(verifier, case, (DRAFTS[:, 0] == 0).astype(int)).sum(axis=(1, 2, 3))
        exact = emitted_law(verifier, case, np.ones(len(DRAFTS), int)).sum(axis=(1, 2, 3))
    np.testing.assert_allclose(cut, [0.85, 0.15, 0, 0], atol=1e-12)
    np.testing.assert_allclose(exact, [0.7, 0.3, 0, 0], atol=1e-12)


def test_block_verification_accepts_at_least_what_rejection_sampling_does():
    gains = []
    for arguments in CASES.values():
        case = random_case(*arguments)
        with jax.enable_x64(True):
            taus = accepted_law(BLOCK, case, whole())
        p, q = case.rows(case.p)[:, :-1], case.rows(case.q)
        p_drawn, q_drawn = (np.take_along_axis(x, DRAFTS[..., None], axis=-1)[..., 0] for x in (p, q))
        ratio = np.divide(p_drawn, q_drawn, out=np.ones_like(p_drawn), where=q_drawn > 0)
        tokenwise = np.cumprod(np.minimum(ratio, 1), axis=1).sum(axis=1)
        gains.append(case.drawn() @ (taus @ np.arange(GAMMA + 1) - tokenwise))
    assert min(gains) > -1e-12
    assert max(gains) > 0.02


@pytest.mark.parametrize("sparse", [0.0, 0.5])
def test_verdicts_are_those_of_the_formulas(sparse):
    """Random rows, lengths, uniforms and noises, each node with a noise of its own."""
    rng = np.random.default_rng(80)
    p, q = (
        np.stack([[random_law(rng, 0, sparse) for _ in range(slots)] for _ in range(300)])
        for slots in (GAMMA + 1, GAMMA)
    )
    q[150:] = 0.5 * q[150:] + 0.5 * p[150:, :-1]
    drafts = np.array([[rng.choice(VOCABULARY, p=law) for law in row] for row in q])
    lengths = rng.integers(GAMMA + 1, size=len(p))
    uniform, noise = rng.random((len(p), GAMMA)), rng.gumbel(size=p.shape)
    with jax.enable_x64(True):
        verdict = verify(BLOCK, drafts, lengths, p, q, uniform, noise)
    for row, length in enumerate(lengths):
        accept, laws = reference(p[row], q[row], drafts[row], length)
        accepted = max([i + 1 for i in range(length) if uniform[row, i] < accept[i]], default=0)
        assert verdict.accepted[row] == accepted
        assert verdict.tokens[row, accepted] == np.argmax(log(laws[accepted]) + noise[row, accepted])
    assert set(verdict.accepted.tolist()) == set(range(GAMMA + 1))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_equal_laws_accept_every_draft(dtype):
    rng = np.random.default_rng(81)
    for sparse in (0.0, 0.5):
        p = np.stack([[random_law(rng, 0, sparse) for _ in range(GAMMA + 1)] for _ in range(ROWS)])
        q = p[:, :-1]
        drafts = np.array([[rng.choice(VOCABULARY, p=law) for law in row] for row in q])
        lengths = rng.integers(GAMMA + 1, size=ROWS)
        uniform = np.full((ROWS, GAMMA), np.nextafter(dtype(1), dtype(0)))
        noise = rng.gumbel(size=p.shape)
        with jax.enable_x64(dtype is np.float64):
            verdict = verify(BLOCK, drafts, lengths, p, q, uniform, noise, dtype)
        assert (verdict.accepted == lengths).all()
        last = np.take_along_axis(log(p) + noise, lengths[:, None, None], axis=1)[:, 0].argmax(axis=-1)
        np.testing.assert_array_equal(verdict.tokens[np.arange(ROWS), lengths], last)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_at_temperature_zero_a_block_is_matched_greedily(dtype):
    """One-hot laws: the drafts up to the first mismatch, then the target's choice, whatever the randomness."""
    rng = np.random.default_rng(82)
    choices = rng.integers(2, size=(ROWS, GAMMA + 1))
    drafts = rng.integers(2, size=(ROWS, GAMMA))
    one_hot = np.eye(VOCABULARY)
    lengths = rng.integers(GAMMA + 1, size=ROWS)
    uniform = rng.choice(np.array([0.0, 0.5, np.nextafter(dtype(1), dtype(0))], dtype), size=(ROWS, GAMMA))
    noise = rng.gumbel(size=(ROWS, GAMMA + 1, VOCABULARY))
    with jax.enable_x64(dtype is np.float64):
        verdict = verify(BLOCK, drafts, lengths, one_hot[choices], one_hot[drafts], uniform, noise, dtype)
    matches = np.cumprod((drafts == choices[:, :-1]) & (np.arange(GAMMA) < lengths[:, None]), axis=1).sum(axis=1)
    np.testing.assert_array_equal(verdict.accepted, matches)
    row = np.arange(ROWS)
    np.testing.assert_array_equal(verdict.tokens[row, matches], choices[row, matches])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_the_target_never_says_is_never_emitted(dtype):
    """Laws full of zeros and a uniform of exactly 0: a NaN or a `<=` would let an impossible token through."""
    rng = np.random.default_rng(83)
    p, q = (
        np.stack([[random_law(rng, 0, 0.6) for _ in range(slots)] for _ in range(ROWS)]) for slots in (GAMMA + 1, GAMMA)
    )
    drafts = np.array([[rng.choice(VOCABULARY, p=law) for law in row] for row in q])
    lengths = rng.integers(GAMMA + 1, size=ROWS)
    uniform = rng.choice(np.array([0.0, 0.5], dtype), size=(ROWS, GAMMA))
    noise = rng.gumbel(size=p.shape)
    with jax.enable_x64(dtype is np.float64):
        verdict = verify(BLOCK, drafts, lengths, p, q, uniform, noise, dtype)
    probability = np.take_along_axis(p, verdict.tokens[..., None], axis=-1)[..., 0]
    emitted = np.arange(GAMMA + 1) <= verdict.accepted[:, None]
    assert (probability[emitted] > 0).all()
    assert len(set(verdict.accepted.tolist())) > 2


def test_one_draft_is_rejection_sampling():
    """At γ = 1 the two are one algorithm: same uniforms and noises, same verdicts."""
    rng = np.random.default_rng(84)
    p, q = rng.dirichlet(np.ones(5), size=(200, 2)), rng.dirichlet(np.ones(5), size=(200, 1))
    drafts = np.array([[rng.choice(5, p=law) for law in row] for row in q])
    with jax.enable_x64(True):
        proposal: Proposal = chain(
            jnp.asarray(np.concatenate([np.zeros_like(drafts), drafts], axis=1), jnp.int32),
            jnp.asarray(rng.integers(2, size=200), jnp.int32),
            jnp.asarray(np.log(q)),
        )
        randomness = (jnp.asarray(rng.random((200, 1))), jnp.asarray(rng.gumbel(size=p.shape)))
        block, rejection = (f(proposal, jnp.asarray(np.log(p)), *randomness) for f in (BLOCK, REJECT))
    np.testing.assert_array_equal(block.accepted, rejection.accepted)
    row = np.arange(200)
    np.testing.assert_array_equal(block.tokens[row, block.accepted], rejection.tokens[row, block.accepted])


def test_a_block_needs_the_laws_it_was_drawn_from():
    proposal = chain(jnp.zeros((1, 3), jnp.int32), jnp.full(1, 2, jnp.int32))
    with pytest.raises(ValueError, match="log_q"):
        verify_block(proposal, jnp.zeros((1, 3, 4)), jnp.zeros((1, 2)), jnp.zeros((1, 3, 4)))
