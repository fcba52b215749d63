"""DDTree's optimum (arXiv 2604.12989, Proposition 2): the most probable prefixes of a product of marginals."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax.drafting.tree import Children, grow
from dspark_jax.proposals import Proposal


def ddtree(
    log_probabilities: Float[Array, "R gamma m"],
    tokens: Int[Array, "R gamma m"],
    anchor_tokens: Int[Array, "R"],
    budget: int,
) -> Proposal:
    """The `budget` likeliest prefixes, the root included, of candidates that all parents of a depth share.

    Candidates are sorted, likeliest first; m of at least min(budget - 1, V) makes it the optimum over all prefixes:
    the frontier of budget - 1 nodes then holds all that can be in the tree.
    """
    candidates = tokens.shape[-1]
    width = budget - 1

    def expand(parents, state, depth) -> Children:
        scores, ids = (jnp.broadcast_to(x[:, None], (*parents.shape, candidates)) for x in depth)
        return Children(ids, scores, state)

    depths = (jnp.moveaxis(log_probabilities, 1, 0), jnp.moveaxis(tokens, 1, 0))
    return grow(expand, None, depths, anchor_tokens, candidates, width, budget, False, log_probabilities.dtype)
