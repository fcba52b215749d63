"""What Eagle3 and multi-token prediction share: one causal layer over pairs of a token and the hidden state before it.

The pair of the token at position p has position p - 1, that of its hidden state; its output predicts the token at
p + 1. Keys and values of pairs with hidden states of the target persist. The anchor's pair is the first draft step's;
every later one pairs a draft with the step's own last output, and is thrown away with its round.
"""

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.config import DraftModelConfig, Eagle3Config
from dspark_jax.drafters import eagle3, mtp
from dspark_jax.drafters.backbone import ContextLayer
from dspark_jax.layers.anchor_attention import anchor_attention, first_visible
from dspark_jax.layers.attention import project_keys_values
from dspark_jax.layers.decoder import after_input_norm
from dspark_jax.layers.kv_cache import LayerCache, cache_capacity, init_cache, write
from dspark_jax.layers.linear import embed
from dspark_jax.layers.norm import rms_norm
from dspark_jax.layers.rope import rope_tables


@struct.dataclass
class PairState:
    """The drafter's own cache, by the position of the pair, and the hidden state of the last token that was read,
    which waits for the token after it.
    """

    cache: LayerCache
    hidden: Float[Array, "R d"]


@struct.dataclass
class Steps:
    """A run of draft steps so far: the last one's output, and the keys and values of all, blank from the next on."""

    hidden: Float[Array, "B A d"]
    keys: Float[Array, "B A gamma kv_heads D"]
    values: Float[Array, "B A gamma kv_heads D"]


def _kind(config: DraftModelConfig) -> ModuleType:
    return eagle3 if isinstance(config, Eagle3Config) else mtp


def init_state(config: DraftModelConfig, requests: int, capacity: int, dtype) -> PairState:
    (cache,) = init_cache(config, requests, capacity, dtype)
    return PairState(cache, jnp.zeros((requests, config.hidden_size), dtype))


def _pairs(params: Any, config: DraftModelConfig, tokens: Int[Array, "*rows"], hidden: Float[Array, "*rows d"]):
    return _kind(config).mix(params, config, embed(params.embed_tokens, tokens, hidden.dtype), hidden)


def _keys_values(params: Any, config: DraftModelConfig, tokens, hidden, positions) -> tuple[Array, Array]:
    _, read = _pairs(params, config, tokens, hidden)
    return project_keys_values(_kind(config).layer(params).self_attn, config, read, rope_tables(config, positions))


def extend(
    params: Any,
    config: DraftModelConfig,
    state: PairState,
    tokens: Int[Array, "R T"],
    features: Float[Array, "R T features"],
    start: Int[Array, "R"],
    count: Int[Array, "R"],
    active: Bool[Array, "R"] | None = None,
) -> PairState:
    """Adds T tokens that the target has read, from position `start` of each request on, of which `count` stand.

    `features` are the target's of these tokens. Rows from `count` on may be anything: the next call overwrites them
    before anything sees them.
    """
    capacity = cache_capacity(state.cache)
    hidden = _kind(config).fuse(params, config, features).astype(state.hidden.dtype)
    before = jnp.concatenate([state.hidden[:, None], hidden[:, :-1]], axis=1)
    positions = start[:, None] + jnp.arange(tokens.shape[1], dtype=start.dtype)[None] - 1
    # No hidden state comes before the very first token.
    stored = positions >= 0
    last = jnp.take_along_axis(hidden, count[:, None, None] - 1, axis=1)[:, 0]
    if active is not None:
        stored &= active[:, None]
        last = jnp.where(active[:, None], last, state.hidden)
    keys, values = _keys_values(params, config, tokens, before, positions)
    return PairState(write(state.cache, keys, values, jnp.where(stored, positions, capacity)), last)


def begin_steps(config: DraftModelConfig, hidden: Float[Array, "B A d"]) -> Steps:
    """No steps yet; `hidden` is the state before each anchor."""
    shape = (*hidden.shape[:2], config.num_drafts, config.num_key_value_heads, config.head_dim)
    blank = jnp.zeros(shape, hidden.dtype)
    return Steps(hidden, blank, blank)


def draft_step(
    params: Any,
    config: DraftModelConfig,
    context: ContextLayer,
    first: Int[Array, "B A 1"],
    anchor_pairs: Int[Array, "B A"],
    steps: Steps,
    tokens: Int[Array, "B A"],
    positions: Int[Array, "B A"],
    step: Int[Array, ""],
) -> tuple[Steps, Float[Array, "B A d"]]:
    """One draft step from `tokens` and the last output: (steps with this one, what the head reads).

    It sees the context from index `first` to before its anchor's pair, and the earlier steps from the same anchor.
    `positions`: of its pairs.
    """

    def attend(q, k, v, steps, window):
        def put(buffer: Array, new: Array) -> Array:
            return jax.lax.dynamic_update_index_in_dim(buffer, new.astype(buffer.dtype), step, 2)

        steps = steps.replace(keys=put(steps.keys, k), values=put(steps.values, v))
        within = jnp.arange(config.num_drafts, dtype=jnp.int32)[None] <= step
        own, row = (steps.keys, steps.values), (context.keys, context.values)
        return anchor_attention(q[:, :, None], *own, *row, first, anchor_pairs, within)[:, :, 0], steps

    residual, read = _pairs(params, config, tokens, steps.hidden)
    layer, rope = _kind(config).layer(params), rope_tables(config, positions)
    hidden, steps = after_input_norm(layer, config, residual, read, rope, attend, steps, None)
    return steps.replace(hidden=hidden), rms_norm(params.norm, hidden, config.rms_norm_eps)


def teacher_forced(
    params: Any,
    config: DraftModelConfig,
    features: Float[Array, "B T features"],
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    document_ids: Int[Array, "B T"],
    anchors: Int[Array, "B A"],
    previous: Int[Array, "B A gamma"],
) -> Float[Array, "B A gamma d"]:
    """What the head reads at every draft from every anchor, on true tokens: EAGLE-3's training-time test.

    `anchors` are indices in the row, at least 1; `previous` the true tokens from each on. Step k sees the pairs with
    hidden states of the target up to the anchor's, and its own steps 1 to k, just as in decoding.
    """
    hidden = _kind(config).fuse(params, config, features)
    following = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
    context = ContextLayer(*_keys_values(params, config, following, hidden, positions))

    anchor_pairs = jnp.maximum(anchors - 1, 0)
    first = first_visible(anchor_pairs, 1, document_ids, None)
    begin = jnp.take_along_axis(positions, anchor_pairs, axis=1)

    @jax.checkpoint
    def step(steps, item):
        k, tokens = item
        return draft_step(params, config, context, first, anchor_pairs, steps, tokens, begin + k, k)

    steps = begin_steps(config, jnp.take_along_axis(hidden, anchor_pairs[..., None], axis=1))
    items = (jnp.arange(config.num_drafts, dtype=jnp.int32), jnp.moveaxis(previous, 2, 0))
    return jnp.moveaxis(jax.lax.scan(step, steps, items)[1], 0, 2)
