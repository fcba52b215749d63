"""Verification by the target's own choices: follow the child whose token the target chose, else stop with it.

Exact for any proposal that is independent of the target's draws, and, with noise keyed by absolute position and
shared with the drafter, for any proposal at all: what is emitted is a function of the target and the noise alone
(drafter-invariant sampling, Daliri et al., arXiv 2408.07978).
"""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int

from dspark_jax.proposals import Proposal


@struct.dataclass
class Verdict:
    """`tokens`: the accepted drafts, then the target's own next token, then anything; `accepted`: drafts accepted.

    `nodes`: the verified node after which each token was chosen (node 0, the anchor, first).
    """

    tokens: Int[Array, "R depth+1"]
    nodes: Int[Array, "R depth+1"]
    accepted: Int[Array, "R"]


def walk(proposal: Proposal, chosen: Int[Array, "R N"], depth: int) -> Verdict:
    """`chosen`: the target's token after each node. `depth`: the deepest node's depth."""
    requests = jnp.arange(chosen.shape[0], dtype=jnp.int32)

    def descend(carry, _):
        node, alive = carry
        token = chosen[requests, node]
        child = (proposal.parents == node[:, None]) & (proposal.tokens == token[:, None]) & proposal.valid
        hit = jnp.any(child, axis=1) & alive
        node = jnp.where(hit, jnp.argmax(child, axis=1).astype(node.dtype), node)
        return (node, hit), (node, hit)

    start = (jnp.zeros(chosen.shape[:1], jnp.int32), jnp.ones(chosen.shape[:1], bool))
    _, (nodes, hits) = jax.lax.scan(descend, start, None, length=depth)
    nodes = jnp.concatenate([start[0][None], nodes]).T
    tokens = jnp.take_along_axis(chosen, nodes, axis=1)
    return Verdict(tokens, nodes, jnp.sum(hits, axis=0, dtype=jnp.int32))
