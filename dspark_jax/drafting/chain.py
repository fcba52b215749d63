"""DSpark's sequential stage: a scan over the slots of one block, each conditioned on the token drawn before it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax.config import DrafterConfig, DraftModelConfig
from dspark_jax.drafters import dspark, kinds, markov
from dspark_jax.drafters.confidence import confidence_logits
from dspark_jax.drafters.dspark import DrafterParams
from dspark_jax.layers.linear import embed, matmul
from dspark_jax.proposals import Proposal, chain

# choose(logits [R, 1, V_d], noise [R, 1, V_d]) -> row of the draft head [R, 1]
Choose = Callable[[Array, Any], Array]
# law(logits [R, γ, V_d]) -> log q [R, γ, V_d]
Law = Callable[[Array], Array]


def sequential_stage(
    params: DrafterParams,
    config: DrafterConfig,
    hidden: Float[Array, "R gamma d"],
    anchor_tokens: Int[Array, "R"],
    noise: Any,
    choose: Choose,
) -> tuple[Int[Array, "R gamma"], Float[Array, "R gamma V_d"], Float[Array, "R gamma"] | None]:
    """Draft rows of the head, their logits (Markov bias included) and confidence logits.

    `noise` is a tree of arrays [R, γ, …] whose slot k is handed to the choice of slot k.
    """
    base = dspark.base_logits(params, hidden)
    head = params.markov_head
    state = None
    if head is not None:
        state = markov.init_state(config, anchor_tokens.shape, hidden.dtype)

    def slot(carry, item):
        token, state = carry
        hidden_k, logits, noise_k = item
        previous = None
        if head is not None:
            previous = embed(head.markov_w1, token, hidden.dtype)
            state, latent = markov.step(head, config, state, previous, hidden_k)
            logits = logits + matmul(latent, head.markov_w2.weight, logits.dtype)
        confidence = None
        if params.confidence_head is not None:
            confidence = confidence_logits(params.confidence_head, config, previous, hidden_k)
        row = choose(logits[:, None], jax.tree.map(lambda x: x[:, None], noise_k))[:, 0]
        return (dspark.target_token_ids(params, row), state), (row, logits, confidence)

    slots = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (hidden, base, noise))
    _, out = jax.lax.scan(slot, (anchor_tokens, state), slots)
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), out)


def confident_length(
    confidence: Float[Array, "R gamma"] | None, threshold: Float[Array, "R"], gamma: int
) -> Int[Array, "R"]:
    """Drafts before the first slot whose own σ(logit) is strictly under the threshold; γ without a confidence head.

    Slot k's confidence depends on x_{<k} only, so this length never looks at the token it decides about.
    """
    if confidence is None:
        return jnp.full(threshold.shape, gamma, jnp.int32)
    confident = jax.nn.sigmoid(confidence) >= threshold[:, None].astype(confidence.dtype)
    return jnp.sum(jnp.cumprod(confident.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def propose_chain(
    params: DrafterParams,
    config: DrafterConfig,
    hidden: Float[Array, "R gamma d"],
    anchor_tokens: Int[Array, "R"],
    noise: Any,
    choose: Choose,
    confidence_threshold: Float[Array, "R"],
    law: Law | None = None,
) -> Proposal:
    """The confident prefix of a chain over one block's hidden states; see `drafted_chain`."""
    drafted = sequential_stage(params, config, hidden, anchor_tokens, noise, choose)
    return drafted_chain(params, config, *drafted, anchor_tokens, confidence_threshold, law)


def drafted_chain(
    params: kinds.DrafterParams,
    config: DraftModelConfig,
    rows: Int[Array, "R gamma"],
    logits: Float[Array, "R gamma V_d"],
    confidence: Float[Array, "R gamma"] | None,
    anchor_tokens: Int[Array, "R"],
    confidence_threshold: Float[Array, "R"],
    law: Law | None = None,
) -> Proposal:
    """The confident prefix of drafts that are rows of the draft head, chosen by these logits.

    With `law`, the proposal carries log q over the whole target vocabulary (-inf outside a reduced one).
    """
    log_q = None
    if law is not None:
        log_q = law(logits)
        if params.draft_token_ids is not None:
            whole = jnp.full((*log_q.shape[:-1], config.vocab_size), -jnp.inf, log_q.dtype)
            log_q = whole.at[..., params.draft_token_ids].set(log_q)
    drafts = dspark.target_token_ids(params, rows)
    tokens = jnp.concatenate([anchor_tokens[:, None], drafts], axis=1)
    lengths = confident_length(confidence, confidence_threshold, rows.shape[1])
    return chain(tokens, lengths, log_q, confidence)
