"""The DSpark drafter: parallel backbone, Markov head and confidence head. DFlash and JetSpec are the backbone alone."""

from typing import Any, ClassVar

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.config import DrafterConfig
from dspark_jax.drafters.backbone import ContextLayer, backbone, context_features, context_keys_values
from dspark_jax.drafters.confidence import ConfidenceHead, declare_confidence
from dspark_jax.drafters.markov import MarkovHead, declare_markov
from dspark_jax.layers.decoder import declare_layers
from dspark_jax.layers.kv_cache import LayerCache, cache_capacity, init_cache, write
from dspark_jax.layers.linear import Embedding, Linear, declare_embedding, declare_linear, embed, matmul, wide_dtype
from dspark_jax.layers.norm import Norm, declare_norm
from dspark_jax.parameters import Parameter
from dspark_jax.sharding import constrain


@struct.dataclass
class DrafterParams:
    """Field paths are the DeepSpec tensor names.

    `embed_tokens` and `lm_head` are frozen copies of the target's. `draft_token_ids` lists, ascending, the target id
    of each row of a reduced draft vocabulary; it is None when the vocabulary is whole.
    """

    FROZEN: ClassVar[tuple[str, ...]] = ("embed_tokens", "lm_head")

    embed_tokens: Embedding | None
    fc: Linear
    hidden_norm: Norm
    layers: Any
    norm: Norm
    lm_head: Linear | None
    markov_head: MarkovHead | None = None
    confidence_head: ConfidenceHead | None = None
    draft_token_ids: Int[Array, "V_d"] | None = None


# The drafter's state between rounds: each layer's context keys and values.
DrafterState = tuple[LayerCache, ...]


def declare_drafter(config: DrafterConfig) -> DrafterParams:
    d, std = config.hidden_size, config.initializer_range
    taps = len(config.target_layer_ids)
    return DrafterParams(
        embed_tokens=declare_embedding(config.vocab_size, d, standard_deviation=std),
        fc=declare_linear(d, taps * d, ("embed", None), standard_deviation=std),
        hidden_norm=declare_norm(d),
        layers=declare_layers(config),
        norm=declare_norm(d),
        lm_head=declare_linear(config.draft_vocab_size, d, ("vocab", "embed"), standard_deviation=std),
        markov_head=declare_markov(config) if config.markov_rank else None,
        confidence_head=declare_confidence(config) if config.enable_confidence_head else None,
        draft_token_ids=Parameter((config.draft_vocab_size,), (None,), dtype=jnp.int32)
        if config.reduced_vocabulary
        else None,
    )


def init_state(config: DrafterConfig, requests: int, capacity: int, dtype) -> DrafterState:
    return init_cache(config, requests, capacity, dtype)


def extend(
    params: DrafterParams,
    config: DrafterConfig,
    state: DrafterState,
    features: Float[Array, "R T features"],
    start: Int[Array, "R"],
    active: Bool[Array, "R"] | None = None,
) -> DrafterState:
    """Adds the target features of T consecutive tokens from position `start` of each request to the context.

    Rows beyond what was committed may be passed: the next call overwrites them before anything sees them.
    """
    capacity = cache_capacity(state)
    positions = start[:, None] + jnp.arange(features.shape[1], dtype=start.dtype)[None]
    slots = positions if active is None else jnp.where(active[:, None], positions, capacity)
    context = context_features(params.fc, params.hidden_norm, config, features)
    new = context_keys_values(params.layers, config, context, positions)
    return tuple(write(old, layer.keys, layer.values, slots) for old, layer in zip(state, new, strict=True))


def block_embeddings(
    params: DrafterParams, config: DrafterConfig, anchor_tokens: Int[Array, "B A"], dtype
) -> Float[Array, "B A block d"]:
    """Embeddings of [anchor, MASK × (block_size-1)]."""
    masks = jnp.full((*anchor_tokens.shape, config.block_size - 1), config.mask_token_id, anchor_tokens.dtype)
    return embed(params.embed_tokens, jnp.concatenate([anchor_tokens[..., None], masks], axis=-1), dtype)


def block_hidden(
    params: DrafterParams,
    config: DrafterConfig,
    state: DrafterState,
    anchor_tokens: Int[Array, "R"],
    anchor_positions: Int[Array, "R"],
) -> Float[Array, "R gamma d"]:
    """h of every draft of one block a request: the parallel stage of a decoding round."""
    block = block_embeddings(params, config, anchor_tokens[:, None], params.fc.weight.dtype)
    context = tuple(ContextLayer(*layer.rows) for layer in state)
    return backbone(params.layers, params.norm, config, block, anchor_positions[:, None], context)[:, 0]


def base_logits(params: DrafterParams, hidden: Float[Array, "*rows d"]) -> Float[Array, "*rows V_d"]:
    """U = lm_head(h) in float32 (or wider), before the Markov bias."""
    logits = matmul(hidden, params.lm_head.weight, wide_dtype(hidden.dtype))
    return constrain(logits, ("batch", *(None,) * (logits.ndim - 2), "vocab"))


def target_token_ids(params: DrafterParams, draft_ids: Int[Array, "*rows"]) -> Int[Array, "*rows"]:
    """Target ids of rows of the draft head."""
    if params.draft_token_ids is None:
        return draft_ids
    return params.draft_token_ids[draft_ids]
