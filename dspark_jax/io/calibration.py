"""Calibration files: what `train calibrate` writes, read back only for the law that it is about."""

import dataclasses
import os
import textwrap
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from dspark_jax.config import TreeSpec
from dspark_jax.decode_state import Verifier
from dspark_jax.io.drafter import Drafter
from dspark_jax.io.errors import InputError
from dspark_jax.io.files import read_json
from dspark_jax.io.target import Target
from dspark_jax.scheduling.survival import SurvivalMap, uncalibrated

# What float32 holds, and its inverse, with room.
_LARGEST = 1e30


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrationLaw:
    """What acceptances depend on: a calibration made under one law says nothing about another.

    Under coupled sampling a chain is accepted a little less often than under rejection sampling, which the confidence
    head is trained on; temperature and filters change both models' laws.
    """

    target_fingerprint: str
    drafter_fingerprint: str
    verifier: str
    temperature: float
    top_k: int
    top_p: float
    min_p: float

    @classmethod
    def of(
        cls,
        target: Target,
        drafter: Drafter,
        verifier: Verifier,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
    ) -> "CalibrationLaw":
        """The law of these models under sampling settings as `dspark_jax.sampling_params` takes them."""
        return cls(
            target_fingerprint=target.fingerprint,
            drafter_fingerprint=drafter.fingerprint,
            verifier=verifier.value,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
        )


@dataclasses.dataclass(frozen=True)
class EdgeMap:
    """α and β of `scheduling.calibration.edge_survival`, fitted on trees of this shape."""

    alpha: float
    beta: float
    tree: TreeSpec


@dataclasses.dataclass(frozen=True, eq=False)
class Platt:
    """A chain's confidences by Platt scaling, one slope and one offset a draft."""

    slopes: Float[np.ndarray, "gamma"]
    offsets: Float[np.ndarray, "gamma"]


@dataclasses.dataclass(frozen=True, eq=False)
class Calibration:
    """Temperatures of a drafter's confidences, one a draft; where fitted, Platt scaling, and the map for trees."""

    temperatures: Float[np.ndarray, "gamma"]
    platt: Platt | None
    edge_map: EdgeMap | None

    @property
    def survival(self) -> SurvivalMap:
        """What an engine takes: Platt scaling, or else temperatures; a tree's edges as they are without a map."""
        offsets = np.zeros_like(self.temperatures)
        confidences = Platt(1 / self.temperatures, offsets) if self.platt is None else self.platt
        survival = uncalibrated(len(offsets)).replace(
            slopes=jnp.asarray(confidences.slopes), offsets=jnp.asarray(confidences.offsets)
        )
        if self.edge_map is None:
            return survival
        alpha, beta = (jnp.asarray(value, jnp.float32) for value in (self.edge_map.alpha, self.edge_map.beta))
        return survival.replace(alpha=alpha, beta=beta)


def load_calibration(
    path: str | os.PathLike, num_drafts: int, law: CalibrationLaw | None = None, tree: TreeSpec | None = None
) -> Calibration:
    """Reads a calibration for a drafter of `num_drafts` drafts.

    With a `law` the file must be about it; with a `tree` it must hold a map fitted on such trees.

    Raises:
      InputError: a missing or malformed file, another number of positions, a temperature that is not positive and
        finite, another law or tree; in one line that names the field and both values.
    """
    fields = read_json(path)
    temperatures = _read_positions(path, fields, "temperatures", num_drafts, least=1 / _LARGEST)
    if law is not None:
        _check_law(path, fields.get("law"), law)
    platt, edge_map = None, None
    if fields.get("platt") is not None:
        if not isinstance(fields["platt"], dict):
            raise InputError(f"{path}: platt must be an object")
        slopes = _read_positions(path, fields["platt"], "slopes", num_drafts, within="platt.", least=0)
        platt = Platt(slopes, _read_positions(path, fields["platt"], "offsets", num_drafts, within="platt."))
    if fields.get("edge_map") is not None:
        edge_map = _read_edge_map(path, fields["edge_map"])
    if tree is not None and (edge_map is None or edge_map.tree != tree):
        found = "no trees" if edge_map is None else f"trees of {_shape(edge_map.tree)}"
        raise InputError(f"{path}: edge_map: was fitted on {found}, not of {_shape(tree)}; calibrate with this tree")
    return Calibration(temperatures, platt, edge_map)


def _read_positions(
    path: str | os.PathLike,
    fields: dict[str, Any],
    name: str,
    num_drafts: int,
    within: str = "",
    least: float = -_LARGEST,
) -> Float[np.ndarray, "gamma"]:
    """A list of one finite number a draft, each at least `least`."""
    values, label = fields.get(name), f"{within}{name}"
    if not isinstance(values, list) or not values:
        raise InputError(f"{path}: {label} must be a list of numbers, one a draft")
    kind = (
        "a finite number"
        if least < 0
        else "a finite number of at least 0"
        if least == 0
        else "a positive, finite number"
    )
    for k, value in enumerate(values):
        if not _is_number(value) or value < least:
            raise InputError(f"{path}: {label}[{k}] must be {kind}, not {_brief(value)}")
    if len(values) != num_drafts:
        raise InputError(
            f"{path}: has {label} of {len(values)} positions, but the drafter drafts {num_drafts}; "
            "calibrate this drafter"
        )
    return np.asarray(values, np.float32)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < _LARGEST


def _brief(value: Any) -> str:
    return textwrap.shorten(str(value), 40, placeholder="…")


def _check_law(path: str | os.PathLike, found: Any, law: CalibrationLaw) -> None:
    if not isinstance(found, dict):
        raise InputError(f"{path}: law is missing: nothing says which models and sampling it is about; calibrate anew")
    for name, value in dataclasses.asdict(law).items():
        if name not in found or found[name] != value:
            raise InputError(
                f"{path}: law.{name} is {_brief(found.get(name))}, not {value}: it is about other acceptances; "
                "calibrate for these"
            )


def _read_edge_map(path: str | os.PathLike, fields: Any) -> EdgeMap:
    if not isinstance(fields, dict):
        raise InputError(f"{path}: edge_map must be an object")
    for name in ("alpha", "beta"):
        if not _is_number(fields.get(name)):
            raise InputError(f"{path}: edge_map.{name} must be a finite number, not {_brief(fields.get(name))}")
    if fields["alpha"] < 0:
        raise InputError(f"{path}: edge_map.alpha must be at least 0, not {fields['alpha']!r}")
    try:
        tree = TreeSpec(**fields["tree"])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: edge_map.tree describes no tree ({error})") from error
    return EdgeMap(float(fields["alpha"]), float(fields["beta"]), tree)


def _shape(tree: TreeSpec) -> str:
    return ", ".join(f"{name} {value}" for name, value in tree_fields(tree).items() if value is not None)


def tree_fields(tree: TreeSpec) -> dict[str, Any]:
    """A tree's description for JSON; `TreeSpec(**fields)` is the tree."""
    return dataclasses.asdict(tree) | {"kind": tree.kind.value}


def edge_map_fields(edge_map: EdgeMap) -> dict[str, Any]:
    """The map for JSON, as `load_calibration` reads it."""
    return {"alpha": edge_map.alpha, "beta": edge_map.beta, "tree": tree_fields(edge_map.tree)}
