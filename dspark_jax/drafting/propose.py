"""The proposal of one round, a chain or a tree."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax.config import DrafterConfig, DraftModelConfig, TreeKind, TreeSpec
from dspark_jax.drafters.kinds import DrafterParams, DrafterState
from dspark_jax.drafting.autoregressive import propose_autoregressive
from dspark_jax.drafting.candidates import shared_candidates
from dspark_jax.drafting.chain import Law, propose_chain
from dspark_jax.drafting.ddtree import ddtree
from dspark_jax.drafting.jetspec import jetspec
from dspark_jax.drafting.pctree import Adjust, pctree
from dspark_jax.proposals import Proposal


def propose(
    params: DrafterParams,
    config: DraftModelConfig,
    spec: TreeSpec | None,
    state: DrafterState,
    hidden: Float[Array, "R gamma d"] | None,
    anchor_tokens: Int[Array, "R"],
    anchor_positions: Int[Array, "R"],
    noise: Any,
    adjust: Adjust,
    confidence_threshold: Float[Array, "R"],
    law: Law | None = None,
) -> Proposal:
    """A chain without a `spec`, else its tree. Drafts are the best tokens of `adjust(logits, noise)`.

    `hidden`: of the parallel stage; a kind without one drafts from its `state`, chains only. `noise` is a tree of
    arrays [R, drafts, …]. With `law` a chain carries log q.
    """

    def choose(logits, slot_noise):
        return jnp.argmax(adjust(logits, slot_noise), axis=-1).astype(jnp.int32)

    if not isinstance(config, DrafterConfig):
        anchors = (anchor_tokens, anchor_positions)
        return propose_autoregressive(params, config, state, *anchors, noise, choose, confidence_threshold, law)
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
