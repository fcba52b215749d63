"""What a simulation found, as a table, figures and JSON."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Int
from matplotlib.figure import Figure

from dspark_jax.io.report import save_figure, shown, table
from dspark_jax.scheduling.simulation import Simulation

FIGURES = ("thresholds", "users", "concurrency")
_MARKERS = "os^vDPX"


@dataclasses.dataclass(frozen=True, eq=False)
class Load:
    """Requests of a replay and when they arrive. `slots`: in a closed loop, the concurrency. `rate`: Poisson's."""

    kind: Literal["closed", "poisson", "trace"]
    rate: float | None
    slots: int
    requests: Int[np.ndarray, "n"]
    arrivals: Float[np.ndarray, "n"]

    @property
    def label(self) -> str:
        match self.kind:
            case "closed":
                return f"{self.slots} at once"
            case "poisson":
                return f"{self.rate:g} a second"
            case "trace":
                return "trace"


@dataclasses.dataclass(frozen=True, eq=False)
class Outcome:
    """One policy under one load."""

    policy: str
    load: Load
    run: Simulation


def figure_path(output: Path, name: str) -> Path:
    return output.with_name(f"{output.stem}_{name}.png")


def outcome_fields(load: Load, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """A load with what each policy came to, for JSON."""
    fields: dict[str, Any] = {"kind": load.kind, "slots": load.slots, "requests": len(load.requests)}
    if load.rate is not None:
        fields["requests_per_second"] = load.rate
    return fields | {"policies": {outcome.policy: _run_fields(outcome.run) for outcome in outcomes}}


def threshold_fields(threshold: float, run: Simulation) -> dict[str, float]:
    """A point of the threshold sweep, for JSON: drafts of a request in a step."""
    return {
        "threshold": threshold,
        "accepted_drafts": run.verified_accepted,
        "rejected_drafts": run.verified - run.verified_accepted,
        "tau": run.tau,
    }


def _run_fields(run: Simulation) -> dict[str, float]:
    return {
        "tokens_per_second": run.throughput,
        "tokens_per_second_per_user": run.user_speed,
        "tau": run.tau,
        "verified_drafts": run.verified,
        "accepted_drafts": run.verified_accepted,
        "active_requests": run.concurrency,
        "wait_seconds": run.wait,
        "steps": len(run.ends),
        "tokens": int(run.committed.sum()),
    }


def outcome_tables(outcomes: Sequence[Outcome]) -> str:
    """Loads by policies: throughput, each user's speed, and the mean verification length."""
    policies = list(dict.fromkeys(outcome.policy for outcome in outcomes))
    loads = list(dict.fromkeys(outcome.load for outcome in outcomes))
    runs = {(outcome.load, outcome.policy): outcome.run for outcome in outcomes}
    tables = []
    for name, digits, value in (
        ("tokens/s of all", 0, lambda run: run.throughput),
        ("tokens/s of a user", 1, lambda run: run.user_speed),
        ("drafts verified in a step", 2, lambda run: run.verified),
    ):
        rows = [[load.label, *(shown(value(runs[load, policy]), digits) for policy in policies)] for load in loads]
        tables.append(table([[name, *policies], *rows]))
    return "\n\n".join(tables) + "\n"


def plot_figures(
    output: Path, outcomes: Sequence[Outcome], sweep: Sequence[tuple[float, Simulation]], title: str
) -> list[Path]:
    """Writes the three figures beside the report, and returns their paths."""
    paths = [figure_path(output, name) for name in FIGURES]
    for path, figure in zip(paths, (_thresholds(sweep), _users(outcomes), _concurrency(outcomes)), strict=True):
        figure.suptitle(title, fontsize="medium")
        save_figure(path, figure)
    return paths


def _thresholds(sweep: Sequence[tuple[float, Simulation]]) -> Figure:
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    thresholds = [threshold for threshold, _ in sweep]
    accepted = np.array([run.verified_accepted for _, run in sweep])
    verified = np.array([run.verified for _, run in sweep])
    axes.fill_between(thresholds, 0, accepted, alpha=0.7, label="accepted")
    axes.fill_between(thresholds, accepted, verified, alpha=0.4, label="rejected")
    axes.set(xlabel="threshold of prefix survival", ylabel="drafts of a request verified in a step", xlim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _users(outcomes: Sequence[Outcome]) -> Figure:
    """Throughput against each user's speed: closed loops as lines, open ones as dotted lines with crosses."""
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.subplots()
    for index, (policy, closed) in enumerate(_by_policy(outcomes, open_loop=False).items()):
        style: dict[str, Any] = {"color": f"C{index}", "markersize": 6, "fillstyle": "none"}
        axes.plot(*_points(closed), marker=_MARKERS[index % len(_MARKERS)], label=policy, **style)
        opened = _by_policy(outcomes, open_loop=True).get(policy)
        if opened:
            axes.plot(*_points(opened), marker="x", linestyle=":", **style)
    axes.set(xlabel="tokens/s of a user", ylabel="tokens/s of all", yscale="log")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize="small")
    return figure


def _points(outcomes: Sequence[Outcome]) -> tuple[list[float], list[float]]:
    return [outcome.run.user_speed for outcome in outcomes], [outcome.run.throughput for outcome in outcomes]


def _concurrency(outcomes: Sequence[Outcome]) -> Figure:
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    throughput, length = figure.subplots(1, 2)
    slots: list[int] = []
    for index, (policy, closed) in enumerate(_by_policy(outcomes, open_loop=False).items()):
        slots = [outcome.load.slots for outcome in closed]
        style: dict[str, Any] = {"marker": _MARKERS[index % len(_MARKERS)], "fillstyle": "none"}
        throughput.plot(slots, _points(closed)[1], label=policy, **style)
        length.plot(slots, [outcome.run.verified for outcome in closed], **style)
    for axes, name in ((throughput, "tokens/s of all"), (length, "drafts of a request verified in a step")):
        axes.set(xlabel="requests at once", ylabel=name, xscale="log")
        axes.set_xticks(slots, map(str, slots))
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.3)
    throughput.set_yscale("log")
    throughput.legend(fontsize="small")
    return figure


def _by_policy(outcomes: Sequence[Outcome], open_loop: bool) -> dict[str, list[Outcome]]:
    lines: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if (outcome.load.kind != "closed") == open_loop:
            lines.setdefault(outcome.policy, []).append(outcome)
    return lines
