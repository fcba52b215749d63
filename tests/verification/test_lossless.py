"""Losslessness by enumeration: the law of draft + verify is the target's, for every head and setting."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import dspark_jax
from dspark_jax.decode_state import DecodeConfig
from dspark_jax.drafters import kinds
from dspark_jax.drafting.propose import propose
from dspark_jax.layers.kv_cache import init_cache
from dspark_jax.sampling import choose, filter_logits, log_law, position_noise, request_keys, sampling_params
from dspark_jax.targets.decoder import forward_cached, forward_documents, target_logits
from dspark_jax.verification.rejection import acceptance_log_probability, reject, residual_log_law
from dspark_jax.verification.verifier import Verifier
from dspark_jax.verification.walk import walk
from tests.models import (
    HEADS,
    PAIR_KINDS,
    drafter_config,
    pad,
    pair_config,
    random_drafter,
    random_target,
    target_config,
)
from tests.test_sampling import reference_law

VOCABULARY, GAMMA = 5, 3
PROMPT = [1, 4, 0, 2]
SETTINGS = {"warm": (1.0, 0, 1.0, 0.0), "nucleus": (0.8, 0, 0.75, 0.0), "greedy": (0.0, 0, 1.0, 0.0)}


@functools.partial(jax.jit, static_argnames="config")
def plain_logits(params, config, rows):
    positions = jnp.broadcast_to(jnp.arange(rows.shape[1], dtype=jnp.int32)[None], rows.shape)
    hidden = forward_documents(params, config, rows, positions, jnp.zeros_like(positions)).hidden
    return target_logits(params, config, hidden)


def target_law(config, params, prefix: list[int], length: int, setting) -> np.ndarray:
    """P(y_1..y_length | prefix) as an array [V]*length, by running every continuation as a plain document."""
    vocabulary = config.vocab_size
    paths = np.array(list(itertools.product(range(vocabulary), repeat=length - 1)), np.int32).reshape(-1, length - 1)
    rows = np.concatenate([np.tile(prefix, (len(paths), 1)), paths], axis=1).astype(np.int32)
    logits = np.asarray(plain_logits(params, config, rows))[:, len(prefix) - 1 :]
    steps = np.apply_along_axis(lambda row: reference_law(row, *setting), -1, logits)
    law = np.zeros((vocabulary,) * length)
    for path, step in zip(paths, steps, strict=True):
        weight = np.prod([step[depth][token] for depth, token in enumerate(path)])
        law[tuple(path)] = weight * step[-1]
    return law


@functools.partial(jax.jit, static_argnames=("config", "draft_config"))
def one_round(target, drafter, config, draft_config, rows, sampling, threshold):
    """One round from the state after PROMPT, with each of `rows` forced as one request's draft."""
    count, context = len(rows), len(PROMPT) - 1
    # A smaller vocabulary than the module's has no token 4.
    known = [token % config.vocab_size for token in PROMPT[:-1]]
    prompt = jnp.broadcast_to(jnp.asarray(known, jnp.int32)[None], (count, context))
    start = jnp.zeros(count, jnp.int32)
    cache = init_cache(config, count, 16, jnp.float64)
    read = forward_cached(target, config, prompt, start, cache, draft_config.target_layer_ids)
    state = kinds.init_state(draft_config, count, 16, jnp.float64)
    features = kinds.target_features(draft_config, read)
    positions = jnp.full(count, context, jnp.int32)
    state = kinds.extend(drafter, draft_config, state, prompt, features, start, positions)
    anchors = jnp.full(count, PROMPT[-1], jnp.int32)
    proposal = propose(
        drafter,
        draft_config,
        None,
        state,
        kinds.block_hidden(drafter, draft_config, state, anchors, positions),
        anchors,
        positions,
        rows,
        lambda logits, forced: jax.nn.one_hot(forced, logits.shape[-1]),
        jnp.broadcast_to(threshold, (count,)),
        lambda logits: log_law(filter_logits(logits, sampling), sampling),
    )
    out = forward_cached(target, config, proposal.tokens, positions, read.cache)
    filtered = filter_logits(target_logits(target, config, out.hidden), sampling)
    return proposal, filtered, log_law(filtered, sampling)


