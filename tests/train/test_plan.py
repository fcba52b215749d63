"""`train plan` from end to end; most tests compile for the CPU devices that are here, as if they were TPUs."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from dspark_jax.io import InputError
from dspark_jax.io.command_line import parse
from dspark_jax.io.step_table import StepTableLaw, load_step_table
from dspark_jax.parameters import count
from dspark_jax.planning.chips import parse_topology
from dspark_jax.sharding import make_mesh
from dspark_jax.targets.decoder import declare_target
from dspark_jax.training.step import declare_trainable
from infer.simulation_inputs import read_table
from train import plan
from train.__main__ import main
from train.fit_config import FitConfig
from train.plan_config import CONFIGS, PlanConfig, make_plan, target_shape
from train.tpu_topology import described_devices

TAPS = {
    "0.6b": (1, 7, 13, 19, 25),
    "4b": (1, 9, 17, 25, 33),
    "8b": (1, 9, 17, 25, 33),
    "14b": (1, 10, 19, 28, 37),
}
PARAMETERS = {"0.6b": 0.6e9, "4b": 4.02e9, "8b": 8.19e9, "14b": 14.77e9}
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


def options(*arguments: str) -> PlanConfig:
    return parse(PlanConfig, arguments, "train plan", CONFIGS)


@pytest.fixture
def target(tmp_path) -> Path:
    """A shape like Qwen3's, but small."""
    path = tmp_path / "small.json"
    path.write_text(json.dumps(json.loads((CONFIGS / "qwen3/0.6b.json").read_text()) | SMALL))
    return path


@pytest.fixture
def small(target, monkeypatch) -> list[str]:
    """Arguments for eight chips, for which the CPU's devices stand in."""
    monkeypatch.setattr(plan, "described_devices", lambda topology: jax.devices()[: topology.chips])
    return [
        "plan", "--topology", "v5e:2x4", "--target", str(target), "--num-layers", "1", "--target-layer-ids", "0",
        "--markov-rank", "4", "--num-anchors", "4", "--max-length", "16", "--batch-size", "16", "--accumulation", "2",
        "--slots", "8", "--cache-length", "32",
    ]  # fmt: skip


