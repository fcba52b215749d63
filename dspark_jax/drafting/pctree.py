"""PCTree (arXiv 2608.02123): the sequential head, a function of the parent token, gives each parent its own children.

One backbone pass, no retraining. Vanilla and gated heads see the parent's token (the gate h of the depth as well); the
RNN head's state follows each path.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax.config import DrafterConfig, TreeSpec
from dspark_jax.drafters import dspark, markov
from dspark_jax.drafters.confidence import confidence_logits
from dspark_jax.drafters.dspark import DrafterParams
from dspark_jax.drafting.top_k import two_stage_top_k
from dspark_jax.drafting.tree import Children, grow
from dspark_jax.layers.linear import embed, matmul
from dspark_jax.proposals import Proposal

# adjust(logits [R, W, V_d], noise [R, 1, V_d]) -> the logits that children are taken and scored by
Adjust = Callable[[Array, Array], Array]


def best_children(logits: Float[Array, "R W V_d"], k: int) -> tuple[Float[Array, "R W k"], Int[Array, "R W k"]]:
    """log π of the k likeliest rows under the softmax over the whole draft vocabulary, at most 0, and the rows."""
    values, rows = two_stage_top_k(logits, k)
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return jnp.minimum(values - total, 0), rows


def pctree(
    params: DrafterParams,
    config: DrafterConfig,
    spec: TreeSpec,
    hidden: Float[Array, "R gamma d"],
    anchor_tokens: Int[Array, "R"],
    noise: Any,
    adjust: Adjust,
    confidence_threshold: Float[Array, "R"],
) -> Proposal:
    """The tree over one block's hidden states. Equal tokens under different parents are different nodes.

    `noise` is a tree of arrays [R, γ, …], the same for all parents of a depth. A parent whose confidence is strictly
    under the threshold has no children.
    """
    logits = dspark.base_logits(params, hidden)
    return pctree_of_logits(params, config, spec, hidden, logits, anchor_tokens, noise, adjust, confidence_threshold)


def pctree_of_logits(
    params: DrafterParams,
    config: DrafterConfig,
    spec: TreeSpec,
    hidden: Float[Array, "R gamma d"],
    base: Float[Array, "R gamma V_d"],
    anchor_tokens: Int[Array, "R"],
    noise: Any,
    adjust: Adjust,
    confidence_threshold: Float[Array, "R"],
) -> Proposal:
    """As `pctree`, with the base logits given: the tree stage alone."""
    head, width = params.markov_head, spec.width
    state = None
    if head is not None:
        state = markov.init_state(config, (anchor_tokens.shape[0], width), hidden.dtype)

    def expand(tokens, state, depth) -> Children:
        hidden_d, logits, noise_d = depth
        hidden_d = jnp.broadcast_to(hidden_d[:, None], (*tokens.shape, hidden_d.shape[-1]))
        logits, previous = logits[:, None], None
        if head is not None:
            previous = embed(head.markov_w1, tokens, hidden_d.dtype)
            state, latent = markov.step(head, config, state, previous, hidden_d)
            logits = logits + matmul(latent, head.markov_w2.weight, logits.dtype)
        scores, rows = best_children(adjust(logits, jax.tree.map(lambda x: x[:, None], noise_d)), spec.k)
        scores, rows = (jnp.broadcast_to(x, (*tokens.shape, spec.k)) for x in (scores, rows))
        if params.confidence_head is not None:
            confidence = jax.nn.sigmoid(confidence_logits(params.confidence_head, config, previous, hidden_d))
            confident = confidence >= confidence_threshold[:, None].astype(confidence.dtype)
            scores = jnp.where(confident[..., None], scores, -jnp.inf)
        return Children(dspark.target_token_ids(params, rows), scores, state)

    depths = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (hidden, base, noise))
    return grow(expand, state, depths, anchor_tokens, spec.k, width, spec.budget, spec.spine, base.dtype)
