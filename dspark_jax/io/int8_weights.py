"""Weights that files hold in int8: `NAME` [out, in] int8 and `NAME_scale` [out, groups] float32.

A group is 32 inputs of one output (the last may be short), and a weight is value times scale: what `layers.quantized`
computes with, so that nothing is rounded twice. The layout is this project's; a `config.json` says that it is used.
"""

from typing import Any, ClassVar

import jax
import numpy as np

from dspark_jax.io.errors import InputError
from dspark_jax.io.safetensors import SafetensorsSource
from dspark_jax.io.tensors import INT8, Index
from dspark_jax.layers.quantized import GROUP, QuantizedWeight, num_groups, pack, round_to_int8, unpack

_KEY = "weight_storage"
# The fields of a config.json of such weights.
FIELDS = {_KEY: INT8}
_SCALE = "_scale"
# That of weights which float32 holds.
_LARGEST_SCALE = np.finfo(np.float32).max / 128
_REMEDY = "the checkpoint is damaged, get or make it again"


def take_storage(fields: dict[str, Any]) -> bool:
    """Takes the field about int8 weights out of those of a `config.json`; whether they are used.

    Raises:
      ValueError: another value.
    """
    value = fields.pop(_KEY, None)
    if value not in (None, INT8):
        raise ValueError(f"{_KEY} {value!r} is not supported; only {INT8!r} is")
    return value is not None


def int8_tensors(name: str, weight: jax.Array | QuantizedWeight) -> dict[str, np.ndarray]:
    """The two tensors of a weight [out, in]; one that is in int8 already keeps its values and scales."""
    quantized = isinstance(weight, QuantizedWeight)
    values, scales = unpack(weight) if quantized else round_to_int8(np.asarray(weight).astype(np.float32))
    return {name: values, f"{name}{_SCALE}": scales}


class Int8Source(SafetensorsSource):
    """A checkpoint folder of which some weights are int8: `read` dequantises them, in float32, and `shapes` is without
    their scales.

    Raises:
      InputError: as SafetensorsSource; or an int8 weight's scale that is missing, misshapen or, when it is read,
        negative or not finite.
    """

    readable: ClassVar[frozenset[str]] = SafetensorsSource.readable | {"I8"}

    def _open_all(self) -> None:
        super()._open_all()
        shapes, dtypes = super().shapes(), self.dtypes()
        self._int8 = {name for name, shape in shapes.items() if dtypes[name] == "I8" and len(shape) == 2}
        for name in sorted(self._int8):
            scale, expected = f"{name}{_SCALE}", (shapes[name][0], num_groups(shapes[name][1]))
            if scale not in shapes:
                raise InputError(f"{self.path}: tensor {scale} {list(expected)} is missing; {_REMEDY}")
            if (shapes[scale], dtypes[scale]) != (expected, "F32"):
                raise InputError(
                    f"{self.path}: tensor {scale} has shape {list(shapes[scale])} in {dtypes[scale]}, but {name} "
                    f"{list(shapes[name])} asks for {list(expected)} in F32; {_REMEDY}"
                )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        scales = {f"{name}{_SCALE}" for name in self._int8}
        return {name: shape for name, shape in super().shapes().items() if name not in scales}

    def read(self, name: str, index: Index) -> np.ndarray:
        if name not in self._int8:
            return super().read(name, index)
        outputs, inputs = index
        values, scales = self._read_rows(name, outputs)
        whole = np.repeat(scales, GROUP, axis=1)[:, : values.shape[1]]
        return (values.astype(np.float32) * whole)[:, inputs]

    def quantized(self, name: str) -> QuantizedWeight | None:
        """A weight as it is stored; None for one that is not stored in int8."""
        return pack(*self._read_rows(name, slice(None))) if name in self._int8 else None

    def _read_rows(self, name: str, rows: slice) -> tuple[np.ndarray, np.ndarray]:
        index, scale = (rows, slice(None)), f"{name}{_SCALE}"
        values, scales = super().read(name, index), super().read(scale, index)
        if not ((scales >= 0) & (scales <= _LARGEST_SCALE)).all():
            raise InputError(f"{self.path}: tensor {scale} has values that are negative or not finite; {_REMEDY}")
        return values, scales
