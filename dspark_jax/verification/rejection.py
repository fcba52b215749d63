"""Speculative rejection sampling of a chain (Leviathan et al., 2023; Chen et al., 2023), as in the DSpark paper.

Lossless only if the verified length is non-anticipating: whether slot k is verified may depend on earlier slots'
tokens and on older rounds, never on slot k's own token or later ones.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from dspark_jax.proposals import Proposal
from dspark_jax.verification.walk import Verdict


def acceptance_log_probability(log_p: Float[Array, "..."], log_q: Float[Array, "..."]) -> Float[Array, "..."]:
    """log min(1, p/q) of a token drawn from q."""
    return jnp.minimum(log_p - log_q, 0.0)


def residual_log_law(log_p: Float[Array, "... V"], log_q: Float[Array, "... V"]) -> Float[Array, "... V"]:
    """Log of max(p - q, 0), unnormalised; log p where nothing is left (p = q, so a rejection has probability 0)."""
    residual = jnp.maximum(jnp.exp(log_p) - jnp.exp(log_q), 0)
    empty = jnp.sum(residual, axis=-1, keepdims=True) <= 0
    return jnp.where(empty, log_p, jnp.log(residual))


def reject(
    proposal: Proposal,
    log_p: Float[Array, "R N V"],
    uniform: Float[Array, "R drafts"],
    noise: Float[Array, "R N V"],
) -> Verdict:
    """Accepts each draft with probability min(1, p/q), in order, then emits one token more.

    That token comes from the residual after a rejection, and from p itself after the last verified draft.
    `log_p`: the target's law after each node. `uniform`: in [0, 1), `noise`: Gumbel, both independent of the drafts.
    """
    if proposal.log_q is None:
        raise ValueError("rejection sampling needs the law that each draft was drawn from: log_q is None")
    drafts = proposal.tokens[:, 1:, None]
    log_p_draft = jnp.take_along_axis(log_p[:, :-1], drafts, axis=-1)[..., 0]
    log_q_draft = jnp.take_along_axis(proposal.log_q, drafts, axis=-1)[..., 0]
    accept = jnp.log(uniform) < acceptance_log_probability(log_p_draft, log_q_draft)
    accept &= proposal.valid[:, 1:]
    accepted = jnp.sum(jnp.cumprod(accept.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)

    count = proposal.tokens.shape[1]
    requests = jnp.arange(accepted.shape[0], dtype=jnp.int32)
    last_p = log_p[requests, accepted]
    last_q = proposal.log_q[requests, jnp.minimum(accepted, count - 2)]
    verified = jnp.sum(proposal.valid[:, 1:], axis=1, dtype=jnp.int32)
    law = jnp.where((accepted < verified)[:, None], residual_log_law(last_p, last_q), last_p)
    extra = jnp.argmax(law + noise[requests, accepted].astype(law.dtype), axis=-1).astype(jnp.int32)
    index = jnp.arange(count, dtype=jnp.int32)[None]
    following = jnp.concatenate([proposal.tokens[:, 1:], extra[:, None]], axis=1)
    tokens = jnp.where(index < accepted[:, None], following, extra[:, None])
    return Verdict(tokens, jnp.broadcast_to(index, tokens.shape), accepted)
