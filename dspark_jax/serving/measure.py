"""Steps per second of the engine's rounds, measured: what the scheduler's throughput table is made of."""

import time
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decode_state import DecodeState, Requests
from dspark_jax.drafters.kinds import DrafterParams
from dspark_jax.sampling import request_keys, sampling_params
from dspark_jax.scheduling.policy import Policy
from dspark_jax.scheduling.survival import uncalibrated
from dspark_jax.scheduling.throughput import StepTable
from dspark_jax.serving.config import EngineConfig
from dspark_jax.serving.programs import draft_and_schedule, empty_state, plain_step, verify_and_commit
from dspark_jax.targets.decoder import TargetParams


def measure_steps(
    target: TargetParams,
    drafter: DrafterParams | None,
    config: EngineConfig,
    context: int = 32,
    repeats: int = 7,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> StepTable:
    """The table of `config.buckets`: rounds a second, with drafts and without, in full buckets at `context` tokens.

    Buckets are measured in turn, `repeats` times after one that compiles; medians count. `progress` wraps the turns.
    Call it under the engine's mesh.
    """
    state = _full_state(target, config, context)
    # The smallest bucket that holds all roots; a plain step needs none larger.
    enough = next(column for column, bucket in enumerate(config.buckets) if bucket >= config.slots)
    seconds = np.zeros((repeats + 1, 2, len(config.buckets)))
    for turn in progress(range(repeats + 1)):
        for column, bucket in enumerate(config.buckets):
            active = jnp.arange(config.slots, dtype=jnp.int32) < bucket
            for row, run in enumerate((_drafted_round, _plain_round)):
                if run is _plain_round and column > enough:
                    seconds[turn, row, column] = seconds[turn, row, enough]
                    continue
                state = state.replace(lengths=jnp.full(config.slots, context, jnp.int32), done=~active)
                jax.block_until_ready(state)
                begin = time.perf_counter()
                state = run(target, drafter, config, state, bucket)
                seconds[turn, row, column] = time.perf_counter() - begin
    drafted, plain = jnp.asarray(1 / np.median(seconds[1:], axis=0), jnp.float32)
    return StepTable(jnp.asarray(config.buckets, jnp.int32), drafted, plain)


def _full_state(target: TargetParams, config: EngineConfig, context: int) -> DecodeState:
    requests = Requests(
        keys=request_keys(0, config.slots),
        sampling=sampling_params(config.slots),
        max_tokens=jnp.full(config.slots, config.capacity, jnp.int32),
        confidence_threshold=jnp.zeros(config.slots, jnp.float32),
    )
    return empty_state(config.decode, requests, config.capacity, target.embed_tokens.weight.dtype)


def _drafted_round(target, drafter, config: EngineConfig, state: DecodeState, bucket: int) -> DecodeState:
    # Any table will do: a stale capacity fills the bucket whatever it says.
    table = StepTable(jnp.asarray(config.buckets, jnp.int32), jnp.ones(len(config.buckets), jnp.float32))
    state, drafted = draft_and_schedule(
        drafter,
        config.decode,
        Policy(),
        table,
        uncalibrated(config.decode.depth),
        state,
        jnp.zeros(config.slots, bool),
        jnp.asarray(bucket, jnp.int32),
    )
    state, report = verify_and_commit(target, drafter, config.decode, bucket, state, drafted)
    jax.block_until_ready(report)
    return state


def _plain_round(target, drafter, config: EngineConfig, state: DecodeState, bucket: int) -> DecodeState:
    state, report = plain_step(target, drafter, config.decode, bucket, state, jnp.zeros(config.slots, bool))
    jax.block_until_ready(report)
    return state
