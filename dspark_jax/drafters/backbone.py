"""The parallel stage: one pass over [anchor, MASK, …] that sees the target's features in every layer (DFlash).

Context features are projected once; every draft layer makes keys and values of its own from the same tensor.
A slot attends, under one softmax, to the context strictly before its anchor and to all slots of its block, or to
itself and those before it in a causal block (JetSpec).
"""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.config import DrafterConfig
from dspark_jax.layers.attention import project_keys_values
from dspark_jax.layers.decoder import apply_layers
from dspark_jax.layers.linear import Linear, linear, wide_dtype
from dspark_jax.layers.norm import Norm, rms_norm
from dspark_jax.layers.rope import rope_tables

# Training attends this many anchors at a time, so that scores over the context stay small.
_ANCHOR_CHUNK = 32


@struct.dataclass
class ContextLayer:
    """One draft layer's keys and values of the context."""

    keys: Float[Array, "B S kv_heads D"]
    values: Float[Array, "B S kv_heads D"]


def context_features(
    fc: Linear, hidden_norm: Norm, config: DrafterConfig, features: Float[Array, "*rows features"]
) -> Float[Array, "*rows d"]:
    """hidden_norm(fc(concatenated taps)): what is injected into every draft layer's keys and values."""
    return rms_norm(hidden_norm, linear(fc, features), config.rms_norm_eps)


def context_keys_values(
    layers, config: DrafterConfig, context: Float[Array, "B S d"], positions: Int[Array, "B S"]
) -> tuple[ContextLayer, ...]:
    """Each layer's keys (normed and rotated) and values of the context; no layer norm or MLP touches it."""
    rope = rope_tables(config, positions)
    return tuple(ContextLayer(*project_keys_values(layer.self_attn, config, context, rope)) for layer in layers)


def block_attention(
    q: Float[Array, "B A block heads D"],
    k: Float[Array, "B A keys kv_heads D"],
    v: Float[Array, "B A keys kv_heads D"],
    context: ContextLayer,
    mask: Bool[Array, "B A block S"],
    within: Bool[Array, "block keys"] | None = None,
) -> Float[Array, "B A block heads D"]:
    """Softmax in float32 over [context; own block].

    `mask` says which context each slot sees, `within` which keys of its block, by default all.
    """
    batch, anchors, slots, heads, width = q.shape
    kv_heads = k.shape[3]
    wide = wide_dtype(q.dtype)
    q = q.reshape(batch, anchors, slots, kv_heads, heads // kv_heads, width)
    keys, values = context.keys.astype(q.dtype), context.values.astype(q.dtype)
    from_context = jnp.einsum("bagknd,bskd->bakngs", q, keys, preferred_element_type=wide)
    from_block = jnp.einsum("bagknd,bajkd->bakngj", q, k, preferred_element_type=wide)
    from_context = jnp.where(mask[:, :, None, None], from_context, jnp.finfo(wide).min)
    if within is not None:
        from_block = jnp.where(within[None, None, None, None], from_block, jnp.finfo(wide).min)
    scores = jnp.concatenate([from_context, from_block], axis=-1) * width**-0.5
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    to_context, to_block = jnp.split(weights, [keys.shape[1]], axis=-1)
    out = jnp.einsum("bakngs,bskd->bagknd", to_context, values) + jnp.einsum("bakngj,bajkd->bagknd", to_block, v)
    return out.reshape(batch, anchors, slots, heads, width)


def context_mask(
    anchors: Int[Array, "B A"],
    anchor_positions: Int[Array, "B A"],
    key_positions: Int[Array, "B S"],
    document: Bool[Array, "B A S"] | None,
    block_size: int,
    window: int | None,
) -> Bool[Array, "B A block S"]:
    """Context strictly before the anchor (by index), of its document, and inside the slot's sliding window."""
    batch, count = anchors.shape
    index = jnp.arange(key_positions.shape[1], dtype=jnp.int32)[None, None]
    before = index < anchors[:, :, None]
    if document is not None:
        before = before & document
    mask = jnp.broadcast_to(before[:, :, None], (batch, count, block_size, index.shape[-1]))
    if window is None:
        return mask
    slots = anchor_positions[:, :, None] + jnp.arange(block_size, dtype=jnp.int32)[None, None]
    return mask & (key_positions[:, None, None] > slots[..., None] - window)


def backbone(
    layers,
    norm: Norm,
    config: DrafterConfig,
    block: Float[Array, "B A block d"],
    anchors: Int[Array, "B A"],
    context: tuple[ContextLayer, ...],
    key_positions: Int[Array, "B S"],
    document_ids: Int[Array, "B S"] | None = None,
) -> Float[Array, "B A gamma d"]:
    """h of the slot of every draft, after the final norm: all slots, or those after the anchor's in place.

    `block` holds the embeddings of [anchor, MASK, …], `anchors` the index of each anchor in the row (which is
    its position too, unless documents are packed), `context` each layer's keys and values of the row.
    """
    block_size, count = block.shape[2], anchors.shape[1]
    anchor_positions, document = anchors, None
    if document_ids is not None:
        anchor_positions = jnp.take_along_axis(key_positions, anchors, axis=1)
        anchor_documents = jnp.take_along_axis(document_ids, anchors, axis=1)
        document = anchor_documents[:, :, None] == document_ids[:, None, :]
    slots = anchor_positions[:, :, None] + jnp.arange(block_size, dtype=jnp.int32)[None, None]

    def masks(window, part=slice(None)):
        return context_mask(
            anchors[:, part],
            anchor_positions[:, part],
            key_positions,
            None if document is None else document[:, part],
            block_size,
            window,
        )

    within = jnp.tril(jnp.ones((block_size, block_size), bool)) if config.causal_block else None

    @jax.checkpoint
    def attend_part(q, k, v, layer_context, mask):
        return block_attention(q, k, v, layer_context, mask, within)

    def attend(q, k, v, layer_context, window):
        if count <= _ANCHOR_CHUNK:
            return block_attention(q, k, v, layer_context, masks(window), within), layer_context
        outputs = []
        for begin in range(0, count, _ANCHOR_CHUNK):
            part = slice(begin, begin + _ANCHOR_CHUNK)
            outputs.append(attend_part(q[:, part], k[:, part], v[:, part], layer_context, masks(window, part)))
        return jnp.concatenate(outputs, axis=1), layer_context

    h, _, _ = apply_layers(layers, config, block, rope_tables(config, slots), attend, context)
    return rms_norm(norm, h[:, :, block_size - config.num_drafts :], config.rms_norm_eps)
