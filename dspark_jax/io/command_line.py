"""Command lines: subcommands whose options are dataclasses, YAML files beside them, and errors as exit codes.

A run ends with 0, with 1 if it failed, with 2 for bad input, which is told in one line on standard error, or with 130
if Ctrl-C interrupted it.
"""

import contextlib
import dataclasses
import enum
import inspect
import io
import itertools
import os
import re
import reprlib
import signal
import sys
import threading
import types
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import tyro
import yaml

from dspark_jax.io.errors import InputError

Options = TypeVar("Options")

_CONFIG_NOTE = "Any option may stand in a YAML file (--config FILE, keys as here); the command line comes first."
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2


@dataclasses.dataclass(frozen=True)
class Command:
    """A subcommand: its options, a dataclass whose docstring is its help, and what runs with them."""

    options: type
    run: Callable[[Any], None]


def main(
    program: str,
    commands: Mapping[str, Command],
    arguments: Sequence[str] | None = None,
    shipped_configs: Path | None = None,
) -> int:
    """Runs the subcommand that the arguments (default: those of the process) name, and returns the exit code.

    `shipped_configs`: folder of YAML files that `--config` may name, see `parse`.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    _open_closed_streams()
    # In one line, as everything that a command says is.
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    try:
        with _interruptible():
            code = _run(program, commands, arguments, shipped_configs)
            # Here what cannot be written is told; at exit it would be a traceback.
            sys.stdout.flush()
            return code
    except BrokenPipeError:
        # Whoever read our output has gone.
        _drop_unwritten()
        return 1
    except InputError as error:
        return _fail(program, str(error), 2)
    except OSError as error:
        _drop_unwritten()
        named = "" if error.filename is None else f"{error.filename}: "
        return _fail(program, f"{named}{error.strerror or error}", 2)
    except MemoryError as error:
        return _fail(program, f"out of memory ({error}); use a smaller batch", 1)
    except KeyboardInterrupt as error:
        return _fail(program, f"interrupted{f'; {error}' if str(error) else ''}", 130)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _fail(program, f"the device is out of memory ({str(error).splitlines()[0]}); use a smaller batch", 1)


def _run(program: str, commands: Mapping[str, Command], arguments: Sequence[str], shipped_configs: Path | None) -> int:
    if not arguments or arguments[0] not in commands:
        return _usage(program, commands, arguments)
    command = commands[arguments[0]]
    try:
        command.run(parse(command.options, arguments[1:], f"{program} {arguments[0]}", shipped_configs))
    except SystemExit as exit_:  # tyro's, after --help, or a command's own
        return exit_.code if isinstance(exit_.code, int) else 1
    return 0


def _open_closed_streams() -> None:
    """A standard stream that the caller has closed is None: nothing is read then, and what is written goes nowhere."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  open to the end of the process


