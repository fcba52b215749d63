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

# Outputs stored in one block, inputs that share a scale (as in GGUF's Q8_0), and inputs of an output side by side.
BLOCK = GROUP = 32
QUAD = 4


@struct.dataclass
class QuantizedWeight:
    """Stands for a float32 weight [out, in]: values times the scale of their group, outputs in blocks of 32.

    Of a block and a group of 32 inputs, four inputs of each output lie side by side. The last block and the last group
    are padded with zeros.
    """

    values: Int8[Array, "blocks groups 8 32 4"]
    scales: Float[Array, "blocks groups 32"]
    out: int = struct.field(pytree_node=False)
    width: int = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.out, self.width

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
    *layers, out, width = values.shape
    blocks, groups = -(-out // BLOCK), scales.shape[-1]

    def padded(array: np.ndarray, columns: int) -> np.ndarray:
        whole = np.zeros((*layers, blocks * BLOCK, columns), array.dtype)
        whole[..., :out, : array.shape[-1]] = array
        return whole

    quads = padded(values, groups * GROUP).reshape(*layers, blocks, BLOCK, groups, GROUP // QUAD, QUAD)
    columns = padded(scales, groups).reshape(*layers, blocks, BLOCK, groups)
    return QuantizedWeight(jnp.asarray(np.moveaxis(quads, -4, -2)), jnp.asarray(columns.swapaxes(-1, -2)), out, width)


def unpack(
    weight: QuantizedWeight,
) -> tuple[Int8[np.ndarray, "*layers out in"], Float[np.ndarray, "*layers out groups"]]:
    """The rows that `pack` was given."""
    values, scales = np.asarray(weight.values), np.asarray(weight.scales)
    *layers, blocks, groups, _ = scales.shape
    rows = np.moveaxis(values, -2, -4).reshape(*layers, blocks * BLOCK, groups * GROUP)
    scales = scales.swapaxes(-1, -2).reshape(*layers, blocks * BLOCK, groups)
    return rows[..., : weight.out, : weight.width], scales[..., : weight.out, :]


def dequantize(weight: QuantizedWeight) -> Float[Array, "out in"]:
    """The float32 weight that it stands for."""
    out, width = weight.shape
    whole = weight.values.astype(weight.dtype) * weight.scales[:, :, None, :, None]
    return jnp.moveaxis(whole, 3, 1).reshape(-1, whole.shape[1] * GROUP)[:out, :width]


def rows(weight: QuantizedWeight, ids: Int[Array, "*rows"]) -> Float[Array, "*rows in"]:
    """Some outputs' weights, dequantised; NaN for an id outside."""
    block, lane = ids // BLOCK, ids % BLOCK
    values = weight.values[block, :, :, lane].astype(weight.dtype) * weight.scales[block, :, lane][..., None, None]
    inside = (ids >= 0) & (ids < weight.out)
    return jnp.where(inside[..., None], values.reshape(*ids.shape, -1)[..., : weight.width], jnp.nan)


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
