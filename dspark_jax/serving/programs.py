"""The engine's compiled programs: one to admit, one to draft and schedule, and one to verify for each bucket."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.decode_state import DecodeConfig, DecodeState, Requests
from dspark_jax.drafters.kinds import DrafterParams
from dspark_jax.proposals import Proposal
from dspark_jax.rounds import (
    anchors_alone,
    begin_round,
    commit,
    init_state,
    prefill_chunk,
    propose_round,
    target_noise,
    verify,
)
from dspark_jax.scheduling.policy import Policy, PolicyKind
from dspark_jax.scheduling.prefix_scheduler import (
    Schedule,
    capacity,
    early_stop,
    fill,
    fixed_length,
    global_best,
    threshold,
)
from dspark_jax.scheduling.survival import SurvivalMap, forest_of
from dspark_jax.scheduling.throughput import StepTable
from dspark_jax.targets.decoder import TargetParams


@struct.dataclass
class Drafted:
    """A round before its verification. `proposal.valid` are the nodes scheduled, `tokens` their number.

    `best_drafts`: drafts, without roots, of the schedule of the largest throughput by this round's confidences,
    for a stale capacity two rounds on; 0 under other policies.
    `survival`: of a request's nodes beside the root, the largest first, on average over the active requests.
    """

    proposal: Proposal
    noise: Float[Array, "R depth+1 V"]
    tokens: Int[Array, ""]
    best_drafts: Int[Array, ""]
    survival: Float[Array, "N-1"]


@struct.dataclass
class Report:
    """What the host needs to know of a round: `tokens[:, :kept]` are new."""

    tokens: Int[Array, "R depth+1"]
    kept: Int[Array, "R"]
    accepted_lengths: Int[Array, "R"]
    verified_nodes: Int[Array, "R"]
    done: Bool[Array, "R"]
    stopped: Bool[Array, "R"]
    best_drafts: Int[Array, ""]
    survival: Float[Array, "N-1"]


def _no_drafts() -> tuple[Int[Array, ""], Float[Array, "0"]]:
    return jnp.zeros((), jnp.int32), jnp.zeros(0, jnp.float32)


empty_state = jax.jit(init_state, static_argnames=("config", "capacity", "dtype"))


def _map_slots(config: DecodeConfig, function: Callable[..., Array], *states: DecodeState) -> DecodeState:
    """Applies function(axis of the slots, *arrays) to corresponding arrays of states."""
    caches = (state.cache for state in states)
    rest = jax.tree.map(functools.partial(function, 0), *(state.replace(cache=None) for state in states))
    axis = 1 if config.target.stacked_layers else 0
    return rest.replace(cache=jax.tree.map(functools.partial(function, axis), *caches))


@functools.partial(jax.jit, static_argnames="config", donate_argnames="state")
def admit(
    target: TargetParams,
    drafter: DrafterParams | None,
    config: DecodeConfig,
    state: DecodeState,
    slot: Int[Array, ""],
    request: Requests,
    tokens: Int[Array, "1 P"],
    start: Int[Array, ""],
    length: Int[Array, ""],
) -> tuple[DecodeState, Report]:
    """Reads a chunk of a prompt into a slot; the last chunk makes the request active, with its first token."""
    row = _map_slots(config, lambda axis, x: jax.lax.dynamic_slice_in_dim(x, slot, 1, axis), state)
    row = prefill_chunk(target, drafter, config, row.replace(requests=request), tokens, start[None], length[None])
    first = jnp.take_along_axis(row.tokens, length[None, None], axis=1)
    whole = start + tokens.shape[1] >= length
    one = jnp.where(whole, 1, 0)[None].astype(jnp.int32)
    report = Report(first, one, one, one, row.done & whole, row.stopped, *_no_drafts())

    def put(axis: int, x: Array, new: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(x, new, slot, axis)

    return _map_slots(config, put, state, row), report


def schedule(
    policy: Policy,
    table: StepTable,
    survival: SurvivalMap,
    proposal: Proposal,
    active: Bool[Array, "R"],
    limit: Int[Array, ""],
) -> tuple[Schedule, Int[Array, ""], Float[Array, "N-1"]]:
    """What is verified of a round's proposal, and `best_drafts` and `survival` of `Drafted`, for rounds to come.

    `limit`: tokens of the bucket that a stale capacity chose; other policies do not read it.
    """
    forest = forest_of(proposal, survival, active)
    best_drafts = jnp.zeros((), jnp.int32)
    count = jnp.sum(active, dtype=jnp.int32)
    match policy.kind:
        case PolicyKind.EARLY_STOP:
            chosen = early_stop(forest, table)
        case PolicyKind.GLOBAL_BEST:
            chosen = global_best(forest, table)
        case PolicyKind.STALE_CAPACITY:
            chosen = fill(forest, limit)
            best_drafts = capacity(forest, table) - count
        case PolicyKind.FIXED:
            chosen = fixed_length(forest, policy.length)
        case PolicyKind.THRESHOLD:
            chosen = threshold(forest, jnp.full(active.shape[0], policy.threshold, forest.survival.dtype))
    ranked = -jnp.sort(-forest.survival[:, 1:], axis=1)
    return chosen, best_drafts, jnp.sum(ranked, axis=0) / jnp.maximum(count, 1).astype(ranked.dtype)


@functools.partial(jax.jit, static_argnames=("config", "policy"), donate_argnames="state")
def draft_and_schedule(
    drafter: DrafterParams | None,
    config: DecodeConfig,
    policy: Policy,
    table: StepTable,
    survival: SurvivalMap,
    state: DecodeState,
    ended: Bool[Array, "R"],
    limit: Int[Array, ""],
) -> tuple[DecodeState, Drafted]:
    """Ends the requests that the host has ended, drafts for the others, and schedules.

    `limit`: tokens of the bucket that a stale capacity chose; other policies do not read it.
    """
    state = begin_round(state.replace(done=state.done | ended))
    noise = target_noise(config, state)
    proposal = propose_round(drafter, config, state, noise)
    with jax.named_scope("schedule"):
        chosen, best_drafts, curve = schedule(policy, table, survival, proposal, ~state.done, limit)
    return state, Drafted(proposal.replace(valid=chosen.nodes), noise, chosen.tokens, best_drafts, curve)


def _verify(
    target: TargetParams,
    drafter: DrafterParams | None,
    config: DecodeConfig,
    capacity: int,
    state: DecodeState,
    drafted: Drafted,
) -> tuple[DecodeState, Report]:
    before = state.lengths
    verification = verify(target, config, state, drafted.proposal, drafted.noise, capacity)
    state = commit(drafter, config, state, drafted.proposal, verification)
    report = Report(
        tokens=verification.verdict.tokens,
        kept=state.lengths - before,
        accepted_lengths=verification.verdict.accepted + 1,
        verified_nodes=jnp.sum(drafted.proposal.valid, axis=1, dtype=jnp.int32),
        done=state.done,
        stopped=state.stopped,
        best_drafts=drafted.best_drafts,
        survival=drafted.survival,
    )
    return state, report


@functools.partial(jax.jit, static_argnames=("config", "capacity"), donate_argnames="state")
def verify_and_commit(
    target: TargetParams,
    drafter: DrafterParams | None,
    config: DecodeConfig,
    capacity: int,
    state: DecodeState,
    drafted: Drafted,
) -> tuple[DecodeState, Report]:
    """Verifies the scheduled nodes in a bucket of `capacity` tokens, and commits what was accepted."""
    return _verify(target, drafter, config, capacity, state, drafted)


@functools.partial(jax.jit, static_argnames=("config", "capacity"), donate_argnames="state")
def plain_step(
    target: TargetParams,
    drafter: DrafterParams | None,
    config: DecodeConfig,
    capacity: int,
    state: DecodeState,
    ended: Bool[Array, "R"],
) -> tuple[DecodeState, Report]:
    """A round that drafts nothing. A drafter's context grows all the same, so that any later round may draft."""
    state = begin_round(state.replace(done=state.done | ended))
    count = jnp.sum(~state.done, dtype=jnp.int32)
    drafted = Drafted(anchors_alone(state), target_noise(config, state, 0), count, *_no_drafts())
    return _verify(target, drafter, config, capacity, state, drafted)
