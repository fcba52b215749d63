"""An output file that appears whole, and whose unfinished work is kept beside it."""

import dataclasses
import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from dspark_jax.io import InputError, JsonlWriter, write_jsonl
from dspark_jax.io.files import reported
from infer.models import stamp

# How a partial file begins.
_HEADER = b'{"settings": '


def resume_settings(options: Any, drafter: str | None, irrelevant: Collection[str]) -> dict[str, Any]:
    """What unfinished work must have in common with a command of these options, `irrelevant` ones apart.

    `options` has `prompts` and `target`, known by their contents. `drafter`: the one in use.
    """
    values = {key: value for key, value in dataclasses.asdict(options).items() if key not in irrelevant}
    values |= {
        "prompts": hashlib.sha256(options.prompts.read_bytes()).hexdigest()[:16],
        "target": [options.target, stamp(options.target)],
        "drafter": None if drafter is None else [drafter, stamp(drafter)],
    }
    return json.loads(json.dumps(values, default=lambda member: member.value))


class ResumableOutput:
    """JSON lines by (prompt's index, turn), kept in `<path>.partial` until `finish` writes them in order.

    The partial file begins with the settings that its lines were made with; lines of other settings are not mixed.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Takes over the lines of an interrupted run. InputError if they were made with other settings."""
        self.path, self.partial = path, path.with_name(f"{path.name}.partial")
        self._settings = dict(settings)
        self._writer: JsonlWriter | None = None
        self.rows: dict[tuple[int, int], dict[str, Any]] = {}
        if self.partial.exists():
            self._take_over()

    def _take_over(self) -> None:
        with reported(self.partial), open(self.partial, "rb") as file:
            begin = file.read(len(_HEADER))
        if begin != _HEADER[: len(begin)]:
            raise InputError(f"{self.partial}: is no unfinished work of this command; move it away")
        with JsonlWriter(self.partial) as writer:
            header, lines = (writer.rows or [{}])[0], writer.rows[1:]
        if not lines:
            self.partial.unlink()
            return
        before = header.get("settings")
        if not isinstance(before, dict):
            raise InputError(f"{self.partial}, line 1: its settings are malformed; remove it to start over")
        for name, value in self._settings.items():
            if before.get(name) != value:
                raise InputError(
                    f"{self.partial}: unfinished work made with another {name} ({before.get(name)}, now {value}); "
                    "remove it to start over, or go on with its settings"
                )
        for number, line in enumerate(lines, 2):
            index, turn, row = (line.get(key) for key in ("index", "turn", "row"))
            if type(index) is not int or type(turn) is not int or not isinstance(row, dict) or "text" not in row:
                raise InputError(f"{self.partial}, line {number}: is malformed; remove the file to start over")
            self.rows[index, turn] = row

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
