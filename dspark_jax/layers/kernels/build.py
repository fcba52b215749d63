"""C++ kernels for XLA's CPU backend, compiled on first use and kept in the user's cache folder."""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path

import jax

# Products and sums are fused where the source says so and nowhere else.
_FLAGS = ("-O3", "-std=c++17", "-ffp-contract=off", "-fPIC", "-shared", "-w")
_COMPILERS = ("c++", "g++", "clang++")


class BuildError(Exception):
    """Why a kernel cannot be had, in one line."""


def load(source: Path) -> ctypes.CDLL:
    """The shared library of one C++ file, built if the cache has none of this source, the headers beside it, this
    compiler and jaxlib.

    The cache is `dspark_jax` in $XDG_CACHE_HOME, or else in ~/.cache. Processes may build at the same time: each
    writes a file of its own and moves it into place whole. $CXX names the compiler; by default it is the first found of
    c++, g++ and clang++.

    Raises:
      BuildError: no compiler, one that fails, or a folder that cannot be written.
    """
    compiler = _compiler()
    try:
        path = _cache() / f"{source.stem}-{_key(source, compiler)}.so"
        if not path.exists():
            _build(source, compiler, path)
        return ctypes.CDLL(str(path))
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "error" in line] or [f"exit code {error.returncode}"]
        raise BuildError(f"{compiler[0]} cannot build {source.name} ({lines[0].strip()})") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{source.name} cannot be built or loaded ({error})") from error


def _compiler() -> list[str]:
    chosen = shlex.split(os.environ.get("CXX", ""))
    if chosen and shutil.which(chosen[0]):
        return chosen
    if chosen:
        raise BuildError(f"CXX names {chosen[0]}, which is not there")
    for name in _COMPILERS:
        if found := shutil.which(name):
            return [found]
    raise BuildError(f"there is no C++ compiler ({', '.join(_COMPILERS)}); install one, or name it in CXX")


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dspark_jax"


def _key(source: Path, compiler: list[str]) -> str:
    version = _run([*compiler, "--version"])
    digest = hashlib.sha256(source.read_bytes())
    for header in sorted(source.parent.glob("*.h")):
        digest.update(header.read_bytes())
    for part in (*compiler, version, *_FLAGS, metadata.version("jaxlib"), platform.machine()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:16]


def _build(source: Path, compiler: list[str], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=path.stem) as folder:
        built = Path(folder) / path.name
        _run([*compiler, *_FLAGS, "-isystem", jax.ffi.include_dir(), str(source), "-o", str(built)])
        os.replace(built, path)


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
