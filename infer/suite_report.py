"""What a suite found: Markdown tables, figures and JSON."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dspark_jax.io.report import number, save_figure, shown
from dspark_jax.scheduling.calibration import expected_calibration_error, reliability, roc_auc
from infer.suite_file import MEAN, Suite
from infer.suite_run import THRESHOLDS, Measured, Row, TextCounts, total

_NOT_MEASURED = "not measured"


@dataclasses.dataclass(frozen=True, eq=False)
class Findings:
    """Of one temperature: the texts of each prompt file, and what each row came to on each, by the row's name."""

    suite: Suite
    rows: Sequence[Row]
    temperature: float
    texts: Mapping[str, TextCounts]
    measured: Mapping[str, Mapping[str, Measured]]

    def mean_tau(self, row: str) -> float:
        """Of the prompt files, each counted once, as papers do."""
        return float(np.mean([measured.counts.tau for measured in self.measured[row].values()]))

    def pooled(self, row: str) -> Measured:
        return total(list(self.measured[row].values()))


def markdown(findings: Findings) -> str:
    """Rows are methods, columns prompt files and their mean; published figures are in brackets."""
    names = list(findings.texts)
    lines = [
        f"Accepted length τ at T = {findings.temperature:g}",
        "",
        f"| method | {' | '.join((*names, MEAN))} |",
        f"| --- |{' ---: |' * (len(names) + 1)}",
    ]
    notes: dict[str, None] = {}
    for drafter in findings.suite.drafters:
        published = drafter.paper if drafter.paper_temperature == findings.temperature else {}
        if published and drafter.paper_note:
            notes[drafter.paper_note] = None
        for method in drafter.methods:
            row = drafter.row(method)
            cells = [_NOT_MEASURED] + [""] * len(names)
            if row in findings.measured:
                values = [measured.counts.tau for measured in findings.measured[row].values()]
                cells = [shown(value) for value in (*values, findings.mean_tau(row))]
            for index, name in enumerate((*names, MEAN)):
                if name in published:
                    cells[index] = f"{cells[index]} ({published[name]:.2f})".strip()
            lines.append(f"| {row} | {' | '.join(cells)} |")
    if notes:
        lines += ["", f"In brackets: {'; '.join(notes)}."]
    return "\n".join(lines) + "\n"


def finding_fields(findings: Findings) -> dict[str, Any]:
    """One temperature, for JSON; a number that is not defined is null."""
    missing = [
        drafter.row(method)
        for drafter in findings.suite.drafters
        for method in drafter.methods
        if drafter.row(method) not in findings.measured
    ]
    return {
        "temperature": findings.temperature,
        "texts": {name: dataclasses.asdict(counts) for name, counts in findings.texts.items()},
        "methods": [_row_fields(findings, row) for row in findings.rows],
        "not_measured": missing,
    }


def _row_fields(findings: Findings, row: Row) -> dict[str, Any]:
    tree, pooled = row.config.tree, findings.pooled(row.name)
    fields: dict[str, Any] = {
        "name": row.name,
        "label": row.spec.label,
        "method": row.method,
        "drafter": row.drafter.name,
        "drafter_fingerprint": row.drafter.fingerprint,
        "drafts": row.config.depth,
        "tree": None if tree is None else dataclasses.asdict(tree) | {"kind": tree.kind.value},
        "mean_tau": number(findings.mean_tau(row.name)),
        "files": {name: _count_fields(measured) for name, measured in findings.measured[row.name].items()},
        "pooled": _count_fields(pooled),
    }
    if row.spec.paper and row.spec.paper_temperature == findings.temperature:
        fields["paper"] = {"tau": row.spec.paper, "note": row.spec.paper_note}
    if pooled.sweep is not None:
        tau, verified = _swept(pooled)
        swept = zip(THRESHOLDS.tolist(), tau, verified, strict=True)
        fields["thresholds"] = [
            {"threshold": threshold, "tau": number(tau), "drafts_verified_per_round": number(verified)}
            for threshold, tau, verified in swept
        ]
        fields["reliability"] = _reliability_fields(pooled)
    return fields


