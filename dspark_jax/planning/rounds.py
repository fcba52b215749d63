"""Rounds of decoding a second, modelled: a throughput table for chips that nobody has measured."""

import jax.numpy as jnp
import numpy as np

from dspark_jax.planning.chips import Chip
from dspark_jax.planning.products import Cost, cut
from dspark_jax.planning.roofline import Estimate, estimate
from dspark_jax.planning.round_cost import draft_cost, extend_cost, verify_cost
from dspark_jax.scheduling.throughput import StepTable
from dspark_jax.serving.config import EngineConfig


def verify_costs(engine: EngineConfig, bucket: int, data: int, model: int) -> dict[str, Cost]:
    """Of one chip in the verification of a bucket: `data` chips share the slots, `model` chips the weights."""
    decode, slots = engine.decode, engine.slots // data
    return verify_cost(decode.target, slots, decode.width, engine.capacity, cut(bucket, data), model)


def round_costs(engine: EngineConfig, bucket: int, data: int, model: int, drafting: bool = True) -> dict[str, Cost]:
    """Of one chip in a round that verifies a bucket; without `drafting` only the drafter's context grows."""
    decode, slots = engine.decode, engine.slots // data
    costs = verify_costs(engine, bucket, data, model)
    costs |= extend_cost(decode.drafter, slots, decode.depth + 1 if drafting else 1, model)
    if drafting:
        costs |= draft_cost(decode.drafter, slots, engine.capacity, model)
    return costs


def verify_estimate(
    engine: EngineConfig, bucket: int, chip: Chip, data: int, model: int, collectives: float
) -> Estimate:
    """Of a bucket's verification. `collectives`: seconds of those of the largest, which grow with a bucket's tokens."""
    return estimate(verify_costs(engine, bucket, data, model), chip, collectives * bucket / engine.buckets[-1])


def modelled_steps(engine: EngineConfig, chip: Chip, data: int, model: int, collectives: float) -> StepTable:
    """Rounds a second by bucket, as `serving.measure_steps` lays them out, by the model of `roofline`.

    `collectives`: seconds of the largest verification's. Those of drafting, which are small, and the host cost nothing.
    """

    def rate(bucket: int, drafting: bool) -> float:
        costs = round_costs(engine, bucket, data, model, drafting)
        return 1 / estimate(costs, chip, collectives * bucket / engine.buckets[-1]).seconds

    # A plain step needs no larger bucket than one that holds all roots.
    enough = next(bucket for bucket in engine.buckets if bucket >= engine.slots)
    drafted = [rate(bucket, True) for bucket in engine.buckets]
    plain = [rate(min(bucket, enough), False) for bucket in engine.buckets]
    return StepTable(
        jnp.asarray(engine.buckets, jnp.int32), jnp.asarray(np.float32(drafted)), jnp.asarray(np.float32(plain))
    )
