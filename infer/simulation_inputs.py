"""What a simulation reads beside the recorded run: a throughput table, and a trace of arrivals."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from dspark_jax.io import InputError, numbered_jsonl, read_json
from dspark_jax.scheduling.throughput import StepTable, validate_table

_LARGEST_BUCKET = 2**30
# NaN is not below it either.
_LARGEST = 1e30


def read_table(path: Path) -> StepTable:
    """The `capacities` and `steps_per_second` of a JSON file, whatever else it holds.

    Raises:
      InputError: a missing or malformed file, or values that no measurement can give.
    """
    fields = read_json(path)
    for name, fits in (("capacities", _is_bucket), ("steps_per_second", _is_number)):
        values = fields.get(name)
        if not isinstance(values, list) or not all(map(fits, values)):
            raise InputError(f"{path}: {name} must be a list of numbers, one a bucket; measure the table again")
    table = StepTable(
        jnp.asarray(fields["capacities"], jnp.int32), jnp.asarray(fields["steps_per_second"], jnp.float32)
    )
    try:
        validate_table(table)
    except ValueError as error:
        raise InputError(f"{path}: {error}") from error
    return table


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


def _is_bucket(value: Any) -> bool:
    return type(value) is int and abs(value) < _LARGEST_BUCKET


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < _LARGEST
