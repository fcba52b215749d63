"""Records to batches: token ids with loss masks, a held-out split, packed rows, and a grain pipeline with an exact
position.
"""

import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Bool, Int
from tqdm import tqdm

from dspark_jax.io import InputError, Tokenizer, check_messages, numbered_jsonl
from dspark_jax.io.files import reported
from dspark_jax.sharding import batch_axes
from dspark_jax.training.anchors import Batch
from dspark_jax.training.features import StoredFeatures
from dspark_jax.training.packing import RowCapacity, deal, place, row_capacity, rows_needed, tightened
from train.processes import hidden_bar, spread

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
    def lengths(self) -> Int[np.ndarray, "documents"]:
        """Tokens of each document."""
        return np.diff(self.starts)

    def valid_anchors(self, first: int) -> Int[np.ndarray, "documents"]:
        """How many indices of each document may be anchors, from position `first` on: those where a token and its
        successor are both trained.
        """
        before = np.concatenate([[0], np.cumsum(self.mask[1:] & self.mask[:-1])])
        last = self.starts[1:] - 1
        return before[last] - before[np.minimum(self.starts[:-1] + first, last)]

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
        reading, name = numbered_jsonl(file), f"reading {Path(file).name}"
        for number, record in tqdm(reading, name, unit=" records", disable=hidden_bar()):
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
    return min(max_length, _ceil(int(documents.lengths.max()), _LENGTH_STEP) * _LENGTH_STEP)


# The arrays of packed rows, by name.
Rows = dict[str, np.ndarray]
# What adds arrays to them.
AddToRows = Callable[[Rows], Rows]


@dataclasses.dataclass(frozen=True, eq=False)
class RowPacker:
    """Packs the documents of a batch into rows [parts · B, T], as `training.packing` says.

    `anchors`: how many each document needs. `part_rows`: B, cut into `row_multiple` equal pieces, one a device.
    `parts`: how many, or more for a batch that needs more, for which programs are compiled again.
    """

    documents: Documents
    anchors: Int[np.ndarray, "documents"]
    capacity: RowCapacity
    part_rows: int
    parts: int
    row_multiple: int = 1

    @property
    def rows(self) -> int:
        """Rows of nearly every batch."""
        return self.parts * self.part_rows

    def __call__(self, chosen: Int[np.ndarray, "n"]) -> Rows:
        """`tokens`, `mask`, `document_ids` and `positions` [parts · B, T], where a document's id is its place in
        `chosen`; of each document [n] `document`, its index, `record`, `length`, and where it is, `row` and `start`;
        and the numbers `part_rows` and `row_anchors`.
        """
        lengths = self.documents.lengths[chosen]
        placement = place(lengths, self.anchors[chosen], self.capacity)
        parts = max(self.parts, _ceil(placement.count, self.part_rows))
        placement = deal(placement, parts * self.part_rows, parts * self.row_multiple)
        shape = (placement.count, self.capacity.tokens)
        tokens, positions = np.full(shape, _PAD, np.int32), np.zeros(shape, np.int32)
        mask, document_ids = np.zeros(shape, bool), np.full(shape, -1, np.int32)
        for number, document in enumerate(chosen):
            row, start, length = placement.rows[number], placement.starts[number], lengths[number]
            at = row, slice(start, start + length)
            tokens[at], mask[at] = self.documents[document]
            document_ids[at], positions[at] = number, np.arange(length)
        return {
            "tokens": tokens,
            "mask": mask,
            "document_ids": document_ids,
            "positions": positions,
            "document": np.asarray(chosen),
            "record": self.documents.records[chosen],
            "length": lengths,
            "row": placement.rows,
            "start": placement.starts,
            "part_rows": np.asarray(self.part_rows),
            "row_anchors": np.asarray(self.capacity.anchors),
        }


