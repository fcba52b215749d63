"""What an evaluation found, as a table, a plot and JSON."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from dspark_jax import Verifier
from dspark_jax.verification.statistics import AcceptanceCounts
from infer.report import number, save_figure, shown, table

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
    """One prompt file under one verifier."""

    file: str
    verifier: Verifier
    temperature: float
    counts: AcceptanceCounts
    requests: int = 0
    prompt_tokens: int = 0
    plain_tokens: int = 0
    tokens: int = 0
    plain_seconds: float = 0.0
    seconds: float = 0.0
    differences: list[Difference] = dataclasses.field(default_factory=list)

    @property
    def comparable(self) -> bool:
        """Speculative and plain output are the same tokens, not only of the same law."""
        return self.temperature == 0 or self.verifier is Verifier.COUPLED

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
    """One result a verifier, over all files."""
    pooled: dict[Verifier, Result] = {}
    for result in results:
        whole = pooled.setdefault(result.verifier, _empty(result))
        whole.counts = whole.counts + result.counts
        for name in ("requests", "prompt_tokens", "plain_tokens", "tokens", "plain_seconds", "seconds"):
            setattr(whole, name, getattr(whole, name) + getattr(result, name))
        whole.differences = whole.differences + result.differences
    return list(pooled.values())


def _empty(like: Result) -> Result:
    return Result(_POOLED, like.verifier, like.temperature, AcceptanceCounts.zero(len(like.counts.reached)))


def result_fields(result: Result) -> dict[str, Any]:
    """The result as JSON; a number that is not defined is null."""
    counts = result.counts
    return {
        "file": result.file,
        "verifier": result.verifier.value,
        "requests": result.requests,
        "mean_prompt_tokens": result.prompt_tokens / result.requests,
        "mean_new_tokens": result.tokens / result.requests,
        "rounds": counts.rounds,
        "tau": number(counts.tau),
        "tau_to_eos": number(counts.tau_to_end),
        "conditional_acceptance": [number(x) for x in counts.conditional_acceptance],
        "prefix_survival": [number(x) for x in counts.prefix_survival],
        "drafts_proposed": counts.proposed,
        "drafts_verified": counts.verified,
        "plain_tokens_per_second": result.plain_speed,
        "speculative_tokens_per_second": result.speed,
        "speed_ratio": result.speed_ratio,
        "identical_outputs": result.identical,
        "differences": [
            dataclasses.asdict(difference) | {"score_gap": number(difference.score_gap)}
            for difference in result.differences
        ],
    }


def results_table(results: Sequence[Result]) -> str:
    """Three tables: totals, conditional acceptance, prefix survival."""
    heading = ["file", "verifier", "requests", "prompt", "new", "rounds", "τ", "τ to EOS", "proposed", "verified"]
    totals = [[*heading, "plain tok/s", "spec tok/s", "ratio", "identical"]]
    positions = range(len(results[0].counts.reached))
    conditional = [["conditional acceptance of position", *positions]]
    survival = [["prefix survival to position", *positions]]
    for result in results:
        counts = result.counts
        row = [result.file, result.verifier.value, result.requests]
        row += [f"{result.prompt_tokens / result.requests:.1f}", f"{result.tokens / result.requests:.1f}"]
        row += [counts.rounds, shown(counts.tau, 3), shown(counts.tau_to_end, 3), counts.proposed, counts.verified]
        row += [f"{result.plain_speed:.1f}", f"{result.speed:.1f}", f"{result.speed_ratio:.2f}", _identical(result)]
        totals.append(row)
        name = f"{result.file}, {result.verifier.value}"
        conditional.append([name, *(shown(x, 3) for x in counts.conditional_acceptance)])
        survival.append([name, *(shown(x, 3) for x in counts.prefix_survival)])
    return "\n\n".join(table(rows) for rows in (totals, conditional, survival)) + "\n"


def _identical(result: Result) -> str:
    if not result.comparable:
        return "same law"
    text = f"{result.identical}/{result.requests}"
    return text if not result.differences else f"{text}, {result.near_ties} near ties"


def plot_results(path: Path, results: Sequence[Result], title: str) -> None:
    """Acceptance by position, both kinds, and the speed ratio of each file."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    figure.suptitle(title)
    acceptance, survival, speed = figure.subplots(1, 3)
    labels = [f"{Path(result.file).stem} ({result.verifier.value})" for result in results]
    for result, label in zip(results, labels, strict=True):
        counts = result.counts
        positions = range(len(counts.reached))
        acceptance.plot(positions, counts.conditional_acceptance, marker="o", label=f"{label}, τ {counts.tau:.2f}")
        survival.plot(positions, counts.prefix_survival, marker="o")
    for axes, name in ((acceptance, "conditional acceptance"), (survival, "prefix survival")):
        axes.set(title=name, xlabel="draft position", ylim=(0, 1))
        axes.grid(alpha=0.3)
    acceptance.legend(fontsize="small")
    ratios = [result.speed_ratio for result in results]
    bars = speed.barh(labels, ratios)
    speed.bar_label(bars, fmt="%.2f", padding=3)
    speed.axvline(1, color="black", linewidth=1)
    speed.set(title="speculative tokens/s over plain", xlim=(0, max(*ratios, 1) * 1.2))
    speed.invert_yaxis()
    save_figure(path, figure)
