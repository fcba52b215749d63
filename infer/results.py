"""What an evaluation found, as a table, a plot and JSON."""

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from dspark_jax import TreeKind, Verifier
from dspark_jax.io.report import number, save_figure, shown, table
from dspark_jax.verification.statistics import AcceptanceCounts
from infer.methods import Method
from infer.round_parts import PARTS

_POOLED = "pooled"


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where a request's speculative output first differs from the plain one, and how close the two tokens are."""

    prompt: int
    turn: int
    position: int
    score_gap: float
    near_tie: bool


@dataclasses.dataclass
class Result:
    """One prompt file under one method. `nodes`: of a full verification pass; `part_ms`: of each part of a round."""

    file: str
    method: Method
    temperature: float
    counts: AcceptanceCounts
    nodes: int
    requests: int = 0
    prompt_tokens: int = 0
    plain_tokens: int = 0
    tokens: int = 0
    plain_seconds: float = 0.0
    seconds: float = 0.0
    differences: list[Difference] = dataclasses.field(default_factory=list)
    part_ms: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def comparable(self) -> bool:
        """Speculative and plain output are the same tokens, not only of the same law."""
        return self.temperature == 0 or self.method.verifier is Verifier.COUPLED

    @property
    def plain_speed(self) -> float:
        return self.plain_tokens / self.plain_seconds

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds

    @property
    def speed_ratio(self) -> float:
        return self.speed / self.plain_speed

    @property
    def identical(self) -> int | None:
        return self.requests - len(self.differences) if self.comparable else None

    @property
    def near_ties(self) -> int:
        return sum(difference.near_tie for difference in self.differences)


def pool(results: Sequence[Result]) -> list[Result]:
    """One result a method, over all files."""
    pooled: dict[Method, Result] = {}
    for result in results:
        whole = pooled.setdefault(result.method, _empty(result))
        whole.counts = whole.counts + result.counts
        for name in ("requests", "prompt_tokens", "plain_tokens", "tokens", "plain_seconds", "seconds"):
            setattr(whole, name, getattr(whole, name) + getattr(result, name))
        whole.differences = whole.differences + result.differences
    return list(pooled.values())


def _empty(like: Result) -> Result:
    depth = len(like.counts.reached)
    return Result(_POOLED, like.method, like.temperature, AcceptanceCounts.zero(depth), like.nodes)


def result_fields(result: Result) -> dict[str, Any]:
    """The result as JSON; a number that is not defined is null."""
    counts = result.counts
    return {
        "file": result.file,
        "method": result.method.name,
        "verifier": result.method.verifier.value,
        "tree": _tree_fields(result.method),
        "requests": result.requests,
        "mean_prompt_tokens": result.prompt_tokens / result.requests,
        "mean_new_tokens": result.tokens / result.requests,
        "rounds": counts.rounds,
        "tau": number(counts.tau),
        "tau_to_eos": number(counts.tau_to_end),
        "conditional_acceptance": [number(x) for x in counts.conditional_acceptance],
        "prefix_survival": [number(x) for x in counts.prefix_survival],
        "drafts_proposed": counts.rounds * (result.nodes - 1),
        "drafts_verified": counts.verified,
        "verified_nodes": counts.verified_nodes,
        "committed_share_of_verified_nodes": number(counts.committed_share),
        "second_choice_mass": number(counts.second_choice_mass),
        "round_parts_ms": {name: number(value) for name, value in result.part_ms.items()},
        "plain_tokens_per_second": result.plain_speed,
        "speculative_tokens_per_second": result.speed,
        "speed_ratio": result.speed_ratio,
        "identical_outputs": result.identical,
        "differences": [
            dataclasses.asdict(difference) | {"score_gap": number(difference.score_gap)}
            for difference in result.differences
        ],
    }


def _tree_fields(method: Method) -> dict[str, Any] | None:
    if method.tree is None:
        return None
    return dataclasses.asdict(method.tree) | {"kind": method.tree.kind.value}


