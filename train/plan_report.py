"""What `plan` found, as tables and as JSON."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from dspark_jax.io.report import shown, table
from dspark_jax.planning.collectives import Collective, seconds
from dspark_jax.planning.products import Cost
from dspark_jax.planning.programs import Memory
from dspark_jax.planning.roofline import Estimate, part_seconds
from dspark_jax.scheduling.throughput import StepTable
from train.plan_config import Plan, PlanConfig

_GIB = 2**30
_DAY = 86_400
# Collectives that a table names; the others are one line.
_LARGEST = 8


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program. `refusal`: what the compiler said where it does not fit; then collectives are unknown."""

    memory: Memory
    fits: bool
    collectives: list[Collective]
    collective_seconds: float
    refusal: str | None = None


@dataclasses.dataclass(frozen=True)
class TrainPlan:
    """The train step: `costs` of one chip by part, and the time modelled."""

    program: Program
    costs: dict[str, Cost]
    estimate: Estimate


@dataclasses.dataclass(frozen=True, eq=False)
class DecodePlan:
    """The verification of the largest bucket, the modelled time of each one's, and rounds a second with drafting."""

    program: Program
    verify: dict[int, Estimate]
    steps: StepTable


def report_text(config: PlanConfig, plan: Plan, training: TrainPlan, decoding: DecodePlan) -> str:
    """All of it for a reader."""
    chip, topology = plan.topology.chip, plan.topology
    fraction = training.estimate.model_flops_utilization(chip)
    step, steps = training.estimate.seconds, plan.train.total_steps
    caveat = "" if training.program.fits else " (it does not fit; without collectives)"
    lines = [
        f"{config.target} on {topology.name}: {topology.chips} chips of {chip.memory / _GIB:g} GiB and "
        f"{chip.flops / 1e12:g} TFLOP/s; memory {chip.memory_bandwidth / 1e9:g} GB/s, links "
        f"{chip.link_bandwidth / 1e9:g} GB/s",
        "",
        f"train step: mesh {_axes(plan.mesh)}; {plan.parts} x {plan.rows} documents of {plan.length} tokens",
        _memory_table(training.program, plan),
        "",
        _cost_table(training.costs, plan),
        "",
        _collective_table(training.program, plan),
        "",
        f"modelled step: {step:.2f} s{caveat} (arithmetic alone {training.estimate.compute:.2f} s, memory alone "
        f"{training.estimate.memory:.2f} s, collectives {training.estimate.collectives:.2f} s), MFU {fraction:.1%}, "
        f"{_tokens_per_second(plan, training):,.0f} tokens/s",
        f"modelled run: {steps:,} steps, {steps * step / _DAY:.1f} days",
        "",
        f"verify step: mesh {_axes(plan.decode_mesh)}; {plan.engine.slots} requests with caches of "
        f"{plan.engine.capacity} positions",
        _memory_table(decoding.program, plan),
        "",
        _collective_table(decoding.program, plan),
        "",
        _round_table(decoding),
    ]
    return "\n".join(lines)


