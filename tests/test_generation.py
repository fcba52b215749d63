"""The decoding loop: goldens, plain against speculative, batches, ends, streaming and compilations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax
from dspark_jax import DecodeConfig, Verifier, request_keys, sampling_params
from dspark_jax.generation import generate_chunks
from dspark_jax.targets.decoder import forward_documents, target_logits
from tests.models import (
    GOLDEN_DRAFTERS,
    HEADS,
    PAIR_KINDS,
    drafter_config,
    golden_drafter,
    golden_prompts,
    golden_target,
    pad,
    pair_config,
    random_drafter,
    random_target,
    target_config,
)

PROMPTS = [[1, 4, 0, 2], [3], [2, 2, 5, 6, 1, 0, 3], [0, 1]]


def decode(target, drafter, tokens, lengths, config, keys=None, **arguments):
    keys = request_keys(0, len(lengths)) if keys is None else keys
    out = dspark_jax.generate(target, drafter, jnp.asarray(tokens), jnp.asarray(lengths), keys, config, **arguments)
    return jax.device_get(out)


class Small:
    """A random target with a random drafter, and 12 new tokens for each of four prompts."""

    def __init__(self, head: str = "vanilla", target_changes=None, **drafter_changes):
        self.target_config = target_config(**(target_changes or {}))
        make = (
            functools.partial(pair_config, kind=head)
            if head in PAIR_KINDS
            else functools.partial(drafter_config, head=head)
        )
        self.drafter_config = make(self.target_config, **drafter_changes)
        self.target = random_target(self.target_config)
        self.drafter = random_drafter(self.drafter_config, self.target)
        self.tokens, self.lengths = pad(PROMPTS)

    def config(self, **changes) -> DecodeConfig:
        settings = {"target": self.target_config, "drafter": self.drafter_config, "max_new_tokens": 12}
        return DecodeConfig(**(settings | changes))

    def plain(self, **changes) -> DecodeConfig:
        return self.config(drafter=None, plain_width=self.drafter_config.num_drafts + 1, **changes)

    def run(self, config: DecodeConfig, **arguments):
        drafter = self.drafter if config.drafter else None
        return decode(self.target, drafter, self.tokens, self.lengths, config, **arguments)


@pytest.mark.parametrize("name", GOLDEN_DRAFTERS)
def test_goldens(name):
    """Greedy tokens and accepted lengths are the reference's, at both confidence thresholds."""
    target, drafter = golden_target(), golden_drafter(name)
    entries, tokens, lengths = golden_prompts(name)
    config = DecodeConfig(
        target=target.config, drafter=drafter.config, max_new_tokens=64, eos_token_ids=target.eos_token_ids
    )
    thresholds = jnp.asarray([entry["confidence_threshold"] for entry in entries], jnp.float32)
    out = decode(target.params, drafter.params, tokens, lengths, config, confidence_threshold=thresholds)
    for row, entry in enumerate(entries):
        new = entry["output"][lengths[row] :]
        assert out.tokens[row, : out.lengths[row]].tolist() == new
        rounds = out.counts.rounds[row]
        expected = entry["acceptance_lengths"]
        # The reference may run one round after all tokens exist.
        assert out.counts.accepted_lengths[row, :rounds].tolist() == expected[:rounds]
        assert len(expected) - rounds in (0, 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("head", "draft_vocab_size"), [*((head, 8) for head in HEADS), ("rnn", 5), ("eagle3", 5), ("mtp", 8)]
)
def test_coupled_output_is_plain_output(head, draft_vocab_size, temperature):
    """Token for token, whatever the drafter, its vocabulary and the thresholds."""
    small = Small(head, draft_vocab_size=draft_vocab_size)
    sampling = sampling_params(4, temperature, top_p=0.9)
    thresholds = jnp.asarray([0.0, 0.5, 0.6, 1.0], jnp.float32)
    speculative = small.run(small.config(), sampling=sampling, confidence_threshold=thresholds)
    plain = small.run(small.plain(), sampling=sampling)
    np.testing.assert_array_equal(speculative.tokens, plain.tokens)
    assert (speculative.counts.rounds <= plain.counts.rounds).all()
    assert (plain.counts.accepted_lengths.sum(axis=1) == plain.counts.rounds).all()
    if small.drafter_config.enable_confidence_head:
        assert speculative.counts.rounds[3] == plain.counts.rounds[3], "threshold 1 verifies no draft"


