"""Exact top-k over a vocabulary in two stages: maxima of blocks, then the chosen blocks alone."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_BLOCK = 128


def two_stage_top_k(x: Float[Array, "*rows V"], k: int) -> tuple[Float[Array, "*rows k"], Int[Array, "*rows k"]]:
    """The k largest values, descending, and their indices; the lower index wins a tie, as in `jax.lax.top_k`.

    The k blocks with the largest maxima hold the k largest values: every other block's values are beaten by those
    k maxima, which for equal values also have lower indices.
    """
    vocab_size = x.shape[-1]
    blocks = -(-vocab_size // _BLOCK)
    if blocks <= k:
        return jax.lax.top_k(x, k)
    padded = jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, blocks * _BLOCK - vocab_size),), constant_values=-jnp.inf)
    padded = padded.reshape(*x.shape[:-1], blocks, _BLOCK)
    _, chosen = jax.lax.top_k(jnp.max(padded, axis=-1), k)
    chosen = jnp.sort(chosen, axis=-1)
    candidates = jnp.take_along_axis(padded, chosen[..., None], axis=-2)
    values, within = jax.lax.top_k(candidates.reshape(*x.shape[:-1], k * _BLOCK), k)
    block = jnp.take_along_axis(chosen, within // _BLOCK, axis=-1)
    return values, (block * _BLOCK + within % _BLOCK).astype(jnp.int32)
