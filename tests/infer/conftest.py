"""The golden target, with and without a byte tokenizer, and the command line run in this process."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dspark_jax.io import byte_tokenizer
from infer.__main__ import main

GOLDENS = Path(__file__).parents[1] / "goldens"


@dataclasses.dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    error: str

    @property
    def error_line(self) -> str:
        """The one line on standard error."""
        (line,) = self.error.splitlines()
        return line


class Files:
    """JSON files, written and read."""

    @staticmethod
    def write_lines(path: Path, rows: list[dict]) -> Path:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    @staticmethod
    def read_lines(path: Path) -> list[dict]:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    @staticmethod
    def edit_config(folder: Path, **values) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.fixture
def files() -> type[Files]:
    return Files


@pytest.fixture
def infer(capsys) -> Callable[..., Outcome]:
    """infer("generate", option=value, …): True is a bare flag, a tuple several values."""

    def run(command: str, *arguments: str, **options) -> Outcome:
        words = [command, *arguments]
        for name, value in options.items():
            words.append(f"--{name.replace('_', '-')}")
            if value is not True:
                words += [str(item) for item in (value if isinstance(value, tuple) else (value,))]
        code = main(words)
        return Outcome(code, *capsys.readouterr())

    return run


@pytest.fixture
def golden_requests() -> list[dict]:
    """The entries of the vanilla golden with threshold 0: four prompts of 60 tokens, 64 new ones."""
    entries = json.loads((GOLDENS / "dspark_vanilla_greedy.json").read_text())
    return [entry for entry in entries if entry["confidence_threshold"] == 0]


@pytest.fixture
def models() -> dict[str, str]:
    return {"target": str(GOLDENS / "target"), "drafter": str(GOLDENS / "dspark_vanilla")}


@pytest.fixture
def prompts(tmp_path, golden_requests) -> Path:
    return Files.write_lines(tmp_path / "prompts.jsonl", [{"input_ids": entry["prompt"]} for entry in golden_requests])


@pytest.fixture
def chat_target(tmp_path) -> Path:
    """The golden target with a byte tokenizer, a chat template, and a context of 96 tokens."""
    folder = tmp_path / "chat_target"
    shutil.copytree(GOLDENS / "target", folder)
    template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    dataclasses.replace(byte_tokenizer(), chat_template=template).save(folder)
    Files.edit_config(folder, max_position_embeddings=96)
    return folder
