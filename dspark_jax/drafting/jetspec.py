"""JetSpec's tree (arXiv 2606.18394, Algorithm 1): best-first over candidates that all parents of a depth share.

The published method conditions a branch on its tokens in verification only, not when it is drafted; PCTree does.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax.drafting.tree import tree
from dspark_jax.proposals import Proposal


def jetspec(
    log_probabilities: Float[Array, "R gamma k"],
    tokens: Int[Array, "R gamma k"],
    anchor_tokens: Int[Array, "R"],
    budget: int,
) -> Proposal:
    """Takes the best open node and adds all its k children at once, until there are `budget` nodes.

    Of equal scores the node inserted first is taken. The last children may not all fit.
    """
    requests, depth, k = tokens.shape
    expansions = -(-(budget - 1) // k)
    size = 1 + expansions * k
    rows = jnp.arange(requests, dtype=jnp.int32)
    root = jnp.arange(size, dtype=jnp.int32)[None] == 0
    dtype = log_probabilities.dtype
    nodes = (
        jnp.where(root, anchor_tokens[:, None], 0),
        jnp.full((requests, size), -1, jnp.int32),
        jnp.zeros((requests, size), jnp.int32),
        jnp.broadcast_to(jnp.where(root, 0.0, -jnp.inf).astype(dtype), (requests, size)),
        jnp.broadcast_to(root, (requests, size)),
    )

    def pop(nodes, first):
        tokens_, parents, depths, scores, open_ = nodes
        best = jnp.argmax(jnp.where(open_ & (depths < depth), scores, -jnp.inf), axis=1).astype(jnp.int32)
        live = open_[rows, best] & (depths[rows, best] < depth)
        level = jnp.minimum(depths[rows, best], depth - 1)
        children = jnp.where(live[:, None], scores[rows, best][:, None] + log_probabilities[rows, level], -jnp.inf)

        def put(x, new):
            return jax.lax.dynamic_update_slice_in_dim(
                x, jnp.broadcast_to(new, (requests, k)).astype(x.dtype), first, 1
            )

        return (
            put(tokens_, tokens[rows, level]),
            put(parents, best[:, None]),
            put(depths, level[:, None] + 1),
            put(scores, children),
            put(open_.at[rows, best].set(False), jnp.isfinite(children)),
        ), None

    first = 1 + k * jnp.arange(expansions, dtype=jnp.int32)
    (tokens_, parents, depths, scores, _), _ = jax.lax.scan(pop, nodes, first)
    return tree(*(x[:, :budget] for x in (tokens_, parents, depths, scores)))
