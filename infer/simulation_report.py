"""What a simulation found, as a table, figures and JSON."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from dspark_jax.io.report import save_figure, shown, table
from dspark_jax.scheduling.simulation import Simulation
from infer.simulation_plan import PLAIN, REFERENCE, Drafts, Kind, Load

_MARKERS = "os^vDPX"

# (threshold, what it came to) of a sweep.
Sweep = Sequence[tuple[float, Simulation]]


@dataclasses.dataclass(frozen=True, eq=False)
class Outcome:
    """One policy under one load, with chains or trees."""

    kind: Kind
    policy: str
    load: Load
    run: Simulation

    @property
    def name(self) -> str:
        """Its name in the report."""
        return self.policy if self.kind == "chain" else f"{self.kind} {self.policy}"


def outcome_fields(load: Load, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """A load with what each policy came to, for JSON."""
    fields: dict[str, Any] = {"kind": load.kind, "slots": load.slots, "requests": len(load.requests)}
    if load.rate is not None:
        fields["requests_per_second"] = load.rate
    return fields | {"policies": {outcome.name: _run_fields(outcome.run) for outcome in outcomes}}


def drafts_fields(drafts: Drafts, sweep: Sweep) -> dict[str, Any]:
    """Chains or trees for JSON: their table, and the sweep of thresholds, in drafts of a request in a step."""
    rates = {"steps_per_second": drafts.table.steps_per_second}
    if drafts.table.plain_steps_per_second is not None:
        rates["plain_steps_per_second"] = drafts.table.plain_steps_per_second
    return {
        "nodes": drafts.nodes,
        "table": {
            "file": str(drafts.path),
            "modelled": drafts.modelled,
            "capacities": np.asarray(drafts.table.capacities).tolist(),
            **{name: np.asarray(values, np.float64).tolist() for name, values in rates.items()},
        },
        "thresholds": [
            {
                "threshold": threshold,
                "accepted_drafts": run.verified_accepted,
                "rejected_drafts": run.verified - run.verified_accepted,
                "tau": run.tau,
            }
            for threshold, run in sweep
        ],
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
    """Policies by loads: throughput, each user's speed, and the mean verification length."""
    policies = list(dict.fromkeys(outcome.name for outcome in outcomes))
    loads = list(dict.fromkeys(outcome.load for outcome in outcomes))
    runs = {(outcome.load, outcome.name): outcome.run for outcome in outcomes}
    tables = []
    for name, digits, value in (
        ("tokens/s of all", 0, lambda run: run.throughput),
        ("tokens/s of a user", 1, lambda run: run.user_speed),
        ("drafts verified in a step", 2, lambda run: run.verified),
    ):
        rows = [[policy, *(shown(value(runs[load, policy]), digits) for load in loads)] for policy in policies]
        tables.append(table([[name, *(load.label for load in loads)], *rows]))
    return "\n\n".join(tables) + "\n"


def plot_figures(
    paths: Mapping[str, Path], outcomes: Sequence[Outcome], sweeps: Mapping[Kind, Sweep], title: str
) -> None:
    """Writes the three figures, chains on the left and trees on the right."""
    panels = _panels(outcomes)
    figures = {"thresholds": _thresholds(sweeps), "users": _users(panels), "concurrency": _concurrency(panels)}
    for name, path in paths.items():
        figures[name].suptitle(title, fontsize="medium")
        save_figure(path, figures[name])


def _thresholds(sweeps: Mapping[Kind, Sweep]) -> Figure:
    figure = Figure(figsize=(6.5 * len(sweeps), 4.5), layout="constrained")
    for axes, (kind, sweep) in zip(_row(figure, len(sweeps)), sweeps.items(), strict=True):
        thresholds = [threshold for threshold, _ in sweep]
        accepted = np.array([run.verified_accepted for _, run in sweep])
        verified = np.array([run.verified for _, run in sweep])
        axes.fill_between(thresholds, 0, accepted, alpha=0.7, label="accepted")
        axes.fill_between(thresholds, accepted, verified, alpha=0.4, label="rejected")
        axes.set(title=f"{kind}s", xlabel="threshold of prefix survival", xlim=(0, 1), ylim=(0, None))
        axes.set_ylabel("drafts of a request verified in a step")
        axes.grid(alpha=0.3)
        axes.legend()
    return figure


