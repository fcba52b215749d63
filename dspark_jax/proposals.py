"""What a drafter proposes: the nodes of one verification pass. A chain is a tree whose parents are k-1."""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int


@struct.dataclass
class Proposal:
    """N nodes for each of R requests, in topological order; node 0 is the anchor, the last committed token.

    `parents`: index of each node's parent (-1 for the anchor and for nodes that are not valid). `depths`: 0 for the
    anchor. `valid`: nodes that may be accepted, ancestors included. `log_q` [R, N-1, V]: the law each draft node was
    drawn from, where the verifier needs it, else None. `confidence_logits` [R, N-1]: of each draft of a chain, before
    the sigmoid, or None. `scores`: of a tree's nodes, the sum of log π from the anchor (0) down, else None.
    """

    tokens: Int[Array, "R N"]
    parents: Int[Array, "R N"]
    depths: Int[Array, "R N"]
    valid: Bool[Array, "R N"]
    log_q: Float[Array, "R drafts V"] | None = None
    confidence_logits: Float[Array, "R drafts"] | None = None
    scores: Float[Array, "R N"] | None = None


def chain(
    tokens: Int[Array, "R N"],
    lengths: Int[Array, "R"],
    log_q: Float[Array, "R drafts V"] | None = None,
    confidence_logits: Float[Array, "R drafts"] | None = None,
) -> Proposal:
    """A chain of which the anchor and the first `lengths` drafts are to be verified."""
    index = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    return Proposal(tokens, index - 1, index, index <= lengths[:, None], log_q, confidence_logits)


def ancestors(parents: Int[Array, "R N"], depth: int) -> Bool[Array, "R N N"]:
    """Whether node j is node i itself or lies on its path from the root, for trees at most `depth` deep."""
    nodes = parents.shape[1]
    columns = jnp.arange(nodes, dtype=jnp.int32)[None, None]
    mask = jnp.broadcast_to(columns == jnp.swapaxes(columns, 1, 2), (*parents.shape, nodes))
    current = parents
    for _ in range(depth):
        mask |= columns == current[:, :, None]
        current = jnp.where(current < 0, -1, jnp.take_along_axis(parents, jnp.maximum(current, 0), axis=1))
    return mask
