"""Whole runs of `python -m train fit`: learning, exact resume, interruptions, failures, export."""

import dataclasses
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import DecodeConfig, generate, request_keys
from dspark_jax.io import load_drafter, load_target, save_target
from dspark_jax.layers.quantized import dequantize, quantize
from train import loop
from train.__main__ import main
from train.checkpoints import Checkpoints

ROOT = Path(__file__).parents[2]


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of an uninterrupted run, which the first test makes."""
    return tmp_path_factory.mktemp("whole") / "run"


@pytest.fixture
def finished(whole, fit_arguments) -> Path:
    if not whole.exists():
        assert main(fit_arguments(whole)) == 0
    return whole


def at_step(monkeypatch, number: int, action) -> None:
    """Calls `action` before a step, counted from the run's start."""
    calls, original = [], loop.train_step

    def train_step(*arguments):
        calls.append(None)
        if len(calls) == number:
            action()
        return original(*arguments)

    monkeypatch.setattr(loop, "train_step", train_step)


def test_the_loss_goes_down_and_the_files_are_there(finished):
    rows = metrics(finished)
    steps = [row["step"] for row in rows if "loss" in row]
    assert steps == list(range(1, 13))
    losses = [row["loss"] for row in rows if "loss" in row]
    assert np.mean(losses[-3:]) < np.mean(losses[:3]) - 0.1
    held_out = [row for row in rows if "held_out_loss" in row]
    assert [row["step"] for row in held_out] == [6, 12]
    assert held_out[1]["held_out_loss"] < held_out[0]["held_out_loss"]
    assert (finished / "metrics.png").read_bytes().startswith(b"\x89PNG")
    assert list((finished / "tensorboard").iterdir())


def test_export_decodes_as_the_target(finished, chat_target, tmp_path):
    assert main(["export", "--run", str(finished), "--output", str(tmp_path / "d"), "--dtype", "float32"]) == 0
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "d" / file).read_bytes() == (finished / "drafter" / file).read_bytes()
    target = load_target(chat_target)
    drafter = load_drafter(tmp_path / "d", target=target)
    prompt = jnp.asarray([list(b"Ann has 3 ducks")], jnp.int32)
    arguments = (prompt, jnp.asarray([15], jnp.int32), request_keys(0, 1))
    config = DecodeConfig(target=target.config, drafter=drafter.config, max_new_tokens=16)
    plain = dataclasses.replace(config, drafter=None, plain_width=5)
    fast = generate(target.params, drafter.params, *arguments, config)
    slow = generate(target.params, None, *arguments, plain)
    assert (np.asarray(fast.tokens) == np.asarray(slow.tokens)).all()


def test_an_export_in_int8_is_small_and_rounds_once(finished, one_line, chat_target, tmp_path):
    command = ["export", "--run", finished, "--output", tmp_path / "d", "--dtype", "int8"]
    one_line(command, "--dtype int8", "--layout reduced")
    assert main([str(part) for part in (*command, "--layout", "reduced")]) == 0
    target = load_target(chat_target)
    exact, small = load_drafter(finished / "drafter", target=target), load_drafter(tmp_path / "d", target=target)
    assert small.config == exact.config
    found = np.asarray(small.params.fc.weight)
    np.testing.assert_array_equal(found, dequantize(quantize(np.asarray(exact.params.fc.weight))))
    np.testing.assert_array_equal(small.params.norm.weight, exact.params.norm.weight)
    np.testing.assert_array_equal(small.params.lm_head.weight, exact.params.lm_head.weight)
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (tmp_path / "d", finished / "drafter")]
    assert sizes[0] < 0.3 * sizes[1]


