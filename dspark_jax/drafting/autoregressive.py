"""Drafting one token after the other: a scan whose every step runs the drafter's layer on the draft before it."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax.config import DraftModelConfig
from dspark_jax.drafters import dspark, pairs
from dspark_jax.drafters.backbone import ContextLayer
from dspark_jax.drafters.kinds import DrafterParams
from dspark_jax.drafters.pairs import PairState
from dspark_jax.drafting.chain import Choose, Law, drafted_chain
from dspark_jax.layers.anchor_attention import first_visible
from dspark_jax.proposals import Proposal


def propose_autoregressive(
    params: DrafterParams,
    config: DraftModelConfig,
    state: PairState,
    anchor_tokens: Int[Array, "R"],
    anchor_positions: Int[Array, "R"],
    noise: Any,
    choose: Choose,
    confidence_threshold: Float[Array, "R"],
    law: Law | None = None,
) -> Proposal:
    """A chain of as many drafts as there is noise for: such drafters have no confidence head, so no threshold cuts it.

    `noise` is a tree of arrays [R, drafts, …]. With `law`, the proposal carries log q over the whole target vocabulary.
    """
    pair = anchor_positions[:, None] - 1
    first, context = first_visible(pair, 1, None, None), ContextLayer(*state.cache.rows)

    def draft(carry, item):
        steps, tokens = carry
        k, noise_k = item
        steps, hidden = pairs.draft_step(params, config, context, first, pair, steps, tokens, pair + k, k)
        logits = dspark.base_logits(params, hidden[:, 0])
        rows = choose(logits[:, None], jax.tree.map(lambda x: x[:, None], noise_k))
        return (steps, dspark.target_token_ids(params, rows)), (rows[:, 0], logits)

    begin = (pairs.begin_steps(config, state.hidden[:, None]), anchor_tokens[:, None])
    by_slot = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), noise)
    items = (jnp.arange(jax.tree.leaves(by_slot)[0].shape[0], dtype=jnp.int32), by_slot)
    _, out = jax.lax.scan(draft, begin, items)
    rows, logits = (jnp.moveaxis(x, 0, 1) for x in out)
    return drafted_chain(params, config, rows, logits, None, anchor_tokens, confidence_threshold, law)
