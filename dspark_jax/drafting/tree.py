"""Trees of candidates, whatever proposes a parent's children: a scan over depth, all shapes static.

Nodes live in a pool of 1 + depth·width·k, numbered depth by depth. A slot that nothing fills is dead: its score is
-inf, and so are the scores of all that would grow from it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.proposals import Proposal


@struct.dataclass
class Children:
    """The k children of each frontier parent, likeliest first. `log_probabilities` are at most 0; -inf is no child.

    `state`: what the children's own expansion needs of each parent, arrays [R, W, …], or None.
    """

    tokens: Int[Array, "R W k"]
    log_probabilities: Float[Array, "R W k"]
    state: Any


# expand(tokens [R, W] of the frontier, its state, what belongs to this depth) -> Children
Expand = Callable[[Int[Array, "R W"], Any, Any], Children]


@struct.dataclass
class _Frontier:
    tokens: Int[Array, "R W"]
    nodes: Int[Array, "R W"]
    scores: Float[Array, "R W"]
    spine: Bool[Array, "R W"]
    state: Any


def grow(
    expand: Expand,
    state: Any,
    depths: Any,
    anchor_tokens: Int[Array, "R"],
    k: int,
    width: int,
    budget: int,
    spine: bool,
    dtype,
) -> Proposal:
    """Expand and rerank (PCTree, Algorithm 1): at every depth each frontier parent's k children join the pool.

    A child scores its parent's score plus its log-probability. The next frontier is the `width` best of a layer, and
    the tree the `budget` best of the pool by score, then depth, then number. Since no log-probability is positive,
    also after rounding, a child never precedes its parent, and the tree holds every node's ancestors. With `spine` the
    chain of first children stays at every pruning and in the tree, if the budget has room for a whole one.

    `depths` is a tree of arrays [depth, …] whose row d is handed to the expansion of depth d; `state` the root's,
    arrays [R, W, …]. `dtype` is that of scores.
    """
    requests, depth = anchor_tokens.shape[0], jax.tree.leaves(depths)[0].shape[0]
    spine = spine and budget > depth
    first_slot = jnp.arange(width, dtype=jnp.int32)[None] == 0
    frontier = _Frontier(
        tokens=jnp.broadcast_to(anchor_tokens[:, None], (requests, width)),
        nodes=jnp.zeros((requests, width), jnp.int32),
        scores=jnp.broadcast_to(jnp.where(first_slot, 0.0, -jnp.inf).astype(dtype), (requests, width)),
        spine=jnp.broadcast_to(first_slot & spine, (requests, width)),
        state=state,
    )

    def layer(frontier: _Frontier, item):
        first_node, row = item
        children = expand(frontier.tokens, frontier.state, row)
        scores = frontier.scores[..., None] + children.log_probabilities.astype(dtype)
        on_spine = frontier.spine[..., None] & (jnp.arange(k, dtype=jnp.int32)[None, None] == 0) & jnp.isfinite(scores)
        parents = jnp.broadcast_to(frontier.nodes[..., None], scores.shape)
        flat = [x.reshape(requests, width * k) for x in (children.tokens, parents, scores, on_spine)]
        tokens, parents, scores, on_spine = flat
        _, best = jax.lax.top_k(jnp.where(on_spine, jnp.inf, scores), width)
        following = _Frontier(
            tokens=jnp.take_along_axis(tokens, best, axis=1),
            nodes=first_node + best.astype(jnp.int32),
            scores=jnp.take_along_axis(scores, best, axis=1),
            spine=jnp.take_along_axis(on_spine, best, axis=1),
            state=jax.tree.map(lambda x: _rows(x, best // k), children.state),
        )
        return following, (tokens, parents, scores, on_spine)

    first_nodes = 1 + width * k * jnp.arange(depth, dtype=jnp.int32)
    _, layers = jax.lax.scan(layer, frontier, (first_nodes, depths))
    tokens, parents, scores, on_spine = (jnp.moveaxis(x, 0, 1).reshape(requests, -1) for x in layers)
    pool = Pool(
        tokens=jnp.concatenate([anchor_tokens[:, None], tokens], axis=1),
        parents=jnp.concatenate([jnp.full((requests, 1), -1, jnp.int32), parents], axis=1),
        depths=jnp.concatenate(
            [jnp.zeros(1, jnp.int32), jnp.repeat(jnp.arange(1, depth + 1, dtype=jnp.int32), width * k)]
        ),
        scores=jnp.concatenate([jnp.zeros((requests, 1), dtype), scores], axis=1),
    )
    root = jnp.ones((requests, 1), bool)
    kept = jnp.concatenate([root, on_spine], axis=1)
    return select(pool, jnp.where(kept, jnp.inf, pool.scores), budget)


def _rows(x: Array, index: Int[Array, "R W"]) -> Array:
    return jnp.take_along_axis(x, index.reshape(*index.shape, *(1,) * (x.ndim - 2)), axis=1)


@struct.dataclass
class Pool:
    """Candidate nodes, numbered so that parents come before children; dead ones score -inf."""

    tokens: Int[Array, "R P"]
    parents: Int[Array, "R P"]
    depths: Int[Array, "P"]
    scores: Float[Array, "R P"]


def select(pool: Pool, keys: Float[Array, "R P"], budget: int) -> Proposal:
    """The `budget` nodes of the largest keys, the lower number first among equals, as a tree in the pool's order.

    Nodes that are dead, or that a small pool lacks, come out invalid.
    """
    requests, size = keys.shape
    count = min(budget, size)
    _, nodes = jax.lax.top_k(keys, count)
    nodes = jnp.sort(nodes, axis=1)
    rows = jnp.arange(requests, dtype=jnp.int32)[:, None]
    columns = jnp.full((requests, size), -1, jnp.int32)
    columns = columns.at[rows, nodes].set(jnp.arange(count, dtype=jnp.int32)[None])
    parents = jnp.take_along_axis(pool.parents, nodes, axis=1)
    parents = jnp.where(parents < 0, -1, jnp.take_along_axis(columns, jnp.maximum(parents, 0), axis=1))
    tokens, scores = (jnp.take_along_axis(x, nodes, axis=1) for x in (pool.tokens, pool.scores))
    chosen = (tokens, parents, pool.depths[nodes], scores)
    fills = (0, -1, 0, -jnp.inf)
    padding = ((0, 0), (0, budget - count))
    return tree(*(jnp.pad(x, padding, constant_values=fill) for x, fill in zip(chosen, fills, strict=True)))


def tree(
    tokens: Int[Array, "R N"], parents: Int[Array, "R N"], depths: Int[Array, "R N"], scores: Float[Array, "R N"]
) -> Proposal:
    """Nodes as a proposal; those that score -inf are not valid, and blank."""
    valid = jnp.isfinite(scores)
    return Proposal(
        tokens=jnp.where(valid, tokens, 0),
        parents=jnp.where(valid, parents, -1),
        depths=jnp.where(valid, depths, 0),
        valid=valid,
        scores=scores,
    )