@pytest.mark.parametrize("size", TAPS)
def test_shipped_configs_are_the_papers(size):
    name = f"qwen3_{size}"
    fit = parse(FitConfig, ["--config", name, "--data", "x.jsonl", "--output", "run"], "train fit", CONFIGS)
    assert fit.target == f"Qwen/Qwen3-{size.upper()}"
    config = options("--config", name, "--topology", "v5e:8x8")
    made = make_plan(config)
    drafter = made.train.drafter
    assert drafter.target_layer_ids == TAPS[size]
    assert (drafter.num_hidden_layers, drafter.num_drafts, drafter.markov_rank) == (5, 7, 256)
    assert (drafter.num_anchors, drafter.mask_token_id, made.length) == (512, 151669, 4096)
    assert made.parts * made.rows == 512
    assert made.train.total_steps == round(10 * 1_300_000 / 512)
    assert (config.optimizer.learning_rate, config.dtype) == (6e-4, "bfloat16")
    assert count(declare_target(target_shape(config))) == pytest.approx(PARAMETERS[size], rel=0.01)
    assert count(declare_trainable(drafter)) > 0


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ("--topology v5e:8x8", ["Missing", "--target"]),
        ("--config qwen3_8b --topology v5e:8x8 --slots few", ["--slots"]),
        ("--config qwen3_8b --topology v5e:8x8 --pods 2", ["--pods"]),
        ("--config qwen3_9b --topology v5e:8x8", ["--config qwen3_9b", "qwen3_8b"]),
        ("--config qwen3_8b --topology v9:8x8", ["--topology", "unknown chip v9"]),
        ("--config qwen3_8b --topology 8x8", ["--topology '8x8'", "v5e:8x8"]),
        ("--config qwen3_8b --topology v5e:8x8 --mesh data=3", ["--mesh data=3", "3 chips", "64"]),
        ("--config qwen3_8b --topology v5e:8x8 --mesh pipe=64", ["--mesh pipe=64", "data=2,fsdp=2,model=2"]),
        ("--config qwen3_8b --topology v5e:8x8 --mesh data", ["--mesh data", "data=2,fsdp=2,model=2"]),
        ("--config qwen3_8b --topology v5e:8x8 --accumulation 16", ["--accumulation 16", "64 chips", "8 gives"]),
        ("--config qwen3_8b --topology v5e:8x8 --slots 12", ["--slots 12", "multiple", "8"]),
        ("--config qwen3_8b --topology v5e:8x8 --samples 0", ["--samples 0"]),
        ("--config qwen3_8b --topology v5e:8x8 --output run", ["--output run", ".json"]),
        ("--config qwen3_8b --topology v5e:8x8 --kind mtp", ["--kind mtp"]),
        ("--config qwen3_8b --topology v5e:8x8 --target Qwen/Qwen3-9B", ["Qwen/Qwen3-9B", "not shipped"]),
        ("--config qwen3_8b --topology v5e:8x8 --target-layer-ids 35", ["drafter options", "target_layer_ids"]),
        ("--config qwen3_8b --topology v5e:8x8 --cache-length 4", ["--cache-length", "capacity 4"]),
    ],
)
def test_bad_input(arguments, names, capsys):
    assert main(["plan", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1
    for name in names:
        assert name in err


def test_without_libtpu(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["plan", "--config", "qwen3_8b", "--topology", "v5e:8x8"]) == 2
    assert "pip install 'dspark-jax[tpu-compile]'" in capsys.readouterr().err


def test_a_plan_that_fits(small, tmp_path, capsys):
    report, steps = tmp_path / "plan.json", tmp_path / "steps.json"
    files = ["--output", str(report), "--step-table", str(steps)]
    assert main([*small, "--mesh", "data=2,fsdp=2,model=2", *files]) == 0
    out = capsys.readouterr().out
    assert "train step: mesh data=2,fsdp=2,model=2; 2 x 8 documents of 16 tokens" in out
    assert "optimiser's moments" in out
    assert "modelled, not measured" in out
    fields = json.loads(report.read_text())
    assert fields["fits"] and fields["modelled"]
    train = fields["train"]
    assert 0 < sum(train["memory"]["held"].values()) < train["memory"]["peak"] < fields["chip"]["memory"]
    assert {each["kind"] for each in train["collectives"]} >= {"all-gather", "all-reduce"}
    assert train["seconds"]["seconds"] > train["seconds"]["collectives"] > 0
    assert 0 < train["model_flops_utilization"] < 1
    assert train["tokens_per_second"] == pytest.approx(16 * 16 / train["seconds"]["seconds"])
    assert train["days"] == pytest.approx(train["steps"] * train["seconds"]["seconds"] / 86_400)
    _check_steps(steps, fields["verify"])


def _check_steps(path: Path, verify: dict) -> None:
    """`infer simulate` reads the table and knows that it is modelled; who asks for a measured one is refused."""
    table, modelled = read_table(path, None)
    assert modelled
    rates = np.asarray(table.steps_per_second)
    assert rates.tolist() == pytest.approx(verify["steps_per_second"])
    assert (np.diff(rates) <= 0).all()
    assert (np.asarray(table.plain_steps_per_second) > rates).all()
    law = StepTableLaw(
        device="8 x TPU v5 lite", mesh="data=4,model=2", dtype="float32", target_fingerprint="", tree=None,
        drafter_fingerprint=None, slots=8, buckets=tuple(np.asarray(table.capacities).tolist()),
    )  # fmt: skip
    with pytest.raises(InputError, match="modelled, not measured"):
        load_step_table(path, law)


def test_a_plan_that_does_not_fit(small, target, capsys):
    """Weights alone are more than a chip has, where each has all of them."""
    target.write_text(json.dumps(json.loads(target.read_text()) | {"vocab_size": 2**28}))
    assert main([*small, "--mesh", "data=8"]) == 1
    out = capsys.readouterr().out
    assert "does not fit" in out
    assert "HBM" in out


def test_what_the_compiler_says_of_too_large_a_program(small):
    made = make_plan(options(*small[1:]))

    def refuse():
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (88.5G) "
            "exceeds available HBM (15.75G).\nmore"
        )

    mesh = make_mesh(1, 1, jax.devices()[:1])
    program = plan.compiled(made, "train step", mesh, refuse, {})
    assert not program.fits
    assert program.memory.peak == 88.5 * 2**30
    assert program.refusal.endswith("available HBM (15.75G).")


@pytest.mark.slow
def test_a_small_model_on_a_real_topology(small, monkeypatch, capsys):
    """By libtpu's own compiler."""
    pytest.importorskip("libtpu")
    monkeypatch.undo()
    assert main([*small, "--mesh", "fsdp=4,model=2"]) == 0
    out = capsys.readouterr().out
    assert "v5e:2x4: 8 chips of 16 GiB" in out
    assert "all-gather" in out


@pytest.mark.slow
def test_a_mesh_axis_longer_than_a_torus_is_wide():
    pytest.importorskip("libtpu")
    devices = described_devices(parse_topology("v6e:4x4"))
    mesh = make_mesh(2, 8, devices)
    assert mesh.devices.shape == (2, 8) and {device.id for device in mesh.devices.flat} == set(range(16))
