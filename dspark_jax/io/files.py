"""Files that are either whole or absent: atomic writes, JSON and JSON Lines."""

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

from dspark_jax.io.errors import InputError


@contextlib.contextmanager
def reported(path: str | os.PathLike) -> Iterator[None]:
    """Turns an operating-system error into an InputError that names the path."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _temporary(path: Path, purpose: str = "tmp") -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.{purpose}")


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike) -> Iterator[Path]:
    """Yields a temporary name beside `path`; the file written there replaces `path` when the block succeeds.

    Raises:
      InputError: the file cannot be written (no space, no permission); `path` is as it was.
    """
    path = Path(path)
    temporary = _temporary(path)
    try:
        with reported(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            _sync(temporary)
            os.replace(temporary, path)
            _sync(path.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


@contextlib.contextmanager
def atomic_folder(path: str | os.PathLike) -> Iterator[Path]:
    """Yields an empty temporary folder beside `path`, which takes its place when the block succeeds.

    An existing folder is replaced only if every file in it is written anew, so that nothing else is lost.

    Raises:
      InputError: the folder cannot be written, or `path` holds files that the new folder has not.
    """
    path = Path(path).absolute()
    temporary, old = _temporary(path), _temporary(path, "old")
    try:
        with reported(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.mkdir()
            yield temporary
            for file in temporary.rglob("*"):
                _sync(file)
            if path.exists():
                if not path.is_dir():
                    raise InputError(f"{path}: is a file; name a folder to write")
                kept = sorted({p.name for p in path.iterdir()} - {p.name for p in temporary.iterdir()})
                if kept:
                    raise InputError(f"{path}: holds {kept[0]}, which would be lost; name another folder or remove it")
                os.replace(path, old)
            os.replace(temporary, path)
            _sync(path.parent)
    except InputError as error:
        raise InputError(str(error).replace(str(temporary), str(path))) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
        elif old.exists():
            os.replace(old, path)


def write_bytes(path: str | os.PathLike, data: bytes) -> None:
    """Writes a whole file or, with an InputError, nothing."""
    with atomic_file(path) as temporary:
        temporary.write_bytes(data)


def write_text(path: str | os.PathLike, text: str) -> None:
    """Writes a whole UTF-8 file or, with an InputError, nothing."""
    write_bytes(path, text.encode())


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Writes indented JSON with sorted keys; non-finite numbers raise ValueError."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n")


def write_jsonl(path: str | os.PathLike, rows: Iterable[dict]) -> None:
    """Writes a whole JSON Lines file or nothing."""
    write_text(path, "".join(_line(row) for row in rows))


def read_json(path: str | os.PathLike) -> dict[str, Any]:
    """The object in a UTF-8 JSON file.

    Raises:
      InputError: missing or unreadable file, malformed JSON (NaN and Infinity included), or no object.
    """
    with reported(path):
        data = Path(path).read_bytes()
    try:
        value = json.loads(data, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8; convert the file") from error
    except json.JSONDecodeError as error:
        raise InputError(f"{path}, line {error.lineno}: malformed JSON ({error.msg})") from error
    except RecursionError as error:
        raise InputError(f"{path}: malformed JSON (nested too deeply)") from error
    except ValueError as error:
        raise InputError(f"{path}: malformed JSON ({error})") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def numbered_jsonl(path: str | os.PathLike) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, object) of each line that is not blank.

    Raises:
      InputError: missing or empty file, or a line that is not UTF-8, not JSON or not an object, with its number.
    """
    rows = 0
    with reported(path), open(path, "rb") as file:
        for number, data in enumerate(file, 1):
            if data.strip():
                rows += 1
                yield number, _parse(path, number, data)
    if not rows:
        raise InputError(f"{path}: empty file; expected one JSON object a line")


def read_jsonl(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The objects of a JSON Lines file; errors as in `numbered_jsonl`."""
    return [row for _, row in numbered_jsonl(path)]


def _parse(path: str | os.PathLike, number: int, data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data.decode())
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise InputError(f"{path}, line {number}: not UTF-8; convert the file") from error
    except UnicodeEncodeError as error:
        raise InputError(f"{path}, line {number}: half of a surrogate pair ({error.reason})") from error
    except json.JSONDecodeError as error:
        raise InputError(f"{path}, line {number}: malformed JSON ({error.msg}, column {error.colno})") from error
    except RecursionError as error:
        raise InputError(f"{path}, line {number}: malformed JSON (nested too deeply)") from error
    except ValueError as error:  # an integer of too many digits
        raise InputError(f"{path}, line {number}: malformed JSON ({error})") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}, line {number}: expected a JSON object, found {type(value).__name__}")
    return value


def _line(row: dict) -> str:
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"


class JsonlWriter:
    """Appends objects to a JSON Lines file, one flushed line each, so that a killed run can go on.

    `rows` are the objects already there when it is opened. A last line without its newline is what a killed
    run left half-written; it is dropped.

    Raises:
      InputError: the file cannot be written, or an earlier line in it is malformed.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self._path = Path(path)
        self.rows: list[dict[str, Any]] = []
        with reported(path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            data = self._path.read_bytes() if self._path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        for number, line in enumerate(whole.split(b"\n"), 1):
            if line.strip():
                self.rows.append(_parse(path, number, line))
        with reported(path):
            self._file = self._path.open("ab")
            self._file.truncate(len(whole))

    def write(self, row: dict[str, Any]) -> None:
        with reported(self._path):
            self._file.write(_line(row).encode())
            self._file.flush()

    def close(self) -> None:
        with reported(self._path):
            os.fsync(self._file.fileno())
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
