"""What a simulation reads beside the recorded run and the throughput table: a trace of arrivals."""

from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from dspark_jax.io import InputError, numbered_jsonl

# NaN is not below it either.
_LARGEST = 1e30


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