def _drop_unwritten() -> None:
    """Drops what standard output does not take: it would be flushed, and fail, once more at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Within it Ctrl-C raises a KeyboardInterrupt, whatever the process does at one before and after."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _fail(program: str, message: str, code: int) -> int:
    print(f"{program}: {' '.join(message.split())}", file=sys.stderr)
    return code


def _usage(program: str, commands: Mapping[str, Command], arguments: Sequence[str]) -> int:
    asked = bool(arguments) and arguments[0] in ("-h", "--help")
    if arguments and not asked:
        return _fail(program, f"no command {arguments[0]!r}; known: {', '.join(commands)}", 2)
    lines = [f"usage: {program} COMMAND [OPTIONS]", ""]
    for name, command in commands.items():
        lines.append(f"  {name:<12} {(command.options.__doc__ or '').strip().splitlines()[0]}")
    lines += ["", f"{program} COMMAND --help describes a command's options."]
    print("\n".join(lines), file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


def parse(
    options: type[Options], arguments: Sequence[str], program: str, shipped_configs: Path | None = None
) -> Options:
    """Options from arguments, over those of a YAML file that `--config` names, over the dataclass's defaults.

    A `bool | None` option is written --name or --no-name. Where there is no such file, `family_size` is
    `family/size.yaml` in the folder `shipped_configs`.

    Raises:
      InputError: a usage error; or the YAML file is missing or malformed, or holds an unknown key or a value of the
        wrong type.
      SystemExit: after --help.
    """
    file, arguments = _take_config(list(arguments))
    file = _shipped(file, shipped_configs)
    values = {} if file is None else _read_yaml(file)
    default, told = _with_defaults(options, values, str(file)), io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            return tyro.cli(
                options,
                args=_spell_out(options, arguments),
                default=default,
                prog=program,
                description=f"{inspect.getdoc(options)}\n\n{_CONFIG_NOTE}",
                config=(tyro.conf.EnumChoicesFromValues,),
            )
    except SystemExit as exit_:
        if exit_.code == 0:
            raise
        raise InputError(f"{_first_box(told.getvalue())} ({program} --help describes the options)") from None


def read_file(options: type[Options], path: Path) -> Options:
    """A dataclass with the values of a YAML file, over its defaults. Its `__post_init__` does not run.

    Raises:
      InputError: the file is missing or malformed, lacks a value, or holds an unknown key or a value of a wrong type.
    """
    result = _with_defaults(options, _read_yaml(path), str(path))
    missing = _first_missing(result, "")
    if missing is not None:
        raise InputError(f"{path}: {missing} is missing; add it")
    return result


def _first_missing(value: Any, key: str) -> str | None:
    """The key of a value that neither a file nor a default gives."""
    if value is tyro.MISSING:
        return key
    parts: dict[str, Any] = {}
    if dataclasses.is_dataclass(value):
        parts = {f"{key}.{name}" if key else name: part for name, part in vars(value).items()}
    elif isinstance(value, tuple):
        parts = {f"{key}[{index}]": part for index, part in enumerate(value)}
    return next((found for name, part in parts.items() if (found := _first_missing(part, name)) is not None), None)


def _first_box(text: str) -> str:
    """The words of tyro's first message, or of that about unknown options. Messages stand between rules, under a title:
    the first words, or in the box's edge where the output can show one.
    """
    parts: list[list[str]] = [[]]
    for line in text.splitlines():
        if not set(line) - set(" -─│├┤╭╮╰╯") or line.startswith("╭"):
            parts.append([])
        else:
            parts[-1].append(line.strip(" │"))
    messages = [" ".join(part) for part in parts if part]
    if "╭" not in text and len(messages) > 1:
        del messages[0]
    return next((message for message in messages if message.startswith("Unrecognized")), (messages or [""])[0])


def _take_config(arguments: list[str]) -> tuple[Path | None, list[str]]:
    file, rest = None, []
    remaining = iter(arguments)
    for argument in remaining:
        if argument == "--config":
            file = next(remaining, None)
            if file is None:
                raise InputError("--config: name a YAML file")
        elif argument.startswith("--config="):
            file = argument.removeprefix("--config=")
        else:
            rest.append(argument)
    return (None if file is None else Path(file)), rest


def _shipped(file: Path | None, folder: Path | None) -> Path | None:
    """The shipped file of a name, or the file itself."""
    if file is None or folder is None or file.suffix == ".yaml" or file.exists():
        return file
    paths = sorted(folder.rglob("*.yaml"))
    named = {path.relative_to(folder).as_posix().removesuffix(".yaml").replace("/", "_"): path for path in paths}
    if str(file) not in named:
        raise InputError(f"--config {file}: no such file, nor a shipped config; those are {', '.join(named)}")
    return named[str(file)]


def _spell_out(options: type, arguments: list[str]) -> list[str]:
    """--name and --no-name of `bool | None` options as the --name=True and --name=False that tyro reads; it reads
    --name True and --name False as they are.
    """
    spelled = {}
    for name, kind in typing.get_type_hints(options).items():
        if kind == bool | None:
            option = name.replace("_", "-")
            spelled |= {f"--{option}": f"--{option}=True", f"--no-{option}": f"--{option}=False"}

    def spell(argument: str, following: str) -> str:
        if not argument.startswith("--") or following in ("None", "True", "False"):
            return argument
        return spelled.get(argument.replace("_", "-"), argument)

    return [spell(*pair) for pair in itertools.pairwise([*arguments, ""])]


class _YamlLoader(yaml.SafeLoader):
    """Safe, and a key that stands twice is an error: one of its values would be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"the key {key} is there twice; keep one")
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _YamlLoader)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, or a number or date out of range
        raise InputError(f"{path}: malformed YAML: {error}") from error
    except RecursionError as error:
        raise InputError(f"{path}: malformed YAML: nested too deeply") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise InputError(f"{path}: expected a mapping of option names to values, found {type(values).__name__}")
    return values