def results_table(results: Sequence[Result]) -> str:
    """Totals, conditional acceptance, prefix survival, and the parts of a round where they were measured."""
    heading = ["file and method", "requests", "prompt", "new", "rounds", "τ", "τ to EOS", "nodes", "committed"]
    totals = [[*heading, "plain tok/s", "spec tok/s", "ratio", "identical"]]
    positions = range(len(results[0].counts.reached))
    conditional = [["conditional acceptance of position", *positions]]
    survival = [["prefix survival to position", *positions]]
    parts = [["milliseconds of a round's parts", *PARTS, "draft share"]]
    for result in results:
        counts, name = result.counts, label(result)
        row = [name, result.requests]
        row += [f"{result.prompt_tokens / result.requests:.1f}", f"{result.tokens / result.requests:.1f}"]
        row += [counts.rounds, shown(counts.tau, 3), shown(counts.tau_to_end, 3)]
        row += [shown(counts.verified_nodes / max(counts.rounds, 1), 1), shown(100 * counts.committed_share, 1) + "%"]
        row += [f"{result.plain_speed:.1f}", f"{result.speed:.1f}", f"{result.speed_ratio:.2f}", _identical(result)]
        totals.append(row)
        conditional.append([name, *(shown(x, 3) for x in counts.conditional_acceptance)])
        survival.append([name, *(shown(x, 3) for x in counts.prefix_survival)])
        if result.part_ms:
            times = [result.part_ms[part] for part in PARTS]
            share = (times[0] + times[1]) / sum(times)
            parts.append([name, *(shown(time, 2) for time in times), shown(100 * share, 0) + "%"])
    tables = [totals, conditional, survival, *([parts] if len(parts) > 1 else [])]
    text = "\n\n".join(map(table, tables)) + "\n"
    masses = [
        f"{label(result)}: {shown(100 * result.counts.second_choice_mass, 1)}% of {result.counts.missed_first}"
        for result in results
        if result.counts.missed_first
    ]
    if masses:
        text += "\nwhere the draft's first choice is not the target's token, its second choice is:\n  "
        text += "\n  ".join(masses) + "\n"
    return text


def label(result: Result) -> str:
    return f"{result.file}, {result.method.label}"


def _identical(result: Result) -> str:
    if not result.comparable:
        return "same law"
    text = f"{result.identical}/{result.requests}"
    return text if not result.differences else f"{text}, {result.near_ties} near ties"


def plot_results(path: Path, results: Sequence[Result], title: str) -> None:
    """Acceptance by position, both kinds, and the speed ratio of each file."""
    figure = Figure(figsize=(13, 4 + 0.12 * len(results)), layout="constrained")
    figure.suptitle(title)
    acceptance, survival, speed = figure.subplots(1, 3)
    for row, result in enumerate(results):
        counts = result.counts
        positions = range(len(counts.reached))
        name = f"{Path(result.file).stem} ({result.method.label}), τ {counts.tau:.2f}"
        (line,) = acceptance.plot(positions, counts.conditional_acceptance, marker="o", label=name)
        survival.plot(positions, counts.prefix_survival, marker="o")
        speed.bar_label(speed.barh(row, result.speed_ratio, color=line.get_color()), fmt="%.2f", padding=3)
    for axes, name in ((acceptance, "conditional acceptance"), (survival, "prefix survival")):
        axes.set(title=name, xlabel="draft position", ylim=(0, 1))
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    speed.axvline(1, color="black", linewidth=1)
    fastest = max(1, *(result.speed_ratio for result in results))
    speed.set(title="speculative tokens/s over plain", xlim=(0, fastest * 1.2))
    speed.set_yticks([])
    speed.invert_yaxis()
    save_figure(path, figure)


def plot_budgets(path: Path, results: Sequence[Result], budgets: Collection[int], title: str) -> None:
    """τ and the speed ratio against a tree's budget, one line a file and verifier, chains dashed."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(1, 2)
    lines: dict[str, list[Result]] = {}
    for result in results:
        tree = result.method.tree
        if tree is not None and tree.spine and tree.kind is TreeKind.PCTREE and tree.budget in budgets:
            lines.setdefault(f"{Path(result.file).stem}, {result.method.verifier.value}", []).append(result)
    chains = {
        f"{Path(result.file).stem}, {result.method.verifier.value}": result
        for result in results
        if result.method.tree is None
    }
    for axes, name, value in (
        (panels[0], "accepted length τ", lambda result: result.counts.tau),
        (panels[1], "speculative tokens/s over plain", lambda result: result.speed_ratio),
    ):
        for line, points in lines.items():
            points = sorted(points, key=lambda result: result.nodes)
            (drawn,) = axes.plot([x.nodes for x in points], [value(x) for x in points], marker="o", label=line)
            if line in chains:
                axes.axhline(value(chains[line]), linestyle="--", color=drawn.get_color(), label=f"{line}: chain")
        axes.set(title=name, xlabel="nodes of the tree, the root included", xscale="log")
        axes.set_xticks(sorted(budgets), [str(budget) for budget in sorted(budgets)])
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize="small")
    save_figure(path, figure)
