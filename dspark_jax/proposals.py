"""What a drafter proposes: the nodes of one verification pass. A chain is a tree whose parents are k-1."""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int


@struct.dataclass
class Proposal:
    """N nodes for each of R requests, in topological order; node 0 is the anchor, the last committed token.

    `parents`: index of each node's parent (-1 for the anchor). `depths`: 0 for the anchor. `valid`: nodes that may be
    accepted. `log_q` [R, N-1, V]: the law each draft node was drawn from, where the verifier needs it, else None.
    `confidence_logits` [R, N-1]: of each draft node, before the sigmoid, or None without a confidence head.
    """

    tokens: Int[Array, "R N"]
    parents: Int[Array, "R N"]
    depths: Int[Array, "R N"]
    valid: Bool[Array, "R N"]
    log_q: Float[Array, "R drafts V"] | None = None
    confidence_logits: Float[Array, "R drafts"] | None = None


def chain(
    tokens: Int[Array, "R N"],
    lengths: Int[Array, "R"],
    log_q: Float[Array, "R drafts V"] | None = None,
    confidence_logits: Float[Array, "R drafts"] | None = None,
) -> Proposal:
    """A chain of which the anchor and the first `lengths` drafts are to be verified."""
    index = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    return Proposal(tokens, index - 1, index, index <= lengths[:, None], log_q, confidence_logits)
