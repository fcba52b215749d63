"""Loss masks against masks made by hand, the held-out split, batches, and the pipeline's position."""

import json

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from dspark_jax.io import InputError
from dspark_jax.sharding import make_mesh
from dspark_jax.training.anchors import valid_anchors
from train.data import (
    Encoding,
    encode_record,
    first_pass,
    held_out_rows,
    in_order,
    load_documents,
    local_rows,
    row_length,
    row_packer,
    split,
    to_batch,
    training_order,
    training_rows,
)


@pytest.fixture
def encoding(tokenizer) -> Encoding:
    return Encoding(tokenizer=tokenizer, vocab_size=260, max_length=64)


def test_chat_mask_is_what_the_assistant_says(encoding, tokenizer):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Añb?"},
        {"role": "assistant", "content": "ñ"},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "ok 🙂"},
    ]
    # Written out by hand: a piece of text, and whether the target wrote it.
    pieces = [
        ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nAñb?<|im_end|>\n<|im_start|>assistant\n", 0),
        ("ñ<|im_end|>", 1),
        ("\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n", 0),
        ("ok 🙂<|im_end|>", 1),
        ("\n", 0),
    ]
    ids, mask = [], []
    for text, trained in pieces:
        part = []
        parts = text.replace("<|im_end|>", "\0\1\0").replace("<|im_start|>", "\0\2\0").split("\0")
        for number, plain in enumerate(parts):
            part += [{"\1": 257, "\2": 256}[plain]] if number % 2 else list(plain.encode())
        ids, mask = ids + part, mask + [trained] * len(part)
    encoding = Encoding(tokenizer=tokenizer, vocab_size=260, max_length=1000)
    assert encode_record({"messages": messages}, "here", encoding) == (ids, mask)


def test_sampled_ids_come_before_the_text(encoding):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    record = {"messages": messages, "input_ids": [1, 2], "output_ids": [3, 257], "text": "c"}
    assert encode_record(record, "here", encoding) == ([1, 2, 3, 257], [0, 0, 1, 1])


def test_text_is_trained_whole_and_cut(encoding):
    ids, mask = encode_record({"text": "x" * 100}, "here", encoding)
    assert ids == [ord("x")] * 64
    assert mask == [1] * 64


def test_records_without_an_anchor_are_dropped_and_counted(tmp_path, write_rows, encoding):
    rows = [
        {"input_ids": [1], "output_ids": [2]},
        {"input_ids": [1] * 64, "output_ids": [2, 3]},
        {"input_ids": [1] * 62, "output_ids": [2, 3]},
        {"messages": [{"role": "user", "content": "nobody answers"}]},
    ]
    documents = load_documents([write_rows(tmp_path / "a.jsonl", rows)], encoding)
    assert documents.dropped == 3
    assert documents.records.tolist() == [2]
    with pytest.raises(InputError, match="none of 2 records"):
        load_documents([write_rows(tmp_path / "b.jsonl", rows[:2])], encoding)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"input_ids": [1], "output_ids": [260]}, "token id 260"),
        ({"input_ids": [1], "output_ids": "x"}, "output_ids must be"),
        ({"output_ids": [1]}, "input_ids must be"),
        ({"messages": [{"role": "user"}]}, "messages\\[0\\]"),
        ({"text": 3}, "text must be"),
        ({"prompt": "x"}, "expected messages"),
    ],
)
def test_bad_records_name_file_and_line(tmp_path, write_rows, encoding, row, words):
    path = write_rows(tmp_path / "a.jsonl", [{"text": "fine"}, row])
    with pytest.raises(InputError, match=f"a.jsonl, line 2: .*{words}"):
        load_documents([path], encoding)


def test_split_holds_out_a_few_and_is_deterministic(data):
    documents = load_documents([data], Encoding(tokenizer=None, vocab_size=260, max_length=512))
    training, held_out = split(documents)
    assert len(held_out) == 7
    assert sorted([*training, *held_out]) == list(range(30))
    assert held_out.tolist() == split(documents)[1].tolist()


def test_documents_are_packed_into_rows(data, records):
    documents = load_documents([data], Encoding(tokenizer=None, vocab_size=260, max_length=512))
    assert row_length(documents, 512) == 64
    assert row_length(documents, 50) == 50
    order = training_order(np.arange(30), 7, seed=0)
    anchors = np.minimum(documents.valid_anchors(0), 5)
    packer = row_packer(documents, anchors, first_pass(order, 30), 192, accumulation=2)
    rows = next(training_rows(order, packer))
    batch = to_batch(rows)
    assert batch.tokens.shape == (2, packer.part_rows, 192) and packer.rows == 2 * packer.part_rows < 7
    assert batch.row_anchors == packer.capacity.anchors
    flat = jax.tree.map(lambda x: np.asarray(x).reshape(-1, 192), batch)
    for number, record in enumerate(rows["record"]):
        ids, prompt = records[record]["input_ids"] + records[record]["output_ids"], len(records[record]["input_ids"])
        mine = flat.document_ids == number
        assert flat.tokens[mine].tolist() == ids
        assert np.flatnonzero(flat.loss_mask[mine]).tolist() == list(range(prompt, len(ids)))
        assert flat.positions[mine].tolist() == list(range(len(ids)))
        assert mine.any(axis=1).sum() == 1
    padding = flat.document_ids == -1
    assert padding.sum() == padding.size - rows["length"].sum()
    assert not flat.loss_mask[padding].any() and not flat.positions[padding].any()