def test_a_finished_run_is_exported_again_and_nothing_else(finished, fit_arguments):
    before = (finished / "metrics.jsonl").read_bytes()
    assert main(fit_arguments(finished)) == 0
    assert (finished / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_accumulation_changes_rounding_only(finished, fit_arguments, tmp_path):
    assert main(fit_arguments(tmp_path / "run", "--accumulation", 2)) == 0
    for name in ("loss", "held_out_loss"):
        first, second = ([row[name] for row in metrics(run) if name in row] for run in (finished, tmp_path / "run"))
        assert np.allclose(first, second, rtol=1e-3)


def test_sigterm_saves_and_the_resumed_curve_is_equal(finished, fit_arguments, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        at_step(patch, 7, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert main(fit_arguments(run)) == 143
    assert "saved after step 7" in capsys.readouterr().err
    # A half-written checkpoint, and metrics beyond the last whole one.
    (run / "checkpoints" / "9.orbax-checkpoint-tmp").mkdir()
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 8, "loss": 1.0}\n{"step": 9, "lo')
    assert main(fit_arguments(run)) == 0
    assert metrics(run) == metrics(finished)
    ours, theirs = ((folder / "drafter" / "model.safetensors").read_bytes() for folder in (run, finished))
    assert ours == theirs


def test_kill_and_resume_gives_the_same_curve(fit_arguments, tmp_path):
    options = ("--steps", 40, "--eval-every", 40, "--checkpoint-every", 5)
    cut, uncut = tmp_path / "cut", tmp_path / "uncut"
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
    }
    command = [sys.executable, "-m", "train", *fit_arguments(cut, *options)]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 240
        while not (cut / "checkpoints" / "5").exists():
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.005)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL
    assert max(row["step"] for row in metrics(cut)) < 40
    assert main(fit_arguments(cut, *options)) == 0
    assert main(fit_arguments(uncut, *options)) == 0
    assert metrics(cut) == metrics(uncut)


def test_other_settings_in_the_same_folder_are_refused(
    finished, fit_arguments, one_line, tmp_path, write_rows, records
):
    one_line(fit_arguments(finished, "--seed", 1), finished, "--seed 0, not 1")
    one_line(fit_arguments(finished, "--loss.decay", 3), "--loss.decay 4.0, not 3.0")
    other = write_rows(tmp_path / "other.jsonl", records[1:])
    one_line(fit_arguments(finished, "--data", other), "other contents of --data")


def test_non_finite_updates_are_skipped_and_named(
    chat_target, fit_arguments, records, write_rows, tmp_path, capsys, monkeypatch
):
    # A target that is not finite is refused; here one stands for whatever else is not.
    monkeypatch.setattr("dspark_jax.io.tensors._finite", lambda _: True)
    target = load_target(chat_target)
    weight = target.params.embed_tokens.weight
    broken = target.params.replace(
        embed_tokens=target.params.embed_tokens.replace(weight=weight.at[255].set(jnp.nan)),
        lm_head=target.params.lm_head or type(target.params.norm)(weight=weight),
    )
    folder = tmp_path / "target"
    save_target(folder, dataclasses.replace(target.config, tie_word_embeddings=False), broken, eos_token_ids=(257,))
    bad = {"input_ids": [255, 1, 2], "output_ids": [3, 4, 5, 6, 7]}
    data = write_rows(tmp_path / "data.jsonl", [*records[:11], bad])
    held_out = write_rows(tmp_path / "held_out.jsonl", records[11:15])
    options = ("--target", folder, "--data", data, "--held-out-data", held_out, "--mask-token-id", 258)
    assert main(fit_arguments(tmp_path / "some", *options, "--steps", 6)) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if "not finite" in line]
    rows = {row["step"]: row for row in metrics(tmp_path / "some") if "loss" in row}
    skipped = [step for step, row in rows.items() if not row["updated"]]
    # Three batches an epoch, one of them with record 11.
    assert len(skipped) == len(told) == 2
    for step, line in zip(skipped, told, strict=True):
        assert rows[step]["loss"] is None
        assert line.startswith(f"step {step}:") and line.endswith(", 11")

    data = write_rows(tmp_path / "all.jsonl", [bad] * 12)
    options = ("--target", folder, "--data", data, "--held-out-data", held_out, "--mask-token-id", 258)
    assert main(fit_arguments(tmp_path / "all", *options, "--max-not-finite", 3)) == 1
    *told, last = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in told] == ["step 1", "step 2", "step 3"]
    assert "3 non-finite updates in a row, stopped at step 3" in last


