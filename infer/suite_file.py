"""Suites: which drafters of one target are compared, how, and on which prompts; YAML files."""

import dataclasses
import math
from pathlib import Path

from dspark_jax import TreeKind, TreeSpec, sampling_params
from dspark_jax.io import InputError
from dspark_jax.io.command_line import read_file
from dspark_jax.io.named_models import locate
from dspark_jax.io.outputs import check_input
from infer.methods import MethodName
from infer.options import DEFAULT_BUDGET

SHIPPED = Path(__file__).parent / "suites"
_SUFFIXES = (".yaml", ".yml")
MEAN = "mean"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SuiteDrafter:
    """A drafter, and the methods to draft with it.

    `path`: its folder, relative to the suite's file, or a name of `named_models`. `optional`: without its folder it is
    listed as not measured.
    `paper`: published τ to print beside, by prompt file without its suffix, or "mean"; at `paper_temperature`, by
    default the first of the suite's. `paper_note` says what they are about.
    """

    label: str
    path: Path
    methods: tuple[MethodName, ...] = ("chain",)
    optional: bool = False
    paper: dict[str, float] = dataclasses.field(default_factory=dict)
    paper_temperature: float | None = None
    paper_note: str = ""

    def row(self, method: MethodName) -> str:
        """The label of one of its methods in the tables."""
        return self.label if len(self.methods) == 1 else f"{self.label}, {method}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suite:
    """What is compared. `target`: a name, hub id or path, this one relative to the suite's file where it is there.

    `prompts`: JSON Lines files, relative to the suite's file. `limit`: prompts of each, from its beginning; null takes
    all. Tree options are those of the command line, for every tree that has them.
    """

    drafters: tuple[SuiteDrafter, ...]
    prompts: tuple[Path, ...]
    target: str | None = None
    limit: int | None = 32
    max_new_tokens: int = 128
    temperatures: tuple[float, ...] = (1.0, 0.0)
    tree_budget: int = DEFAULT_BUDGET
    tree_k: int | None = None
    tree_width: int | None = None

    def tree(self, method: MethodName) -> TreeSpec | None:
        """The method's tree. Raises ValueError for tree options that make none."""
        if method == "chain":
            return None
        kind = TreeKind(method)
        chosen = {"k": self.tree_k} if kind is not TreeKind.DDTREE else {}
        if kind is TreeKind.PCTREE:
            chosen["width"] = self.tree_width
        return TreeSpec(kind=kind, budget=self.tree_budget, **chosen)


def find_suite(source: str) -> Path:
    """The file of a suite, by its path or by the name of a shipped one. Raises an InputError where there is none."""
    path = Path(source)
    if path.suffix in _SUFFIXES or path.is_file():
        check_input(path)
        return path
    shipped = {file.stem: file for file in sorted(SHIPPED.glob("*.yaml"))}
    if source not in shipped:
        given = f"{source}: no such suite" if source else "no suite is given"
        raise InputError(f"{given}; name a YAML file, or a shipped suite ({', '.join(shipped) or 'there is none'})")
    return shipped[source]


def read_suite(path: Path) -> Suite:
    """A suite whose paths are those of files and folders, checked but for its models.

    Raises:
      InputError: a malformed file, an unknown key, a missing file, or a value that makes no sense; in one line.
    """
    suite = read_file(Suite, path)
    folder = path.parent
    target = suite.target
    if target is not None and (folder / target).exists():
        target = str(folder / target)
    suite = dataclasses.replace(
        suite,
        target=target,
        prompts=tuple(folder / file for file in suite.prompts),
        drafters=tuple(
            dataclasses.replace(each, path=_drafter_folder(folder, each, f"{path}: drafters[{index}].path"))
            for index, each in enumerate(suite.drafters)
        ),
    )
    _check(suite, path)
    first = suite.temperatures[0]
    drafters = (
        dataclasses.replace(each, paper_temperature=first) if each.paper_temperature is None else each
        for each in suite.drafters
    )
    return dataclasses.replace(suite, drafters=tuple(drafters))


def _drafter_folder(folder: Path, drafter: SuiteDrafter, place: str) -> Path:
    """Where the drafter lies or, if there is none, should lie. Raises an InputError for a name without its model."""
    here = folder / drafter.path
    if here.exists():
        return here
    try:
        named = locate(str(drafter.path))
    except InputError as error:
        if not drafter.optional:
            raise InputError(f"{place}: {error}") from error
        return here
    # A path comes back as it is; it is relative to the suite's file, not to where the command runs.
    return named if isinstance(named, Path) else here


def _check(suite: Suite, path: Path) -> None:
    for name in ("drafters", "prompts", "temperatures"):
        if not getattr(suite, name):
            raise InputError(f"{path}: {name}: name at least one")
    for name in ("limit", "max_new_tokens"):
        value = getattr(suite, name)
        if value is not None and value < 1:
            raise InputError(f"{path}: {name} {value} must be at least 1")
    for temperature in suite.temperatures:
        try:
            sampling_params(1, temperature)
        except ValueError as error:
            raise InputError(f"{path}: temperatures: {error}") from error
    for file in suite.prompts:
        if not file.is_file():
            raise InputError(f"{path}: prompts: {file}: no such file; paths are relative to the suite's file")
    names = [file.stem for file in suite.prompts]
    # The last column of the tables has this name.
    _check_distinct(path, "prompts", [*names, MEAN], "name files by different names, none of them mean")
    rows = [drafter.row(method) for drafter in suite.drafters for method in drafter.methods]
    _check_distinct(path, "drafters", rows, "give each a label of its own")
    _check_distinct(path, "temperatures", [f"{temperature:g}" for temperature in suite.temperatures], "name it once")
    for index, drafter in enumerate(suite.drafters):
        _check_drafter(suite, drafter, f"{path}: drafters[{index}]", names)


def _check_distinct(path: Path, key: str, names: list[str], remedy: str) -> None:
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"{path}: {key}: {name} is there twice; {remedy}")


def _check_drafter(suite: Suite, drafter: SuiteDrafter, place: str, names: list[str]) -> None:
    if not drafter.label.strip() or not drafter.label.isprintable() or "|" in drafter.label:
        raise InputError(f"{place}.label: {drafter.label!r} is no name for a table's row; use printable text without |")
    if not drafter.methods:
        raise InputError(f"{place}.methods: name at least one")
    if not drafter.path.is_dir() and not drafter.optional:
        raise InputError(
            f"{place}.path: {drafter.path}: no such folder; train or fetch {drafter.label}, or mark it optional: true"
        )
    for method in drafter.methods:
        try:
            suite.tree(method)
        except ValueError as error:
            raise InputError(f"{place}.methods: {method}: {error}") from error
    if drafter.paper and len(drafter.methods) > 1:
        raise InputError(f"{place}.paper: is about one method; list the methods under labels of their own")
    for name, value in drafter.paper.items():
        if name not in (*names, MEAN):
            raise InputError(f"{place}.paper.{name}: is no prompt file; known: {', '.join((*names, MEAN))}")
        if not 0 < value < math.inf:
            raise InputError(f"{place}.paper.{name}: {value} must be a positive number")
    if drafter.paper_temperature is not None and drafter.paper_temperature not in suite.temperatures:
        known = ", ".join(f"{temperature:g}" for temperature in suite.temperatures)
        raise InputError(f"{place}.paper_temperature: {drafter.paper_temperature:g} is not measured; known: {known}")
