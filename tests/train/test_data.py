"""Loss masks against masks made by hand, the held-out split, batches, and the pipeline's position."""

import json

import numpy as np
import pytest

from dspark_jax.io import InputError
from train.data import (
    Encoding,
    encode_record,
    held_out_rows,
    load_documents,
    row_length,
    split,
    to_batch,
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


def test_batches_pad_with_document_minus_one(data, records):
    documents = load_documents([data], Encoding(tokenizer=None, vocab_size=260, max_length=512))
    assert row_length(documents, 512) == 64
    assert row_length(documents, 50) == 50
    rows = next(training_rows(documents, np.arange(30), 64, 4, seed=0))
    batch = to_batch(rows, accumulation=2)
    assert batch.tokens.shape == (2, 2, 64)
    for place, record in enumerate(rows["record"]):
        row = records[record]
        ids, prompt = row["input_ids"] + row["output_ids"], len(row["input_ids"])
        tokens, mask, documents_, positions = (
            np.asarray(x).reshape(4, 64)[place]
            for x in (batch.tokens, batch.loss_mask, batch.document_ids, batch.positions)
        )
        assert tokens[: len(ids)].tolist() == ids
        assert np.flatnonzero(mask).tolist() == list(range(prompt, len(ids)))
        assert (documents_ == np.where(np.arange(64) < len(ids), 0, -1)).all()
        assert positions[: len(ids)].tolist() == list(range(len(ids)))


def test_held_out_rows_are_filled_up_with_empty_ones(data):
    documents = load_documents([data], Encoding(tokenizer=None, vocab_size=260, max_length=512))
    batches = list(held_out_rows(documents, np.arange(6), 64, 4))
    assert [rows["record"].tolist() for rows in batches] == [[0, 1, 2, 3], [4, 5, 0, 0]]
    last = to_batch(batches[1])
    assert not np.asarray(last.loss_mask)[2:].any()
    assert (np.asarray(last.document_ids)[2:] == -1).all()


def test_every_epoch_is_another_permutation_and_the_position_is_exact(data):
    documents = load_documents([data], Encoding(tokenizer=None, vocab_size=260, max_length=512))

    def rows():
        return training_rows(documents, np.arange(30), 64, 5, seed=3)

    stream = rows()
    epochs = [[record for _ in range(6) for record in next(stream)["record"].tolist()] for _ in range(2)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(30))] * 2
    assert epochs[0] != epochs[1]
    position = json.loads(json.dumps(stream.get_state()))
    following = [next(stream)["record"].tolist() for _ in range(4)]
    again = rows()
    again.set_state(position)
    assert [next(again)["record"].tolist() for _ in range(4)] == following