def test_a_full_disk_is_one_line_and_the_checkpoint_before_stays(fit_arguments, one_line, tmp_path, monkeypatch):
    run = tmp_path / "run"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill() -> None:
        """From here on files may not grow beyond 16 KiB."""
        while not (run / "checkpoints" / "4").exists():
            time.sleep(0.005)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**14, hard))

    try:
        with monkeypatch.context() as patch:
            at_step(patch, 6, fill)
            one_line(fit_arguments(run, "--eval-every", 12), run / "checkpoints", "checkpoint 8", "File too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    checkpoints = Checkpoints(run / "checkpoints", read_only=True)
    assert checkpoints.last() == 4
    assert checkpoints.notes(4)["metrics_bytes"] > 0
    assert main(fit_arguments(run, "--eval-every", 12)) == 0
    assert [row["step"] for row in metrics(run) if "loss" in row] == list(range(1, 13))


def test_a_damaged_checkpoint_is_one_line(finished, one_line, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    for file in (run / "checkpoints" / "12" / "params").rglob("d/*"):
        os.truncate(file, min(file.stat().st_size, 1000))
    command = ["export", "--run", run, "--output", tmp_path / "drafter"]
    one_line(command, run / "checkpoints", "checkpoint 12 could not be read")
    assert not (tmp_path / "drafter").exists()
    shutil.rmtree(run / "checkpoints" / "12" / "notes")
    one_line(command, run / "checkpoints", "checkpoint 12 could not be read")


def test_a_published_drafter_is_fine_tuned(finished, fit_arguments, one_line, tmp_path, data, chat_target):
    base = ["fit", "--target", chat_target, "--data", data, "--init", finished / "drafter"]
    short = [*base, "--num-anchors", 8, "--batch-size", 4, "--steps", 1, "--output", tmp_path / "tuned"]
    assert main([str(part) for part in short]) == 0
    # It begins where the other ended.
    fresh, tuned = metrics(finished)[0]["loss"], metrics(tmp_path / "tuned")[-1]["held_out_loss"]
    assert tuned < fresh - 0.1
    one_line([*base, "--output", tmp_path / "x", "--block-size", 4], "--block-size", "fixed by --init")
    one_line([*base, "--output", tmp_path / "x", "--no-causal-block"], "--causal-block", "fixed by --init")
    one_line([*base[:-1], ROOT / "tests/goldens/dspark_vanilla", "--output", tmp_path / "x"], "num_target_layers")


def test_jetspec_with_a_reduced_draft_vocabulary(fit_arguments, one_line, tmp_path, chat_target):
    run = tmp_path / "run"
    options = ("--config", ROOT / "train/configs/jetspec.yaml", "--markov-rank", 0, "--draft-vocab-size", 20)
    for _ in range(2):  # The second is a resumption: an infinite decay is the same setting.
        assert main(fit_arguments(run, *options, "--steps", 2)) == 0
    drafter = load_drafter(run / "drafter", target=load_target(chat_target))
    assert drafter.config.causal_block and not drafter.config.sample_from_anchor
    trained = metrics(run)[0]
    assert trained["loss"] == pytest.approx(trained["forward_kl"], rel=1e-6)
    assert len(trained["acceptance"]) == drafter.config.num_drafts == 3
    ids = np.asarray(drafter.params.draft_token_ids)
    assert len(ids) == 20 and (np.diff(ids) > 0).all()
    assert {ord(" "), ord("a"), ord("N"), 257} <= set(ids.tolist())
    one_line(["export", "--run", run, "--output", tmp_path / "d"], "reduced draft vocabulary", "DeepSpec")
    assert main(["export", "--run", str(run), "--output", str(tmp_path / "d"), "--layout", "reduced"]) == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--target", "nowhere/target"), ["nowhere/target"]),
        (("--data", "nowhere.jsonl"), ["nowhere.jsonl"]),
        (("--init", "nowhere/drafter"), ["--num-layers", "--init"]),
        (("--init-layers", "0", "1"), ["--init-layers", "2 layers", "1"]),
        (("--init-layers", "7"), ["--init-layers 7"]),
        (("--kind", "eagle3", "--init-layers", "0"), ["eagle3"]),
        (("--batch-size", "0"), ["--batch-size 0"]),
        (("--accumulation", "3"), ["--batch-size 4", "--accumulation 3"]),
        (("--optimizer.learning-rate", "nan"), ["--optimizer.learning-rate nan"]),
        (("--loss.decay", "0"), ["--loss.decay"]),
        (("--loss.decay", "nan"), ["--loss.decay nan"]),
        (("--loss.forward-kl", "inf"), ["--loss.forward-kl inf"]),
        (("--no-sample-from-anchor", "--block-size", "1"), ["block_size 1 must be at least 2"]),
        (("--seed", str(2**32)), ["--seed 4294967296"]),
        (("--block-size", "100000"), ["block_size 100000"]),
        (("--dtype", "float23"), ["--dtype", "float23"]),
        (("--mask-token-id", "300"), ["mask_token_id 300"]),
        (("--target-layer-ids", "0", "2"), ["target_layer_ids", "2"]),
        (("--draft-vocab-size", "1000"), ["draft_vocab_size 1000"]),
        (("--config", "nowhere.yaml"), ["nowhere.yaml"]),
    ],
)
def test_bad_options_are_one_line(fit_arguments, one_line, tmp_path, options, words):
    one_line(fit_arguments(tmp_path / "run", *options), *words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["empty"]),
        ('{"text": "ab"}\n{"text": \n', ["line 2"]),
        ('{"input_ids": [1], "output_ids": [2, 260]}\n', ["line 1", "token id 260"]),
        ('{"input_ids": [1], "output_ids": [2]}\n', ["nothing to train on"]),
        ('{"text": "ab"}\n', ["only one record"]),
    ],
)
def test_bad_data_is_one_line(fit_arguments, one_line, tmp_path, text, words, no_weights):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    one_line(fit_arguments(tmp_path / "run", "--data", path), *words)


