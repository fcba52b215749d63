"""`fit` over several devices: the run of one device, and a run that goes on with another mesh."""

import os
import signal

import pytest

from tests.train.test_fit import at_step
from tests.train.test_processes import assert_alike, metrics
from train.__main__ import main

STEPS = ("--steps", 4, "--eval-every", 4)


@pytest.mark.slow
def test_a_run_goes_on_with_another_mesh_as_on_one_device(fit_arguments, tmp_path, monkeypatch):
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert main(fit_arguments(whole, *STEPS)) == 0
    with monkeypatch.context() as patch:
        at_step(patch, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert main(fit_arguments(run, *STEPS, "--mesh", "data=2,fsdp=2,model=2")) == 143
    assert len(metrics(run)) == 2
    assert main(fit_arguments(run, *STEPS, "--mesh", "fsdp=8")) == 0
    assert_alike(run, whole)


@pytest.mark.parametrize(
    ("mesh", "named"),
    [
        ("data=4", "--mesh data=4: is about 4 devices, but there are 8"),
        ("data=4,fdsp=2", "'fdsp=2' is no axis and its size; write it as data=2,fsdp=2,model=2"),
    ],
)
def test_bad_meshes(fit_arguments, one_line, tmp_path, mesh, named):
    one_line(fit_arguments(tmp_path / "run", "--mesh", mesh), named)
    assert not (tmp_path / "run").exists()
