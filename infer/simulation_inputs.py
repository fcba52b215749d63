"""What a simulation reads beside the recorded run: throughput tables, and a trace of arrivals."""

from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from dspark_jax import TreeSpec
from dspark_jax.io import InputError, numbered_jsonl, read_json
from dspark_jax.io.calibration import tree_fields
from dspark_jax.io.step_table import is_modelled, load_step_table
from dspark_jax.scheduling.throughput import StepTable

# NaN is not below it either.
_LARGEST = 1e30


def read_table(path: Path, tree: TreeSpec | None) -> tuple[StepTable, bool]:
    """A table of steps with such trees, or with chains, and whether it is modelled instead of measured. Of any device;
    one without a law is believed.

    Raises:
      InputError: a missing or malformed file, or one that says that it is about other drafts.
    """
    table = load_step_table(path)
    law = read_json(path).get("law")
    if not isinstance(law, dict) or "tree" not in law:
        return table, is_modelled(law)
    if tree is None and law["tree"] is not None:
        raise InputError(f"{path}: law.tree: is about trees; --table is for chains, name this one as --tree-table")
    if tree is not None and law["tree"] != tree_fields(tree):
        raise InputError(
            f"{path}: law.tree: is not about the run's trees; measure with `profile --slots` and its --tree"
        )
    return table, is_modelled(law)


def read_trace(path: Path) -> Float[np.ndarray, "n"]:
    """Arrival times from a JSON Lines file of `arrival_seconds`, ascending, moved to begin at 0.

    Raises:
      InputError: a missing or malformed file, or a line whose time is missing or before the last one's.
    """
    times: list[float] = []
    for line, row in numbered_jsonl(path):
        time: Any = row.get("arrival_seconds")
        if not _is_number(time):
            raise InputError(f"{path}, line {line}: arrival_seconds must be a finite number, not {time!r}")
        if times and time < times[-1]:
            raise InputError(f"{path}, line {line}: arrival_seconds {time} is before the line above; sort the trace")
        times.append(time)
    return np.asarray(times, np.float64) - times[0]


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < _LARGEST
