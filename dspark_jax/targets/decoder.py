"""The target's forward pass: dense decoder of the Llama and Qwen3 families."""

from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.config import TargetConfig
from dspark_jax.layers.attention import attention, visible
from dspark_jax.layers.decoder import Attend, apply_layers, declare_layers, fuse_layer
from dspark_jax.layers.kv_cache import cache_capacity, cached_attention, packed_attention
from dspark_jax.layers.linear import Embedding, Linear, declare_embedding, declare_linear, embed, matmul, wide_dtype
from dspark_jax.layers.norm import Norm, declare_norm, rms_norm
from dspark_jax.layers.packing import Packing
from dspark_jax.layers.quantized import QuantizedWeight
from dspark_jax.layers.rope import rope_tables
from dspark_jax.sharding import constrain


@struct.dataclass
class TargetParams:
    """`layers` is a tuple of `DecoderLayer`, or one stacked; `lm_head` is None where it is tied to the embedding."""

    embed_tokens: Embedding
    layers: Any
    norm: Norm
    lm_head: Linear | None = None


@struct.dataclass
class TargetOutput:
    """`hidden`: after the final norm. `features`: the tapped layers' outputs, concatenated in ascending order."""

    hidden: Float[Array, "*rows d"]
    features: Float[Array, "*rows features"] | None
    cache: Any


def declare_target(config: TargetConfig) -> TargetParams:
    std = config.initializer_range
    return TargetParams(
        embed_tokens=declare_embedding(config.vocab_size, config.hidden_size, standard_deviation=std),
        layers=declare_layers(config, config.stacked_layers),
        norm=declare_norm(config.hidden_size),
        lm_head=None
        if config.tie_word_embeddings
        else declare_linear(config.vocab_size, config.hidden_size, ("vocab", "embed"), standard_deviation=std),
    )


def fuse_projections(params: TargetParams) -> TargetParams:
    """The same function with fewer products: one for queries, keys and values, one for the MLP's two inputs."""
    layers = params.layers
    fused = tuple(map(fuse_layer, layers)) if isinstance(layers, tuple) else fuse_layer(layers)
    return params.replace(layers=fused)


def is_fused(params: TargetParams) -> bool:
    """Whether `fuse_projections` made them."""
    layers = params.layers if isinstance(params.layers, tuple) else (params.layers,)
    return any(layer.self_attn.qkv_proj is not None for layer in layers)


def head_weight(params: TargetParams) -> Float[Array, "V d"] | QuantizedWeight:
    return params.embed_tokens.weight if params.lm_head is None else params.lm_head.weight


def target_logits(params: TargetParams, config: TargetConfig, hidden: Float[Array, "*rows d"]) -> Array:
    """Logits [*rows, V] in float32 (or wider); padded rows of the vocabulary are -inf."""
    wide = wide_dtype(hidden.dtype)
    logits = matmul(hidden, head_weight(params), wide)
    logits = constrain(logits, ("batch", *(None,) * (logits.ndim - 2), "vocab"))
    if config.num_valid_tokens == config.vocab_size:
        return logits
    real = (jnp.arange(config.vocab_size, dtype=jnp.int32) < config.num_valid_tokens).reshape(
        (1,) * (logits.ndim - 1) + (-1,)
    )
    return jnp.where(real, logits, -jnp.inf)


def forward(
    params: TargetParams,
    config: TargetConfig,
    tokens: Int[Array, "*rows"],
    positions: Int[Array, "*rows"],
    attend: Attend,
    cache: Any = None,
    taps: tuple[int, ...] = (),
    dtype=None,
) -> TargetOutput:
    """One pass over tokens of any leading shape; what each sees is `attend`'s business."""
    x = embed(params.embed_tokens, tokens, dtype)
    x = constrain(x, ("batch", *(None,) * (x.ndim - 1)))
    x, tapped, cache = apply_layers(params.layers, config, x, rope_tables(config, positions), attend, cache, taps)
    features = jnp.concatenate(tapped, axis=-1) if tapped else None
    return TargetOutput(rms_norm(params.norm, x, config.rms_norm_eps), features, cache)


def forward_cached(
    params: TargetParams,
    config: TargetConfig,
    tokens: Int[Array, "R T"],
    start: Int[Array, "R"],
    cache: Any,
    taps: tuple[int, ...] = (),
    active: Bool[Array, "R"] | None = None,
) -> TargetOutput:
    """T new tokens of each request at positions start, start+1, …: prefill, decoding step and chain verify alike.

    Their keys and values go to the slots of the same numbers; a request that is not `active` stores nothing.
    """
    positions = start[:, None] + jnp.arange(tokens.shape[1], dtype=start.dtype)[None]
    keys = _cache_slots(cache, tokens)
    masks = {window: visible(positions, keys, window) for window in set(config.sliding_windows)}
    attend = cached_attention(_stored(positions, keys.shape[1], active), masks)
    return forward(params, config, tokens, positions, attend, cache, taps)


