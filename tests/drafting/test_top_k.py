"""The two-stage top-k is the top-k, ties included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.drafting.top_k import two_stage_top_k


@pytest.mark.parametrize("size", [1, 5, 127, 128, 129, 1000])
def test_two_stage_top_k_is_top_k(size):
    rng = np.random.default_rng(size)
    rows = [
        rng.standard_normal(size),
        rng.integers(0, 2, size=size),
        -rng.integers(0, 40, size=size),
        np.zeros(size),
        np.full(size, -np.inf),
        np.where(rng.random(size) < 0.97, -np.inf, 1.0),
        np.arange(size) // 128,
        -(np.arange(size) // 128),
    ]
    x = jnp.asarray(np.stack(rows).reshape(2, 4, size), jnp.float32)
    for k in sorted({1, min(7, size), min(150, size), size}):
        values, indices = jax.jit(two_stage_top_k, static_argnums=1)(x, k)
        expected_values, expected_indices = jax.lax.top_k(x, k)
        assert indices.dtype == jnp.int32 and values.dtype == x.dtype
        np.testing.assert_array_equal(values, expected_values)
        np.testing.assert_array_equal(indices, expected_indices)