def _count_fields(measured: Measured) -> dict[str, Any]:
    counts = measured.counts
    return {
        "rounds": counts.rounds,
        "tokens": counts.tokens,
        "tau": number(counts.tau),
        "tau_to_eos": number(counts.tau_to_end),
        "drafts_verified_per_round": number(counts.verified / counts.rounds) if counts.rounds else None,
        "conditional_acceptance": [number(x) for x in counts.conditional_acceptance],
        "reached": counts.reached.tolist(),
        "prefix_survival": [number(x) for x in counts.prefix_survival],
    }


def _swept(measured: Measured) -> tuple[np.ndarray, np.ndarray]:
    """τ, and drafts verified a round, by the thresholds."""
    sweep: Any = measured.sweep
    rounds = np.where(sweep.rounds > 0, sweep.rounds, np.nan)
    return sweep.tokens / rounds, sweep.verified / rounds


def _reliability_fields(measured: Measured) -> dict[str, Any]:
    pair = (measured.confidences, measured.accepted)
    diagram = reliability(*pair)
    return {
        "predicted": [number(x) for x in diagram.predicted],
        "observed": [number(x) for x in diagram.observed],
        "count": diagram.count.tolist(),
        "ece": number(expected_calibration_error(*pair)),
        "roc_auc": number(roc_auc(*pair)),
    }


def plot_suite(path: Path, all_findings: Sequence[Findings], title: str) -> None:
    """A line of panels a temperature: acceptance by position and, of chains with confidences, the thresholds and how
    reliable the confidences are. All prompt files are pooled.
    """
    confident = any(row.confident for row in all_findings[0].rows)
    panels = [_acceptance, *([_tau_of_thresholds, _verified_of_thresholds, _reliability] if confident else [])]
    height = 3.6 * len(all_findings) + 0.25 * len(all_findings[0].rows)
    figure = Figure(figsize=(1 + 4.4 * len(panels), height), layout="constrained")
    figure.suptitle(title)
    grid = figure.subplots(len(all_findings), len(panels), squeeze=False)
    for findings, line in zip(all_findings, grid, strict=True):
        for axes, draw in zip(line, panels, strict=True):
            for index, row in enumerate(findings.rows):
                draw(axes, findings.pooled(row.name), {"label": row.name, "color": f"C{index}", "marker": "."})
            axes.set_title(f"T = {findings.temperature:g}: {axes.get_title()}", fontsize="medium")
            axes.grid(alpha=0.3)
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
    save_figure(path, figure)


def _acceptance(axes: Axes, measured: Measured, style: Mapping[str, Any]) -> None:
    rates = measured.counts.conditional_acceptance
    # With one draft there is a point, no line.
    axes.plot(np.arange(1, len(rates) + 1), rates, **style)
    axes.set(title="acceptance if all before were", xlabel="draft position", ylim=(0, 1))


def _tau_of_thresholds(axes: Axes, measured: Measured, style: Mapping[str, Any]) -> None:
    if measured.sweep is not None:
        axes.plot(THRESHOLDS, _swept(measured)[0], **style)
    axes.set(title="accepted length τ", xlabel="confidence threshold", xlim=(0, 1))


def _verified_of_thresholds(axes: Axes, measured: Measured, style: Mapping[str, Any]) -> None:
    if measured.sweep is not None:
        axes.plot(THRESHOLDS, _swept(measured)[1], **style)
    axes.set(title="drafts verified a round", xlabel="confidence threshold", xlim=(0, 1))


def _reliability(axes: Axes, measured: Measured, style: Mapping[str, Any]) -> None:
    if not axes.lines:
        axes.plot([0, 1], [0, 1], color="black", linewidth=0.8, linestyle="--")
    if measured.sweep is not None:
        diagram = reliability(measured.confidences, measured.accepted)
        filled = diagram.count > 0
        axes.plot(diagram.predicted[filled], diagram.observed[filled], **style)
    axes.set(title="acceptance of drafts", xlabel="their confidence", xlim=(0, 1), ylim=(0, 1))
