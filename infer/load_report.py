"""What `infer load` measured, as a table, a figure and JSON."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from dspark_jax.io.report import save_figure, shown, table
from dspark_jax.scheduling.throughput import StepTable
from dspark_jax.serving import Result, Statistics

SCHEDULED, PLAIN = "scheduled", "plain"


@dataclasses.dataclass(frozen=True, eq=False)
class PolicyRuns:
    """One engine's turns: `rates`, tokens a second of each, `results` of the last, by request, `statistics` of all."""

    rates: list[float]
    results: dict[int, Result]
    statistics: Statistics

    @property
    def rate(self) -> float:
        return float(np.median(self.rates))

    @property
    def tau(self) -> float:
        """Tokens of a request's round, bonus included."""
        return float(np.mean([length for result in self.results.values() for length in result.accepted_lengths]))

    @property
    def verified(self) -> float:
        """Nodes of a request verified in a round, roots included."""
        return float(np.mean([nodes for result in self.results.values() for nodes in result.verified_nodes]))


@dataclasses.dataclass(frozen=True, eq=False)
class Load:
    """Every policy at one concurrency. `schedule_seconds`: what scheduling takes of a round."""

    slots: int
    steps: StepTable
    schedule_seconds: float
    runs: dict[str, PolicyRuns]

    @property
    def best(self) -> str:
        """The name of the best policy that does not schedule."""
        return max((name for name in self.runs if name != SCHEDULED), key=lambda name: self.runs[name].rate)

    @property
    def over_best(self) -> float:
        """Scheduled over the best of the others."""
        return self.runs[SCHEDULED].rate / self.runs[self.best].rate

    @property
    def schedule_share(self) -> float:
        """Of a round that drafts, in the bucket whose round is the shortest."""
        return self.schedule_seconds * float(np.max(np.asarray(self.steps.steps_per_second)))

    def identical(self, name: str) -> int:
        """Requests whose output under this policy is plain decoding's, token for token."""
        plain = self.runs[PLAIN].results
        return sum(result.tokens == plain[key].tokens for key, result in self.runs[name].results.items())


def load_fields(load: Load) -> dict[str, Any]:
    """One concurrency, for JSON."""
    names = ("rounds", "plain", "late", "prefills")
    return {
        "slots": load.slots,
        "capacities": np.asarray(load.steps.capacities).tolist(),
        "steps_per_second": np.asarray(load.steps.steps_per_second, np.float64).tolist(),
        "plain_steps_per_second": np.asarray(load.steps.plain_steps_per_second, np.float64).tolist(),
        "schedule_ms": 1e3 * load.schedule_seconds,
        "schedule_share_of_round": load.schedule_share,
        "best_other": load.best,
        "scheduled_over_best": load.over_best,
        "policies": {
            name: {
                "tokens_per_second": runs.rate,
                "tokens_per_second_of_turns": runs.rates,
                "tau": runs.tau,
                "verified_nodes": runs.verified,
                "requests": len(runs.results),
                "identical_to_plain": load.identical(name),
                **{field: getattr(runs.statistics, field) for field in names},
            }
            for name, runs in load.runs.items()
        },
    }


def sweep_fields(loads: Sequence[Load]) -> dict[str, float]:
    """Each policy's throughput over the sweep: the geometric mean of its shares of plain decoding's."""
    return {
        name: float(np.exp(np.mean([np.log(load.runs[name].rate / load.runs[PLAIN].rate) for load in loads])))
        for name in loads[0].runs
    }


def load_table(loads: Sequence[Load]) -> str:
    """Concurrencies by policies, then the sweep's means."""
    names = list(loads[0].runs)
    rows = [["tokens/s", *names, "scheduled / best", "identical", "scheduling of a round"]]
    for load in loads:
        same = sum(load.identical(name) for name in names)
        total = sum(len(runs.results) for runs in load.runs.values())
        rates = [shown(load.runs[name].rate, 0) for name in names]
        share = f"{100 * load.schedule_share:.1f}%"
        rows.append([f"{load.slots} at once", *rates, shown(load.over_best), f"{same}/{total}", share])
    means = sweep_fields(loads)
    rows.append(["geometric mean over plain", *(shown(means[name]) for name in names), "", "", ""])
    return table(rows)


def plot_loads(path: Path, loads: Sequence[Load], title: str) -> None:
    """Throughput, and nodes verified, against concurrency."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    figure.suptitle(title, fontsize="medium")
    throughput, nodes = figure.subplots(1, 2)
    slots = [load.slots for load in loads]
    for name in loads[0].runs:
        style: dict[str, Any] = {"marker": "o", "linewidth": 2.5 if name == SCHEDULED else 1.2}
        throughput.plot(slots, [load.runs[name].rate for load in loads], label=name, **style)
        nodes.plot(slots, [load.runs[name].verified for load in loads], **style)
    for axes, label in ((throughput, "tokens/s of all"), (nodes, "nodes of a request verified in a round")):
        axes.set(xlabel="requests at once", ylabel=label, xscale="log", ylim=(0, None))
        axes.set_xticks(slots, map(str, slots))
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.3)
    throughput.legend(fontsize="small")
    save_figure(path, figure)
