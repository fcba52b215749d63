"""`fit` and `cache` as several processes: the results of one process, and the end of all when one of them ends."""

import json
import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.train.jobs import contents, ends, finish, start, wait_until
from train.cache_files import read_manifest

# The data's 30 documents then make several shards.
SMALL_SHARDS = "import train.cache_layout as layout; layout.SHARD_BYTES = 2**14"
# What a full disk is like: no file grows beyond 8 KiB.
FULL_DISK = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2**13, resource.RLIM_INFINITY))"
LONG = ("--steps", 100_000, "--eval-every", 100_000, "--checkpoint-every", 100_000)


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def trains(run: Path) -> bool:
    """Whether a first line of metrics is there."""
    return (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size > 0


def assert_alike(run: Path, other: Path) -> None:
    for one, two in zip(metrics(run), metrics(other), strict=True):
        assert one.keys() == two.keys()
        for name, value in one.items():
            # The best draft of a slot may change where two are nearly equal.
            if "agreement" not in name:
                np.testing.assert_allclose(value, two[name], rtol=2e-5, atol=1e-6, err_msg=name)
    ours, theirs = (load_file(folder / "drafter" / "model.safetensors") for folder in (run, other))
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, atol=2e-5, err_msg=name)


@pytest.fixture
def arguments(fit_arguments):
    def of(run: Path, mesh: str, *more: object) -> list[str]:
        return fit_arguments(run, "--steps", 6, "--eval-every", 6, "--mesh", mesh, *more)

    return of


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_several_processes_train_as_one(arguments, tmp_path, count):
    mesh = "data=2,fsdp=2"
    finish(start(arguments(tmp_path / "one", mesh), 1, 4))
    first, *others = finish(start(arguments(tmp_path / "several", mesh), count, 4 // count))
    # Beside what Gloo says of its connections.
    assert "the drafter after step 6" in first and not any("drafter" in output for output in others)
    assert_alike(tmp_path / "several", tmp_path / "one")


@pytest.mark.slow
def test_one_process_is_told_to_stop_and_fewer_go_on(arguments, tmp_path):
    """All save the same step and end with 143; one process with another mesh then ends as an uncut run."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    long = ("--steps", 400, "--eval-every", 400, "--checkpoint-every", 400)
    processes = start(arguments(cut, "data=2,fsdp=2", *long), 2, 2)
    wait_until(lambda: trains(cut), processes)
    processes[1].send_signal(signal.SIGTERM)
    finish(processes, 143)
    saved = len(metrics(cut))
    assert [path.name for path in (cut / "checkpoints").iterdir()] == [str(saved)]
    assert saved < 400
    finish(start(arguments(cut, "fsdp=2,model=2", *long), 1, 4))
    finish(start(arguments(whole, "data=4", *long), 1, 4))
    for one, two in zip(metrics(cut), metrics(whole), strict=True):
        # Rounding differs between meshes, and many updates make it larger.
        if "loss" in one:
            np.testing.assert_allclose(one["loss"], two["loss"], rtol=0.05)
    np.testing.assert_allclose(metrics(cut)[saved]["loss"], metrics(whole)[saved]["loss"], rtol=1e-4)


def assert_told(returned: int, error: str) -> None:
    """A process has failed because another one has, and says so."""
    assert returned not in (0, 143)
    assert "another task died" in error or "failed, and the others end with it" in error, error[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_other(arguments, tmp_path, victim):
    processes = start(arguments(tmp_path / "run", "data=2,fsdp=2", *LONG), 2, 2)
    wait_until(lambda: trains(tmp_path / "run"), processes)
    processes[victim].kill()
    returned, _, error = ends(processes, 90)[1 - victim]
    assert_told(returned, error)


@pytest.mark.slow
def test_a_full_disk_of_one_process_ends_the_other(arguments, tmp_path):
    run = tmp_path / "run"
    options = (*LONG, "--checkpoint-every", 5, "--log-every", 1000)
    processes = start(arguments(run, "data=2,fsdp=2", *options), 2, 2, before_in={0: FULL_DISK})
    first, second = ends(processes, 200)
    assert first[0] == 2 and "checkpoint 5 could not be written: File too large" in first[2]
    assert_told(second[0], second[2])


@pytest.mark.slow
def test_what_all_processes_refuse_each_tells(arguments, tmp_path):
    for returned, _, error in ends(start(arguments(tmp_path / "run", "data=3"), 2, 2)):
        assert returned == 2 and "--mesh data=3: is about 3 devices, but there are 4" in error


@pytest.fixture
def cache_arguments(chat_target, data):
    def of(output: Path) -> list[str]:
        given = ("cache", "--target", chat_target, "--data", data, "--output", output, "--batch-size", 4)
        return [str(part) for part in given]

    return of


@pytest.mark.slow
def test_several_processes_write_the_cache_of_one(cache_arguments, arguments, tmp_path):
    """As do others that go on where one of several had a full disk; and several train on it as one."""
    one, three, cut = (tmp_path / name for name in ("one", "three", "cut"))
    finish(start(cache_arguments(one), before=SMALL_SHARDS))
    first, *others = finish(start(cache_arguments(three), 3, before=SMALL_SHARDS))
    assert "tokens/s" in first and not any("tokens" in output for output in others)
    assert contents(three) == contents(one) and read_manifest(one).shards > 6

    first, second = ends(start(cache_arguments(cut), 2, before=SMALL_SHARDS, before_in={1: FULL_DISK}), 200)
    assert second[0] == 2 and "File too large" in second[2]
    assert_told(first[0], first[2])
    assert not read_manifest(cut).complete
    finish(start(cache_arguments(cut), 3, before=SMALL_SHARDS))
    assert contents(cut) == contents(one)
    assert "complete already" in finish(start(cache_arguments(cut), 2, before=SMALL_SHARDS))[0]

    features = ("--features", one)
    finish(start(arguments(tmp_path / "alone", "data=2,fsdp=2", *features), 1, 4, SMALL_SHARDS))
    finish(start(arguments(tmp_path / "together", "data=2,fsdp=2", *features), 2, 2, SMALL_SHARDS))
    assert_alike(tmp_path / "together", tmp_path / "alone")


@pytest.mark.slow
def test_a_job_lacks_a_variable(arguments, tmp_path, one_line, monkeypatch):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    one_line([*arguments(tmp_path / "run", "data=8"), "--distributed"], "JAX_COORDINATOR_ADDRESS is None")