@dataclasses.dataclass(frozen=True, eq=False)
class _Line:
    """A policy's outcomes in one panel, with its style."""

    label: str
    style: dict[str, Any]
    closed: Sequence[Outcome]
    opened: Sequence[Outcome]


def _panels(outcomes: Sequence[Outcome]) -> dict[Kind, list[_Line]]:
    """The lines of chains and of trees. Plain decoding is in both; in grey is the other's reference."""
    policies = list(dict.fromkeys(outcome.policy for outcome in outcomes))
    kinds = list(dict.fromkeys(outcome.kind for outcome in outcomes))

    def line(kind: Kind, policy: str, label: str, **style: Any) -> _Line:
        mine = [outcome for outcome in outcomes if (outcome.kind, outcome.policy) == (kind, policy)]
        closed = [outcome for outcome in mine if outcome.load.kind == "closed"]
        return _Line(label, style, closed, [outcome for outcome in mine if outcome.load.kind != "closed"])

    panels = {}
    for kind in kinds:
        label, grey = f"{REFERENCE} of the other panel", {"color": "0.6", "linewidth": 4, "alpha": 0.6}
        others = [line(other, REFERENCE, label, **grey) for other in kinds if other != kind]
        own = [
            line(
                "chain" if policy == PLAIN else kind,
                policy,
                policy,
                color="black" if policy == PLAIN else f"C{index}",
                marker=_MARKERS[index % len(_MARKERS)],
                fillstyle="none",
                markersize=6,
            )
            for index, policy in enumerate(policies)
        ]
        panels[kind] = [*(dataclasses.replace(other, opened=[]) for other in others), *own]
    return panels


def _users(panels: Mapping[Kind, Sequence[_Line]]) -> Figure:
    """Throughput against each user's speed: closed loops as lines, open ones as dotted lines with crosses."""
    figure = Figure(figsize=(1 + 6 * len(panels), 6), layout="constrained")
    row = _row(figure, len(panels), sharex=True, sharey=True)
    for axes, (kind, lines) in zip(row, panels.items(), strict=True):
        for line in lines:
            axes.plot(*_points(line.closed), label=line.label, **line.style)
            if line.opened:
                axes.plot(*_points(line.opened), **line.style | {"marker": "x", "linestyle": ":"})
        axes.set(title=f"{kind}s", xlabel="tokens/s of a user")
        axes.grid(alpha=0.3, which="both")
    row[0].set_ylabel("tokens/s of all")
    _plain_log_scale(row[0])
    _legend_below(figure, row[0])
    return figure


def _points(outcomes: Sequence[Outcome]) -> tuple[list[float], list[float]]:
    return [outcome.run.user_speed for outcome in outcomes], [outcome.run.throughput for outcome in outcomes]


def _concurrency(panels: Mapping[Kind, Sequence[_Line]]) -> Figure:
    """Throughput above, the mean verification length below."""
    figure = Figure(figsize=(1 + 6 * len(panels), 9), layout="constrained")
    above, below = figure.subplots(2, len(panels), squeeze=False, sharex=True, sharey="row")
    for column, (kind, lines) in enumerate(panels.items()):
        for line in lines:
            slots = [outcome.load.slots for outcome in line.closed]
            above[column].plot(slots, _points(line.closed)[1], label=line.label, **line.style)
            below[column].plot(slots, [outcome.run.verified for outcome in line.closed], **line.style)
            below[column].set_xscale("log")
            below[column].set_xticks(slots, map(str, slots))
            below[column].set_xticks([], minor=True)
        above[column].set(title=f"{kind}s")
        below[column].set(xlabel="requests at once")
        for axes in (above[column], below[column]):
            axes.grid(alpha=0.3)
    above[0].set_ylabel("tokens/s of all")
    below[0].set_ylabel("drafts of a request verified in a step")
    _plain_log_scale(above[0])
    _legend_below(figure, above[0])
    return figure


def _row(figure: Figure, count: int, **share: Any) -> Sequence[Axes]:
    return figure.subplots(1, count, squeeze=False, **share)[0]


def _plain_log_scale(axes: Axes) -> None:
    """A logarithmic y axis with ordinary numbers, enough of them within a decade."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.yaxis.set_minor_locator(NullLocator())


def _legend_below(figure: Figure, axes: Axes) -> None:
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
