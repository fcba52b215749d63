"""Options from YAML and the command line, and errors as exit codes."""

import dataclasses
import enum
import errno
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Literal

import jax
import pytest

from dspark_jax.io import InputError
from dspark_jax.io.command_line import Command, main


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer:
    rate: float = 1e-3
    steps: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Do something."""

    path: Path
    """Where."""
    colours: tuple[Colour, ...] = (Colour.RED,)
    kind: Literal["a", "b"] = "a"
    thinking: bool | None = None
    flag: bool = False
    limit: int | None = None
    words: tuple[str, ...] = ()
    optimizer: Optimizer

    def __post_init__(self) -> None:
        if self.limit == 0:
            raise InputError("--limit 0 must be at least 1")


@pytest.fixture
def run(tmp_path):
    """run(yaml text or None, argument, …): the options parsed, or the exit code."""

    def call(text: str | None, *arguments: str) -> Options | int:
        seen = []
        if text is not None:
            (tmp_path / "c.yaml").write_text(text)
            arguments = ("--config", str(tmp_path / "c.yaml"), *arguments)
        code = main("program", {"do": Command(Options, seen.append)}, ["do", *arguments])
        return seen[0] if code == 0 else code

    return call


# Written out it would have 10^12 numbers.
BOMB = "limit: [&a [1], " + ", ".join(f"&{b} [{', '.join([f'*{a}'] * 10)}]" for a, b in pairwise("abcdefghijklm")) + "]"
YAML = """
path: somewhere
colours: [blue, red]
thinking: false
words: ["-a", b]
optimizer: {rate: 6e-4, steps: 3}
"""


def test_yaml_alone(run):
    expected = Options(
        path=Path("somewhere"),
        colours=(Colour.BLUE, Colour.RED),
        thinking=False,
        words=("-a", "b"),
        optimizer=Optimizer(rate=6e-4, steps=3),
    )
    assert run(YAML) == expected


def test_the_command_line_comes_first(run):
    options = run(YAML, "--path", "x", "--thinking", "--optimizer.steps", "7", "--words", "c", "--colours", "blue")
    assert options.path == Path("x") and options.thinking is True
    assert options.optimizer == Optimizer(rate=6e-4, steps=7)
    assert options.words == ("c",) and options.colours == (Colour.BLUE,)


def test_the_command_line_alone(run):
    options = run(None, "--path", "x", "--no-thinking", "--optimizer.steps", "1", "--flag")
    assert options == Options(path=Path("x"), thinking=False, flag=True, optimizer=Optimizer(steps=1))
    for value in (True, False, None):
        assert run(YAML, "--thinking", str(value), "--limit", "3").thinking is value


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("colour: red", "unknown key colour; known: path, colours"),
        ("optimizer: {rat: 1}", "unknown key optimizer.rat; known: optimizer.rate, optimizer.steps"),
        ("colours: [green]", "colours must be one of red, blue, not 'green'"),
        ("colours: red", "colours must be a list, not 'red'"),
        ("kind: c", "kind must be one of a, b, not 'c'"),
        ("flag: 1", "flag must be true or false, not 1"),
        ("limit: 1.5", "limit must be an integer, not 1.5"),
        ("limit: true", "limit must be an integer, not True"),
        ("optimizer: {rate: fast}", "optimizer.rate must be a number, not 'fast'"),
        ("path: 3", "path must be a string, not 3"),
        ("- path", "expected a mapping"),
        ("path: [", "malformed YAML"),
        ("path: x\nlimit: 1\npath: y", "malformed YAML: the key path is there twice; keep one"),
        ("optimizer: {rate: 1, 'rate': 2}", "the key rate is there twice"),
        ('path: "\\ud800"', "path must be a string, not '\\ud800'"),
        (BOMB, "limit must be an integer, not [[1], [[...], [...],"),
    ],
)
def test_bad_yaml(run, tmp_path, capsys, text, named):
    assert run(text) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"program: {tmp_path / 'c.yaml'}: ") and named in line


def test_checks_of_the_options_themselves(run, capsys):
    assert run(YAML, "--limit", "0") == 2
    assert capsys.readouterr().err == "program: --limit 0 must be at least 1\n"


@pytest.mark.parametrize(
    ("error", "code", "named"),
    [
        (InputError("file: field is wrong"), 2, "file: field is wrong"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "a/b"), 2, "a/b: No such file or directory"),
        (OSError(errno.ENOSPC, "No space left on device", "a/b"), 2, "a/b: No space left on device"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (MemoryError("Unable to allocate 37.3 GiB"), 1, "out of memory (Unable to allocate 37.3 GiB); use a smaller"),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), 1, "smaller batch"),
    ],
)
def test_errors(capsys, error, code, named):
    def fail(_):
        raise error

    assert main("program", {"do": Command(Optimizer, fail)}, ["do", "--steps", "1"]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("program: ") and named in line


@pytest.mark.parametrize("name", ["stdin", "stdout", "stderr"])
def test_a_closed_stream(monkeypatch, name):
    """Python has None for it, which has no isatty."""
    monkeypatch.setattr(sys, name, None)
    seen = []
    commands = {"do": Command(Optimizer, lambda _: seen.append(getattr(sys, name).isatty()))}
    assert main("program", commands, ["do", "--steps", "1"]) == 0 and seen == [False]
    assert main("program", commands, ["do", "--help"]) == 0
    getattr(sys, name).close()


PROGRAM = """
import dataclasses, sys
from dspark_jax.io.command_line import Command, main
@dataclasses.dataclass
class Options:
    "Do something."
sys.exit(main("program", {"do": Command(Options, lambda _: print("x" * 10))}))
"""


def test_output_that_cannot_be_written():
    """A pipe whose reader has gone, and a full disk: told before the exit, at which it would be a traceback."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb") as pipe, open("/dev/full", "wb") as full:
        for stdout, argument, expected in (
            (pipe, "do", (1, "")),
            (pipe, "--help", (1, "")),
            (full, "do", (2, "program: No space left on device\n")),
        ):
            command = [sys.executable, "-c", PROGRAM, argument]
            root = Path(__file__).parents[2]
            done = subprocess.run(command, cwd=root, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)
            assert (done.returncode, done.stderr) == expected


def test_a_bug_keeps_its_traceback():
    def fail(_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        main("program", {"do": Command(Optimizer, fail)}, ["do", "--steps", "1"])


def test_help_and_usage(capsys):
    commands = {"do": Command(Options, print)}
    assert main("program", commands, ["--help"]) == 0
    assert "do           Do something." in capsys.readouterr().out
    assert main("program", commands, ["do", "--help"]) == 0
    text = capsys.readouterr().out
    assert "Where." in text and "--config FILE" in text
    assert main("program", commands, []) == 2
    assert main("program", commands, ["undo"]) == 2
    assert "no command 'undo'; known: do" in capsys.readouterr().err
    assert main("program", commands, ["do", "--path", "x", "--colours", "green", "--optimizer.steps", "1"]) == 2