@pytest.mark.parametrize("first", [0, 1])
def test_valid_anchors_are_counted_as_they_are_drawn_from(first, tmp_path, write_rows):
    encoding = Encoding(tokenizer=None, vocab_size=260, max_length=9)
    kinds = ([], [1, 2]), ([1], [2, 3]), ([1, 2], list(range(20)))
    written = [{"input_ids": before, "output_ids": after} for before, after in kinds]
    documents = load_documents([write_rows(tmp_path / "a.jsonl", written)], encoding)
    assert documents.valid_anchors(first).tolist() == [1 - first, 1, 6]
    packer = row_packer(documents, documents.valid_anchors(first), [np.arange(3)], 16)
    batch = jax.tree.map(lambda x: x[0], to_batch(packer(np.arange(3))))
    drawn = np.asarray(valid_anchors(batch) & (batch.positions >= first))
    counts = [int((drawn & (batch.document_ids == number)).sum()) for number in range(3)]
    assert counts == documents.valid_anchors(first).tolist()


@pytest.mark.parametrize(
    ("accumulation", "row_multiple", "shapes"),
    [(1, 1, [(1, 5), (1, 5), (2, 5)]), (3, 1, [(3, 2), (3, 2), (4, 2)]), (4, 1, [(3, 2), (3, 2), (4, 2)]),
     (9, 1, [(5, 1), (5, 1), (7, 1)]), (2, 2, [(2, 4), (2, 4), (2, 4)]), (2, 8, [(1, 8), (1, 8), (1, 8)])],
)  # fmt: skip
def test_parts_are_of_one_size_and_no_more_than_needed(accumulation, row_multiple, shapes, data):
    """Sized for five documents, of which no two fit into a row; a batch of seven needs more."""
    documents = load_documents([data], Encoding(tokenizer=None, vocab_size=260, max_length=512))
    anchors = documents.valid_anchors(0)
    packer = row_packer(documents, anchors, [np.arange(5)], 64, accumulation, row_multiple)
    found = [to_batch(packer(np.arange(count))).tokens.shape[:2] for count in (1, 5, 7)]
    assert found == shapes


def test_held_out_documents_are_packed_and_the_rest_is_padding(data):
    documents = load_documents([data], Encoding(tokenizer=None, vocab_size=260, max_length=512))
    batches = in_order(np.arange(6), 4)
    packer = row_packer(documents, documents.valid_anchors(0), batches, 64)
    rows = list(held_out_rows(batches, packer))
    assert [part["record"].tolist() for part in rows] == [[0, 1, 2, 3], [4, 5]]
    last = to_batch(rows[1])
    assert last.tokens.shape == (1, 4, 64)
    empty = (np.asarray(last.document_ids) == -1).all(axis=2)
    assert empty.sum() == 2 and not np.asarray(last.loss_mask)[empty].any()


def test_every_epoch_is_another_permutation_and_the_position_is_exact(data):
    documents = load_documents([data], Encoding(tokenizer=None, vocab_size=260, max_length=512))

    def rows():
        order = training_order(np.arange(30), 5, seed=3)
        return training_rows(order, row_packer(documents, documents.valid_anchors(0), first_pass(order, 30), 128))

    stream = rows()
    epochs = [[record for _ in range(6) for record in next(stream)["record"].tolist()] for _ in range(2)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(30))] * 2
    assert epochs[0] != epochs[1]
    position = json.loads(json.dumps(stream.get_state()))
    following = [next(stream) for _ in range(4)]
    again = rows()
    again.set_state(position)
    for expected in following:
        found = next(again)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value)


def test_a_process_holds_the_rows_of_its_devices_in_each_part(monkeypatch):
    rows = {"tokens": np.zeros((32, 5), np.int32), "part_rows": np.asarray(16)}
    mesh = make_mesh(data=2, fsdp=2, model=2)
    assert local_rows(rows, None).all() and local_rows(rows, mesh).all()
    monkeypatch.setattr(
        NamedSharding,
        "addressable_devices_indices_map",
        lambda self, shape: {d: i for d, i in self.devices_indices_map(shape).items() if d.id in (2, 3)},
    )
    held = [4, 5, 6, 7, 20, 21, 22, 23]
    np.testing.assert_array_equal(np.flatnonzero(local_rows(rows, mesh)), held)
