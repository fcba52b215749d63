"""Step tables: rates that `infer profile` measures, read back only for the device and the programs they are about."""

import dataclasses
import os
import textwrap
from typing import Any

import jax.numpy as jnp
import numpy as np

from dspark_jax.config import TreeSpec
from dspark_jax.io.calibration import tree_fields
from dspark_jax.io.drafter import Drafter
from dspark_jax.io.errors import InputError
from dspark_jax.io.files import read_json, write_json
from dspark_jax.io.report import environment
from dspark_jax.io.target import Target
from dspark_jax.io.tensors import INT8
from dspark_jax.layers.quantized import QuantizedWeight
from dspark_jax.scheduling.throughput import StepTable, validate_table
from dspark_jax.sharding import mesh_of

_PLAIN = "plain_steps_per_second"
_REMEDY = "measure again with `python -m infer profile --slots`"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTableLaw:
    """What steps per second depend on.

    `mesh`: of the weights (`sharding.mesh_of`). `buckets`: the engine's capacities of a verification step. `modelled`:
    the rates were not measured but worked out for a device that nobody had; then fingerprints are the models' names.
    """

    device: str
    mesh: str
    dtype: str
    target_fingerprint: str
    drafter_fingerprint: str | None
    tree: TreeSpec | None
    slots: int
    buckets: tuple[int, ...]
    modelled: bool = False

    @classmethod
    def of(
        cls, target: Target, drafter: Drafter | None, tree: TreeSpec | None, slots: int, buckets: tuple[int, ...]
    ) -> "StepTableLaw":
        """The law of these models on this process's devices."""
        weight = target.params.embed_tokens.weight
        return cls(
            device=environment()["device"],
            mesh=mesh_of(target.params.norm.weight),
            dtype=INT8 if isinstance(weight, QuantizedWeight) else weight.dtype.name,
            target_fingerprint=target.fingerprint,
            drafter_fingerprint=None if drafter is None else drafter.fingerprint,
            tree=tree,
            slots=slots,
            buckets=buckets,
        )

    def fields(self) -> dict[str, Any]:
        """The law for JSON."""
        tree = None if self.tree is None else tree_fields(self.tree)
        return dataclasses.asdict(self) | {"tree": tree, "buckets": list(self.buckets)}


def save_step_table(path: str | os.PathLike, table: StepTable, law: StepTableLaw, **about: Any) -> None:
    """Writes a table with its law, versions and date, and what else there is to say `about` it.

    Raises:
      ValueError: a table that no measurement can give, or of other buckets than the law's.
    """
    validate_table(table)
    capacities, rates = np.asarray(table.capacities).tolist(), np.asarray(table.steps_per_second).tolist()
    if tuple(capacities) != law.buckets:
        raise ValueError(f"step table of buckets {capacities}, but its law is about {list(law.buckets)}")
    law_fields = {name: value for name, value in law.fields().items() if name != "buckets"}
    fields = {"capacities": capacities, "steps_per_second": rates}
    if table.plain_steps_per_second is not None:
        fields[_PLAIN] = np.asarray(table.plain_steps_per_second).tolist()
    write_json(path, fields | {"law": environment() | about | law_fields})


def load_step_table(path: str | os.PathLike, law: StepTableLaw | None = None) -> StepTable:
    """Reads a table; with a `law` it must be about it.

    Raises:
      InputError: a missing or malformed file, a rate that is not positive and finite, or another law; in one line that
        names the field and both values.
    """
    try:
        fields = read_json(path)
    except InputError as error:
        raise InputError(f"{error}; {_REMEDY}") from error
    capacities = fields.get("capacities")
    rates = {name: fields[name] for name in ("steps_per_second", _PLAIN) if fields.get(name) is not None}
    for name, values in ({"capacities": capacities, "steps_per_second": None} | rates).items():
        if not isinstance(values, list) or not values:
            raise InputError(f"{path}: {name} must be a list with a number for each bucket; {_REMEDY}")
    for index, value in enumerate(capacities):
        if type(value) is not int or not 0 < value < 2**31:
            raise InputError(f"{path}: capacities[{index}] must be a positive integer, not {_brief(value)}; {_REMEDY}")
    for name, index, value in ((name, i, value) for name, values in rates.items() for i, value in enumerate(values)):
        if type(value) not in (int, float) or not 0 < value <= float(np.finfo(np.float32).max):
            raise InputError(
                f"{path}: {name}[{index}] must be a positive, finite number, not {_brief(value)}; {_REMEDY}"
            )
    if law is not None:
        _check_law(path, fields.get("law"), capacities, law)
    table = StepTable(
        jnp.asarray(capacities, jnp.int32), *(jnp.asarray(values, jnp.float32) for values in rates.values())
    )
    try:
        validate_table(table)
    except ValueError as error:
        raise InputError(f"{path}: {error}; {_REMEDY}") from error
    return table


def is_modelled(law: Any) -> bool:
    """Whether a table's stored law says that it was not measured."""
    return isinstance(law, dict) and law.get("modelled") is True


def _check_law(path: str | os.PathLike, found: Any, capacities: list[int], law: StepTableLaw) -> None:
    if not isinstance(found, dict):
        raise InputError(f"{path}: law is missing: nothing says which device and models it is about; {_REMEDY}")
    if is_modelled(found) and not law.modelled:
        raise InputError(f"{path}: law.modelled: the table is modelled, not measured; {_REMEDY}")
    there = {"modelled": False} | found | {"buckets": capacities}
    for name, value in law.fields().items():
        if name not in there or there[name] != value:
            field = "capacities" if name == "buckets" else f"law.{name}"
            raise InputError(
                f"{path}: {field}: the table is about {_brief(there.get(name))}, not {_brief(value)}; {_REMEDY}"
            )


def _brief(value: Any) -> str:
    if isinstance(value, dict):
        value = ", ".join(f"{key} {item}" for key, item in value.items() if item is not None)
    return textwrap.shorten(str(value), 80, placeholder="…")