def _axes(sizes: dict[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in sizes.items())


def _tokens_per_second(plan: Plan, training: TrainPlan) -> float:
    return plan.parts * plan.rows * plan.length / training.estimate.seconds


def _gib(size: float) -> str:
    return f"{size / _GIB:.2f}"


def _memory_table(program: Program, plan: Plan) -> str:
    memory = program.memory
    rows = [["memory of a chip", "GiB"], *([name, _gib(size)] for name, size in memory.held.items())]
    rows += [["activations and other temporaries", _gib(memory.temporary)], ["program", _gib(memory.program)]]
    rows += [["peak", _gib(memory.peak)], ["HBM", _gib(plan.topology.chip.memory)]]
    verdict = "fits" if program.fits else f"does not fit{'' if program.refusal is None else f': {program.refusal}'}"
    return f"{table(rows)}\n{verdict}"


def _cost_table(costs: dict[str, Cost], plan: Plan) -> str:
    chip = plan.topology.chip
    rows = [["part, on a chip", "useful TFLOP", "executed TFLOP", "GB moved", "s", "limit"]]
    for name, cost in (costs | {"all": sum(costs.values(), Cost())}).items():
        limit = "arithmetic" if cost.executed / chip.flops > cost.bytes / chip.memory_bandwidth else "memory"
        time = sum(part_seconds(each, chip) for each in costs.values()) if name == "all" else part_seconds(cost, chip)
        rows.append([
            name, shown(cost.useful / 1e12, 1), shown(cost.executed / 1e12, 1), shown(cost.bytes / 1e9, 1),
            shown(time, 2), "" if name == "all" else limit,
        ])  # fmt: skip
    return table(rows)


def _collective_table(program: Program, plan: Plan) -> str:
    if program.refusal is not None:
        return "collectives: unknown, as it was not compiled"
    rows = [["collective", "MB", "chips", "times", "ms"]]
    for each in program.collectives[:_LARGEST]:
        times = f"{each.count} or more" if each.counted_once else f"{each.count:,}"
        time = seconds(each, plan.topology)
        rows.append([each.kind, f"{each.bytes / 1e6:,.2f}", str(each.group), times, shown(1e3 * time, 2)])
    if others := program.collectives[_LARGEST:]:
        time = sum(seconds(each, plan.topology) for each in others)
        rows.append([f"{len(others)} other kinds and sizes", "", "", f"{_count(others):,}", shown(1e3 * time, 2)])
    return table(rows) if program.collectives else "no collectives"


def _count(collectives: Sequence[Collective]) -> int:
    return sum(each.count for each in collectives)


def _round_table(decoding: DecodePlan) -> str:
    rows = [["tokens per step", "verify ms", "round ms", "plain ms", "limit"]]
    for (bucket, verify), drafted, plain in zip(decoding.verify.items(), *_rates(decoding.steps), strict=True):
        limit = "arithmetic" if verify.compute > verify.memory else "memory"
        times = (verify.seconds, 1 / drafted, 1 / plain)
        rows.append([str(bucket), *(f"{1e3 * time:.2f}" for time in times), limit])
    return f"{table(rows)}\nmodelled, not measured"


def _rates(steps: StepTable) -> tuple[list[float], list[float]]:
    return np.asarray(steps.steps_per_second).tolist(), np.asarray(steps.plain_steps_per_second).tolist()


def report_fields(config: PlanConfig, plan: Plan, training: TrainPlan, decoding: DecodePlan) -> dict[str, Any]:
    """All of it for JSON: bytes and seconds, of one chip."""
    chip, estimate = plan.topology.chip, training.estimate
    drafted, plain = _rates(decoding.steps)
    return {
        "modelled": True,
        "topology": plan.topology.name,
        "chips": plan.topology.chips,
        "chip": dataclasses.asdict(chip),
        "target": config.target,
        "dtype": config.dtype,
        "fits": training.program.fits and decoding.program.fits,
        "train": {
            "mesh": plan.mesh,
            "documents": plan.parts * plan.rows,
            "accumulation": plan.parts,
            "length": plan.length,
            **_program_fields(training.program, plan),
            "parts": {name: dataclasses.asdict(cost) for name, cost in training.costs.items()},
            "seconds": dataclasses.asdict(estimate),
            "model_flops_utilization": estimate.model_flops_utilization(chip),
            "tokens_per_second": _tokens_per_second(plan, training),
            "steps": plan.train.total_steps,
            "days": plan.train.total_steps * estimate.seconds / _DAY,
        },
        "verify": {
            "mesh": plan.decode_mesh,
            "slots": plan.engine.slots,
            "cache_length": plan.engine.capacity,
            **_program_fields(decoding.program, plan),
            "buckets": {str(bucket): dataclasses.asdict(each) for bucket, each in decoding.verify.items()},
            "steps_per_second": drafted,
            "plain_steps_per_second": plain,
        },
    }


def _program_fields(program: Program, plan: Plan) -> dict[str, Any]:
    return {
        "memory": dataclasses.asdict(program.memory) | {"fits": program.fits, "refusal": program.refusal},
        "collectives": [
            dataclasses.asdict(each) | {"seconds": seconds(each, plan.topology)} for each in program.collectives
        ],
    }
