"""An output file that appears whole, and whose unfinished work is kept beside it."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark_jax.io import InputError, JsonlWriter, write_jsonl


def check_output(path: Path) -> None:
    """Raises an InputError if a file cannot be written there; called before any work is done."""
    if not path.parent.is_dir():
        raise InputError(f"{path}: its folder {path.parent} does not exist; make it first")
    if path.is_dir():
        raise InputError(f"{path}: is a folder; name a file")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"{path}: its folder {path.parent} is not writable")


class ResumableOutput:
    """JSON lines by (prompt's index, turn), kept in `<path>.partial` until `finish` writes them in order.

    The partial file begins with the settings that its lines were made with; lines of other settings are not mixed.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Takes over the lines of an interrupted run. InputError if they were made with other settings."""
        check_output(path)
        self.path, self.partial = path, path.with_name(f"{path.name}.partial")
        self._settings = dict(settings)
        self._writer: JsonlWriter | None = None
        self.rows: dict[tuple[int, int], dict[str, Any]] = {}
        if self.partial.exists():
            self._take_over()

    def _take_over(self) -> None:
        with JsonlWriter(self.partial) as writer:
            header, lines = (writer.rows or [{}])[0], writer.rows[1:]
        if not lines:
            self.partial.unlink()
            return
        before = header.get("settings", {})
        for name, value in self._settings.items():
            if before.get(name) != value:
                raise InputError(
                    f"{self.partial}: unfinished work made with another {name} ({before.get(name)}, now {value}); "
                    "remove it to start over, or go on with its settings"
                )
        self.rows = {(line["index"], line["turn"]): line["row"] for line in lines}

    def add(self, index: int, turn: int, row: dict[str, Any]) -> None:
        if self._writer is None:
            self._writer = JsonlWriter(self.partial)
            if not self._writer.rows:
                self._writer.write({"settings": self._settings})
        self._writer.write({"index": index, "turn": turn, "row": row})
        self.rows[index, turn] = row

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def finish(self) -> None:
        """Writes the output and removes the partial file."""
        self.close()
        write_jsonl(self.path, [self.rows[key] for key in sorted(self.rows)])
        self.partial.unlink(missing_ok=True)
