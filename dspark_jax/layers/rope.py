"""Rotary position embeddings (Su et al., 2021), with the Llama-3 frequency scaling. Tables stay float32."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dspark_jax.config import DecoderConfig
from dspark_jax.layers.linear import wide_dtype


def inverse_frequencies(config: DecoderConfig) -> np.ndarray:
    """Angular frequency of each of the head_dim/2 planes, radians per position, float32."""
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequencies = (1.0 / np.power(np.float32(config.rope_theta), exponent)).astype(np.float32)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    cycles = scaling.original_max_position_embeddings / wavelengths
    smooth = (cycles - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return ((1 - smooth) * frequencies / scaling.factor + smooth * frequencies).astype(np.float32)


def rope_tables(config: DecoderConfig, positions: Int[Array, "*rows"]) -> tuple[Array, Array]:
    """(cos, sin), each [*rows, head_dim/2] float32."""
    frequencies = jnp.asarray(inverse_frequencies(config))
    angles = positions.astype(jnp.float32)[..., None] * frequencies.reshape((1,) * positions.ndim + (-1,))
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x: Float[Array, "*rows heads D"], tables: tuple[Array, Array]) -> Float[Array, "*rows heads D"]:
    """Rotates the planes (i, i + D/2) of every head, as Hugging Face's `rotate_half` does."""
    cos, sin = (table[..., None, :] for table in tables)
    wide = wide_dtype(x.dtype)
    first, second = jnp.split(x.astype(wide), 2, axis=-1)
    cos, sin = cos.astype(wide), sin.astype(wide)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
