"""The files of a feature cache: its manifest, and its arrays on one flat axis of all documents' tokens."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import tensorstore as ts

from dspark_jax.io import InputError, read_json, write_json
from dspark_jax.training.features import Storage
from train.cache_layout import CHUNK, state_arrays
from train.storage import sharded_array

MANIFEST = "manifest.json"
_FORMAT = "dspark_jax features 1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a cache holds; written first, and again with `complete` when all else is on disk.

    `target`, `tokenizer` (None for none) and `data` are hashes; `max_length` is where documents were cut, `dtype` what
    the target computed in. Shards hold up to `shard_tokens` tokens each.
    """

    target: str
    tokenizer: str | None
    enable_thinking: bool | None
    data: str
    max_length: int
    target_layer_ids: tuple[int, ...]
    storage: Storage
    dtype: str
    batch_size: int
    hidden_size: int
    documents: int
    tokens: int
    shards: int
    shard_tokens: int
    complete: bool = False

    @property
    def layers(self) -> int:
        """Stored states of a token: tapped layers, and the last hidden state."""
        return len(self.target_layer_ids) + 1

    def fields(self) -> dict[str, Any]:
        """Its JSON."""
        return json.loads(json.dumps(dataclasses.asdict(self))) | {"format": _FORMAT}

    def write(self, folder: Path) -> None:
        write_json(folder / MANIFEST, self.fields())


_KINDS: dict[str, tuple[type, ...]] = {
    "target": (str,), "tokenizer": (str, type(None)), "enable_thinking": (bool, type(None)), "data": (str,),
    "max_length": (int,), "target_layer_ids": (list,), "storage": (str,), "dtype": (str,), "batch_size": (int,),
    "hidden_size": (int,), "documents": (int,), "tokens": (int,), "shards": (int,), "shard_tokens": (int,),
    "complete": (bool,),
}  # fmt: skip


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a cache, complete or not.

    Raises:
      InputError: there is none, or one that `cache` did not write.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise InputError(f"{folder}: has no {MANIFEST}; name a folder that `cache` has made")
    fields = read_json(path)
    if fields.get("format") != _FORMAT:
        raise InputError(f"{path}: format {fields.get('format')!r} is not {_FORMAT!r}; make the cache again")
    for name, kinds in _KINDS.items():
        if type(fields.get(name, fields)) not in kinds:
            raise InputError(f"{path}: {name} is missing or malformed; make the cache again")
    layers = fields["target_layer_ids"]
    if any(type(layer) is not int for layer in layers) or layers != sorted(set(layers)):
        raise InputError(f"{path}: target_layer_ids {layers} must be ascending integers; make the cache again")
    if fields["storage"] not in ("bfloat16", "int8"):
        raise InputError(f"{path}: storage {fields['storage']!r} is not bfloat16 or int8; make the cache again")
    values = {name: fields[name] for name in _KINDS}
    return Manifest(**values | {"target_layer_ids": tuple(fields["target_layer_ids"])})


def open_arrays(folder: Path, manifest: Manifest, create: bool = False) -> dict[str, ts.TensorStore]:
    """`states` [n, m+1, d], `scales` [n, m+1] with int8, and `tokens` [n] on one flat axis, and `documents`
    [documents, 2]: each one's start on it and its length. TensorStore's errors.
    """
    shard, count = manifest.shard_tokens, manifest.shards * manifest.shard_tokens
    arrays = {
        name: sharded_array(folder / name, (count, *shape), dtype, shard, CHUNK, create)
        for name, (shape, dtype) in state_arrays(manifest.storage, manifest.layers, manifest.hidden_size).items()
    }
    arrays["tokens"] = sharded_array(folder / "tokens", (count,), "int32", shard, shard, create)
    rows = manifest.documents
    arrays["documents"] = sharded_array(folder / "documents", (rows, 2), "int64", rows, rows, create)
    return arrays
