"""Key/value cache of fixed slots for each layer, or with a leading layer axis.

Keys lie as [R, kv_heads, D, S_max] and values as [R, kv_heads, S_max, D]: so neither is transposed by the products of
attention, which on CPU takes longer than they do.
"""

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

CACHE_AXES = ("batch", "kv_heads", None, None)


@struct.dataclass
class LayerCache:
    keys: Float[Array, "R kv_heads D S"]
    values: Float[Array, "R kv_heads S D"]

    @property
    def rows(self) -> tuple[Float[Array, "R S kv_heads D"], Float[Array, "R S kv_heads D"]]:
        """Keys and values slot by slot."""
        return jnp.moveaxis(self.keys, 3, 1), jnp.moveaxis(self.values, 2, 1)


def init_cache(config: DecoderConfig, requests: int, capacity: int, dtype, stacked: bool = False) -> Any:
    """Zeroed caches of `capacity` slots a request: a tuple, one a layer, or one stacked `LayerCache`."""
    before = (requests, config.num_key_value_heads)
    keys, values = (*before, config.head_dim, capacity), (*before, capacity, config.head_dim)
    layers, axes = config.num_hidden_layers, CACHE_AXES
    if stacked:
        keys, values, axes = (layers, *keys), (layers, *values), ("layers", *CACHE_AXES)

    def zeros() -> LayerCache:
        return LayerCache(*(constrain(jnp.zeros(shape, dtype), axes) for shape in (keys, values)))

    return zeros() if stacked else tuple(zeros() for _ in range(layers))


def cache_capacity(cache: Any) -> int:
    """Slots of each request."""
    return (cache if isinstance(cache, LayerCache) else cache[0]).keys.shape[-1]


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

    def put(layer: LayerCache, keys: Array, values: Array, slots: Array) -> LayerCache:
        return LayerCache(
            layer.keys.at[:, slots].set(keys.T.astype(layer.keys.dtype), mode="drop"),
            layer.values.at[slots].set(values.astype(layer.values.dtype), mode="drop"),
        )

    return _constrained(jax.vmap(jax.vmap(put, (0, 1, 1, None)))(cache, keys, values, slots))


def _constrained(cache: LayerCache) -> LayerCache:
    return jax.tree.map(lambda x: constrain(x, CACHE_AXES), cache)


def move(cache: Any, source: Int[Array, "R T"], destination: Int[Array, "R T"]) -> Any:
    """Copies rows of every layer from slot to slot, all read before any is written; see `write` for dropped rows."""

    def one(layer: LayerCache) -> LayerCache:
        keys = jnp.take_along_axis(layer.keys, source[:, None, None, :], axis=3)
        values = jnp.take_along_axis(layer.values, source[:, None, :, None], axis=2)
        return write(layer, *LayerCache(keys, values).rows, destination)

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
        stored = LayerCache(
            cache.keys.at[packing.request, :, :, slots].set(k.astype(cache.keys.dtype), mode="drop"),
            cache.values.at[packing.request, :, slots].set(v.astype(cache.values.dtype), mode="drop"),
        )
        cache = _constrained(stored)
        keys, values = cache.keys.astype(q.dtype), cache.values.astype(q.dtype)
        return packing.gather(attention(packing.scatter(q), keys, values, masks[window])), cache

    return attend
