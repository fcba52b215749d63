"""`train device-check`: what it measures on the CPU for a tiny shape, and what it refuses."""

import json
from pathlib import Path

import jax
import pytest

from dspark_jax.planning.chips import CHIPS, peaks_of
from train import device_check
from train.__main__ import main
from train.device_check import DeviceCheckConfig
from train.plan_config import CONFIGS

SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 96,
    "max_window_layers": 2,
}


@pytest.fixture
def shape(tmp_path) -> Path:
    """A config of `fit` for a target like Qwen3, but small."""
    target, path = tmp_path / "small.json", tmp_path / "small.yaml"
    target.write_text(json.dumps(json.loads((CONFIGS / "qwen3/0.6b.json").read_text()) | SMALL))
    path.write_text(
        f"target: {target}\nnum_layers: 1\ntarget_layer_ids: [0]\nmarkov_rank: 4\nnum_anchors: 4\nmax_length: 16\n"
        "block_size: 3\ndtype: bfloat16\n"
    )
    return path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rounds", "0"], ["--rounds 0"]),
        (["--requests", "0"], ["--requests 0"]),
        (["--output", "none/x.json"], ["none/x.json", "does not exist"]),
        (["--shapes", "qwen3_9b"], ["qwen3_9b", "qwen3_4b"]),
        (["--shapes", "none.yaml"], ["none.yaml", "No such file"]),
    ],
)
def test_bad_input(one_line, arguments, words):
    one_line(["device-check", *arguments], *words)


def test_shipped_shapes_are_the_default():
    assert [device_check.read_shape(name, "x").drafter.num_anchors for name in DeviceCheckConfig().shapes] == [512, 512]


def test_what_runs_out_of_memory_is_reported_and_the_rest_goes_on(shape, tmp_path, monkeypatch, capsys):
    """A failed parity ends with 1."""
    kept = tmp_path / "out.json"

    def exhausted(*_):
        assert set(json.loads(kept.read_text())["parts"]) >= {"parity"}
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.\nmore")

    parity = {"passed": False, "requests": 1, "bfloat16_error": 0.0, "bound": 1.0}
    parity |= {name: {"equal_requests": 0, "tau": 1.0} for name in ("chain", "tree")}
    monkeypatch.setattr(device_check, "measure_parity", lambda: dict(parity))
    monkeypatch.setattr(device_check, "measure_training", exhausted)
    monkeypatch.setattr(device_check, "measure_decoding", exhausted)
    assert main(["device-check", "--shapes", str(shape), "--requests", "1", "2", "--output", str(kept)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("parity: FAILED") and len(lines) == 4
    assert lines[3].startswith("small, decoding 2: out of memory (RESOURCE_EXHAUSTED") and "more" not in lines[3]
    parts = json.loads(kept.read_text())["parts"]
    assert set(parts) == {"parity", "small, training", "small, decoding 1", "small, decoding 2"}


def test_another_failure_is_not_hidden(shape, tmp_path, monkeypatch):
    def broken():
        raise jax.errors.JaxRuntimeError("INTERNAL: no")

    monkeypatch.setattr(device_check, "measure_parity", broken)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        main(["device-check", "--shapes", str(shape), "--output", str(tmp_path / "out.json")])


@pytest.mark.slow
def test_a_tiny_shape_on_cpu(shape, tmp_path, capsys):
    output = tmp_path / "out.json"
    few = ["--requests", "2", "--context", "8", "--rounds", "2", "--repeats", "2"]
    assert main(["device-check", "--shapes", str(shape), *few, "--output", str(output)]) == 0
    assert "parity: passed" in capsys.readouterr().out
    parts = json.loads(output.read_text())["parts"]
    parity = parts["parity"]
    assert parity["chain"]["equal_requests"] == parity["tree"]["equal_requests"] == parity["requests"]
    assert 0 < parity["bfloat16_error"] < parity["bound"]
    # Drafts are accepted now and then, else it would say nothing.
    assert parity["tree"]["tau"] >= parity["chain"]["tau"] > 1
    training = parts["small, training"]
    assert (training["length"], training["anchors"], training["updated"]) == (16, 4, True)
    assert 0 < training["useful_tflops"] < training["executed_tflops"]
    assert training["peak_bytes"] > sum(training["held_bytes"].values())
    decoding = parts["small, decoding 2"]
    assert set(decoding["rounds"]) == {"plain", "pass of 4", "chain", "pctree 32"}
    assert decoding["rounds"]["plain"]["over_plain"] == decoding["rounds"]["plain"]["tau"] == 1
    assert all(1 <= entry["tau"] <= 4 for entry in decoding["rounds"].values())


def test_peaks_by_the_devices_name():
    assert peaks_of("TPU v5 lite") is CHIPS["v5e"]
    assert peaks_of("NVIDIA H200").memory_bandwidth == 4800e9
    assert peaks_of("cpu") is None
