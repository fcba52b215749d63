"""A picture of one tree of a decoding run."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from dspark_jax.io import Tokenizer
from dspark_jax.io.report import save_figure
from dspark_jax.proposals import Proposal
from dspark_jax.verification.walk import Verdict
from infer.batching import Batch
from infer.decoding import Decoder
from infer.round_parts import rounds_in_parts

# Of so many rounds the one that shows most is drawn.
_ROUNDS = 24
_ACCEPTED, _OTHER = "#1a7f37", "#9a9a9a"


def draw_tree(path: Path, decoder: Decoder, batch: Batch) -> None:
    """Draws the tree of the first request's round that leaves the first choices and still accepts most."""
    best: tuple[tuple[bool, int], int, Proposal, Verdict] | None = None
    for index, (proposal, verdict, _) in zip(range(_ROUNDS), rounds_in_parts(decoder, batch), strict=False):
        accepted = int(verdict.accepted[0])
        path_nodes = verdict.nodes[0, : accepted + 1]
        worth = (bool((_sibling_ranks(proposal)[path_nodes] > 0).any()), accepted)
        if best is None or worth > best[0]:
            best = (worth, index, proposal, verdict)
    if best is not None:
        _, index, proposal, verdict = best
        save_figure(path, _figure(proposal, verdict, decoder.target.tokenizer, index))


def _sibling_ranks(proposal: Proposal) -> np.ndarray:
    parents = np.asarray(proposal.parents[0])
    return np.array([np.count_nonzero(parents[:node] == parent) for node, parent in enumerate(parents)])


def _heights(parents: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """A row for each leaf, top to bottom; a parent stands in the middle of its children."""
    children: dict[int, list[int]] = {}
    for node in np.flatnonzero(valid)[1:]:
        children.setdefault(int(parents[node]), []).append(int(node))
    heights, leaves = np.zeros(len(parents)), 0

    def place(node: int) -> None:
        nonlocal leaves
        below = children.get(node, [])
        for child in below:
            place(child)
        if below:
            heights[node] = np.mean([heights[child] for child in below])
        else:
            heights[node], leaves = leaves, leaves + 1

    place(0)
    return heights


def _figure(proposal: Proposal, verdict: Verdict, tokenizer: Tokenizer | None, index: int) -> Figure:
    parents, depths, valid = (np.asarray(x[0]) for x in (proposal.parents, proposal.depths, proposal.valid))
    tokens, scores = np.asarray(proposal.tokens)[0], np.asarray(proposal.scores)[0]
    heights = _heights(parents, valid)
    accepted = int(verdict.accepted[0])
    on_path = set(np.asarray(verdict.nodes[0, : accepted + 1]).tolist())

    def text(token: int) -> str:
        shown = str(token) if tokenizer is None else repr(tokenizer.decode([token]))[1:-1]
        return shown.replace("$", r"\$")

    figure = Figure(figsize=(2 + 1.6 * (depths.max() + 2), 1.2 + 0.32 * (heights.max() + 1)), layout="constrained")
    axes = figure.subplots()
    for node in np.flatnonzero(valid):
        color = _ACCEPTED if node in on_path else _OTHER
        if parents[node] >= 0:
            parent = parents[node]
            ends = ([depths[parent], depths[node]], [heights[parent], heights[node]])
            axes.plot(*ends, color=color, linewidth=2.5 if node in on_path else 0.8, zorder=1)
        probability = np.exp(scores[node])
        axes.text(
            depths[node],
            heights[node],
            f"{text(int(tokens[node]))}  {probability:.2f}" if parents[node] >= 0 else text(int(tokens[node])),
            ha="center",
            va="center",
            fontsize=8,
            family="monospace",
            color="white" if node in on_path else "black",
            bbox={"boxstyle": "round", "facecolor": color if node in on_path else "white", "edgecolor": color},
            zorder=2,
        )
    last = int(verdict.nodes[0, accepted])
    bonus = text(int(verdict.tokens[0, accepted]))
    axes.annotate(
        f"target: {bonus}",
        (depths[last], heights[last]),
        (depths[last] + 1, heights[last] - 0.6),
        arrowprops={"arrowstyle": "->", "color": _ACCEPTED},
        fontsize=8,
        family="monospace",
        color=_ACCEPTED,
        ha="center",
        va="center",
    )
    axes.set(
        title=f"round {index + 1}: {accepted} of {int(valid.sum()) - 1} drafts accepted; numbers: path probabilities",
        xlabel="depth",
        xlim=(-0.7, depths.max() + 1.7),
    )
    axes.set_xticks(range(int(depths.max()) + 1))
    axes.set_yticks([])
    axes.invert_yaxis()
    axes.spines[["left", "right", "top"]].set_visible(False)
    return figure
