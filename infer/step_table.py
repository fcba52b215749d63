"""Measuring and showing the throughput table of an engine."""

import functools
import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

from dspark_jax.io import Drafter, Target
from dspark_jax.io.report import save_figure, table
from dspark_jax.scheduling.throughput import StepTable, is_flat
from dspark_jax.serving import EngineConfig, measure_steps


def measure(target: Target, drafter: Drafter | None, config: EngineConfig, context: int, repeats: int = 7) -> StepTable:
    """The table of an engine's buckets, measured under a progress bar."""
    return measure_steps(
        target.params,
        None if drafter is None else drafter.params,
        config,
        context,
        repeats,
        functools.partial(tqdm, desc="measure steps", unit="turn"),
    )


def warn_if_flat(steps: StepTable) -> None:
    """Says in one line that an engine will not schedule by such a table."""
    if is_flat(steps):
        capacities = np.asarray(steps.capacities)
        print(
            f"warning: a step of {capacities[-1]} tokens takes no longer than one of {capacities[0]}: every draft will "
            "be verified, without scheduling",
            file=sys.stderr,
        )


def rates_table(steps: StepTable) -> str:
    rows = [["tokens per step", "ms", "steps/s", "tokens/s"]]
    for capacity, rate in _pairs(steps):
        rows.append([str(capacity), f"{1e3 / rate:.2f}", f"{rate:,.1f}", f"{capacity * rate:,.0f}"])
    return table(rows)


def _pairs(steps: StepTable) -> list[tuple[int, float]]:
    capacities, rates = np.asarray(steps.capacities).tolist(), np.asarray(steps.steps_per_second).tolist()
    return list(zip(capacities, rates, strict=True))


def plot_steps(path: Path, steps: StepTable, title: str) -> None:
    """Steps, and tokens verified, a second against tokens a step: a step costs what its padded bucket costs."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    figure.suptitle(title)
    rates, tokens = figure.subplots(1, 2)
    begin = 0
    for capacity, rate in _pairs(steps):
        for axes, ends in ((rates, (rate, rate)), (tokens, (begin * rate, capacity * rate))):
            axes.plot((begin, capacity), ends, color="C0")
            axes.plot(capacity, ends[1], color="C0", marker="o")
        begin = capacity
    for axes, name in ((rates, "steps per second"), (tokens, "tokens verified per second")):
        axes.set(title=name, xlabel="tokens per step, roots included", xlim=(0, None), ylim=(0, None))
        axes.grid(alpha=0.3)
    save_figure(path, figure)
