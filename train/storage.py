"""TensorStore arrays: sharded along their first axis, and what their many kinds of errors mean."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tensorstore as ts

from dspark_jax.io import InputError

# Bytes of indices and chunks that reading keeps.
_POOL = 2**26
# Of a chunk's checksum, and of its entry in a shard's index.
_CHECKSUM, _ENTRY = 4, 16


def storage_cause(error: BaseException) -> str:
    """Why TensorStore or Orbax failed, in a few words."""
    root = str(error.__cause__ or error)
    number = re.search(r"os_error_code='(\d+)'", root)
    # TensorStore goes on with the whole description of the array.
    words = root.partition(" [tensorstore_spec=")[0][:300]
    return os.strerror(int(number[1])) if number else getattr(error, "strerror", None) or words


@contextmanager
def storage_reported(folder: Path, what: str, remedy: str) -> Iterator[None]:
    """Turns TensorStore's errors, which are ValueErrors, into an InputError: "FOLDER: could not be WHAT: …; REMEDY"."""
    try:
        yield
    except (ValueError, OSError, OverflowError) as error:
        raise InputError(f"{folder}: could not be {what}: {storage_cause(error)}; {remedy}") from error


def sharded_array(
    folder: Path, shape: Sequence[int], dtype: str, shard: int, chunk: int, create: bool = False
) -> ts.TensorStore:
    """A zarr3 array whose first axis is cut into shards, one file each, of chunks that are read alone.

    A shard appears whole or not at all, in one write of its rows; all its bytes are under checksums.
    """
    codecs: list[dict[str, Any]] = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    rest = list(shape[1:])
    sharding = {"chunk_shape": [chunk, *rest], "codecs": codecs, "index_codecs": codecs}
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{folder}/"},
        "metadata": {
            "shape": list(shape),
            "data_type": dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [shard, *rest]}},
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        },
        # A shard that is there is a shard that was written, whatever its values.
        "store_data_equal_to_fill_value": True,
        # Shards do not change once they are there.
        "recheck_cached_data": "open",
        "recheck_cached_metadata": "open",
    }
    context = ts.Context({"cache_pool": {"total_bytes_limit": _POOL}})
    return ts.open(spec, open=True, create=create, context=context).result()


def written_shards(array: ts.TensorStore) -> set[int]:
    """Numbers of the shards that are there."""
    keys = [key.decode().split("/") for key in array.kvstore.list().result()]
    return {int(key[1]) for key in keys if key[0] == "c"}


def missing_shards(arrays: Iterable[ts.TensorStore], shards: int) -> list[int]:
    """Numbers of the shards that one of the arrays lacks; it would be read as zeros."""
    return sorted(set(range(shards)) - set.intersection(*map(written_shards, arrays)))


def stored_bytes(rows: Sequence[int], row_bytes: int, shard: int, chunk: int) -> int:
    """Bytes of the files of an array whose shards hold `rows` rows each."""
    chunks = sum(-(-count // chunk) for count in rows)
    return chunks * (chunk * row_bytes + _CHECKSUM) + len(rows) * (shard // chunk * _ENTRY + _CHECKSUM)
