"""Commands of `train` in processes of their own, one or several, and the end of them at any moment."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import jax

ROOT = Path(__file__).parents[2]
RUN = "; from train.__main__ import run; run()"


def start(
    arguments: list[str], count: int = 1, devices: int = 1, before: str = "", before_in: Mapping[int, str] | None = None
) -> list[subprocess.Popen]:
    """Processes of one job, each with so many devices.

    `before`: Python that runs before the command, and `before_in` what runs as well in some of the processes.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes = []
    for number in range(count):
        environment = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
            "XLA_FLAGS": re.sub(r"(device_count)=\d+", rf"\1={devices}", os.environ["XLA_FLAGS"]),
        }
        if count > 1:
            environment |= {
                "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
                "JAX_NUM_PROCESSES": str(count),
                "JAX_PROCESS_ID": str(number),
            }
        program = "; ".join(part for part in (before, (before_in or {}).get(number, "")) if part) or "pass"
        command = [sys.executable, "-c", program + RUN, *arguments, *(["--distributed"] if count > 1 else [])]
        processes.append(
            subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    return processes


def ends(processes: list[subprocess.Popen], seconds: float = 400) -> list[tuple[int, str, str]]:
    """Each one's exit code, and what it wrote to standard output and standard error."""
    try:
        outputs = [process.communicate(timeout=seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


def finish(processes: list[subprocess.Popen], code: int = 0) -> list[str]:
    """What each printed; all must end with the code."""
    outputs = ends(processes)
    for returned, _, error in outputs:
        assert returned == code, error[-3000:]
    return [output for _, output, _ in outputs]


def wait_until(reached: Callable[[], bool], processes: list[subprocess.Popen]) -> None:
    """Returns once `reached`; all processes must live on until then."""
    end = time.monotonic() + 300
    while not reached():
        if time.monotonic() > end or any(process.poll() is not None for process in processes):
            raise AssertionError(ends(processes, 1))
        time.sleep(0.01)


def killed(process: subprocess.Popen, reached: Callable[[], bool]) -> bool:
    """Kills a process once `reached`; whether that was before its end, which must be a good one."""
    while process.poll() is None and not reached():
        time.sleep(0.001)
    process.kill()
    _, error = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), error[-3000:]
    return process.returncode != 0


def contents(folder: Path) -> dict[str, bytes]:
    """Every file but the temporary ones that a killed run leaves."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.endswith((".tmp", ".__lock")))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
