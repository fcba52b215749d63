"""Where a feature cache puts which document, and how large it is: all known before the target runs."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from dspark_jax.training.features import Storage
from train.storage import stored_bytes

# Tokens of a chunk, the least that is read.
CHUNK = 64
# A shard is written once it holds this much; an interruption loses at most one.
SHARD_BYTES = 2**27
# A row is as long as its longest document, rounded up so that at most a fifth of it is padding and few programs are
# compiled: four lengths between a power of two and the next.
_SHORTEST, _LENGTHS_AN_OCTAVE = 32, 4


@dataclasses.dataclass(frozen=True)
class Layout:
    """Shards of batches of documents. Document i is at [starts[i], starts[i] + its length) of the flat axis.

    Shard s holds the documents of `shards[s]` one after another from s · `shard_tokens` on; what a shard has beyond
    them is never written. `rows`: tokens of each shard.
    """

    shards: tuple[tuple[Int[np.ndarray, "batch"], ...], ...]
    rows: tuple[int, ...]
    shard_tokens: int
    starts: Int[np.ndarray, "documents"]


def plan(lengths: Int[np.ndarray, "documents"], batch_size: int, token_bytes: int) -> Layout:
    """Batches of documents of like lengths, the longest first, so that memory runs out at once or never."""
    order = np.argsort(-lengths, kind="stable")
    batches = [order[begin : begin + batch_size] for begin in range(0, len(order), batch_size)]
    shards: list[list[np.ndarray]] = [[]]
    rows = [0]
    for batch in batches:
        if rows[-1] * token_bytes >= SHARD_BYTES:
            shards.append([])
            rows.append(0)
        shards[-1].append(batch)
        rows[-1] += int(lengths[batch].sum())
    shard_tokens = -(-max(rows) // CHUNK) * CHUNK
    starts = np.zeros(len(lengths), np.int64)
    for number, shard in enumerate(shards):
        documents = np.concatenate(shard)
        ends = np.cumsum(lengths[documents])
        starts[documents] = number * shard_tokens + ends - lengths[documents]
    return Layout(tuple(map(tuple, shards)), tuple(rows), shard_tokens, starts)


def row_length(longest: int) -> int:
    """T of a batch whose longest document has so many tokens."""
    if longest <= _SHORTEST:
        return _SHORTEST
    step = (1 << (longest - 1).bit_length() - 1) // _LENGTHS_AN_OCTAVE
    return -(-longest // step) * step


def state_arrays(storage: Storage, layers: int, hidden_size: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape of a token and dtype of each array; `layers` counts the last hidden state too."""
    arrays: dict[str, tuple[tuple[int, ...], str]] = {"states": ((layers, hidden_size), storage)}
    if storage == "int8":
        arrays["scales"] = ((layers,), "float32")
    return arrays


def token_bytes(storage: Storage, layers: int, hidden_size: int) -> int:
    """Bytes of a token's states."""
    return layers * (hidden_size * 2 if storage == "bfloat16" else hidden_size + 4)


def cache_bytes(rows: Sequence[int], shard_tokens: int, storage: Storage, layers: int, hidden_size: int) -> int:
    """Bytes of the shards of a whole cache whose shards hold `rows` tokens, or of some of its shards."""
    sizes = [hidden_size * 2 * layers] if storage == "bfloat16" else [hidden_size * layers, 4 * layers]
    states = sum(stored_bytes(rows, size, shard_tokens, CHUNK) for size in sizes)
    return states + stored_bytes(rows, 4, shard_tokens, shard_tokens)
