"""Key/value cache of fixed slots: [R, S_max, kv_heads, D] for each layer, or with a leading layer axis."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.config import DecoderConfig
from dspark_jax.layers.attention import attention
from dspark_jax.layers.decoder import Attend
from dspark_jax.layers.packing import Packing
from dspark_jax.sharding import constrain

_AXES = ("batch", None, "kv_heads", None)


@struct.dataclass
class LayerCache:
    keys: Float[Array, "R S kv_heads D"]
    values: Float[Array, "R S kv_heads D"]


def init_cache(config: DecoderConfig, requests: int, capacity: int, dtype, stacked: bool = False) -> Any:
    """Zeroed caches of `capacity` slots a request: a tuple, one a layer, or one stacked `LayerCache`."""
    shape = (requests, capacity, config.num_key_value_heads, config.head_dim)
    if stacked:
        shape = (config.num_hidden_layers, *shape)
        axes = ("layers", *_AXES)
        return LayerCache(*(constrain(jnp.zeros(shape, dtype), axes) for _ in range(2)))
    return tuple(
        LayerCache(*(constrain(jnp.zeros(shape, dtype), _AXES) for _ in range(2)))
        for _ in range(config.num_hidden_layers)
    )


def cache_bytes(config: DecoderConfig, requests: int, capacity: int, dtype) -> int:
    """Size of `init_cache`'s arrays in bytes."""
    row = config.num_key_value_heads * config.head_dim * jnp.dtype(dtype).itemsize
    return 2 * config.num_hidden_layers * requests * capacity * row


def write(
    cache: LayerCache,
    keys: Float[Array, "R T kv_heads D"],
    values: Float[Array, "R T kv_heads D"],
    slots: Int[Array, "R T"],
) -> LayerCache:
    """Stores rows at their slots; a slot at or beyond S_max drops its row."""
    rows = jnp.arange(slots.shape[0], dtype=jnp.int32)[:, None]

    def put(buffer: Array, new: Array) -> Array:
        return constrain(buffer.at[rows, slots].set(new.astype(buffer.dtype), mode="drop"), _AXES)

    return LayerCache(put(cache.keys, keys), put(cache.values, values))


def move(cache: Any, source: Int[Array, "R T"], destination: Int[Array, "R T"]) -> Any:
    """Copies rows of every layer from slot to slot, all read before any is written; see `write` for dropped rows."""

    def one(layer: LayerCache) -> LayerCache:
        def rows(buffer: Array) -> Array:
            return jnp.take_along_axis(buffer, source[:, :, None, None], axis=1)

        return write(layer, rows(layer.keys), rows(layer.values), destination)

    if isinstance(cache, LayerCache):
        return jax.vmap(one)(cache)
    return tuple(map(one, cache))


def cached_attention(slots: Int[Array, "R T"], masks: dict[int | None, Bool[Array, "R T S"]]) -> Attend:
    """Attention that first stores the pass's own keys and values at `slots`, then reads each cache once.

    `masks`: for each sliding window in use, which slots each query sees.
    """

    def attend(q, k, v, cache, window):
        cache = write(cache, k, v, slots)
        return attention(q, cache.keys.astype(q.dtype), cache.values.astype(q.dtype), masks[window]), cache

    return attend


def packed_attention(packing: Packing, slots: Int[Array, "C"], masks: dict[int | None, Bool[Array, "R N S"]]) -> Attend:
    """As `cached_attention`, for tokens packed on one axis: queries are spread over [R, N] and collected again."""

    def attend(q, k, v, cache, window):
        def put(buffer: Array, new: Array) -> Array:
            stored = buffer.at[packing.request, slots].set(new.astype(buffer.dtype), mode="drop")
            return constrain(stored, _AXES)

        cache = LayerCache(put(cache.keys, k), put(cache.values, v))
        keys, values = cache.keys.astype(q.dtype), cache.values.astype(q.dtype)
        return packing.gather(attention(packing.scatter(q), keys, values, masks[window])), cache

    return attend
