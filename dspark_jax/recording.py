"""Decoding that keeps what each round drafted: what confidences are calibrated on, and what simulations replay."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.decode_state import DecodeConfig, DecodeState, Requests
from dspark_jax.drafters.kinds import DrafterParams
from dspark_jax.generation import Generation, generation_of
from dspark_jax.proposals import Proposal
from dspark_jax.rounds import (
    anchors_alone,
    begin_round,
    commit,
    draft,
    draft_hidden,
    prefill,
    propose_round,
    target_noise,
    verify,
)
from dspark_jax.sharding import under_auto_axes
from dspark_jax.targets.decoder import TargetParams
from dspark_jax.verification.walk import Verdict


@struct.dataclass
class Edges:
    """The edges of trees, each named by the node that it leads to.

    `log_q`: log π of the node given its parent, at most 0. `reached`: the node's ancestors were all accepted, so that
    the target decided about it; `accepted`: it was accepted too. The root, node 0, has no edge and is never reached.
    """

    log_q: Float[Array, "R rounds N"]
    reached: Bool[Array, "R rounds N"]
    accepted: Bool[Array, "R rounds N"]


@struct.dataclass
class Recording:
    """What R requests' rounds drafted; a request's rows from its number of rounds on are zero.

    `draft_tokens`: all γ drafts of a chain, verified or not; None for trees. `confidence_logits`: of the same drafts,
    before the sigmoid; None for trees and for drafters without a confidence head. `edges`: of trees, None for chains.
    A chain's acceptances are in the generation's `counts.accepted_lengths`, bonus included.
    """

    draft_tokens: Int[Array, "R rounds gamma"] | None
    confidence_logits: Float[Array, "R rounds gamma"] | None
    edges: Edges | None


@functools.partial(jax.jit, static_argnames="config")
def record_rounds(
    target: TargetParams,
    drafter: DrafterParams,
    tokens: Int[Array, "R P"],
    lengths: Int[Array, "R"],
    requests: Requests,
    config: DecodeConfig,
) -> tuple[Generation, Recording]:
    """What `generate` gives, and a recording with room for `config.max_new_tokens` rounds of each request.

    `tokens` holds the prompts, right-padded to P, of which `lengths` are real.
    """

    @under_auto_axes
    def run(target, drafter, tokens, lengths, requests):
        def observed_round(state: DecodeState) -> tuple[DecodeState, Recording]:
            noise = target_noise(config, state)
            proposal = propose_round(drafter, config, state, noise)
            verification = verify(target, config, state, proposal, noise)
            if config.tree is None:
                observed = Recording(proposal.tokens[:, 1:], proposal.confidence_logits, None)
            else:
                observed = Recording(None, None, decided_edges(proposal, verification.verdict))
            return commit(drafter, config, state, proposal, verification), observed

        return observe_rounds(config, observed_round, prefill(target, drafter, config, requests, tokens, lengths))

    return run(target, drafter, tokens, lengths, requests)


@functools.partial(jax.jit, static_argnames="config")
def record_positions(
    target: TargetParams,
    drafter: DrafterParams,
    tokens: Int[Array, "R P"],
    lengths: Int[Array, "R"],
    requests: Requests,
    config: DecodeConfig,
) -> tuple[Generation, tuple[Proposal, Proposal | None]]:
    """Decodes plainly, and keeps what the drafter proposes from every position: the chain and, if the config has one,
    the tree. Their arrays have an axis of rounds after R; a request's rows from its number of rounds on are zero.

    Under greedy and coupled sampling that is the proposal of whichever round begins there. The other arguments are
    those of `record_rounds`.
    """
    chain = dataclasses.replace(config, tree=None)

    @under_auto_axes
    def run(target, drafter, tokens, lengths, requests):
        def observed_round(state: DecodeState) -> tuple[DecodeState, tuple[Proposal, Proposal | None]]:
            noise = target_noise(config, state)
            hidden = draft_hidden(drafter, config, state)
            tree = None if config.tree is None else draft(drafter, config, state, hidden, noise)
            observed = (draft(drafter, chain, state, hidden, noise), tree)
            alone = anchors_alone(state)
            verification = verify(target, chain, state, alone, noise[:, :1])
            return commit(drafter, chain, state, alone, verification), observed

        return observe_rounds(chain, observed_round, prefill(target, drafter, chain, requests, tokens, lengths))

    return run(target, drafter, tokens, lengths, requests)


def observe_rounds(config: DecodeConfig, observed_round: Callable, state: DecodeState) -> tuple[Generation, Any]:
    """Runs rounds from `state` to the end. What `observed_round(state)` gives beside the new state is kept at
    [R, round].
    """

    def body(carry):
        state, recording = carry
        state = begin_round(state)
        rows = jnp.arange(state.done.shape[0], dtype=jnp.int32)
        columns = jnp.where(state.done, config.max_new_tokens, state.counts.rounds - 1)
        state, observed = observed_round(state)
        recording = jax.tree.map(lambda x, new: x.at[rows, columns].set(new, mode="drop"), recording, observed)
        return state, recording

    _, one_round = jax.eval_shape(observed_round, state)
    recording = jax.tree.map(lambda x: jnp.zeros((x.shape[0], config.max_new_tokens, *x.shape[1:]), x.dtype), one_round)
    state, recording = jax.lax.while_loop(lambda carry: ~jnp.all(carry[0].done), body, (state, recording))
    return generation_of(config, state), recording


def decided_edges(proposal: Proposal, verdict: Verdict) -> Edges:
    """The edges [R, N] of one round's tree."""
    parents = jnp.maximum(proposal.parents, 0)
    nodes = jnp.arange(parents.shape[1], dtype=jnp.int32)[None, None]
    on_path = jnp.arange(verdict.nodes.shape[1], dtype=jnp.int32)[None] <= verdict.accepted[:, None]
    accepted = jnp.any((verdict.nodes[..., None] == nodes) & on_path[..., None], axis=1)
    edge = proposal.valid & (proposal.parents >= 0)
    scores: Any = proposal.scores
    log_q = scores - jnp.take_along_axis(scores, parents, axis=1)
    return Edges(
        log_q=jnp.where(edge, jnp.minimum(log_q, 0), -jnp.inf),
        reached=edge & jnp.take_along_axis(accepted, parents, axis=1),
        accepted=edge & accepted,
    )
