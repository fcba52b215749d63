"""Matrix products with weights stored (out, in), as in Hugging Face files."""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from dspark_jax.layers import quantized
from dspark_jax.layers.quantized import QuantizedWeight
from dspark_jax.parameters import Initializer, Parameter
from dspark_jax.sharding import gather_width

# At most this many rows count as decoding. There a tall weight is placed on the left of the product: with
# SmolLM2's vocabulary head and 8 rows, XLA's CPU backend then takes 7 ms instead of 25.
_FEW_ROWS = 64
_TALL = 4096


@struct.dataclass
class Linear:
    weight: Float[Array, "out in"] | QuantizedWeight
    bias: Float[Array, "out"] | None = None


@struct.dataclass
class FusedLinear:
    """Layers of one input in one weight, their outputs one after the other: one product instead of several small ones.

    `sizes`: outputs of each.
    """

    weight: Float[Array, "out in"]
    bias: Float[Array, "out"] | None
    sizes: tuple[int, ...] = struct.field(pytree_node=False)


@struct.dataclass
class Embedding:
    weight: Float[Array, "V d"] | QuantizedWeight


def declare_linear(
    out_features: int,
    in_features: int,
    axes: tuple[str | None, str | None],
    bias: bool = False,
    standard_deviation: float = 0.02,
    initializer: Initializer = Initializer.NORMAL,
) -> Linear:
    return Linear(
        weight=Parameter((out_features, in_features), axes, initializer, standard_deviation, quantizable=True),
        bias=Parameter((out_features,), axes[:1], Initializer.ZEROS) if bias else None,
    )


def declare_embedding(rows: int, width: int, axes=("vocab", "embed"), standard_deviation: float = 0.02) -> Embedding:
    return Embedding(weight=Parameter((rows, width), axes, standard_deviation=standard_deviation, quantizable=True))


def wide_dtype(dtype) -> jnp.dtype:
    """What norms, softmaxes and logits are computed in: float32, or float64 for a float64 model."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def along_last(vector: Array, ndim: int) -> Array:
    """Reshapes a vector so that it broadcasts along the last of `ndim` axes."""
    return vector.reshape((1,) * (ndim - 1) + (-1,))


def matmul(
    x: Float[Array, "*rows in"], weight: Float[Array, "out in"] | QuantizedWeight, dtype=None
) -> Float[Array, "*rows out"]:
    """x @ weight.T, in `dtype` (default: that of x). Weights are cast to x's dtype."""
    if isinstance(weight, QuantizedWeight):
        return quantized.products(x, [weight])[0].astype(dtype or x.dtype)
    weight = weight.astype(x.dtype)
    rows = 1
    for dimension in x.shape[:-1]:
        rows *= dimension
    if rows <= _FEW_ROWS and weight.shape[0] >= _TALL:
        flat = x.reshape(rows, x.shape[-1])
        product = jax.lax.dot_general(weight, flat, (((1,), (1,)), ((), ())), preferred_element_type=dtype)
        return product.T.reshape(*x.shape[:-1], weight.shape[0])
    return jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=dtype)


def linear(params: Linear, x: Float[Array, "*rows in"]) -> Float[Array, "*rows out"]:
    return linears([params], x)[0]


def fuse(layers: Sequence[Linear]) -> FusedLinear:
    """Layers with a bias each or none, whose weights may have a leading axis of stacked layers."""
    weights, biases = [params.weight for params in layers], [params.bias for params in layers]
    bias = None if biases[0] is None else jnp.concatenate(biases, axis=-1)
    return FusedLinear(jnp.concatenate(weights, axis=-2), bias, tuple(weight.shape[-2] for weight in weights))


def linears(layers: Sequence[Linear] | FusedLinear, x: Float[Array, "*rows in"]) -> list[Float[Array, "*rows out"]]:
    """Several layers of one input; int8 weights are read in one pass."""
    if isinstance(layers, FusedLinear):
        ends = list(itertools.accumulate(layers.sizes))[:-1]
        return jnp.split(_biased(matmul(x, layers.weight), layers.bias), ends, axis=-1)
    weights = [params.weight for params in layers]
    if all(isinstance(weight, QuantizedWeight) for weight in weights):
        found = [y.astype(x.dtype) for y in quantized.products(x, weights)]
    else:
        found = [matmul(x, weight) for weight in weights]
    return [_biased(y, params.bias) for y, params in zip(found, layers, strict=True)]


def _biased(y: Float[Array, "*rows out"], bias: Float[Array, "out"] | None) -> Float[Array, "*rows out"]:
    return y if bias is None else y + along_last(bias.astype(y.dtype), y.ndim)


def embed(params: Embedding, ids, dtype=None) -> Array:
    """Rows of the table; an id outside it gives NaN, so that it cannot pass unnoticed."""
    if isinstance(params.weight, QuantizedWeight):
        rows = quantized.rows(params.weight, ids)
    else:
        rows = gather_width(params.weight).at[ids].get(mode="fill", fill_value=jnp.nan)
    return rows if dtype is None else rows.astype(dtype)
