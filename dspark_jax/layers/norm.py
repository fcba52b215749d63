"""Root-mean-square layer normalisation (Zhang and Sennrich, 2019)."""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from dspark_jax.layers.linear import along_last, wide_dtype
from dspark_jax.parameters import Initializer, Parameter


@struct.dataclass
class Norm:
    weight: Float[Array, "d"]


def declare_norm(width: int, axis: str | None = None) -> Norm:
    return Norm(weight=Parameter((width,), (axis,), Initializer.ONES))


def rms_norm(params: Norm, x: Float[Array, "*rows d"], eps: float) -> Float[Array, "*rows d"]:
    """Computed in float32 (or wider), returned in x's dtype."""
    wide = x.astype(wide_dtype(x.dtype))
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return along_last(params.weight.astype(x.dtype), x.ndim) * (wide * scale).astype(x.dtype)
