"""A calibration and what it is worth, as JSON, tables and reliability diagrams."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dspark_jax import TreeSpec
from dspark_jax.io.calibration import EdgeMap, edge_map_fields
from dspark_jax.io.report import number, save_figure, shown, table
from dspark_jax.scheduling.calibration import (
    edge_survival,
    expected_calibration_error,
    fit_edge_map,
    fit_platt,
    fit_temperatures,
    prefix_accepted,
    prefix_survival,
    reliability,
    roc_auc,
)
from train.recorded import Edges, Records, Rounds

POOLED = "pooled"
BEFORE, AFTER, PLATT = "before", "temperatures", "Platt scaling"
_ERRORS = {BEFORE: "ece_before", AFTER: "ece_after", PLATT: "ece_platt"}
# Diagrams side by side.
_COLUMNS = 4
_MEANING = (
    "ece_before, ece_after (by the temperatures) and ece_platt of a position: of its prefix survival, the product of "
    "the confidences up to it, against the acceptance of all drafts up to it, over all rounds; at the top their means "
    "over the positions. roc_auc: of a position's own confidence against its acceptance, over the rounds in which all "
    "earlier drafts were accepted; no calibration changes it. Fitted on every other prompt of each file, from the "
    "first on; measured on the others."
)

Kind = TypeVar("Kind", bound=Records)
Predictions = tuple[Float[np.ndarray, "n"], Bool[np.ndarray, "n"]]


class Figures:
    """Fits on one half of the prompts of each file, and measures on the other half, before and after."""

    def __init__(self, rounds: Mapping[str, Rounds], edges: Mapping[str, Edges], tree: TreeSpec | None) -> None:
        """By prompt file; `edges` are those of trees of this shape, empty where there is none."""
        fitting = Rounds.concatenate(list(rounds.values())).for_fitting
        self.temperatures = fit_temperatures(fitting.logits, fitting.accepted)
        self.slopes, self.offsets = fit_platt(fitting.logits, fitting.accepted)
        self.fitted_rounds = len(fitting)
        self._rounds = _for_report(rounds, Rounds)
        self.edge_map, self._edges = None, {}
        if tree is not None:
            fitting = Edges.concatenate(list(edges.values())).for_fitting
            self.edge_map = EdgeMap(*fit_edge_map(fitting.log_q, fitting.accepted), tree)
            self.fitted_edges = len(fitting)
            self._edges = _for_report(edges, Edges)

    def fields(self) -> dict[str, Any]:
        """What the JSON file says, but for the law."""
        files = {name: self._positions(rounds) for name, rounds in self._rounds.items()}
        pooled = files.pop(POOLED)
        fields = {
            "temperatures": self.temperatures.tolist(),
            "platt": {"slopes": self.slopes.tolist(), "offsets": self.offsets.tolist()},
            "dataset": ", ".join(files),
            "num_samples": self.fitted_rounds,
            "ece_before": float(np.mean(pooled["ece_before"])),
            "ece_after": float(np.mean(pooled["ece_after"])),
            "ece_platt": float(np.mean(pooled["ece_platt"])),
            "meaning": _MEANING,
            "positions": pooled,
            "files": files,
        }
        if self.edge_map is not None:
            files = {name: self._edge_fields(edges) for name, edges in self._edges.items()}
            pooled = files.pop(POOLED)
            samples = {"num_samples": self.fitted_edges}
            fields["edge_map"] = edge_map_fields(self.edge_map) | samples | pooled | {"files": files}
        return fields

    def _positions(self, rounds: Rounds) -> dict[str, Any]:
        accepted = prefix_accepted(rounds.accepted, rounds.logits.shape[1])
        survival = self._survival(rounds)
        return {
            "num_rounds": len(rounds),
            **{_ERRORS[name]: _errors(values, accepted) for name, values in survival.items()},
            "roc_auc": [number(_conditional_auc(rounds, k)) for k in range(len(accepted.T))],
        }

    def _survival(self, rounds: Rounds) -> dict[str, Float[np.ndarray, "n gamma"]]:
        """Prefix survival by each calibration."""
        ones, zeros = np.ones_like(self.slopes), np.zeros_like(self.slopes)
        maps = {BEFORE: (ones, zeros), AFTER: (1 / self.temperatures, zeros), PLATT: (self.slopes, self.offsets)}
        return {name: prefix_survival(rounds.logits, *values) for name, values in maps.items()}

    def _edge_predictions(self, edges: Edges) -> tuple[Float[np.ndarray, "n"], Float[np.ndarray, "n"]]:
        """q itself, and its survival by the map."""
        survival = edge_survival(jnp.asarray(edges.log_q), self.edge_map.alpha, self.edge_map.beta)
        return np.exp(edges.log_q), np.asarray(survival)

    def _edge_fields(self, edges: Edges) -> dict[str, Any]:
        before, after = self._edge_predictions(edges)
        return {
            "num_edges": len(edges),
            "ece_before": number(expected_calibration_error(before, edges.accepted)),
            "ece_after": number(expected_calibration_error(after, edges.accepted)),
            "roc_auc": number(roc_auc(edges.log_q, edges.accepted)),
        }

    def tables(self) -> str:
        """The temperatures, and ECE and ROC-AUC by position, pooled and by file."""
        fields, positions = self.fields(), range(len(self.temperatures))
        several = len(fields["files"]) > 1
        groups = {POOLED: fields["positions"], **(fields["files"] if several else {})}
        fitted = {"temperature": self.temperatures, "Platt: slope": self.slopes, "Platt: offset": self.offsets}
        rows = [[name, *(shown(value, 3) for value in values)] for name, values in fitted.items()]
        text = table([["position", *positions], *rows]) + "\n"
        for title, digits, keys in (
            ("ECE of the prefix survival to position", 4, _ERRORS),
            ("ROC-AUC of the confidence of position", 3, {"": "roc_auc"}),
        ):
            rows: list[list[Any]] = [[title, "rounds", *positions]]
            for name, group in groups.items():
                for when, key in keys.items():
                    label = f"{name}, {when}" if when else name
                    rows.append([label, group["num_rounds"], *(shown(x, digits) for x in group[key])])
            text += f"\n{table(rows)}\n"
        if self.edge_map is not None:
            fitted = fields["edge_map"]
            rows = [["edges of trees", "edges", "ECE before", "ECE after", "ROC-AUC"]]
            for name, group in {POOLED: fitted, **(fitted["files"] if several else {})}.items():
                errors = [shown(group[key], 4) for key in ("ece_before", "ece_after")]
                rows.append([name, group["num_edges"], *errors, shown(group["roc_auc"], 3)])
            law = f"sigmoid({fitted['alpha']:.3f}·logit(q) {fitted['beta']:+.3f})"
            text += f"\n{table(rows)}\n\nsurvival of an edge: {law}\n"
        rounds = f"{self.fitted_rounds:,} rounds of every other prompt"
        return f"{text}\nfitted on {rounds}; the errors above are those on the other prompts\n"

    def plot(self, path: Path, title: str) -> None:
        """Reliability diagrams of each position, and of edges, all files pooled."""
        rounds = self._rounds[POOLED]
        accepted = prefix_accepted(rounds.accepted, rounds.logits.shape[1])
        survival = self._survival(rounds)
        panels = {
            f"drafts 0 to {k}": ({name: values[:, k] for name, values in survival.items()}, accepted[:, k])
            for k in range(len(accepted.T))
        }
        if self.edge_map is not None:
            edges = self._edges[POOLED]
            before, after = self._edge_predictions(edges)
            panels["edges of trees"] = ({BEFORE: before, "after": after}, edges.accepted)
        rows, columns = -(-len(panels) // _COLUMNS), min(len(panels), _COLUMNS)
        figure = Figure(figsize=(3 * columns, 3 * rows + 0.6), layout="constrained")
        figure.suptitle(title)
        grid = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes, (name, (predictions, outcomes)) in zip(grid, panels.items(), strict=False):
            axes.set_title(name, fontsize="medium")
            axes.plot([0, 1], [0, 1], color="black", linewidth=0.8, linestyle="--")
            for when, predicted in predictions.items():
                _draw(axes, when, (predicted, outcomes))
            axes.set(xlim=(0, 1), ylim=(0, 1))
            axes.legend(fontsize="small")
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        figure.supxlabel("predicted survival")
        figure.supylabel("accepted")
        save_figure(path, figure)


def _draw(axes: Axes, name: str, predictions: Predictions) -> None:
    """One line; a point's area grows with the share of its bin."""
    diagram = reliability(*predictions)
    filled = diagram.count > 0
    error = expected_calibration_error(*predictions)
    (line,) = axes.plot(diagram.predicted[filled], diagram.observed[filled], label=f"{name}, ECE {error:.3f}")
    sizes = 10 + 120 * diagram.count[filled] / max(diagram.count.sum(), 1)
    axes.scatter(diagram.predicted[filled], diagram.observed[filled], sizes, color=line.get_color())


def _errors(survival: Float[np.ndarray, "n gamma"], accepted: Bool[np.ndarray, "n gamma"]) -> list[float | None]:
    return [number(expected_calibration_error(*pair)) for pair in zip(survival.T, accepted.T, strict=True)]


def _conditional_auc(rounds: Rounds, k: int) -> float:
    reached = rounds.accepted >= k
    return roc_auc(rounds.logits[reached, k], rounds.accepted[reached] > k)


def _for_report(files: Mapping[str, Kind], kind: type[Kind]) -> dict[str, Kind]:
    """The half for the report, all files pooled first."""
    pooled = {POOLED: kind.concatenate(list(files.values()))}
    return {name: records.for_report for name, records in {**pooled, **files}.items()}
