"""The parallel stage: one pass over [anchor, MASK, …] that sees the target's features in every layer (DFlash).

Context features are projected once; every draft layer makes keys and values of its own from the same tensor.
A slot attends, under one softmax, to the context strictly before its anchor and to all slots of its block, or to
itself and those before it in a causal block (JetSpec).
"""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from dspark_jax.config import DrafterConfig
from dspark_jax.layers.anchor_attention import anchor_attention, first_visible
from dspark_jax.layers.attention import project_keys_values
from dspark_jax.layers.decoder import Remat, apply_layers
from dspark_jax.layers.linear import Linear, linear
from dspark_jax.layers.norm import Norm, rms_norm
from dspark_jax.layers.rope import rope_tables


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


def backbone(
    layers,
    norm: Norm,
    config: DrafterConfig,
    block: Float[Array, "B A block d"],
    anchors: Int[Array, "B A"],
    context: tuple[ContextLayer, ...],
    positions: Int[Array, "B S"] | None = None,
    document_ids: Int[Array, "B S"] | None = None,
    remat: Remat = Remat.NONE,
) -> Float[Array, "B A gamma d"]:
    """h of the slot of every draft, after the final norm: all slots, or those after the anchor's in place.

    `block` holds the embeddings of [anchor, MASK, …], `anchors` the index of each anchor in the row, `context` each
    layer's keys and values of the row. An index is a position unless documents are packed, with `positions` and
    `document_ids`.
    """
    block_size = block.shape[2]
    slots = anchors if document_ids is None else jnp.take_along_axis(positions, anchors, axis=1)
    slots = slots[:, :, None] + jnp.arange(block_size, dtype=jnp.int32)[None, None]
    within = jnp.ones((block_size, block_size), bool)
    if config.causal_block:
        within = jnp.tril(within)

    def attend(q, k, v, layer, window):
        first = first_visible(anchors, block_size, document_ids, window)
        return anchor_attention(q, k, v, layer.keys, layer.values, first, anchors, within), layer

    h, _, _ = apply_layers(layers, config, block, rope_tables(config, slots), attend, context, remat=remat)
    return rms_norm(norm, h[:, :, block_size - config.num_drafts :], config.rms_norm_eps)
