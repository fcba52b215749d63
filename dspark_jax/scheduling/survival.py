"""From a round's proposal to what the scheduler chooses from: calibrated prefix survival of every node."""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.proposals import Proposal
from dspark_jax.scheduling.calibration import calibrated_confidences, edge_survival
from dspark_jax.scheduling.forest import Forest, chain_forest, tree_forest


@struct.dataclass
class SurvivalMap:
    """`slopes`, `offsets` of a chain's confidences, `alpha`, `beta` of a tree's edges. See `scheduling.calibration`."""

    slopes: Float[Array, "gamma"]
    offsets: Float[Array, "gamma"]
    alpha: Float[Array, ""]
    beta: Float[Array, ""]


def uncalibrated(gamma: int) -> SurvivalMap:
    """Confidences, and probabilities of a tree's edges, as they are."""
    one, zero = jnp.ones((), jnp.float32), jnp.zeros((), jnp.float32)
    return SurvivalMap(jnp.broadcast_to(one, gamma), jnp.broadcast_to(zero, gamma), one, zero)


def forest_of(proposal: Proposal, survival: SurvivalMap, active: Bool[Array, "R"]) -> Forest:
    """The proposal's nodes with their survival. A chain without confidences survives for certain."""
    if proposal.scores is None:
        drafts = proposal.tokens.shape[1] - 1
        prefix = jnp.ones((active.shape[0], drafts), jnp.float32)
        if proposal.confidence_logits is not None:
            confidences = calibrated_confidences(proposal.confidence_logits, survival.slopes, survival.offsets)
            prefix = jnp.cumprod(confidences, axis=1)
        return chain_forest(prefix, active, proposal.valid[:, 1:])
    parent = jnp.maximum(proposal.parents, 0)
    log_q = proposal.scores - jnp.take_along_axis(proposal.scores, parent, axis=1)
    edges = edge_survival(jnp.where(proposal.valid, log_q, -jnp.inf), survival.alpha, survival.beta)
    edges = jnp.where(proposal.depths == 0, 1.0, edges).astype(edges.dtype)
    path = _product_on_path(edges, proposal.parents)
    return tree_forest(path, proposal.parents, proposal.depths, proposal.valid, active)


def _product_on_path(values: Float[Array, "R N"], parents: Int[Array, "R N"]) -> Float[Array, "R N"]:
    """The product over each node and its ancestors, by hops that double; a root, where hops end, must hold 1."""
    count = parents.shape[1]
    hop = jnp.where(parents < 0, jnp.arange(count, dtype=parents.dtype)[None], parents)
    for _ in range((count - 1).bit_length()):
        values, hop = values * jnp.take_along_axis(values, hop, axis=1), jnp.take_along_axis(hop, hop, axis=1)
    return values