def _with_defaults(options: type[Any], values: Mapping[Any, Any], file: str, prefix: str = "") -> Any:
    """An object for tyro to take defaults from: the file's values, the dataclass's own, or tyro.MISSING.

    It is not made by the constructor, whose checks are for the finished options.
    """
    fields = {field.name: field for field in dataclasses.fields(options)}
    hints = typing.get_type_hints(options, include_extras=True)
    named = {str(key).replace("-", "_"): value for key, value in values.items()}
    for key in named:
        if key not in fields:
            raise InputError(f"{file}: unknown key {prefix}{key}; known: {', '.join(prefix + name for name in fields)}")
    result = object.__new__(options)
    for name, field in fields.items():
        if name in named:
            value = _convert(hints[name], named[name], file, prefix + name)
        elif field.default is not dataclasses.MISSING:
            value = field.default
        elif field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        elif dataclasses.is_dataclass(hints[name]):
            value = _with_defaults(hints[name], {}, file, f"{prefix}{name}.")
        else:
            value = tyro.MISSING
        object.__setattr__(result, name, value)
    return result


def _convert(kind: Any, value: Any, file: str, key: str) -> Any:
    """A YAML value as the type of its option."""

    def wrong(expected: str) -> InputError:
        # Shortened: aliases make a value of a few lines that is longer than any memory.
        return InputError(f"{file}: {key} must be {expected}, not {_SHORT.repr(value)}")

    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _convert(parts[0], value, file, key)
    if origin in (typing.Union, types.UnionType):
        if value is None and types.NoneType in parts:
            return None
        return _convert(next(part for part in parts if part is not types.NoneType), value, file, key)
    if origin is typing.Literal:
        if value not in parts:
            raise wrong(f"one of {', '.join(map(str, parts))}")
        return value
    if origin in (tuple, list):
        if not isinstance(value, list):
            raise wrong("a list")
        numbered = dataclasses.is_dataclass(parts[0])
        return origin(
            _convert(parts[0], item, file, f"{key}[{index}]" if numbered else key) for index, item in enumerate(value)
        )
    if origin is dict:
        if not isinstance(value, dict):
            raise wrong("a mapping")
        return {_convert(parts[0], k, file, key): _convert(parts[1], v, file, f"{key}.{k}") for k, v in value.items()}
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise wrong("a mapping")
        return _with_defaults(kind, value, file, f"{key}.")
    if issubclass(kind, enum.Enum):
        if value not in (known := [member.value for member in kind]):
            raise wrong(f"one of {', '.join(map(str, known))}")
        return kind(value)
    if kind is bool:
        if not isinstance(value, bool):
            raise wrong("true or false")
        return value
    if kind in (int, float):
        try:
            # YAML reads 6e-4 as a string.
            number = kind(value) if not isinstance(value, bool) else None
        except (TypeError, ValueError, OverflowError):
            number = None
        if number is None or (kind is int and not isinstance(value, int)):
            raise wrong("an integer" if kind is int else "a number")
        return number
    # Neither can be written to a file or be part of a path.
    if not isinstance(value, str) or re.search("[\0\ud800-\udfff]", value):
        raise wrong("a string")
    return kind(value)
