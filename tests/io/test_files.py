"""Atomic writes and JSON Lines."""

import errno
import os

import pytest

from dspark_jax.io import (
    InputError,
    JsonlWriter,
    atomic_folder,
    read_json,
    read_jsonl,
    write_json,
    write_jsonl,
    write_text,
)
from dspark_jax.io.safetensors import write_safetensors


def test_error_is_one_line():
    assert str(InputError("a\n  b\tc")) == "a b c"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "rows.jsonl: empty file"),
        (b"\n  \n", "rows.jsonl: empty file"),
        (b'{"a": 1}\n\n{"a": \n', "rows.jsonl, line 3: malformed JSON"),
        (b'{"a": 1}\n[1]\n', "rows.jsonl, line 2: expected a JSON object, found list"),
        (b'{"a": "\xff"}\n', "rows.jsonl, line 1: not UTF-8"),
        (b'{"a": "\\ud800"}\n', "rows.jsonl, line 1: half of a surrogate pair"),
        (b"[" * 100_000, "rows.jsonl, line 1: malformed JSON"),
    ],
)
def test_bad_jsonl(tmp_path, content, message):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError) as error:
        read_jsonl(path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_files(tmp_path):
    for read in (read_json, read_jsonl):
        with pytest.raises(InputError, match=r"absent.json: No such file"):
            read(tmp_path / "absent.json")


def test_jsonl_round_trip(tmp_path):
    rows = [{"text": "é\u2028\n"}, {"ids": [1, 2]}]
    write_jsonl(tmp_path / "new" / "rows.jsonl", rows)
    assert read_jsonl(tmp_path / "new" / "rows.jsonl") == rows


def test_writer_drops_a_half_written_line(tmp_path):
    path = tmp_path / "out.jsonl"
    with JsonlWriter(path) as writer:
        assert writer.rows == []
        writer.write({"i": 0})
        writer.write({"i": "\u2028\r"})
    with open(path, "ab") as file:
        file.write(b'{"i": 2, "te')
    with JsonlWriter(path) as writer:
        assert writer.rows == [{"i": 0}, {"i": "\u2028\r"}]
        writer.write({"i": 2})
    assert read_jsonl(path) == [{"i": 0}, {"i": "\u2028\r"}, {"i": 2}]


def test_writer_refuses_a_malformed_earlier_line(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(b'{"i": 0}\nnonsense\n{"i": 1}\n')
    with pytest.raises(InputError, match="line 2: malformed"):
        JsonlWriter(path)
    assert path.read_bytes().count(b"\n") == 3


def _full_disk(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    write_text(tmp_path / "kept.txt", "old")
    with atomic_folder(tmp_path / "folder") as folder:
        write_json(folder / "config.json", {"a": 1})
    monkeypatch.setattr(os, "fsync", _full_disk)
    with pytest.raises(InputError, match=r"kept.txt: No space left on device"):
        write_text(tmp_path / "kept.txt", "new")
    with (
        pytest.raises(InputError, match=r"/folder/config.json: No space left on device"),
        atomic_folder(tmp_path / "folder") as folder,
    ):
        write_json(folder / "config.json", {"a": 2})
    assert (tmp_path / "kept.txt").read_text() == "old"
    assert read_json(tmp_path / "folder" / "config.json") == {"a": 1}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "kept.txt"]


def test_safetensors_that_cannot_be_written(tmp_path):
    (tmp_path / "blocked").write_text("a file")
    with pytest.raises(InputError, match="blocked"):
        write_safetensors(tmp_path / "blocked" / "model.safetensors", {})


def test_folder_replaces_only_what_it_rewrites(tmp_path):
    folder = tmp_path / "model"
    for value in (1, 2):
        with atomic_folder(folder) as temporary:
            write_json(temporary / "config.json", {"a": value})
    assert read_json(folder / "config.json") == {"a": 2}
    write_text(folder / "notes.txt", "mine")
    with pytest.raises(InputError, match=r"model: holds notes.txt"), atomic_folder(folder) as temporary:
        write_json(temporary / "config.json", {"a": 3})
    assert (folder / "notes.txt").read_text() == "mine"
    assert read_json(folder / "config.json") == {"a": 2}


def test_folder_is_absent_after_an_error(tmp_path):
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "model") as temporary:
        write_json(temporary / "config.json", {})
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