class EveryDraft:
    """One round with every possible draft of γ tokens (one for MTP) as one request of a batch, in float64."""

    def __init__(self, head: str, draft_vocab_size: int, setting, truncated: bool = False, vocabulary=VOCABULARY):
        self.target_config = target_config(vocabulary)
        if head in PAIR_KINDS:
            config = pair_config(self.target_config, head, draft_vocab_size=draft_vocab_size)
        else:
            config = drafter_config(self.target_config, head, block_size=GAMMA, draft_vocab_size=draft_vocab_size)
        self.target = random_target(self.target_config, dtype=jnp.float64)
        drafter = random_drafter(config, self.target)
        self.gamma = config.num_drafts
        self.rows = np.array(list(itertools.product(range(draft_vocab_size), repeat=self.gamma)), np.int32)
        self.sampling = sampling_params(len(self.rows), *setting)
        arguments = (self.target, drafter, self.target_config, config, self.rows, self.sampling)
        self.proposal, self.filtered, self.log_p = one_round(*arguments, jnp.asarray(0.0))
        if truncated:
            threshold = jnp.median(jax.nn.sigmoid(self.proposal.confidence_logits))
            self.proposal, self.filtered, self.log_p = one_round(*arguments, threshold)
            lengths = set(np.asarray(self.proposal.valid).sum(axis=1).tolist())
            assert len(lengths) > 1, "the threshold must cut some drafts for the test to mean anything"


def emitted_law(case: EveryDraft, longer: np.ndarray) -> np.ndarray:
    """Exact law of the next γ+1 tokens: draft, accept or reject, then the target's own law for what is missing."""
    proposal = case.proposal
    drafts = np.asarray(proposal.tokens)[:, 1:]
    verified = np.asarray(proposal.valid)[:, 1:].sum(axis=1)
    log_q, log_p = np.asarray(proposal.log_q), np.asarray(case.log_p)
    row = np.arange(len(drafts))[:, None]
    slot = np.arange(case.gamma)[None]
    q_drawn = log_q[row, slot, drafts]
    accept = np.exp(acceptance_log_probability(jnp.asarray(log_p[row, slot, drafts]), jnp.asarray(q_drawn)))
    residual = np.exp(residual_log_law(jnp.asarray(log_p[:, :-1]), jnp.asarray(log_q)))
    residual = residual / residual.sum(axis=-1, keepdims=True)
    law = np.zeros((VOCABULARY,) * (case.gamma + 1))
    for i, draft in enumerate(drafts):
        drawn = np.exp(q_drawn[i].sum())
        if drawn == 0:
            continue
        for accepted in range(verified[i] + 1):
            weight = drawn * np.prod(accept[i, :accepted])
            extra = np.exp(log_p[i, accepted])
            if accepted < verified[i]:
                weight, extra = weight * (1 - accept[i, accepted]), residual[i, accepted]
            prefix = tuple(draft[:accepted])
            for token in range(VOCABULARY):
                if weight * extra[token] > 0:
                    head = (*prefix, token)
                    rest = longer[head]
                    law[head] += weight * extra[token] * rest / rest.sum()
    return law


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(
    ("head", "draft_vocab_size", "truncated"),
    [
        *((head, size, truncated) for head in HEADS[1:] for size in (VOCABULARY, 3) for truncated in (False, True)),
        ("dflash", VOCABULARY, False),
        ("dflash", 3, False),
        ("eagle3", 3, False),
        ("mtp", VOCABULARY, False),
    ],
)
def test_rejection_sampling_keeps_the_targets_law(head, draft_vocab_size, truncated, setting):
    with jax.enable_x64(True):
        case = EveryDraft(head, draft_vocab_size, SETTINGS[setting], truncated)
        expected = target_law(case.target_config, case.target, PROMPT, case.gamma + 1, SETTINGS[setting])
        # A law of the rest is needed after any prefix, also where the target itself never goes.
        longer = expected + 1e-300
        law = emitted_law(case, longer)
    assert law.sum() == pytest.approx(1, abs=1e-6)
    np.testing.assert_allclose(law, expected, atol=1e-6)


@pytest.mark.parametrize("head", HEADS)
def test_enumeration_notices_a_length_that_looks_at_its_own_token(head):
    """Cutting before the less likely tokens is anticipating: the law must come out wrong."""
    with jax.enable_x64(True):
        case = EveryDraft(head, VOCABULARY, SETTINGS["warm"])
        expected = target_law(case.target_config, case.target, PROMPT, GAMMA + 1, SETTINGS["warm"])
        drawn = np.take_along_axis(np.asarray(case.proposal.log_q), np.asarray(case.proposal.tokens)[:, 1:, None], -1)
        likely = np.cumprod(np.exp(drawn[..., 0]) > 0.2, axis=1).astype(bool)
        valid = np.concatenate([np.ones((len(likely), 1), bool), likely], axis=1)
        case.proposal = case.proposal.replace(valid=jnp.asarray(valid))
        law = emitted_law(case, expected)
    assert np.abs(law - expected).sum() > 0.01


