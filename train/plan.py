"""`python -m train plan`: a run of `fit` compiled for TPUs that nobody needs to have, and what it would take there."""

import contextlib
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from tqdm import tqdm

from dspark_jax.io import InputError, write_json
from dspark_jax.io.report import environment
from dspark_jax.io.step_table import StepTableLaw, save_step_table
from dspark_jax.planning.collectives import Collective, parse_collectives, total_seconds
from dspark_jax.planning.programs import (
    Memory,
    bytes_per_chip,
    lower_train_step,
    lower_verify_step,
    memory_of,
    train_arguments,
    verify_arguments,
)
from dspark_jax.planning.roofline import Estimate, estimate
from dspark_jax.planning.rounds import modelled_steps, verify_estimate
from dspark_jax.planning.train_cost import train_step_cost
from dspark_jax.sharding import make_mesh
from train.plan_config import Plan, PlanConfig, make_plan
from train.plan_report import DecodePlan, Program, TrainPlan, report_fields, report_text
from train.tpu_topology import described_devices

_MASTER_BYTES = 4
_GIB = 2**30


def main(config: PlanConfig) -> None:
    """Runs the command.

    Raises:
      SystemExit: 1 where a program does not fit the chips' memory.
    """
    plan = make_plan(config)
    devices = described_devices(plan.topology)
    training = plan_training(plan, config.dtype, devices)
    decoding = plan_decoding(plan, config.dtype, devices)
    print(report_text(config, plan, training, decoding))
    if config.output is not None:
        write_json(config.output, environment() | report_fields(config, plan, training, decoding))
        print(f"wrote {config.output}", file=sys.stderr)
    if config.step_table is not None:
        save_step_table(config.step_table, decoding.steps, _law(config, plan, devices), topology=plan.topology.name)
        print(f"wrote {config.step_table}", file=sys.stderr)
    if not (training.program.fits and decoding.program.fits):
        raise SystemExit(1)


def plan_training(plan: Plan, dtype: str, devices: Sequence[Any]) -> TrainPlan:
    """The train step, compiled for these devices."""
    sizes, chip = plan.mesh, plan.topology.chip
    mesh = make_mesh(sizes["data"], sizes["model"], devices, fsdp=sizes["fsdp"])
    arguments = train_arguments(
        plan.train, mesh, jnp.dtype(dtype), parts=plan.parts, rows=plan.rows, length=plan.length
    )
    state, target, batch = arguments
    held = {
        "target's weights": target,
        "drafter's masters": state.params,
        "optimiser's moments": state.optimizer,
        "batch": batch,
    }
    program = compiled(plan, "train step", mesh, lambda: lower_train_step(plan.train, *arguments), held)
    costs = train_step_cost(
        plan.train.target,
        plan.train.drafter,
        plan.train.loss,
        rows=plan.rows // plan.batch_ways,
        parts=plan.parts,
        length=plan.length,
        parameters=bytes_per_chip(state.params) / _MASTER_BYTES,
        model=sizes["model"],
    )
    return TrainPlan(program, costs, estimate(costs, chip, program.collective_seconds))


def plan_decoding(plan: Plan, dtype: str, devices: Sequence[Any]) -> DecodePlan:
    """The verification of the largest bucket, compiled for these devices, and every bucket modelled."""
    sizes, engine = plan.decode_mesh, plan.engine
    mesh = make_mesh(sizes["data"], sizes["model"], devices)
    arguments = verify_arguments(engine, mesh, jnp.dtype(dtype))
    target, drafter, state, drafted = arguments
    held = {
        "target's weights": target,
        "drafter's weights": drafter,
        "target's cache": state.cache,
        "drafter's cache": state.drafter,
        "drafts": drafted,
    }
    program = compiled(plan, "verify step", mesh, lambda: lower_verify_step(engine, *arguments), held)
    shape = (plan.topology.chip, sizes["data"], sizes["model"], program.collective_seconds)
    verify: dict[int, Estimate] = {bucket: verify_estimate(engine, bucket, *shape) for bucket in engine.buckets}
    return DecodePlan(program, verify, modelled_steps(engine, *shape))


def compiled(
    plan: Plan, name: str, mesh: Mesh, lower: Callable[[], jax.stages.Lowered], held: Mapping[str, Any]
) -> Program:
    """A program's memory and collectives, by the compiler's account."""
    topology = plan.topology
    with _patience(f"compile the {name} for {topology.chips} x {topology.chip.name}"):
        try:
            # Only here: under a mesh of devices that are not there nothing can be computed.
            with jax.set_mesh(mesh):
                executable = lower().compile()
        except jax.errors.JaxRuntimeError as error:
            return _too_large(str(error), held)
    memory = memory_of(executable, dict(held))
    collectives: list[Collective] = parse_collectives(executable.as_text() or "", topology.chips)
    fits = memory.peak <= topology.chip.memory
    return Program(memory, fits, collectives, total_seconds(collectives, topology))


def _too_large(message: str, held: Mapping[str, Any]) -> Program:
    """What the compiler says of a program that it could not place in memory.

    Raises:
      InputError: it says something else.
    """
    found = re.search(r"([\d.]+)G\) exceeds available HBM|Used ([\d.]+)G of", message)
    if "RESOURCE_EXHAUSTED" not in message:
        raise InputError(f"the compiler refused: {message.splitlines()[0]}")
    needed = 0 if found is None else round(float(found[1] or found[2]) * _GIB)
    sizes = {part: bytes_per_chip(tree) for part, tree in held.items()}
    temporary = max(needed - sum(sizes.values()), 0)
    return Program(Memory(sizes, temporary, 0, needed), False, [], 0.0, message.splitlines()[0])


@contextlib.contextmanager
def _patience(what: str) -> Iterator[None]:
    """A line with the time that goes by while something takes minutes; without a terminal, when it is over."""
    done, begin = threading.Event(), time.perf_counter()
    with tqdm(desc=what, bar_format="{desc}: {elapsed}", disable=None) as bar:

        def tick() -> None:
            while not done.wait(1):
                bar.refresh()

        thread = threading.Thread(target=tick, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
    if bar.disable:
        print(f"{what}: {time.perf_counter() - begin:.0f} s", file=sys.stderr)


def _law(config: PlanConfig, plan: Plan, devices: Sequence[Any]) -> StepTableLaw:
    """What the modelled table is about. Models without weights have no fingerprints but their names."""
    return StepTableLaw(
        device=f"{len(devices)} x {devices[0].device_kind}",
        mesh=",".join(f"{axis}={size}" for axis, size in plan.decode_mesh.items()),
        dtype=config.dtype,
        target_fingerprint=config.target,
        drafter_fingerprint=f"DSpark for {config.target}",
        tree=None,
        slots=config.slots,
        buckets=plan.engine.buckets,
        modelled=True,
    )
