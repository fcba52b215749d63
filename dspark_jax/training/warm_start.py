"""A drafter that begins as a piece of its target, for runs too short to learn attention from noise."""

import jax
import jax.numpy as jnp

from dspark_jax.drafters.dspark import DrafterParams
from dspark_jax.layers.decoder import DecoderLayer, layer_at
from dspark_jax.layers.linear import Linear
from dspark_jax.layers.norm import Norm
from dspark_jax.targets.decoder import TargetParams

# What random initial values of the feature projection are multiplied with, beside the tap that it passes on.
_OTHER_TAPS = 0.1


def start_from_target(params: DrafterParams, target: TargetParams, layer_ids: tuple[int, ...]) -> DrafterParams:
    """Fresh trainable parameters whose layers are the target's `layer_ids`, one each, and whose last norm is its own.

    The feature projection passes on the last tapped layer, and the context's norm is the first chosen layer's input
    norm: if that layer follows the tap, its context keys and values are exactly those of the target. The layers share
    one context, so the others' input norms become the first one's, and their projections make up for it.

    The target's layers are unfused and have the drafter's widths. Raises ValueError for another
    number of layers.
    """
    if len(layer_ids) != len(params.layers):
        raise ValueError(f"{len(layer_ids)} layers of the target cannot start {len(params.layers)} draft layers")
    chosen = [layer_at(target.layers, index) for index in layer_ids]
    first = chosen[0].input_layernorm
    layers = tuple(_with_input_norm(layer, first) for layer in chosen)
    width, random = params.fc.weight.shape[0], params.fc.weight.astype(jnp.float32)
    fc = (_OTHER_TAPS * random).at[:, -width:].add(jnp.eye(width, dtype=jnp.float32))
    started = params.replace(fc=Linear(weight=fc), hidden_norm=first, layers=layers, norm=target.norm)
    # Copies, so that a train step can take them over: two of them share a norm, and all else is the target's own.
    copied = jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), started.replace(draft_token_ids=None))
    return copied.replace(draft_token_ids=params.draft_token_ids)


def _with_input_norm(layer: DecoderLayer, norm: Norm) -> DecoderLayer:
    """The same layer with another input norm: queries, keys and values read their inputs in its units."""
    ratio = (layer.input_layernorm.weight / norm.weight)[None]
    attention = layer.self_attn
    scaled = {
        name: getattr(attention, name).replace(weight=getattr(attention, name).weight * ratio)
        for name in ("q_proj", "k_proj", "v_proj")
    }
    return layer.replace(input_layernorm=norm, self_attn=attention.replace(**scaled))
