"""The train step timed on the device, beside what its shapes say it must take."""

import time
from typing import Any

import jax
import numpy as np

from dspark_jax.io.report import number
from dspark_jax.planning.chips import peaks_of
from dspark_jax.planning.products import Cost
from dspark_jax.planning.programs import memory_of
from dspark_jax.planning.roofline import estimate
from dspark_jax.planning.train_cost import train_step_cost
from dspark_jax.training.step import declare_trainable, init_train_state, train_step
from train.device_shapes import Shape, random_document, random_parameters, random_target


def measure_training(shape: Shape, repeats: int) -> dict[str, Any]:
    """Updates from one document, with random weights."""
    target = random_target(shape.target, shape.dtype)
    params = random_parameters(declare_trainable(shape.drafter), 1000, "float32")
    state = init_train_state(shape.train, jax.random.key(0), params)
    batch = jax.tree.map(lambda x: x[None], random_document(shape.target, shape.length, shape.drafter.num_anchors))
    begin = time.perf_counter()
    compiled = train_step.lower(state, target, batch, config=shape.train).compile()
    compile_seconds = time.perf_counter() - begin
    held = {"target's weights": target, "masters and moments": state, "batch": batch}
    memory = memory_of(compiled, held)
    del params, held
    taken, metrics = [], {}
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        state, metrics = jax.block_until_ready(compiled(state, target, batch))
        taken.append(time.perf_counter() - begin)
    seconds = float(np.median(taken[1:]))
    costs = train_step_cost(
        shape.target,
        shape.drafter,
        shape.train.loss,
        rows=1,
        parts=1,
        length=shape.length,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(state.params)),
    )
    total = sum(costs.values(), Cost())
    found = {
        "length": shape.length,
        "anchors": batch.row_anchors,
        "remat": shape.train.remat.value,
        "compile_seconds": compile_seconds,
        "seconds": seconds,
        "best_seconds": min(taken[1:]),
        "tokens_per_second": shape.length / seconds,
        "useful_tflops": total.useful / seconds / 1e12,
        "executed_tflops": total.executed / seconds / 1e12,
        "held_bytes": memory.held,
        "temporary_bytes": memory.temporary,
        "peak_bytes": memory.peak,
        "loss": number(float(metrics["loss"])),
        "updated": bool(metrics["updated"]),
    }
    peaks = peaks_of(jax.devices()[0].device_kind)
    if peaks is not None:
        modelled = estimate(costs, peaks)
        found["modelled_seconds"] = modelled.seconds
        found["model_flops_utilization"] = total.useful / (peaks.flops * seconds)
    return found


def training_line(found: dict[str, Any]) -> str:
    modelled = f", modelled {found['modelled_seconds']:.3f} s" if "modelled_seconds" in found else ""
    return (
        f"a step takes {found['seconds']:.3f} s{modelled}; {found['tokens_per_second']:,.0f} tokens/s, "
        f"{found['useful_tflops']:,.2f} useful TFLOP/s; {found['temporary_bytes'] / 2**30:.2f} GiB of temporaries; "
        f"loss {found['loss']}"
    )
