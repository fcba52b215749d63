"""The proposal of one round, a chain or a tree, from the hidden states of one block."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax.config import DrafterConfig, TreeKind, TreeSpec
from dspark_jax.drafters.dspark import DrafterParams
from dspark_jax.drafting.candidates import shared_candidates
from dspark_jax.drafting.chain import Law, propose_chain
from dspark_jax.drafting.ddtree import ddtree
from dspark_jax.drafting.jetspec import jetspec
from dspark_jax.drafting.pctree import Adjust, pctree
from dspark_jax.proposals import Proposal


def propose(
    params: DrafterParams,
    config: DrafterConfig,
    spec: TreeSpec | None,
    hidden: Float[Array, "R gamma d"],
    anchor_tokens: Int[Array, "R"],
    noise: Any,
    adjust: Adjust,
    confidence_threshold: Float[Array, "R"],
    law: Law | None = None,
) -> Proposal:
    """A chain without a `spec`, else its tree. Drafts are the best tokens of `adjust(logits, noise)`.

    `noise` is a tree of arrays [R, γ, …]. With `law` a chain carries log q.
    """

    def choose(logits, slot_noise):
        return jnp.argmax(adjust(logits, slot_noise), axis=-1).astype(jnp.int32)

    block = (params, config, hidden, anchor_tokens, noise)
    if spec is None:
        return propose_chain(*block, choose, confidence_threshold, law)
    if spec.kind is TreeKind.PCTREE:
        return pctree(params, config, spec, hidden, anchor_tokens, noise, adjust, confidence_threshold)
    if spec.kind is TreeKind.JETSPEC:
        candidates = shared_candidates(*block, adjust, confidence_threshold, spec.k)
        return jetspec(*candidates, anchor_tokens, spec.budget)
    count = min(spec.budget - 1, config.draft_vocab_size)
    candidates = shared_candidates(*block, adjust, confidence_threshold, count)
    return ddtree(*candidates, anchor_tokens, spec.budget)