def test_an_export_of_no_run_is_one_line(one_line, tmp_path):
    one_line(["export", "--run", tmp_path / "nothing", "--output", tmp_path / "d"], "nothing")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    one_line(["export", "--run", tmp_path / "run", "--output", tmp_path / "d"], "no checkpoint yet")


def test_a_checkpoint_with_other_notes_is_one_line(one_line, finished, fit_arguments, tmp_path):
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    for notes in (run / "checkpoints").glob("*/notes/metadata"):
        notes.write_text("{}")
    one_line(["export", "--run", run, "--output", tmp_path / "d"], "could not be read", "notes")
    one_line(fit_arguments(run), "could not be read", "notes")


@pytest.mark.parametrize(
    ("notes", "word"),
    [
        ({"settings": []}, "settings"),
        ({"target": None}, "target"),
        ({"best": {"loss": 1}}, "best.step"),
        ({"drafter": {"block_size": 3}}, "drafter"),
        ({"dtype": 5}, "dtype"),
    ],
)
def test_a_checkpoint_with_edited_notes_is_one_line(notes, word, one_line, finished, tmp_path, no_weights):
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    for path in (run / "checkpoints").glob("*/notes/metadata"):
        path.write_text(json.dumps(json.loads(path.read_text()) | notes))
    one_line(["export", "--run", run, "--output", tmp_path / "d"], run / "checkpoints", word)


def test_an_export_replaces_no_other_model(one_line, finished, tmp_path, no_weights):
    folder = Path(shutil.copytree(ROOT / "tests/goldens/target", tmp_path / "target"))
    (folder / "generation_config.json").unlink()
    one_line(["export", "--run", finished, "--output", folder], f"{folder}: holds another model")
    drafter = Path(shutil.copytree(finished / "drafter", tmp_path / "drafter"))
    fields = json.loads((drafter / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps(fields | {"num_anchors": 9, "dflash_config": None}))
    one_line(["export", "--run", finished, "--output", drafter], f"{drafter}: holds another model")
    one_line(["export", "--run", finished, "--output", drafter / "config.json"], "config.json: is a file")
