"""`fit` as several processes: the numbers of one process, a SIGTERM that only one of them gets, the end of all."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

ROOT = Path(__file__).parents[2]


def start(arguments: list[str], count: int, devices: int) -> list[subprocess.Popen]:
    """Processes of one job, each with so many devices."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes = []
    for number in range(count):
        environment = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0",
        }
        if count > 1:
            environment |= {
                "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
                "JAX_NUM_PROCESSES": str(count),
                "JAX_PROCESS_ID": str(number),
            }
        command = [sys.executable, "-m", "train", *arguments, *(["--distributed"] if count > 1 else [])]
        processes.append(
            subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    return processes


def finish(processes: list[subprocess.Popen], code: int = 0) -> list[str]:
    """What each printed."""
    try:
        outputs = [process.communicate(timeout=400) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, error) in zip(processes, outputs, strict=True):
        assert process.returncode == code, error[-3000:]
    return [output for output, _ in outputs]


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


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
    end = time.monotonic() + 300
    while not (cut / "metrics.jsonl").exists() or not (cut / "metrics.jsonl").stat().st_size:
        assert time.monotonic() < end and all(process.poll() is None for process in processes)
        time.sleep(0.05)
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


@pytest.mark.slow
def test_a_job_lacks_a_variable(arguments, tmp_path, one_line, monkeypatch):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    one_line([*arguments(tmp_path / "run", "data=8"), "--distributed"], "JAX_COORDINATOR_ADDRESS is None")
