"""Safetensors files, single or sharded, read in parts and written atomically."""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import safetensors
import safetensors.numpy

from dspark_jax.io.errors import InputError
from dspark_jax.io.files import atomic_file, read_json, reported
from dspark_jax.io.tensors import Index

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class SafetensorsSource:
    """The tensors of a checkpoint folder: `model.safetensors`, or the shards that its index lists.

    A context manager; the files stay open, and unread, until it ends.

    Raises:
      InputError: no checkpoint in the folder, a missing shard, a truncated or corrupt file, or a tensor that the
        index places in a shard that lacks it.
    """

    readable: ClassVar[frozenset[str]] = frozenset({"F64", "F32", "F16", "BF16", "I64", "I32", "BOOL"})

    def __init__(self, folder: str | os.PathLike) -> None:
        self.path = Path(folder)
        self._files = contextlib.ExitStack()
        self._slices: dict[str, Any] = {}
        try:
            self._open_all()
        except BaseException:
            self._files.close()
            raise

    def _open_all(self) -> None:
        if (self.path / FILE).is_file():
            file = self._open(self.path / FILE)
            names = file.keys()
            self._slices = {name: file.get_slice(name) for name in names}
        elif (self.path / INDEX).is_file():
            self._open_shards(read_json(self.path / INDEX).get("weight_map"))
        else:
            raise InputError(f"{self.path}: has neither {FILE} nor {INDEX}; convert the weights to safetensors")
        for name, part in self._slices.items():
            if part.get_dtype() not in self.readable:
                raise InputError(
                    f"{self.path}: tensor {name} is stored as {part.get_dtype()}; "
                    "quantised weights are not supported, use an unquantised checkpoint"
                )

    def _open_shards(self, weight_map: Any) -> None:
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise InputError(f"{self.path / INDEX}: weight_map is missing or malformed; download the file again")
        shards: dict[str, Any] = {}
        for file in sorted(set(weight_map.values())):
            if not (self.path / file).is_file():
                raise InputError(f"{self.path / file}: this shard of {INDEX} is missing; download it")
            shards[file] = self._open(self.path / file)
        names = {file: set(shard.keys()) for file, shard in shards.items()}
        for name, file in weight_map.items():
            if name not in names[file]:
                raise InputError(f"{self.path / file}: tensor {name}, which {INDEX} places here, is missing")
            self._slices[name] = shards[file].get_slice(name)

    def _open(self, path: Path) -> Any:
        try:
            with reported(path):
                return self._files.enter_context(safetensors.safe_open(path, framework="numpy"))
        except safetensors.SafetensorError as error:
            raise InputError(f"{path}: truncated or corrupt safetensors file ({error}); get it again") from error

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(part.get_shape()) for name, part in self._slices.items()}

    def dtypes(self) -> dict[str, str]:
        """The dtype of every tensor, as safetensors calls it."""
        return {name: part.get_dtype() for name, part in self._slices.items()}

    def read(self, name: str, index: Index) -> np.ndarray:
        return self._slices[name][index]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()


def write_safetensors(path: str | os.PathLike, tensors: Mapping[str, Any]) -> None:
    """Writes arrays (NumPy or JAX, bfloat16 included) bit-exactly, or, with an InputError, nothing."""
    arrays = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    with atomic_file(path) as temporary:
        try:
            # Hugging Face's readers ask for this mark.
            temporary.write_bytes(safetensors.numpy.save(arrays, metadata={"format": "pt"}))
        except safetensors.SafetensorError as error:
            raise InputError(f"{path}: cannot be written ({error})") from error
