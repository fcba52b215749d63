"""Writes prompts for the byte model: beginnings of the standard library's files and functions."""

import dataclasses
import re
import sys
from pathlib import Path

import numpy as np

from dspark_jax.io import command_line
from dspark_jax.io.errors import InputError
from dspark_jax.io.files import write_jsonl
from train.stdlib_corpus import Split, corpus

_FUNCTION = re.compile(rb"^[ \t]*(?:async[ \t]+)?def[ \t]", re.MULTILINE)
_SHORTEST, _LONGEST = 64, 160


@dataclasses.dataclass(frozen=True)
class StdlibPromptsConfig:
    """Write JSONL prompts for the byte model: the first 64 to 160 bytes of standard-library files and functions."""

    output: Path
    """File to write: one {"prompt": …} a line."""
    count: int = 256
    """Prompts to write."""
    split: Split = Split.TRAIN
    """Take them from the files that the byte model is trained on, or from the held-out ones."""
    seed: int = 0
    """Of the choice."""
    sources: Path | None = None
    """Folder of *.py files; by default the running Python's standard library."""


def prompts(config: StdlibPromptsConfig) -> list[str]:
    """`count` different prompts; the same settings and sources give the same ones.

    Raises:
      InputError: the count is not positive, or the sources have not so many.
    """
    if config.count < 1:
        raise InputError(f"count {config.count}: must be positive")
    if config.seed < 0:
        raise InputError(f"seed {config.seed}: must be at least 0")
    places = [
        (data, begin)
        for data in corpus(config.split, config.sources).values()
        for begin in (0, *(match.start() for match in _FUNCTION.finditer(data)))
        if begin + _LONGEST <= len(data)
    ]
    rng = np.random.default_rng(config.seed)
    chosen: dict[str, None] = {}  # ordered, each once
    for place in rng.permutation(len(places)):
        data, begin = places[place]
        end = begin + int(rng.integers(_SHORTEST, _LONGEST + 1))
        chosen.setdefault(data[begin:end].decode(errors="ignore"))  # drops the last character if it is cut
        if len(chosen) == config.count:
            return list(chosen)
    raise InputError(f"count {config.count}: the {config.split.value} split has only {len(chosen)} prompts")


def main(config: StdlibPromptsConfig) -> None:
    """Runs the command."""
    write_jsonl(config.output, ({"prompt": prompt} for prompt in prompts(config)))
    print(f"{config.output}: {config.count} prompts from the {config.split.value} split")


if __name__ == "__main__":
    commands = {"stdlib-prompts": command_line.Command(StdlibPromptsConfig, main)}
    sys.exit(command_line.main("train", commands, ["stdlib-prompts", *sys.argv[1:]]))