def test_a_chain_ends_after_max_drafts():
    """Its drafts are the first ones of the whole chain, and the output is the same."""
    target, drafter = golden_target(), golden_drafter("dspark_vanilla")
    _, tokens, lengths = golden_prompts("dspark_vanilla")
    whole, cut = (
        decode(
            target.params,
            drafter.params,
            tokens,
            lengths,
            DecodeConfig(target=target.config, drafter=drafter.config, max_new_tokens=24, max_drafts=most),
        )
        for most in (None, 2)
    )
    np.testing.assert_array_equal(cut.tokens, whole.tokens)
    assert whole.counts.accepted_lengths.max() > cut.counts.accepted_lengths.max() == 3
    assert cut.counts.reached.shape[1] == 2
    first = whole.counts.accepted_lengths[:, 0]
    np.testing.assert_array_equal(cut.counts.accepted_lengths[:, 0], np.minimum(first, 3))


@pytest.mark.parametrize("kind", PAIR_KINDS)
def test_drafting_one_after_the_other_ends_after_max_drafts(kind):
    small = Small(kind)
    plain, cut = (
        small.run(config, sampling=sampling_params(4, 1.0)) for config in (small.plain(), small.config(max_drafts=1))
    )
    np.testing.assert_array_equal(cut.tokens, plain.tokens)
    assert cut.counts.accepted_lengths.max() == 2 and cut.counts.reached.shape == (4, 1)


def test_max_drafts_that_make_no_sense_are_refused():
    small = Small()
    with pytest.raises(ValueError, match="max_drafts 0 must be at least 1"):
        small.config(max_drafts=0)
    with pytest.raises(ValueError, match="max_drafts: is for chains"):
        small.config(max_drafts=2, tree=dspark_jax.TreeSpec(k=2, budget=5))


@pytest.mark.parametrize("verifier", [Verifier.COUPLED, Verifier.BLOCK])
def test_batch_equals_single_requests(verifier):
    """A request's tokens do not depend on what else is in the batch."""
    small = Small("rnn")
    sampling = sampling_params(4, 1.0)
    together = small.run(small.config(verifier=verifier), sampling=sampling)
    keys = request_keys(0, 4)
    for row in range(4):
        alone = dspark_jax.generate(
            small.target,
            small.drafter,
            jnp.asarray(small.tokens[row : row + 1]),
            jnp.asarray(small.lengths[row : row + 1]),
            keys[row : row + 1],
            small.config(verifier=verifier),
            sampling=jax.tree.map(lambda x, row=row: x[row : row + 1], sampling),
        )
        assert alone.tokens[0].tolist() == together.tokens[row].tolist()
        assert alone.counts.accepted_lengths[0].tolist() == together.counts.accepted_lengths[row].tolist()


def test_ends_inside_a_block():
    """The first EOS, of several, and each request's max_tokens cut what a block accepted."""
    small = Small()
    free = small.run(small.config())
    eos = (int(free.tokens[0, 4]), int(free.tokens[2, 6]))
    cut = small.run(small.config(eos_token_ids=eos), max_tokens=jnp.asarray([12, 5, 12, 1], jnp.int32))
    for row, most in enumerate([12, 5, 12, 1]):
        whole = free.tokens[row, :most].tolist()
        ends = [index for index, token in enumerate(whole) if token in eos]
        expected = whole[: ends[0] + 1] if ends else whole
        assert cut.tokens[row, : cut.lengths[row]].tolist() == expected
        assert not cut.tokens[row, cut.lengths[row] :].any()
        assert bool(cut.stopped[row]) == bool(ends)
        rounds = cut.counts.rounds[row]
        assert cut.counts.accepted_lengths[row, :rounds].tolist() == free.counts.accepted_lengths[row, :rounds].tolist()
        assert cut.counts.accepted_lengths[row, :rounds].sum() + 1 >= cut.lengths[row]


def test_position_counts_agree_with_accepted_lengths():
    small = Small("gated")
    out = small.run(small.config(), confidence_threshold=jnp.full(4, 0.5, jnp.float32))
    for row in range(4):
        lengths = out.counts.accepted_lengths[row, : out.counts.rounds[row]]
        assert out.counts.accepted[row].tolist() == [(lengths > slot + 1).sum() for slot in range(3)]
    assert (out.counts.reached >= out.counts.accepted).all()
    assert (out.counts.reached[:, 1:] <= out.counts.accepted[:, :-1]).all()
    verified = out.counts.verified_nodes.sum(axis=1) - out.counts.rounds
    assert (verified <= 3 * out.counts.rounds).all() and (verified >= out.counts.accepted.sum(axis=1)).all()


def test_log_probabilities_are_the_targets():
    small = Small()
    sampling = sampling_params(4, 0.8, top_k=3)
    out = small.run(small.config(log_probabilities=True), sampling=sampling)
    texts, _ = pad([prompt + out.tokens[row].tolist() for row, prompt in enumerate(PROMPTS)])

    @jax.jit
    def document_log_probabilities(target, rows):
        positions = jnp.broadcast_to(jnp.arange(rows.shape[1], dtype=jnp.int32)[None], rows.shape)
        hidden = forward_documents(target, small.target_config, rows, positions, jnp.zeros_like(rows)).hidden
        return jax.nn.log_softmax(target_logits(target, small.target_config, hidden))

    log_p = np.asarray(document_log_probabilities(small.target, jnp.asarray(texts)))
    for row, prompt in enumerate(PROMPTS):
        expected = [log_p[row, len(prompt) - 1 + i, token] for i, token in enumerate(out.tokens[row])]
        np.testing.assert_allclose(out.log_probabilities[row], expected, atol=1e-4)


