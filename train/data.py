"""Records to batches: token ids with loss masks, a held-out split, and a grain pipeline with an exact position."""

import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
from jaxtyping import Bool, Int
from tqdm import tqdm

from dspark_jax.io import InputError, Tokenizer, check_messages, numbered_jsonl
from dspark_jax.io.files import reported
from dspark_jax.training.anchors import Batch
from dspark_jax.training.features import StoredFeatures

# The held-out split: this share of the records, but some of any data set, and never so many that evaluating is slow.
_HELD_OUT_SHARE, _HELD_OUT_LEAST, _HELD_OUT_MOST = 0.02, 8, 1024
# Rows are as long as the longest document, rounded up so that similar data shares a compiled program.
_LENGTH_STEP = 64
_PAD = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoding:
    """How records become ids. Documents are cut after `max_length` tokens."""

    tokenizer: Tokenizer | None
    vocab_size: int
    max_length: int
    enable_thinking: bool | None = None


@dataclasses.dataclass(frozen=True)
class Documents:
    """Documents one after another: document i is [starts[i], starts[i + 1]). `mask`: tokens that are trained.

    `records`: each document's record index, counted over all files from 0. `dropped`: records without a valid anchor.
    """

    tokens: Int[np.ndarray, "total"]
    mask: Bool[np.ndarray, "total"]
    starts: Int[np.ndarray, "documents_and_one"]
    records: Int[np.ndarray, "documents"]
    dropped: int

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> tuple[Int[np.ndarray, "length"], Bool[np.ndarray, "length"]]:
        part = slice(self.starts[index], self.starts[index + 1])
        return self.tokens[part], self.mask[part]

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return int(np.diff(self.starts).max())

    def counts(self, vocab_size: int, trained_only: bool) -> Int[np.ndarray, "V"]:
        """How often each id occurs."""
        return np.bincount(self.tokens[self.mask] if trained_only else self.tokens, minlength=vocab_size)


def encode_record(record: Mapping[str, Any], location: str, encoding: Encoding) -> tuple[list[int], list[int]]:
    """Ids of one record, and a mask of those that are trained.

    `input_ids` with `output_ids`: the output is trained. Where a record has `messages` too, the ids still count: they
    are what the target sampled, while its text may tokenise otherwise. `messages`: what the assistant says is
    trained. `text`: a raw document, all of it is trained.

    Raises:
      InputError: another or a malformed record, beginning with `location`.
    """
    if record.get("output_ids") is not None:
        parts = [record.get("input_ids"), record["output_ids"]]
        for name, part in zip(("input_ids", "output_ids"), parts, strict=True):
            if not isinstance(part, list) or any(type(token) is not int for token in part):
                raise InputError(f"{location}: {name} must be a list of integers")
        ids, mask = parts[0] + parts[1], [0] * len(parts[0]) + [1] * len(parts[1])
    elif record.get("messages") is not None:
        check_messages(record["messages"], location)
        tokenizer = _tokenizer(encoding, location, "messages")
        try:
            ids, mask = tokenizer.encode_chat_with_offsets(record["messages"], encoding.enable_thinking)
        except InputError as error:
            raise InputError(f"{location}: {error}") from error
    elif record.get("text") is not None:
        if not isinstance(record["text"], str):
            raise InputError(f"{location}: text must be a string")
        ids = _tokenizer(encoding, location, "text").encode(record["text"])
        mask = [1] * len(ids)
    else:
        raise InputError(f"{location}: expected messages, or input_ids and output_ids, or text")
    for token in ids:
        if not 0 <= token < encoding.vocab_size:
            raise InputError(f"{location}: token id {token} is outside the vocabulary of {encoding.vocab_size}")
    return ids[: encoding.max_length], mask[: encoding.max_length]


def _tokenizer(encoding: Encoding, location: str, field: str) -> Tokenizer:
    if encoding.tokenizer is None:
        raise InputError(f"{location}: {field} needs a tokenizer, and the target has none; give input_ids, output_ids")
    return encoding.tokenizer


def load_documents(files: Sequence[str | os.PathLike], encoding: Encoding) -> Documents:
    """All records of the files, without those in which no two trained tokens are neighbours.

    Raises:
      InputError: a missing, empty or malformed file or line, named with its number; or no record can be trained on.
    """
    tokens, masks, records, count = [], [], [], 0
    for file in files:
        for number, record in tqdm(numbered_jsonl(file), f"reading {Path(file).name}", unit=" records", disable=None):
            ids, mask = encode_record(record, f"{file}, line {number}", encoding)
            trained = np.asarray(mask, bool)
            if (trained[1:] & trained[:-1]).any():
                tokens.append(np.asarray(ids, np.int32))
                masks.append(trained)
                records.append(count)
            count += 1
    if not records:
        names = ", ".join(map(str, files))
        raise InputError(f"{names}: none of {count} records has two neighbouring trained tokens; nothing to train on")
    starts = np.cumsum([0, *map(len, tokens)])
    return Documents(np.concatenate(tokens), np.concatenate(masks), starts, np.asarray(records), count - len(records))


