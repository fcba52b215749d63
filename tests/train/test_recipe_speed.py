"""`train recipe-speed` on the golden target: both sides train alike, and what it refuses."""

import json
import sys

import jax
import numpy as np
import pytest

from tests.models import GOLDENS
from train import recipe_speed
from train.__main__ import main

TARGET = str(GOLDENS / "target")
SMALL = ["--target", TARGET, "--length", "24", "--num-anchors", "4", "--num-layers", "1", "--repeats", "3"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--target", "./none"], ["./none: no such folder"]),
        (["--repeats", "0"], ["--repeats 0: must be at least 1"]),
        (["--num-anchors", "0"], ["--num-anchors 0: must be at least 1"]),
        (["--length", "1"], ["--length 1: must be at least 2"]),
        (["--target", TARGET, "--length", "1025"], ["--length 1025", "1024 positions"]),
        (["--output", "none/x.json"], ["none/x.json", "does not exist"]),
        (["--output", "tests"], ["tests: is a folder"]),
    ],
)
def test_bad_options_are_one_line(one_line, arguments, words):
    one_line(["recipe-speed", *arguments], *words)


@pytest.mark.parametrize("module", ["torch", "transformers"])
def test_without_its_packages(one_line, tmp_path, monkeypatch, module):
    if module == "transformers":
        pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, module, None)
    output = tmp_path / "speed.json"
    one_line(["recipe-speed", *SMALL, "--output", output], f"{module} is not installed: pip install -e '.[parity]'")
    assert not output.exists()


def test_another_device_is_refused(one_line, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    one_line(["recipe-speed", *SMALL, "--output", tmp_path / "speed.json"], "JAX_PLATFORMS=cpu")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_run(tmp_path, monkeypatch, capsys):
    """The losses of both sides agree before the first update and, both training alike, in the updates after it."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    monkeypatch.setattr(recipe_speed, "_added_bytes", lambda side, config: [3, 2 if side.__name__[0] == "o" else 4])
    output = tmp_path / "speed.json"
    assert main(["recipe-speed", *SMALL, "--output", str(output)]) == 0
    out = capsys.readouterr().out
    assert "losses agree" in out and "ratio 2.00; losses" in out
    report = json.loads(output.read_text())
    ours, theirs = report["losses"]["ours"], report["losses"]["theirs"]
    assert len(ours) == len(theirs) == 4 and ours[0] != ours[-1]
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    assert (report["target"], report["length"], report["num_anchors"], report["num_layers"]) == ("target", 24, 4, 1)
    assert report["memory_ratio"] == 2 and report["losses_agree"] is True
    assert set(report["seconds"]) == set(report["processor_seconds"]) == {"ours", "theirs"}
    assert {"ratio", "processor_ratio", "transformers", "device", "versions", "date"} <= set(report)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_memory_is_of_a_process_of_its_own():
    pytest.importorskip("torch")
    if not recipe_speed._RESET.exists():
        pytest.skip("no such file on this system")
    config = recipe_speed.RecipeSpeedConfig(target=TARGET, length=24, num_anchors=4, num_layers=1)
    first, second = recipe_speed._added_bytes(recipe_speed.our_update, config)
    assert first > second >= 0, "the first update compiles"
