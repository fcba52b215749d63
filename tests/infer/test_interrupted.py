"""Ctrl-C ends the programs with exit code 130 and without a traceback, while they import and while they work."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GOLDENS = ROOT / "tests" / "goldens"
COMMANDS = {"infer": ["generate", "--no-drafter"], "train": ["regenerate"]}


# The last may meet a compiled program, which ends before Python hears of the signal.
@pytest.mark.parametrize("delay", [0, 0.3, pytest.param(1.5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("module", COMMANDS)
def test_ctrl_c(module, delay, tmp_path):
    """`delay`: seconds after imports have begun; an interpreter that only starts can be taught nothing."""
    options = {"target": GOLDENS / "target", "prompts": GOLDENS / "prompts.jsonl", "output": tmp_path / "out.jsonl"}
    options["max-new-tokens"] = 900
    words = [*COMMANDS[module], *(str(word) for name, value in options.items() for word in (f"--{name}", value))]
    errors = tmp_path / "errors.txt"
    with (
        open(errors, "w") as file,
        subprocess.Popen(
            [sys.executable, "-X", "importtime", "-m", module, *words],
            cwd=ROOT,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stderr=file,
        ) as process,
    ):
        try:
            # JAX is imported only when Ctrl-C is taken care of.
            while not re.search(r"\| +jax\.", errors.read_text()):
                assert process.poll() is None
                time.sleep(0.002)
            time.sleep(delay)
            process.send_signal(signal.SIGINT)
            code = process.wait(timeout=300)
        finally:
            process.kill()
    said = [line for line in errors.read_text().splitlines() if not line.startswith("import time:")]
    assert code == 130, said
    assert not any("Traceback" in line or "Exception" in line for line in said)