def forward_tree(
    params: TargetParams,
    config: TargetConfig,
    tokens: Int[Array, "R N"],
    depths: Int[Array, "R N"],
    ancestors: Bool[Array, "R N N"],
    start: Int[Array, "R"],
    cache: Any,
    taps: tuple[int, ...] = (),
    active: Bool[Array, "R"] | None = None,
) -> TargetOutput:
    """The N nodes of each request's tree, the root at position `start`: tree verification.

    A node's position is start + its depth, its slot start + its number; it sees the slots before `start` and its
    `ancestors`, itself included. Sliding windows count positions.
    """
    nodes = jnp.arange(tokens.shape[1], dtype=start.dtype)[None]
    slots = _cache_slots(cache, tokens)
    masks = _tree_masks(config, depths, ancestors, start, slots)
    attend = cached_attention(_stored(start[:, None] + nodes, slots.shape[1], active), masks)
    return forward(params, config, tokens, start[:, None] + depths, attend, cache, taps)


def forward_packed(
    params: TargetParams,
    config: TargetConfig,
    packing: Packing,
    tokens: Int[Array, "R N"],
    depths: Int[Array, "R N"],
    ancestors: Bool[Array, "R N N"],
    start: Int[Array, "R"],
    cache: Any,
    taps: tuple[int, ...] = (),
) -> TargetOutput:
    """As `forward_tree`, for the packed nodes alone: `hidden` and `features` are of the C packed tokens.

    A packed node's ancestors must be packed too. Queries are spread over [R, N] for attention, so that each request's
    cache is read once; everything else runs on the packed axis.
    """
    masks = _tree_masks(config, depths, ancestors, start, _cache_slots(cache, tokens))
    slots = packing.gather(jnp.broadcast_to(start[:, None], tokens.shape)) + packing.node
    positions = packing.gather(start[:, None] + depths)
    attend = packed_attention(packing, slots, masks)
    return forward(params, config, packing.gather(tokens), positions, attend, cache, taps)


def _tree_masks(
    config: TargetConfig,
    depths: Int[Array, "R N"],
    ancestors: Bool[Array, "R N N"],
    start: Int[Array, "R"],
    slots: Int[Array, "R S"],
) -> dict[int | None, Bool[Array, "R N S"]]:
    """What each node sees, for each sliding window in use: the slots before `start`, and its ancestors' slots."""
    count = depths.shape[1]
    positions = start[:, None] + depths
    node = slots - start[:, None]
    inside = (node >= 0) & (node < count)
    node = jnp.clip(node, 0, count - 1)
    key_positions = jnp.where(inside, jnp.take_along_axis(positions, node, axis=1), slots)
    mine = jnp.take_along_axis(ancestors, node[:, None, :], axis=2) & inside[:, None, :]
    seen = (slots < start[:, None])[:, None, :] | mine
    return {window: seen & visible(positions, key_positions, window) for window in set(config.sliding_windows)}


def _cache_slots(cache: Any, tokens: Int[Array, "R T"]) -> Int[Array, "R S"]:
    capacity = cache_capacity(cache)
    return jnp.broadcast_to(jnp.arange(capacity, dtype=jnp.int32)[None], (tokens.shape[0], capacity))


def _stored(slots: Int[Array, "R T"], capacity: int, active: Bool[Array, "R"] | None) -> Int[Array, "R T"]:
    """The slots, moved beyond the cache where a request stores nothing."""
    return slots if active is None else jnp.where(active[:, None], slots, capacity)


def forward_documents(
    params: TargetParams,
    config: TargetConfig,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    document_ids: Int[Array, "B T"],
    taps: tuple[int, ...] = (),
    dtype=None,
) -> TargetOutput:
    """Whole rows of one or more documents, without a cache; a token sees its own document only (training)."""
    same = document_ids[:, :, None] == document_ids[:, None, :]
    index = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    masks = {window: visible(index, index, window) & same for window in set(config.sliding_windows)}

    def attend(q, k, v, cache, window):
        return attention(q, jnp.moveaxis(k, 1, 3), jnp.moveaxis(v, 1, 2), masks[window]), cache

    return forward(params, config, tokens, positions, attend, None, taps, dtype)
