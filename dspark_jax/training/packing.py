"""Documents of a batch packed into few rows, each of so many tokens and so many anchors (numpy, on the host)."""

import bisect
import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

# An anchor capacity is rounded up to a multiple of this, so that similar data shares a compiled program.
_ANCHOR_STEP = 8


@dataclasses.dataclass(frozen=True)
class RowCapacity:
    """What a row holds at most: T tokens and A anchors."""

    tokens: int
    anchors: int


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """Each document's row, and its first index in that row; `count` rows are in use."""

    rows: Int[np.ndarray, "documents"]
    starts: Int[np.ndarray, "documents"]
    count: int


def row_capacity(
    lengths: Int[np.ndarray, "documents"], anchors: Int[np.ndarray, "documents"], tokens: int
) -> RowCapacity:
    """Rows of so many tokens that have as many anchors a token as these documents have.

    So a row is about full of anchors when it is full of tokens, and what a drafter costs grows with the anchors that
    are trained and not with the context. Any of the documents fits into an empty row.
    """
    share = -(-tokens * int(anchors.sum()) // int(lengths.sum()))
    least = max(share, int(anchors.max()), 1)
    return RowCapacity(tokens, min(tokens, -(-least // _ANCHOR_STEP) * _ANCHOR_STEP))


def place(
    lengths: Int[np.ndarray, "documents"], anchors: Int[np.ndarray, "documents"], capacity: RowCapacity
) -> Placement:
    """First fit decreasing: the documents that fill most of a row come first, each into the first row with room.

    Raises:
      ValueError: a document needs more than a row holds.
    """
    if lengths.max(initial=0) > capacity.tokens or anchors.max(initial=0) > capacity.anchors:
        raise ValueError(f"a document does not fit into a row of {capacity}")
    count = len(lengths)
    free_tokens, free_anchors = np.full(count, capacity.tokens), np.full(count, capacity.anchors)
    rows, starts = np.zeros(count, np.int32), np.zeros(count, np.int32)
    part_of_row = np.maximum(lengths / capacity.tokens, anchors / capacity.anchors)
    for document in np.argsort(-part_of_row, kind="stable"):
        fits = (free_tokens >= lengths[document]) & (free_anchors >= anchors[document])
        row = int(np.argmax(fits))
        rows[document], starts[document] = row, capacity.tokens - free_tokens[row]
        free_tokens[row] -= lengths[document]
        free_anchors[row] -= anchors[document]
    return Placement(rows, starts, int(rows.max(initial=-1)) + 1)


def rows_needed(batches: Sequence[tuple[np.ndarray, np.ndarray]], capacity: RowCapacity) -> int:
    """Rows that hold any one of these batches, each of lengths and anchors of documents."""
    return max(place(lengths, anchors, capacity).count for lengths, anchors in batches)


def tightened(batches: Sequence[tuple[np.ndarray, np.ndarray]], capacity: RowCapacity, rows: int) -> RowCapacity:
    """Room for as few anchors as do where `rows` rows of `capacity` hold any of these batches.

    Batches of few documents do not fill their rows, and would else be computed with blocks that nobody trains.
    """

    def with_anchors(steps: int) -> RowCapacity:
        return RowCapacity(capacity.tokens, min(capacity.tokens, steps * _ANCHOR_STEP))

    def enough(steps: int) -> bool:
        return all(place(*batch, with_anchors(steps)).count <= rows for batch in batches)

    most = max(int(anchors.max()) for _, anchors in batches)
    fewer = range(max(1, -(-most // _ANCHOR_STEP)), -(-capacity.anchors // _ANCHOR_STEP))
    return with_anchors(fewer.start + bisect.bisect_left(fewer, True, key=enough))


def deal(placement: Placement, count: int, parts: int) -> Placement:
    """The same documents among `count` rows, in `parts` equal parts of neighbouring rows that get the rows in use in
    turn. `count` is a multiple of `parts`, and no less than the rows in use.
    """
    rows = placement.rows % parts * (count // parts) + placement.rows // parts
    return Placement(rows, placement.starts, count)
