"""What a run reports: metrics.jsonl, TensorBoard and a plot."""

import contextlib
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from matplotlib.figure import Figure
from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog

from dspark_jax.io import InputError, atomic_file, read_jsonl
from dspark_jax.io.files import reported

HELD_OUT = "held_out_"
JSONL, PLOT, TENSORBOARD = "metrics.jsonl", "metrics.png", "tensorboard"


class MetricsLog:
    """Appends to a run's metrics. A resumed run cuts the file at `position`, so that no step is in it twice.

    Values are scalars, or [γ] arrays with an entry a slot; a value that is not finite is null.
    """

    def __init__(self, folder: Path, position: int, step: int) -> None:
        self._path = folder / JSONL
        with reported(self._path):
            folder.mkdir(parents=True, exist_ok=True)
            size = self._path.stat().st_size if self._path.exists() else 0
            if size < position:
                raise InputError(f"{self._path}: shorter than at the last checkpoint; metrics are missing from it")
            self._file = open(self._path, "ab")  # noqa: SIM115  (closed by close)
            self._file.truncate(position)
            self._file.seek(position)
            (folder / TENSORBOARD).mkdir(exist_ok=True)
            # Not SummaryWriter: its thread dies of a full disk, and then closing it never returns.
            self._board = EventsWriter(str(folder / TENSORBOARD / "events"))
            # What TensorBoard has seen of later steps is to be forgotten.
            self._board.write_event(Event(step=step + 1, session_log=SessionLog(status=SessionLog.START)))

    @property
    def position(self) -> int:
        """Bytes written so far."""
        return self._file.tell()

    def write(self, step: int, values: Mapping[str, Any], prefix: str = "") -> None:
        row: dict[str, Any] = {"step": step}
        scalars: dict[str, Any] = {}
        for name, value in values.items():
            row[prefix + name] = _plain(value)
            slots = {name: value} if np.ndim(value) == 0 else {f"{name}/slot_{k}": v for k, v in enumerate(value)}
            scalars |= {f"{'held_out' if prefix else 'train'}/{slot}": number for slot, number in slots.items()}
        with reported(self._path.parent):
            for name, number in scalars.items():
                event = Event(wall_time=time.time(), step=step, summary=summary.scalar(name, float(number)))
                self._board.write_event(event)
            self._file.write((json.dumps(row, allow_nan=False) + "\n").encode())
            self._file.flush()

    def close(self) -> None:
        with reported(self._path):
            self._board.close()
            os.fsync(self._file.fileno())
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class NoLog(contextlib.nullcontext):
    """In the place of a `MetricsLog` in all processes but the one that writes."""

    position = 0

    def __enter__(self) -> Self:
        return self

    def write(self, step: int, values: Mapping[str, Any], prefix: str = "") -> None:
        """Does nothing."""


def _plain(value: Any) -> Any:
    value = np.asarray(value)
    if value.dtype == bool:
        return value.tolist()
    if value.ndim:
        return [_plain(entry) for entry in value]
    return float(value) if math.isfinite(value) else None


def plot(folder: Path) -> None:
    """Draws the loss and the expected accepted length of metrics.jsonl."""
    rows = read_jsonl(folder / JSONL)
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, name, label in zip(
        panels,
        ("loss", "expected_accepted_length"),
        ("loss", "expected accepted length (tokens a round)"),
        strict=True,
    ):
        for prefix, style, who in (("", {"linewidth": 1}, "training"), (HELD_OUT, {"marker": "o"}, "held out")):
            points = [(row["step"], row[prefix + name]) for row in rows if row.get(prefix + name) is not None]
            if points:
                axes.plot(*zip(*points, strict=True), label=who, **style)
        axes.set_xlabel("step")
        axes.set_ylabel(label)
        if axes.has_data():
            axes.legend()
    with atomic_file(folder / PLOT) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
