"""Replayed rounds are those of `generate`, for every kind of drafter, without a pass of the target."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import DecodeConfig, TreeSpec, Verifier, generate, request_keys, sampling_params
from dspark_jax.decode_state import Requests
from dspark_jax.replay import record_texts, replay_positions, replay_rounds, sweep_thresholds
from dspark_jax.verification.statistics import count_acceptance
from tests.models import golden_drafter, golden_prompts, golden_target, pair_config, random_drafter

NEW, TAPS, DEPTH = 24, (-1, 0, 1, 2, 4), 7
# The golden target ends no answer itself; these bytes, "g" and "y", end some of them, within blocks.
EOS = (103, 121)


@functools.cache
def drafter(name: str):
    """(config, parameters): a golden one, or a random one of another kind that fits the golden target."""
    if name.startswith("dspark"):
        golden = golden_drafter(name)
        return golden.config, golden.params
    target = golden_target()
    config = pair_config(target.config, name)
    return config, random_drafter(config, target.params)


def asked(temperature: float, thresholds=(0.0, 0.0, 0.0, 0.0, 0.0)) -> tuple[tuple, Requests]:
    """Four golden prompts cut to different lengths, and a row that asks for nothing; one answer is short."""
    _, tokens, lengths = golden_prompts("dspark_vanilla")
    tokens, lengths = tokens[:5, :32], np.array([32, 20, 31, 9, 1], np.int32)
    requests = Requests(
        keys=request_keys(0, 5),
        sampling=sampling_params(5, temperature),
        max_tokens=jnp.asarray([NEW, NEW, 11, NEW, 0], jnp.int32),
        confidence_threshold=jnp.asarray(thresholds, jnp.float32),
    )
    return (jnp.asarray(tokens), jnp.asarray(lengths)), requests


def decode_config(name: str | None, eos=(), **changes) -> DecodeConfig:
    config = None if name is None else drafter(name)[0]
    settings = {"target": golden_target().config, "drafter": config, "max_new_tokens": NEW, "eos_token_ids": eos}
    return DecodeConfig(**(settings | changes))


@functools.cache
def texts(temperature: float, eos=()):
    prompts, requests = asked(temperature)
    config = decode_config(None, eos, plain_width=DEPTH + 1)
    return record_texts(golden_target().params, *prompts, requests, config, TAPS, DEPTH)


def generated(name: str | None, prompts, requests: Requests, config: DecodeConfig):
    params = None if name is None else drafter(name)[1]
    settings = (requests.sampling, requests.max_tokens, requests.confidence_threshold)
    return jax.device_get(generate(golden_target().params, params, *prompts, requests.keys, config, *settings))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_plain_decoding(temperature):
    for eos in ((), EOS):
        prompts, requests = asked(temperature)
        plain = generated(None, prompts, requests, decode_config(None, eos, plain_width=DEPTH + 1))
        recorded = texts(temperature, eos)
        expected = [row[:length].tolist() for row, length in zip(plain.tokens, plain.lengths, strict=True)]
        assert recorded.answers() == expected
        assert plain.stopped.any() == bool(eos)
        states = np.asarray(recorded.states)
        ends = np.asarray(recorded.lengths)
        assert (np.abs(states[0, : ends[0]]).max(axis=(1, 2)) > 0).all() and not states[4].any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("name", "tree"),
    [
        ("dspark_vanilla", None),
        ("dspark_vanilla", TreeSpec(k=3, budget=16)),
        ("eagle3", None),
        ("mtp", None),
        pytest.param("dspark_rnn", TreeSpec(k=2, budget=12), marks=pytest.mark.slow),
    ],
)
def test_rounds_are_those_of_generate(name, tree, temperature):
    """All that `generate` returns, accepted lengths first of all; answers end within blocks, and by their limits."""
    prompts, requests = asked(temperature)
    config = decode_config(name, EOS, tree=tree)
    recorded = texts(temperature, EOS)
    if name == "mtp":
        recorded = recorded.padded(100)
        assert recorded.tokens.shape[1] == 100 == recorded.padded(50).tokens.shape[1]
    replayed, confidence = replay_rounds(drafter(name)[1], recorded, requests, config, TAPS)
    real = generated(name, prompts, requests, config)
    np.testing.assert_array_equal(replayed.counts.accepted_lengths, real.counts.accepted_lengths)
    jax.tree.map(np.testing.assert_array_equal, replayed, real)
    assert real.stopped.any() and not real.stopped.all()
    if name.startswith("dspark"):
        assert real.counts.accepted.any()
    assert (confidence is not None) == (name.startswith("dspark") and tree is None)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_sweep_is_decoding_with_each_threshold(temperature):
    name = "dspark_vanilla"
    prompts, requests = asked(temperature)
    config, recorded = decode_config(name, EOS), texts(temperature, EOS)
    positions = jax.device_get(replay_positions(drafter(name)[1], recorded, requests, config, TAPS))
    first = positions[1][..., 0]
    thresholds = np.array([0, *np.quantile(first[first > 0], [0.3, 0.7]), 1], np.float32)
    lengths = np.asarray(recorded.lengths - recorded.prompt_lengths)
    swept = sweep_thresholds(*positions, lengths, thresholds)
    for index, threshold in enumerate(thresholds):
        each = requests.replace(confidence_threshold=jnp.full(5, threshold, jnp.float32))
        real = generated(name, prompts, each, config)
        counts = count_acceptance(real.counts, real.lengths, real.stopped)
        found = (swept.rounds[index], swept.tokens[index], swept.verified[index])
        assert found == (counts.rounds, counts.tokens, counts.verified)
    assert swept.verified[0] > swept.verified[1] > swept.verified[2] > swept.verified[3] == 0


def test_what_cannot_be_replayed():
    _, requests = asked(1.0)
    for changes, taps, word in (({"verifier": Verifier.REJECTION}, TAPS, "coupled"), ({}, (0,), "were not recorded")):
        config = decode_config("dspark_vanilla", **changes)
        with pytest.raises(ValueError, match=word):
            replay_rounds(drafter("dspark_vanilla")[1], texts(1.0), requests, config, taps)
