"""Filters and laws against a numpy reference that sorts, written from the definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.sampling import (
    SamplingParams,
    choose,
    filter_logits,
    log_law,
    position_noise,
    purpose_keys,
    request_keys,
    sampling_params,
)


def reference_law(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Temperature, top-k, top-p, min-p of one row in float64; ties at a threshold are kept."""
    if temperature == 0:
        law = np.zeros(len(logits))
        law[int(np.argmax(logits))] = 1
        return law
    scaled = logits.astype(np.float64) / temperature
    law = np.exp(scaled - scaled.max())
    law /= law.sum()
    if top_k:
        law[law < np.sort(law)[::-1][min(top_k, len(law)) - 1]] = 0
        law /= law.sum()
    if top_p < 1:
        descending = np.sort(law)[::-1]
        cut = descending[int(np.searchsorted(np.cumsum(descending), top_p))]
        law[law < cut] = 0
    law[law < min_p * law.max()] = 0
    return law / law.sum()


def params(rows: list[tuple[float, int, float, float]]) -> SamplingParams:
    columns = list(zip(*rows, strict=True))
    kinds = (jnp.float32, jnp.int32, jnp.float32, jnp.float32)
    return SamplingParams(*(jnp.asarray(column, kind) for column, kind in zip(columns, kinds, strict=True)))


@jax.jit
def filtered_law(logits, sampling):
    return jnp.exp(log_law(filter_logits(logits, sampling), sampling))


settings_rows = st.tuples(
    st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    st.integers(0, 12),
    st.sampled_from([1.0, 0.97, 0.83, 0.51, 0.013]),
    st.sampled_from([0.0, 0.04, 0.37, 1.0]),
)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(settings_rows, min_size=3, max_size=3), seed=st.integers(0, 2**31), tied=st.booleans())
def test_filtered_law_is_the_definition(rows, seed, tied):
    logits = np.random.default_rng(seed).normal(size=(3, 2, 9)).astype(np.float32) * 3
    if tied:
        logits = np.round(logits)
    sampling = params(rows)
    law = filtered_law(jnp.asarray(logits), sampling)
    for row, setting in enumerate(rows):
        for node in range(2):
            expected = reference_law(logits[row, node], *setting)
            np.testing.assert_allclose(law[row, node], expected, atol=2e-6)


def test_removed_and_padded_tokens_are_never_chosen():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(4000, 1, 6)), jnp.float32).at[..., 5].set(-jnp.inf)
    sampling = sampling_params(4000, temperature=5.0, top_k=3)
    keys = request_keys(0, 4000)
    filtered = filter_logits(logits, sampling)
    chosen = choose(filtered, position_noise(keys, jnp.zeros((4000, 1), jnp.int32), 6, sampling), sampling)
    assert bool(jnp.all(jnp.take_along_axis(filtered, chosen[..., None], -1) > -jnp.inf))
    assert len(set(np.asarray(chosen).ravel().tolist())) > 3


def test_choice_follows_the_law():
    logits = jnp.broadcast_to(jnp.asarray([0.0, 1.0, -1.0, 0.5])[None, None], (40_000, 1, 4))
    sampling = sampling_params(40_000, temperature=0.7)
    noise = position_noise(request_keys(3, 40_000), jnp.full((40_000, 1), 17, jnp.int32), 4, sampling)
    frequencies = np.bincount(np.asarray(choose(logits, noise, sampling)).ravel(), minlength=4) / 40_000
    expected = reference_law(np.asarray(logits)[0, 0], 0.7, 0, 1.0, 0.0)
    assert np.abs(frequencies - expected).max() < 5 * np.sqrt(0.25 / 40_000)


def test_noise_depends_on_request_and_position_alone():
    sampling, keys = sampling_params(3, temperature=1.0), request_keys(0, 3)
    positions = jnp.asarray([[4, 5], [5, 6], [4, 9]], jnp.int32)
    noise = position_noise(keys, positions, 11, sampling)
    alone = position_noise(keys[1:2], positions[1:2, ::-1], 11, sampling_params(1, temperature=1.0))
    np.testing.assert_array_equal(noise[1], alone[0, ::-1])
    assert not np.array_equal(noise[0, 1], noise[1, 0])
    first, second = (jax.random.key_data(purpose_keys(keys, jnp.full(3, r, jnp.int32), positions, 0)) for r in (1, 2))
    assert not np.array_equal(first, second)


def test_greedy_requests_draw_no_noise():
    noise = position_noise(request_keys(0, 2), jnp.zeros((2, 3), jnp.int32), 5, sampling_params(2))
    assert not noise.any()


@pytest.mark.parametrize(
    "setting",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": 1e39},
        {"top_k": -1},
        {"top_p": 0.0},
        {"min_p": 1.5},
    ],
)
def test_settings_outside_their_range_are_refused(setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        sampling_params(1, **setting)