def _ceil(count: int, divisor: int) -> int:
    return -(-count // divisor)


def row_packer(
    documents: Documents,
    anchors: Int[np.ndarray, "documents"],
    batches: Sequence[Int[np.ndarray, "n"]],
    length: int,
    accumulation: int = 1,
    row_multiple: int = 1,
) -> RowPacker:
    """What packs into rows of `length` tokens, sized for these `batches` of indices of documents.

    They are computed in `accumulation` parts, or in fewer of the same size, so that few rows are empty.
    `row_multiple`: devices over which the rows of a part are sharded.
    """
    lengths, chosen = documents.lengths, np.concatenate(batches)
    sizes = [(lengths[batch], anchors[batch]) for batch in batches]
    capacity = row_capacity(lengths[chosen], anchors[chosen], length)
    needed = rows_needed(sizes, capacity)
    part_rows = _ceil(needed, accumulation * row_multiple) * row_multiple
    parts = _ceil(needed, part_rows)
    capacity = tightened(sizes, capacity, parts * part_rows)
    return RowPacker(documents, anchors, capacity, part_rows, parts, row_multiple)


def training_order(chosen: Int[np.ndarray, "n"], batch_size: int, seed: int) -> grain.MapDataset[np.ndarray]:
    """Endless batches of `batch_size` documents' indices, each epoch in a new order."""
    return grain.MapDataset.source(np.asarray(chosen)).shuffle(seed=seed).repeat().batch(batch_size)


def in_order(chosen: Int[np.ndarray, "n"], batch_size: int) -> list[Int[np.ndarray, "batch_size_or_rest"]]:
    """Batches of the chosen documents' indices, once."""
    return [np.asarray(chosen[begin : begin + batch_size]) for begin in range(0, len(chosen), batch_size)]


def first_pass(order: grain.MapDataset[np.ndarray], count: int) -> list[Int[np.ndarray, "batch_size"]]:
    """The first batches of `training_order`, in which each of its `count` documents occurs."""
    batch_size = len(np.asarray(order[0]))
    return [np.asarray(order[index]) for index in range(_ceil(count, batch_size))]


def training_rows(
    order: grain.MapDataset[np.ndarray], packer: RowPacker, add: AddToRows | None = None
) -> grain.DatasetIterator:
    """The packed rows of each batch of `training_order`. Its state is the exact position.

    They are made, with what `add` reads, in a thread of their own, ahead of their use.
    """
    rows = order.map(packer)
    if add is not None:
        rows = rows.map(add)
    # Few ahead: rows with features are large.
    return iter(rows.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4 if add is None else 2)))


def held_out_rows(
    batches: Iterable[Int[np.ndarray, "n"]], packer: RowPacker, add: AddToRows | None = None
) -> Iterator[Rows]:
    """The packed rows of each batch, with what `add` reads."""
    for batch in batches:
        rows = packer(batch)
        yield rows if add is None else add(rows)


def _batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of a Batch [parts, B, …]: the rows of each part are spread over the devices."""
    return NamedSharding(mesh, PartitionSpec(None, batch_axes(mesh)))


def local_rows(rows: Rows, mesh: Mesh | None) -> Bool[np.ndarray, "rows"]:
    """Which packed rows the devices of this process hold; without a mesh all."""
    parts = (-1, int(rows["part_rows"]))
    held = np.zeros(len(rows["tokens"]), bool).reshape(parts)
    if mesh is None:
        return ~held.reshape(-1)
    for index in _batch_sharding(mesh).addressable_devices_indices_map(held.shape).values():
        held[index] = True
    return held.reshape(-1)


def to_batch(rows: Mapping[str, np.ndarray], mesh: Mesh | None = None) -> Batch:
    """A Batch [parts, B, T] of packed rows; with a mesh, the rows of each part are spread over the devices, and only
    `local_rows` are read.
    """
    part_rows = int(rows["part_rows"])
    stored = StoredFeatures(rows["states"], rows.get("scales")) if "states" in rows else None
    batch = Batch(
        rows["tokens"], rows["mask"], rows["document_ids"], rows["positions"], stored, int(rows["row_anchors"])
    )
    batch = jax.tree.map(lambda x: x.reshape(-1, part_rows, *x.shape[1:]), batch)
    if mesh is None:
        return jax.device_put(batch)
    return spread(batch, _batch_sharding(mesh))


def file_digest(files: Sequence[str | os.PathLike]) -> str:
    """A short hash of the files' contents."""
    digest = hashlib.sha256()
    for file in files:
        with reported(file), open(file, "rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()[:16]
