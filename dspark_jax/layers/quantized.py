"""Weights of matrix products in int8, with a scale for each 32 inputs of an output; activations stay float.

Reading weights is what decoding a few tokens costs, and these are read in 1.125 bytes a weight.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int, Int8

from dspark_jax.layers.kernels import int8_products

# Outputs stored side by side, and inputs that share a scale (as in GGUF's Q8_0).
BLOCK = GROUP = 32


@struct.dataclass
class QuantizedWeight:
    """Stands for a float32 weight [out, in]: values times the scale of their group, outputs in blocks of 32.

    The last block is padded with zeros; the last group may be short.
    """

    values: Int8[Array, "blocks in 32"]
    scales: Float[Array, "blocks groups 32"]
    out: int = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.out, self.values.shape[-2]

    @property
    def dtype(self) -> jnp.dtype:
        """That of the weight it stands for."""
        return self.scales.dtype

    def astype(self, dtype) -> Float[Array, "out in"]:
        """The weight it stands for."""
        return dequantize(self).astype(dtype)


def quantize(weight: Float[np.ndarray, "*layers out in"]) -> QuantizedWeight:
    """The nearest int8 weight of symmetric scales: off by at most 1/254 of a group's largest magnitude.

    NumPy, for loaders; the arrays lie on the default device. Stacked layers keep their leading axis.
    """
    return pack(*round_to_int8(weight))


def round_to_int8(
    weight: Float[np.ndarray, "*layers out in"],
) -> tuple[Int8[np.ndarray, "*layers out in"], Float[np.ndarray, "*layers out groups"]]:
    """Values and scales of `quantize`, row by row, as files hold them."""
    *layers, out, width = weight.shape
    groups = num_groups(width)
    padded = np.zeros((*layers, out, groups * GROUP), np.float32)
    padded[..., :width] = weight
    grouped = padded.reshape(*layers, out, groups, GROUP)
    scales = np.abs(grouped).max(axis=-1) / np.float32(127)
    # A group of zeros, or of numbers too small for a scale, is stored as zeros.
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales > np.finfo(np.float32).tiny)
    values = np.rint(grouped * inverse[..., None]).astype(np.int8).reshape(*layers, out, -1)
    return values[..., :width], scales


def num_groups(width: int) -> int:
    """Scales of an output with `width` inputs."""
    return -(-width // GROUP)


def pack(
    values: Int8[np.ndarray, "*layers out in"], scales: Float[np.ndarray, "*layers out groups"]
) -> QuantizedWeight:
    """Rows of values and scales in the blocks that products read."""
    *layers, out, _ = values.shape

    def blocks(array: np.ndarray) -> Array:
        padded = np.zeros((*layers, -(-out // BLOCK) * BLOCK, array.shape[-1]), array.dtype)
        padded[..., :out, :] = array
        return jnp.asarray(padded.reshape(*layers, -1, BLOCK, array.shape[-1]).swapaxes(-1, -2))

    return QuantizedWeight(blocks(values), blocks(scales), out)


def unpack(
    weight: QuantizedWeight,
) -> tuple[Int8[np.ndarray, "*layers out in"], Float[np.ndarray, "*layers out groups"]]:
    """The rows that `pack` was given."""

    def whole(blocks: Array) -> np.ndarray:
        *layers, _, columns, _ = blocks.shape
        return np.asarray(blocks).swapaxes(-1, -2).reshape(*layers, -1, columns)[..., : weight.out, :]

    return whole(weight.values), whole(weight.scales)


def dequantize(weight: QuantizedWeight) -> Float[Array, "out in"]:
    """The float32 weight that it stands for."""
    out, width = weight.shape
    scales = jnp.repeat(weight.scales, GROUP, axis=1)[:, :width]
    whole = weight.values.astype(scales.dtype) * scales
    return whole.swapaxes(1, 2).reshape(-1, width)[:out]


def rows(weight: QuantizedWeight, ids: Int[Array, "*rows"]) -> Float[Array, "*rows in"]:
    """Some outputs' weights, dequantised; NaN for an id outside."""
    block, lane = ids // BLOCK, ids % BLOCK
    scales = jnp.repeat(weight.scales[block, :, lane], GROUP, axis=-1)[..., : weight.shape[1]]
    inside = (ids >= 0) & (ids < weight.out)
    return jnp.where(inside[..., None], weight.values[block, :, lane].astype(scales.dtype) * scales, jnp.nan)


def products(x: Float[Array, "*rows in"], weights: Sequence[QuantizedWeight]) -> list[Float[Array, "*rows out"]]:
    """x · Wᵀ for each weight, in float32 (or x's wider dtype).

    On CPU in one pass of a kernel, where one can be built; a row's results are then the same, bit for bit, however many
    rows there are. Elsewhere the weights are dequantised first.
    """

    def dequantized(x: Array, stored: list[QuantizedWeight]) -> list[Array]:
        return [jax.lax.dot_general(x, weight.astype(x.dtype), (((1,), (1,)), ((), ()))) for weight in stored]

    def kernel(x: Array, stored: list[QuantizedWeight]) -> Sequence[Array]:
        pairs = [(weight.values, weight.scales) for weight in stored]
        return int8_products.int8_products(x, pairs, [weight.out for weight in stored])

    flat = x.reshape(-1, x.shape[-1])
    if flat.dtype != jnp.float64:
        flat = flat.astype(jnp.float32)
    if flat.dtype == jnp.float32 and jax.default_backend() == "cpu" and int8_products.best_path() is not None:
        found = jax.lax.platform_dependent(flat, list(weights), cpu=kernel, default=dequantized)
    else:
        found = dequantized(flat, list(weights))
    return [y.reshape(*x.shape[:-1], y.shape[-1]) for y in found]