def test_chunks_are_prefixes_of_the_whole():
    small = Small()
    whole = small.run(small.config())
    arguments = (jnp.asarray(small.tokens), jnp.asarray(small.lengths), request_keys(0, 4), small.config())
    lengths = np.zeros(4, int)
    for chunk in generate_chunks(small.target, small.drafter, *arguments, rounds_per_chunk=2):
        assert (chunk.lengths >= lengths).all()
        lengths = np.asarray(chunk.lengths)
        for row in range(4):
            assert chunk.tokens[row, : lengths[row]].tolist() == whole.tokens[row, : lengths[row]].tolist()
    assert lengths.tolist() == whole.lengths.tolist()
    assert chunk.counts.rounds.tolist() == whole.counts.rounds.tolist()


def test_a_stopped_request_is_cut_and_the_others_go_on():
    small = Small()
    whole = small.run(small.config())

    def stop(request, tokens):
        return 3 if request == 1 and len(tokens) >= 3 else None

    arguments = (jnp.asarray(small.tokens), jnp.asarray(small.lengths), request_keys(0, 4), small.config())
    *_, last = generate_chunks(small.target, small.drafter, *arguments, rounds_per_chunk=1, stop=stop)
    assert last.lengths.tolist() == [12, 3, 12, 12]
    assert bool(last.stopped[1]) and not bool(last.stopped[0])
    assert last.tokens[1, :3].tolist() == whole.tokens[1, :3].tolist()
    assert last.tokens[2].tolist() == whole.tokens[2].tolist()


def test_one_compilation_serves_drafters_prompts_and_settings(compilations):
    small = Small()
    other = random_drafter(small.drafter_config, small.target, seed=9)
    tokens, lengths = pad([[5, 5], [1], [2, 3, 4], [6]], width=small.tokens.shape[1])
    keys, sampling = request_keys(3, 4), sampling_params(4, 0.7, top_k=4, top_p=0.8)
    inputs = [jnp.asarray(x) for x in (small.tokens, small.lengths, tokens, lengths)]
    thresholds = jnp.asarray([0.0, 0.1, 0.2, 0.3], jnp.float32)
    config = small.config(max_new_tokens=11)
    plain_sampling, none = sampling_params(4), jnp.zeros(4, jnp.float32)
    compilations.reset()
    dspark_jax.generate(
        small.target, small.drafter, *inputs[:2], keys, config, sampling=plain_sampling, confidence_threshold=none
    )
    assert compilations.count == 1
    dspark_jax.generate(
        small.target, other, *inputs[2:], keys, config, sampling=sampling, confidence_threshold=thresholds
    )
    assert compilations.count == 1


def test_callers_may_jit_and_vmap():
    small = Small()
    whole = small.run(small.config())
    pairs = jnp.asarray(small.tokens).reshape(2, 2, -1), jnp.asarray(small.lengths).reshape(2, 2)

    @jax.jit
    def pipeline(target, drafter, tokens, lengths, keys):
        def run(tokens, lengths, keys):
            return dspark_jax.generate(target, drafter, tokens, lengths, keys, small.config()).tokens

        return jax.vmap(run)(tokens, lengths, keys)

    tokens = pipeline(small.target, small.drafter, *pairs, request_keys(0, 4).reshape(2, 2))
    assert tokens.reshape(4, -1).tolist() == whole.tokens.tolist()


def test_stacked_layers_and_sliding_windows_decode_alike():
    changes = {"sliding_windows": (4, 4, 4)}
    small = Small(target_changes=changes, sliding_windows=(5,))
    expected = small.run(small.plain())
    assert small.run(small.config()).tokens.tolist() == expected.tokens.tolist()
    full = Small()
    assert full.run(full.plain()).tokens.tolist() != expected.tokens.tolist()

    stacked = Small(target_changes=changes | {"stacked_layers": True}, sliding_windows=(5,))
    stacked.target = small.target.replace(layers=jax.tree.map(lambda *x: jnp.stack(x), *small.target.layers))
    stacked.drafter = small.drafter
    assert stacked.run(stacked.config()).tokens.tolist() == expected.tokens.tolist()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 9}, "vocab_size"),
        ({"hidden_size": 8}, "hidden_size"),
        ({"num_target_layers": 5}, "num_target_layers"),
    ],
)
def test_a_drafter_of_another_target_is_refused(changes, message):
    target = target_config()
    with pytest.raises(ValueError, match=message):
        DecodeConfig(target=target, drafter=drafter_config(target, **changes))
