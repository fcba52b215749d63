"""What a scheduler chooses from: the nodes of all requests with their prefix survival. A chain is a tree of depth γ."""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int


@struct.dataclass
class Forest:
    """N nodes for each of R requests; node 0 is the root, the anchor, which a round of its request always verifies.

    `survival`: the prefix survival a, the probability that a node and all its ancestors are accepted; 1 at a root,
    never above the parent's, 0 at nodes that are not valid. `depths`: 0 at roots. `valid`: nodes that exist, of active
    requests, and so do their parents.
    """

    survival: Float[Array, "R N"]
    depths: Int[Array, "R N"]
    valid: Bool[Array, "R N"]


def tree_forest(
    survival: Float[Array, "R N"],
    parents: Int[Array, "R N"],
    depths: Int[Array, "R N"],
    valid: Bool[Array, "R N"],
    active: Bool[Array, "R"],
) -> Forest:
    """The trees of the active requests; `parents`, `depths` and `valid` are those of a `Proposal`.

    `survival`: of each node, the product of its path's edge survivals; a root's is not read. NaN counts as 0, and more
    than the parent's as the parent's: a parallel cumulative product may exceed it in the last bit.
    """
    if jnp.finfo(survival.dtype).bits < 32:
        survival = survival.astype(jnp.float32)
    survival = jnp.where(survival > 0, jnp.minimum(survival, 1), 0)
    survival = jnp.where(depths == 0, 1, survival)
    survival = _least_on_path(jnp.where(valid & active[:, None], survival, -1), parents)
    valid = survival >= 0
    return Forest(jnp.where(valid, survival, 0), depths.astype(jnp.int32), valid)


def chain_forest(
    survival: Float[Array, "R gamma"], active: Bool[Array, "R"], valid: Bool[Array, "R gamma"] | None = None
) -> Forest:
    """The chains of the active requests as nodes [R, γ+1].

    `survival`: a_k = Π_{i≤k} c_i of each draft's confidences. `valid`: drafts that exist, all by default; whether one
    does must not depend on its own token.
    """
    requests, gamma = survival.shape
    if valid is None:
        valid = jnp.ones(survival.shape, bool)
    depths = jnp.broadcast_to(jnp.arange(gamma + 1, dtype=jnp.int32)[None], (requests, gamma + 1))
    survival = jnp.pad(survival, ((0, 0), (1, 0)), constant_values=1)
    valid = jnp.pad(valid, ((0, 0), (1, 0)), constant_values=True)
    return tree_forest(survival, depths - 1, depths, valid, active)


def _least_on_path(values: Float[Array, "R N"], parents: Int[Array, "R N"]) -> Float[Array, "R N"]:
    """The least value of each node and its ancestors, by hops that double: ⌈log2 N⌉ steps whatever the depth."""
    count = parents.shape[1]
    index = jnp.arange(count, dtype=parents.dtype)[None]
    hop = jnp.where(parents < 0, index, parents)
    for _ in range((count - 1).bit_length()):
        values = jnp.minimum(values, jnp.take_along_axis(values, hop, axis=1))
        hop = jnp.take_along_axis(hop, hop, axis=1)
    return values
