"""Steps per second of the engine's rounds, measured: what the scheduler's throughput table is made of."""

import functools
import time
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from dspark_jax.decode_state import DecodeState, Requests
from dspark_jax.drafters.kinds import DrafterParams
from dspark_jax.proposals import Proposal
from dspark_jax.sampling import request_keys, sampling_params
from dspark_jax.scheduling.policy import Policy
from dspark_jax.scheduling.survival import SurvivalMap, uncalibrated
from dspark_jax.scheduling.throughput import StepTable
from dspark_jax.serving.config import EngineConfig
from dspark_jax.serving.programs import (
    Report,
    draft_and_schedule,
    empty_state,
    plain_step,
    schedule,
    verify_and_commit,
)
from dspark_jax.targets.decoder import TargetParams

# Schedules in a timed loop: one takes less than a program takes to start.
_SCHEDULES = 50
# Rounds timed in a row: enough that filling the pipeline counts little.
_ROUNDS = 8

Round = Callable[[DecodeState, int], tuple[DecodeState, Report]]


def measure_steps(
    target: TargetParams,
    drafter: DrafterParams | None,
    config: EngineConfig,
    context: int = 32,
    repeats: int = 7,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> StepTable:
    """The table of `config.buckets`: rounds a second, with drafts and without, from `context` tokens on.

    Rounds are timed as the engine runs them, a few in a row, each dispatched before the one before it is read: what the
    host does meanwhile costs nothing, and what it keeps the device waiting for does. Buckets are measured in turn,
    `repeats` times after one that compiles; medians count. `progress` wraps the turns. Call it under the engine's mesh.
    """
    blank = StepTable(jnp.asarray(config.buckets, jnp.int32), jnp.ones(len(config.buckets), jnp.float32))
    survival, ended = uncalibrated(config.decode.depth), np.zeros(config.slots, bool)

    def drafted(state: DecodeState, bucket: int) -> tuple[DecodeState, Report]:
        # Any table will do: a stale capacity fills the bucket whatever it says.
        state, proposed = draft_and_schedule(
            drafter,
            config.decode,
            Policy(),
            blank,
            survival,
            state,
            jnp.asarray(ended),
            jnp.asarray(bucket, jnp.int32),
        )
        return verify_and_commit(target, drafter, config.decode, bucket, state, proposed)

    def plain(state: DecodeState, bucket: int) -> tuple[DecodeState, Report]:
        return plain_step(target, drafter, config.decode, bucket, state, jnp.asarray(ended))

    def time_rounds(run: Round, state: DecodeState, bucket: int) -> tuple[DecodeState, float]:
        active = jnp.arange(config.slots, dtype=jnp.int32) < bucket
        state = state.replace(lengths=jnp.full(config.slots, context, jnp.int32), done=~active)
        jax.block_until_ready(state)
        begin, before = time.perf_counter(), None
        for _ in range(_ROUNDS):
            state, report = run(state, bucket)
            if before is not None:
                jax.tree.map(np.asarray, before)
            before = report
        jax.tree.map(np.asarray, before)
        return state, (time.perf_counter() - begin) / _ROUNDS

    state = _full_state(target, config)
    # The smallest bucket that holds all roots; a plain step needs none larger.
    enough = next(column for column, bucket in enumerate(config.buckets) if bucket >= config.slots)
    seconds = np.zeros((repeats + 1, 2, len(config.buckets)))
    for turn in progress(range(repeats + 1)):
        for column, bucket in enumerate(config.buckets):
            state, seconds[turn, 0, column] = time_rounds(drafted, state, bucket)
            if column <= enough:
                state, seconds[turn, 1, column] = time_rounds(plain, state, bucket)
            else:
                seconds[turn, 1, column] = seconds[turn, 1, enough]
    medians = jnp.asarray(1 / np.median(seconds[1:], axis=0), jnp.float32)
    return StepTable(blank.capacities, *medians)


def measure_schedule(
    target: TargetParams, drafter: DrafterParams, config: EngineConfig, table: StepTable, repeats: int = 7
) -> float:
    """Seconds that scheduling takes of a round of full slots by the engine's policy; the median over repeats.

    It is timed in a loop on the device, of one drafted round's nodes. Call it under the engine's mesh.
    """
    state = _full_state(target, config)
    state = state.replace(lengths=jnp.ones(config.slots, jnp.int32), done=jnp.zeros(config.slots, bool))
    survival = uncalibrated(config.decode.depth)
    ended, limit = jnp.zeros(config.slots, bool), table.capacities[-1]
    # A stale capacity that fills the largest bucket leaves no node out.
    _, drafted = draft_and_schedule(drafter, config.decode, Policy(), table, survival, state, ended, limit)
    seconds = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        jax.block_until_ready(_schedule_often(config.policy, table, survival, drafted.proposal, limit))
        seconds.append((time.perf_counter() - begin) / _SCHEDULES)
    return float(np.median(seconds[1:]))


@functools.partial(jax.jit, static_argnames="policy")
def _schedule_often(policy: Policy, table: StepTable, survival: SurvivalMap, proposal: Proposal, limit: Int[Array, ""]):
    """Schedules one proposal many times over."""

    def once(limit):
        active = jnp.broadcast_to(limit > 0, proposal.tokens.shape[:1])
        return schedule(policy, table, survival, proposal, active, limit)

    def body(_, carry):
        # Each needs a limit that only the one before tells, so that none leaves the loop.
        limit, (chosen, *_) = carry
        limit = jnp.maximum(limit, chosen.tokens)
        return limit, once(limit)

    return jax.lax.fori_loop(0, _SCHEDULES, body, (limit, once(limit)))


def _full_state(target: TargetParams, config: EngineConfig) -> DecodeState:
    requests = Requests(
        keys=request_keys(0, config.slots),
        sampling=sampling_params(config.slots),
        max_tokens=jnp.full(config.slots, config.capacity, jnp.int32),
        confidence_threshold=jnp.zeros(config.slots, jnp.float32),
    )
    return empty_state(config.decode, requests, config.capacity, target.embed_tokens.weight.dtype)
