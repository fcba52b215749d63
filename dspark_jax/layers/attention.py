"""Attention projections, and softmax attention of queries over one set of keys for each request."""

from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.config import DecoderConfig
from dspark_jax.layers.cudnn_attention import cudnn_attention, serves
from dspark_jax.layers.linear import FusedLinear, Linear, declare_linear, fuse, linears, wide_dtype
from dspark_jax.layers.norm import Norm, declare_norm, rms_norm
from dspark_jax.layers.rope import apply_rope

# Queries are processed this many at a time, so that scores over a long context stay small.
_QUERY_CHUNK = 256


@struct.dataclass
class Attention:
    """`qkv_proj` stands in the place of the first three where they are fused."""

    q_proj: Linear | None
    k_proj: Linear | None
    v_proj: Linear | None
    o_proj: Linear
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    qkv_proj: FusedLinear | None = None

    def fused(self) -> Self:
        return self.replace(
            q_proj=None, k_proj=None, v_proj=None, qkv_proj=fuse([self.q_proj, self.k_proj, self.v_proj])
        )


def declare_attention(config: DecoderConfig, input_size: int | None = None) -> Attention:
    """`input_size`: width of what queries, keys and values are made from, by default the hidden size."""
    d, std, bias = config.hidden_size, config.initializer_range, config.attention_bias
    width = d if input_size is None else input_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    return Attention(
        q_proj=declare_linear(queries, width, ("heads", "embed"), bias, std),
        k_proj=declare_linear(keys, width, ("kv_heads", "embed"), bias, std),
        v_proj=declare_linear(keys, width, ("kv_heads", "embed"), bias, std),
        o_proj=declare_linear(d, queries, ("embed", "heads"), bias, std),
        q_norm=declare_norm(config.head_dim) if config.qk_norm else None,
        k_norm=declare_norm(config.head_dim) if config.qk_norm else None,
    )


def project(
    params: Attention, config: DecoderConfig, x: Float[Array, "*rows d"], rope: tuple[Array, Array]
) -> tuple[Float[Array, "*rows heads D"], Float[Array, "*rows kv_heads D"], Float[Array, "*rows kv_heads D"]]:
    """Queries and keys with their norms and rotary positions, and values."""
    layers: Any = params.qkv_proj or [params.q_proj, params.k_proj, params.v_proj]
    q, k, v = (_heads(config, y) for y in linears(layers, x))
    return _placed(params.q_norm, config, q, rope), _placed(params.k_norm, config, k, rope), v


def project_keys_values(
    params: Attention, config: DecoderConfig, x: Float[Array, "*rows d"], rope: tuple[Array, Array]
) -> tuple[Float[Array, "*rows kv_heads D"], Float[Array, "*rows kv_heads D"]]:
    """Keys with their norm and rotary positions, and values."""
    layers: Any = [params.k_proj, params.v_proj]
    k, v = (_heads(config, y) for y in linears(layers, x))
    return _placed(params.k_norm, config, k, rope), v


def _heads(config: DecoderConfig, y: Float[Array, "*rows out"]) -> Float[Array, "*rows heads D"]:
    return y.reshape(*y.shape[:-1], -1, config.head_dim)


def _placed(
    norm: Norm | None, config: DecoderConfig, y: Float[Array, "*rows heads D"], rope: tuple[Array, Array]
) -> Float[Array, "*rows heads D"]:
    return apply_rope(y if norm is None else rms_norm(norm, y, config.rms_norm_eps), rope)


def _attend(q: Array, k: Array, v: Array, mask: Array) -> Array:
    # jax.nn.dot_product_attention rounds scores to float32, which the exact float64 checks cannot use.
    requests, length, heads, width = q.shape
    kv_heads, wide = k.shape[1], wide_dtype(q.dtype)
    group = heads // kv_heads
    # The queries that share a head's keys are the rows of one product.
    q = jnp.moveaxis(q.reshape(requests, length, kv_heads, group, width), 1, 3)
    q = q.reshape(requests, kv_heads, group * length, width)
    scores = jnp.einsum("rkqd,rkds->rkqs", q, k, preferred_element_type=wide) * width**-0.5
    scores = scores.reshape(requests, kv_heads, group, length, -1)
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(wide).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype).reshape(requests, kv_heads, group * length, -1)
    out = jnp.einsum("rkqs,rksd->rkqd", weights, v).reshape(requests, kv_heads, group, length, width)
    return jnp.moveaxis(out, 3, 1).reshape(requests, length, heads, width)


def _attend_in_chunks(q: Array, k: Array, v: Array, mask: Array) -> Array:
    length = q.shape[1]
    chunks = -(-length // _QUERY_CHUNK)
    padding = chunks * _QUERY_CHUNK - length
    q = jnp.pad(q, ((0, 0), (0, padding), (0, 0), (0, 0)))
    mask = jnp.pad(mask, ((0, 0), (0, padding), (0, 0)), constant_values=True)

    def split(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(x.shape[0], chunks, _QUERY_CHUNK, *x.shape[2:]), 1, 0)

    out = jax.lax.map(jax.checkpoint(lambda part: _attend(part[0], k, v, part[1])), (split(q), split(mask)))
    return jnp.moveaxis(out, 0, 1).reshape(q.shape)[:, :length]


def attention(
    q: Float[Array, "R T heads D"],
    k: Float[Array, "R kv_heads D S"],
    v: Float[Array, "R kv_heads S D"],
    mask: Bool[Array, "R T S"],
) -> Float[Array, "R T heads D"]:
    """Softmax attention in float32 where `mask` is true; long runs of queries go in chunks, or to cuDNN on GPUs that
    have it for their type and shape.
    """
    if q.shape[1] <= _QUERY_CHUNK:
        return _attend(q, k, v, mask)
    if serves(q, k):
        return jax.lax.platform_dependent(q, k, v, mask, cuda=cudnn_attention, default=_attend_in_chunks)
    return _attend_in_chunks(q, k, v, mask)


def visible(
    query_positions: Int[Array, "R T"], key_positions: Int[Array, "R S"], window: int | None
) -> Bool[Array, "R T S"]:
    """Causal visibility, restricted to a sliding window of positions where there is one."""
    queries, keys = query_positions[:, :, None], key_positions[:, None, :]
    mask = keys <= queries
    return mask if window is None else mask & (keys > queries - window)
