"""Checkpoints whose weights are not finite are refused by file and tensor, however they are stored and loaded."""

import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark_jax.io import InputError, load_drafter, load_target
from dspark_jax.io.safetensors import SafetensorsSource
from dspark_jax.sharding import make_mesh

GOLDENS = Path(__file__).parent.parent / "goldens"
BFLOAT16 = ml_dtypes.bfloat16


def spoil(folder: Path, name: str, value: float, stored=np.float32, index=-1) -> None:
    tensors = {key: tensor.astype(stored) for key, tensor in load_file(folder / "model.safetensors").items()}
    tensors[name].flat[index] = value
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture
def folder(tmp_path) -> Path:
    return Path(shutil.copytree(GOLDENS / "target", tmp_path / "target"))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("stored", [np.float32, np.float16, BFLOAT16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_target(folder, value, stored, dtype):
    name = "model.layers.3.mlp.up_proj.weight"
    spoil(folder, name, value, stored)
    with pytest.raises(InputError) as error:
        load_target(folder, dtype=dtype)
    assert str(error.value).startswith(f"{folder}: tensor {name} has values that are not finite in {dtype}; ")


@pytest.mark.parametrize("index", [0, -1], ids=["first shard", "last shard"])
@pytest.mark.parametrize("stacked", [False, True])
def test_a_sharded_target(folder, index, stacked):
    name = "model.layers.5.self_attn.q_proj.weight"
    spoil(folder, name, np.nan, index=index)
    with pytest.raises(InputError, match=f"tensor {name} has values that are not finite"):
        load_target(folder, mesh=make_mesh(4, 2), stacked_layers=stacked)


def test_finite_weights_that_a_dtype_cannot_hold(folder):
    spoil(folder, "model.norm.weight", 1e39, np.float64)
    with pytest.raises(InputError, match=r"tensor model.norm.weight has values that are not finite in float32"):
        load_target(folder)


def test_the_largest_numbers_pass(folder):
    largest = float(ml_dtypes.finfo(BFLOAT16).max)
    spoil(folder, "model.norm.weight", largest, BFLOAT16)
    for dtype in ("float32", "bfloat16"):
        assert float(load_target(folder, dtype=dtype).params.norm.weight[-1]) == largest


def test_a_drafter(tmp_path):
    folder = Path(shutil.copytree(GOLDENS / "dspark_gated", tmp_path / "drafter"))
    spoil(folder, "markov_head.markov_w2.weight", np.inf)
    with pytest.raises(InputError) as error:
        load_drafter(folder, target=load_target(GOLDENS / "target"))
    assert str(error.value).startswith(f"{folder}: tensor markov_head.markov_w2.weight has values that are not finite")


def test_each_part_is_read_once(monkeypatch):
    """Of a mesh's devices those that hold the same part share one reading."""
    read, seen = SafetensorsSource.read, []

    def counted(self, name, index):
        seen.append((name, repr(index)))
        return read(self, name, index)

    monkeypatch.setattr(SafetensorsSource, "read", counted)
    load_target(GOLDENS / "target", mesh=make_mesh(4, 2))
    layer = [part for part in seen if part[0] == "model.layers.0.mlp.gate_proj.weight"]
    assert len(layer) == 2 and len(set(layer)) == 2