def split(documents: Documents) -> tuple[Int[np.ndarray, "training"], Int[np.ndarray, "held_out"]]:
    """Indices of training and held-out documents: about 2% are held out, chosen by a hash of the record's index.

    Raises:
      InputError: there is only one document.
    """
    count = len(documents)
    if count < 2:
        raise InputError("data: only one record can be trained on; give more, or --held-out-data")
    least = max(1, min(_HELD_OUT_LEAST, count // 4))
    size = min(max(round(_HELD_OUT_SHARE * count), least), _HELD_OUT_MOST)
    digests = [hashlib.sha256(str(record).encode()).digest() for record in documents.records]
    order = np.asarray(sorted(range(count), key=digests.__getitem__))
    return np.sort(order[size:]), np.sort(order[:size])


def row_length(documents: Documents, max_length: int) -> int:
    """T of all batches."""
    return min(max_length, -(-documents.longest // _LENGTH_STEP) * _LENGTH_STEP)


class _Rows(grain.sources.RandomAccessDataSource[dict[str, np.ndarray]]):
    """Documents padded to rows of T."""

    def __init__(self, documents: Documents, chosen: Int[np.ndarray, "n"], length: int) -> None:
        self._documents, self._chosen, self._length = documents, chosen, length

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index) -> dict[str, np.ndarray]:
        document = self._chosen[index]
        ids, mask = (part[: self._length] for part in self._documents[document])
        padding = (0, self._length - len(ids))
        return {
            "tokens": np.pad(ids, padding, constant_values=_PAD),
            "mask": np.pad(mask, padding),
            "length": np.asarray(len(ids), np.int32),
            "record": np.asarray(self._documents.records[document]),
            "document": np.asarray(document, np.int64),
        }


# What adds arrays to the dict of a batch's rows.
AddToRows = Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]


def training_rows(
    documents: Documents,
    chosen: Int[np.ndarray, "n"],
    length: int,
    batch_size: int,
    seed: int,
    add: AddToRows | None = None,
) -> grain.DatasetIterator:
    """Endless dicts of `batch_size` rows, each epoch in a new order. Its state is the exact position.

    They are made, with what `add` reads, in a thread of their own, ahead of their use.
    """
    rows = grain.MapDataset.source(_Rows(documents, chosen, length)).shuffle(seed=seed).repeat().batch(batch_size)
    if add is not None:
        rows = rows.map(add)
    # Few ahead: rows with features are large.
    return iter(rows.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4 if add is None else 2)))


def held_out_rows(
    documents: Documents,
    chosen: Int[np.ndarray, "n"],
    length: int,
    batch_size: int,
    add: AddToRows | None = None,
) -> Iterator[dict[str, np.ndarray]]:
    """The chosen documents once, in order, with what `add` reads; the last dict is filled up with empty rows."""
    source = _Rows(documents, chosen, length)
    for begin in range(0, len(chosen), batch_size):
        rows = [source[index] for index in range(begin, min(begin + batch_size, len(chosen)))]
        empty = {name: np.zeros_like(value) for name, value in rows[0].items()}
        rows += [empty] * (batch_size - len(rows))
        batch = {name: np.stack([row[name] for row in rows]) for name in empty}
        yield batch if add is None else add(batch)


def to_batch(rows: Mapping[str, np.ndarray], accumulation: int | None = None) -> Batch:
    """A Batch [B, T] of one document a row, or [accumulation, B / accumulation, T]."""
    tokens = rows["tokens"]
    leading = tokens.shape[:1] if accumulation is None else (accumulation, len(tokens) // accumulation)
    index = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    real = index < rows["length"][:, None]
    stored = StoredFeatures(rows["states"], rows.get("scales")) if "states" in rows else None
    batch = Batch(tokens, rows["mask"], np.where(real, 0, -1).astype(np.int32), np.where(real, index, 0), stored)
    return jax.device_put(jax.tree.map(lambda x: x.reshape(*leading, *x.shape[1:]), batch))


def file_digest(files: Sequence[str | os.PathLike]) -> str:
    """A short hash of the files' contents."""
    digest = hashlib.sha256()
    for file in files:
        with reported(file), open(file, "rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()[:16]
