"""`python -m train fit` of Eagle3 and multi-token prediction, from options to export."""

import json
from pathlib import Path

import numpy as np
import pytest

from dspark_jax.config import Eagle3Config, MTPConfig
from dspark_jax.io import load_drafter, load_target
from train.__main__ import main

CONFIGS = Path(__file__).parents[2] / "train" / "configs"


@pytest.fixture
def arguments(chat_target, data):
    """Arguments of a small run of one of the files in train/configs."""

    def make(kind: str, output: Path, *more: object) -> list[str]:
        options = ["--config", CONFIGS / f"{kind}.yaml", "--target", chat_target, "--data", data, "--output", output]
        small = ["--batch-size", 4, "--steps", 6, "--log-every", 1, "--optimizer.learning-rate", 5e-3]
        return [str(part) for part in ("fit", *options, *small, *more)]

    return make


@pytest.mark.parametrize(
    ("kind", "options", "term"),
    [
        ("eagle3", ("--block-size", 2, "--draft-vocab-size", 20), "soft_cross_entropy"),
        # The whole vocabulary, whose head begins as the target's.
        pytest.param(
            "eagle3", ("--block-size", 2, "--draft-vocab-size", 260), "soft_cross_entropy", marks=pytest.mark.slow
        ),
        pytest.param("mtp", (), "cross_entropy", marks=pytest.mark.slow),
    ],
)
def test_a_run_is_exported_and_loads(kind, options, term, arguments, chat_target, tmp_path):
    run = tmp_path / "run"
    assert main(arguments(kind, run, *options)) == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "loss" in row]
    assert all(row["loss"] == pytest.approx(row[term], rel=1e-5) for row in trained)
    assert np.mean([row["loss"] for row in trained[-2:]]) < trained[0]["loss"]
    command = ["export", "--run", str(run), "--output", str(tmp_path / "d")]
    for _ in range(2):  # The second replaces the first.
        assert main(command) == 0
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "d" / file).read_bytes() == (run / "drafter" / file).read_bytes()
    config = load_drafter(tmp_path / "d", target=load_target(chat_target)).config
    assert isinstance(config, Eagle3Config if kind == "eagle3" else MTPConfig)
    assert len(trained[0]["acceptance"]) == config.num_drafts == (2 if kind == "eagle3" else 1)


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("eagle3", ("--markov-rank", 8), ["--markov-rank", "--kind eagle3 has no such option"]),
        ("eagle3", ("--num-layers", 1), ["--num-layers", "--kind eagle3"]),
        ("mtp", ("--block-size", 3), ["--block-size", "--kind mtp has no such option"]),
        ("mtp", ("--target-layer-ids", 0), ["--target-layer-ids", "--kind mtp"]),
        ("eagle3", (), ["draft_vocab_size 32000 is outside 1..260"]),
        ("eagle3", ("--draft-vocab-size", 20, "--target-layer-ids", 0, 2), ["target_layer_ids", "not a tap"]),
        ("eagle3", ("--init", "nowhere"), ["--kind", "fixed by --init"]),
        ("eagle3", ("--kind", "medusa"), ["--kind", "medusa"]),
    ],
)
def test_options_of_other_kinds_are_one_line(kind, options, words, arguments, one_line, tmp_path):
    one_line(arguments(kind, tmp_path / "run", *options), *words)
