"""Block verification of a sampled chain (Sun et al., "Block Verification Accelerates Speculative Decoding", ICLR 2025).

The longest prefix that a running product of ratios accepts stands, so that a late good token can save an early one;
never worse in expectation than token-wise rejection. As there, the verified length must be non-anticipating.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from dspark_jax.proposals import Proposal
from dspark_jax.verification.walk import Verdict


def verify_block(
    proposal: Proposal,
    log_p: Float[Array, "R N V"],
    uniform: Float[Array, "R drafts"],
    noise: Float[Array, "R N V"],
) -> Verdict:
    """Accepts the longest i with uniform_i under h_i, then emits one token more.

    With p_0 = 1, p_i = min(p_{i-1} p(x_i)/q(x_i), 1) and S_i = Σ_x max(p_i p(x) - q(x), 0) over the next token's laws,
    h_i = S_i / (S_i + 1 - p_i), and h_ℓ = p_ℓ at the last verified draft. The extra token comes from
    max(p_i p - q, 0), or after all drafts from p. `log_p`: the target's law after each node. `uniform`: in [0, 1),
    `noise`: Gumbel, both independent of the drafts.
    """
    if proposal.log_q is None:
        raise ValueError("block verification needs the law that each draft was drawn from: log_q is None")
    count = proposal.tokens.shape[1]
    drafts = proposal.tokens[:, 1:, None]
    log_p_draft = jnp.take_along_axis(log_p[:, :-1], drafts, axis=-1)[..., 0]
    log_q_draft = jnp.take_along_axis(proposal.log_q, drafts, axis=-1)[..., 0]
    # A token outside q is never drawn; its ratio must only not be NaN.
    ratio = jnp.where(log_q_draft > -jnp.inf, jnp.exp(log_p_draft - log_q_draft), 0.0)
    running = [jnp.ones(ratio.shape[:1], ratio.dtype)]
    for slot in range(count - 1):
        running.append(jnp.minimum(running[-1] * ratio[:, slot], 1.0))
    running = jnp.stack(running, axis=1)

    residual = jnp.maximum(running[:, :-1, None] * jnp.exp(log_p[:, :-1]) - jnp.exp(proposal.log_q), 0.0)
    mass = jnp.sum(residual, axis=-1)
    # No mass is left where p = q and p_i = 1: a later draft then stands for certain, whatever is said here.
    denominator = mass + 1 - running[:, :-1]
    stands = jnp.where(denominator > 0, mass / jnp.where(denominator > 0, denominator, 1), 1.0)
    verified = jnp.sum(proposal.valid[:, 1:], axis=1, dtype=jnp.int32)[:, None]
    index = jnp.arange(count, dtype=jnp.int32)[None]
    # h_1 … h_γ; index i is the number of accepted drafts.
    stands = jnp.where(index[:, 1:] == verified, running[:, 1:], jnp.pad(stands[:, 1:], ((0, 0), (0, 1))))
    accept = (uniform < stands) & (index[:, 1:] <= verified)
    accepted = jnp.max(jnp.where(accept, index[:, 1:], 0), axis=1)

    requests = jnp.arange(accepted.shape[0], dtype=jnp.int32)
    left = residual[requests, jnp.minimum(accepted, count - 2)]
    whole = (accepted == verified[:, 0]) | (jnp.sum(left, axis=-1) <= 0)
    law = jnp.where(whole[:, None], log_p[requests, accepted], jnp.log(left))
    extra = jnp.argmax(law + noise[requests, accepted].astype(law.dtype), axis=-1).astype(jnp.int32)
    following = jnp.concatenate([proposal.tokens[:, 1:], extra[:, None]], axis=1)
    tokens = jnp.where(index < accepted[:, None], following, extra[:, None])
    return Verdict(tokens, jnp.broadcast_to(index, tokens.shape), accepted)
