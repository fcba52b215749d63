"""Whether files can be read and written, asked before any work is done."""

import os
from collections.abc import Iterable
from pathlib import Path

from dspark_jax.io.errors import InputError


def check_input(path: Path) -> None:
    """Raises an InputError for a path that is no file."""
    if path.is_dir():
        raise InputError(f"{path}: is a folder; name a file")
    if not path.is_file():
        raise InputError(f"{path}: no such file")


def check_output(path: Path, inputs: Iterable[str | os.PathLike | None] = ()) -> None:
    """Raises an InputError if a file cannot be written there; called before any work is done.

    `inputs`: files, and folders of models, of which none is to be overwritten.
    """
    if not path.parent.is_dir():
        raise InputError(f"{path}: its folder {path.parent} does not exist; make it first")
    if path.is_dir():
        raise InputError(f"{path}: is a folder; name a file")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"{path}: its folder {path.parent} is not writable")
    if not path.exists():
        return
    if not path.is_file():
        raise InputError(f"{path}: is no regular file; name another")
    for source in inputs:
        if source is not None and Path(source).exists() and Path(source).samefile(_read_as(path, source)):
            raise InputError(f"{path}: is read by this command and would be lost; name another file")


def _read_as(path: Path, source: str | os.PathLike) -> Path:
    return path.parent if Path(source).is_dir() else path


def check_report(path: Path, inputs: Iterable[str | os.PathLike | None] = ()) -> None:
    """As `check_output`, for a JSON file and the plot beside it."""
    inputs = list(inputs)
    check_output(path, inputs)
    if path.suffix == ".png":
        raise InputError(f"{path}: the plot goes to this file; name a .json file")
    check_output(path.with_suffix(".png"), inputs)