def test_reject_follows_the_events_it_is_given():
    """Uniforms that force each number of acceptances, and noise that forces each last token."""
    with jax.enable_x64(True):
        case = EveryDraft("rnn", VOCABULARY, SETTINGS["warm"], truncated=True)
        drafts = np.asarray(case.proposal.tokens)[:, 1:]
        verified = np.asarray(case.proposal.valid)[:, 1:].sum(axis=1)
        count = len(drafts)
        for accepted, token in itertools.product(range(GAMMA + 1), range(VOCABULARY)):
            uniform = jnp.where(jnp.arange(GAMMA)[None] < accepted, 1e-300, 1 - 1e-16)
            noise = jnp.zeros((count, GAMMA + 1, VOCABULARY)).at[..., token].set(1e6)
            verdict = reject(case.proposal, case.log_p, jnp.broadcast_to(uniform, (count, GAMMA)), noise)
            for i in range(count):
                stands = int(verdict.accepted[i])
                p, q = np.exp(case.log_p[i]), np.exp(case.proposal.log_q[i])
                always = [p[k, drafts[i, k]] >= q[k, drafts[i, k]] for k in range(GAMMA)]
                expected = min(accepted, verified[i])
                while expected < verified[i] and always[expected]:
                    expected += 1
                assert stands == expected
                assert verdict.tokens[i, :stands].tolist() == drafts[i, :stands].tolist()
                left = p[stands] - q[stands] if stands < verified[i] else p[stands]
                if left[token] > 1e-9:
                    assert int(verdict.tokens[i, stands]) == token
                else:
                    assert left[int(verdict.tokens[i, stands])] > 0


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(
    ("head", "draft_vocab_size"), [("vanilla", VOCABULARY), ("dflash", VOCABULARY), ("rnn", 3), ("eagle3", 3)]
)
def test_coupled_verification_emits_the_plain_sample_for_every_draft(head, draft_vocab_size, setting):
    """With one noise, every possible draft and every length gives the tokens of plain sampling."""
    with jax.enable_x64(True):
        case = EveryDraft(head, draft_vocab_size, SETTINGS[setting])
        config, params = case.target_config, case.target
        count = len(case.rows)
        for seed, cut in itertools.product(range(2), range(GAMMA + 1)):
            key = jnp.broadcast_to(request_keys(seed, 1), (count,))
            positions = jnp.broadcast_to(jnp.arange(len(PROMPT), len(PROMPT) + GAMMA + 1)[None], (count, GAMMA + 1))
            noise = position_noise(key, positions, VOCABULARY, case.sampling)
            plain = list(PROMPT)
            for depth in range(GAMMA + 1):
                row, _ = pad([plain], len(PROMPT) + GAMMA)
                logits = plain_logits(params, config, row)[:, len(plain) - 1, None]
                logits = filter_logits(logits, one(case.sampling))
                plain.append(int(choose(logits, noise[:1, depth : depth + 1], one(case.sampling))[0, 0]))
            valid = case.proposal.valid & (jnp.arange(GAMMA + 1)[None] <= cut)
            verdict = walk(case.proposal.replace(valid=valid), choose(case.filtered, noise, case.sampling), GAMMA)
            for i in range(count):
                stands = int(verdict.accepted[i])
                assert stands <= cut
                assert verdict.tokens[i, : stands + 1].tolist() == plain[len(PROMPT) : len(PROMPT) + stands + 1]


def one(sampling):
    return jax.tree.map(lambda x: x[:1], sampling)


@pytest.mark.parametrize(
    ("head", "verifier", "max_drafts"),
    [
        *(("rnn", verifier, None) for verifier in Verifier),
        ("dflash", Verifier.COUPLED, None),
        ("rnn", Verifier.BLOCK, 1),
    ],
)
def test_generated_tokens_follow_the_targets_law(verifier, head, max_drafts):
    """The whole loop with its real keys: frequencies of the first three tokens over many requests."""
    requests, length = 10_000, 3
    setting = (0.9, 0, 0.9, 0.0)
    config = target_config(4)
    target = random_target(config, 5)
    draft_config = drafter_config(config, head, block_size=2)
    drafter = random_drafter(draft_config, target)
    decode = DecodeConfig(
        target=config, drafter=draft_config, max_new_tokens=length, verifier=verifier, max_drafts=max_drafts
    )
    prompt = [3, 0, 1]
    out = dspark_jax.generate(
        target,
        drafter,
        jnp.broadcast_to(jnp.asarray(prompt, jnp.int32)[None], (requests, len(prompt))),
        jnp.full(requests, len(prompt), jnp.int32),
        request_keys(11, requests),
        decode,
        sampling=sampling_params(requests, *setting),
        confidence_threshold=jnp.full(requests, 0.45, jnp.float32),
    )
    expected = target_law(config, target, prompt, length, setting).ravel() * requests
    counts = np.bincount(np.asarray(out.tokens) @ (4 ** np.arange(length)[::-1]), minlength=4**length)
    assert counts[expected == 0].sum() == 0
    likely = expected > 5
    statistic = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    assert stats.chi2.sf(statistic, likely.sum() - 1) > 1e-4
    assert int(out.counts.accepted.sum()) > 0.1 * requests
