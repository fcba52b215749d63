"""Candidates of each depth that all parents share: what JetSpec's and DDTree's trees are made of.

They are the drafter's best tokens of each slot; with a sequential head, those along its own chain (the control that
the PCTree paper calls the shared-Markov tree).
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax.config import DrafterConfig
from dspark_jax.drafters import dspark
from dspark_jax.drafters.dspark import DrafterParams
from dspark_jax.drafting.chain import confident_length, sequential_stage
from dspark_jax.drafting.pctree import Adjust, best_children


def shared_candidates(
    params: DrafterParams,
    config: DrafterConfig,
    hidden: Float[Array, "R gamma d"],
    anchor_tokens: Int[Array, "R"],
    noise: Any,
    adjust: Adjust,
    confidence_threshold: Float[Array, "R"],
    count: int,
) -> tuple[Float[Array, "R gamma k"], Int[Array, "R gamma k"]]:
    """log π and target ids of each slot's `count` best tokens, likeliest first; -inf from the first unconfident slot.

    `noise` is a tree of arrays [R, γ, …].
    """

    def choose(logits, slot_noise):
        return jnp.argmax(adjust(logits, slot_noise), axis=-1).astype(jnp.int32)

    _, logits, confidence = sequential_stage(params, config, hidden, anchor_tokens, noise, choose)
    log_probabilities, rows = best_children(adjust(logits, noise), count)
    gamma = hidden.shape[1]
    length = confident_length(confidence, confidence_threshold, gamma)
    confident = jnp.arange(gamma, dtype=jnp.int32)[None] < length[:, None]
    return jnp.where(confident[..., None], log_probabilities, -jnp.inf), dspark.target_token_ids(params, rows)
