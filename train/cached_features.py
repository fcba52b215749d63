"""Stored features of the documents that `fit` trains on, found by the documents' tokens."""

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import tensorstore as ts
from jax.sharding import Mesh
from jaxtyping import Int

from dspark_jax.config import DraftModelConfig
from dspark_jax.io import InputError, TargetDescription
from train.cache_files import MANIFEST, Manifest, open_arrays, read_manifest
from train.cache_layout import token_bytes
from train.data import Documents, Encoding, local_rows
from train.storage import missing_shards, storage_reported


def complete_manifest(folder: Path, target: TargetDescription) -> Manifest:
    """The manifest of a complete cache of this target.

    Raises:
      InputError: there is no cache, or it is incomplete or another target's.
    """
    manifest = read_manifest(folder)
    if not manifest.complete:
        raise InputError(f"{folder}: the cache is incomplete; run the `cache` command that began it again")
    if manifest.target != target.fingerprint:
        raise InputError(f"{folder / MANIFEST}: target {manifest.target} is not the --target {target.name} "
                         f"({target.fingerprint}); make a cache of this target")  # fmt: skip
    if manifest.hidden_size != target.config.hidden_size:
        raise InputError(f"{folder / MANIFEST}: hidden_size {manifest.hidden_size} is not the target's "
                         f"{target.config.hidden_size}; make the cache again")  # fmt: skip
    return manifest


@dataclasses.dataclass(frozen=True, eq=False)
class FeatureRows:
    """Adds the stored states of their documents to packed rows, all documents of a batch being read at once: those
    whose rows this process's devices hold.

    `arrays`: the layers that are read. `starts`: where each document is on the flat axis.
    """

    folder: Path
    arrays: Mapping[str, ts.TensorStore]
    starts: Int[np.ndarray, "documents"]
    mesh: Mesh | None = None

    def __call__(self, rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """`rows` with `states` [B, T, m+1, d] and, with int8, `scales` [B, T, m+1]; padding is 0, as are rows that
        only other processes hold: nothing writes these zeros, so they take no memory.
        """
        own = local_rows(rows, self.mesh)[rows["row"]]
        starts, lengths = self.starts[rows["document"][own]], rows["length"][own]
        spans = [slice(int(start), int(start + length)) for start, length in zip(starts, lengths, strict=True)]
        with _reported(self.folder):
            with ts.Batch() as batch:
                futures = {
                    name: [array[span].read(batch=batch) for span in spans] for name, array in self.arrays.items()
                }
            parts = {name: [future.result() for future in started] for name, started in futures.items()}
        added = {}
        for name, values in parts.items():
            array = self.arrays[name]
            added[name] = np.zeros((*rows["tokens"].shape, *array.shape[1:]), array.dtype.numpy_dtype)
            for row, start, value in zip(rows["row"][own], rows["start"][own], values, strict=True):
                added[name][row, start : start + len(value)] = value
        return rows | added


def _reported(folder: Path):
    return storage_reported(folder, "read", "remove the damaged file and make it again by the same `cache` command")


class CachedFeatures:
    """A complete cache, opened.

    A document's features are a function of its tokens, and those of its beginning of its beginning. So documents are
    found by their tokens, wherever they stand in which file, and however `fit` cuts them shorter.

    Raises:
      InputError: files that cannot be read, or are gone.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        with _reported(folder):
            self._arrays = open_arrays(folder, manifest)
            self._documents = self._arrays.pop("documents").read().result()
            missing = missing_shards(self._arrays.values(), manifest.shards)
            self._tokens = self._arrays.pop("tokens").read().result()
        if missing:
            raise InputError(
                f"{folder}: shard {missing[0]} of {manifest.shards} is gone; run the `cache` command that made it, "
                "which writes it again"
            )

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's states, all layers of them."""
        return token_bytes(self.manifest.storage, self.manifest.layers, self.manifest.hidden_size)

    def starts(self, documents: Documents, max_length: int) -> Int[np.ndarray, "documents"]:
        """Where documents, cut at `max_length`, are on the flat axis; -1 for one that is not in the cache."""
        known = {
            _digest(self._tokens[start : start + min(length, max_length)]): start
            for start, length in self._documents.tolist()
        }
        return np.asarray([known.get(_digest(documents[index][0]), -1) for index in range(len(documents))])

    def check_found(
        self, starts: Int[np.ndarray, "documents"], documents: Documents, encoding: Encoding, data: str
    ) -> None:
        """Raises an InputError for a document that is not in the cache, with the likeliest reason. `data`: a hash of
        the files.
        """
        absent = np.flatnonzero(starts < 0)
        if not len(absent):
            return
        manifest, first = self.manifest, absent[0]
        length = len(documents[first][0])
        name, remedy = f"{self.folder / MANIFEST}", "make the cache again"
        tokenizer = None if encoding.tokenizer is None else encoding.tokenizer.fingerprint
        if length > manifest.max_length:
            reason = f"max_length {manifest.max_length} is under {length} tokens"
            remedy = f"use --max-length {manifest.max_length}, or make the cache again with a larger one"
        elif tokenizer != manifest.tokenizer:
            reason = "tokenizer is not the target's: another tokenizer or chat template"
        elif encoding.enable_thinking != manifest.enable_thinking:
            reason = f"enable_thinking {manifest.enable_thinking} is not {encoding.enable_thinking}"
        elif data != manifest.data:
            reason = "data are other files than --data"
            remedy = "make a cache of these files"
        else:
            reason = "it lacks tokens that it should hold"
        raise InputError(f"{name}: no features of record {documents.records[first]} of --data: {reason}; {remedy}")

    def rows(
        self, starts: Int[np.ndarray, "documents"], drafter: DraftModelConfig, mesh: Mesh | None = None
    ) -> FeatureRows:
        """What reads the layers that a drafter taps, for this process's devices of the mesh.

        Raises:
          InputError: one that is not in the cache.
        """
        stored, taps = self.manifest.target_layer_ids, drafter.target_layer_ids
        absent = [layer for layer in taps if layer not in stored]
        if absent:
            raise InputError(
                f"{self.folder / MANIFEST}: target_layer_ids {list(stored)} lack layer {absent[0]}, which the drafter "
                f"taps; make the cache with --target-layer-ids {' '.join(map(str, taps))}"
            )
        chosen = (*(stored.index(layer) for layer in taps), len(stored))
        arrays = self._arrays
        if len(chosen) <= len(stored):
            arrays = {name: array[:, list(chosen)] for name, array in arrays.items()}
        return FeatureRows(self.folder, arrays, starts, mesh)


def _digest(tokens: Int[np.ndarray, "length"]) -> bytes:
    return hashlib.blake2b(tokens.tobytes(), digest_size=16).digest()
