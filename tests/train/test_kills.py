"""`kill -9` at random moments of a run's whole life, each resumed: nothing of the uninterrupted run is lost."""

import random
import time
from pathlib import Path

import pytest

from tests.train.jobs import contents, finish, killed, start, wait_until
from tests.train.test_processes import metrics, trains
from train.cache_files import read_manifest

KILLS = 20
# One document a shard.
TINY_SHARDS = "import train.cache_layout as layout; layout.SHARD_BYTES = 1"


def after(seconds: float, reached=lambda: True):
    """True so long after the first call at which it is `reached`."""
    since = []

    def ready() -> bool:
        if not since and reached():
            since.append(time.monotonic())
        return bool(since) and time.monotonic() - since[0] >= seconds

    return ready


def last(run: Path) -> int:
    """The newest whole checkpoint's step, or 0."""
    return max((int(path.name) for path in (run / "checkpoints").glob("*") if path.name.isdecimal()), default=0)


def files(folder: Path) -> int:
    """How many files there are, temporary ones too."""
    return sum(path.is_file() for path in folder.rglob("*"))


def timed(arguments: list[str], moments: list) -> list[float]:
    """Runs a command to its end; seconds from its start to each of the moments, and to the end."""
    begin, seconds, processes = time.monotonic(), [], start(arguments)
    for reached in moments:
        wait_until(reached, processes)
        seconds.append(time.monotonic() - begin)
    finish(processes)
    return [*seconds, time.monotonic() - begin]


@pytest.mark.slow
def test_a_run_that_is_killed_at_any_moment_ends_as_an_uninterrupted_one(fit_arguments, tmp_path):
    """Most kills are between the start and a while after the first step, the others after the last checkpoint."""
    whole, cut, steps = tmp_path / "whole", tmp_path / "cut", 1500
    options = ("--steps", steps, "--eval-every", 75, "--checkpoint-every", 10)
    # A first run compiles.
    finish(start(fit_arguments(tmp_path / "first", *options, "--steps", 80)))
    first, saved, end = timed(fit_arguments(whole, *options), [lambda: trains(whole), lambda: last(whole) == steps])
    rng, kills, reached = random.Random(0), 0, []
    while kills < KILLS:
        moment = after(rng.uniform(0, 1.4 * first))
        if kills >= KILLS - 6:
            moment = after(rng.uniform(0, 1.2 * (end - saved)), lambda: last(cut) == steps)
        kills += killed(start(fit_arguments(cut, *options))[0], moment)
        reached.append(last(cut))
    finish(start(fit_arguments(cut, *options)))
    print(f"checkpoints at the kills: {reached}")
    assert 0 in reached and steps in reached and len(set(reached)) > 5
    assert metrics(cut) == metrics(whole)
    for file in ("config.json", "model.safetensors"):
        assert (cut / "drafter" / file).read_bytes() == (whole / "drafter" / file).read_bytes()


@pytest.mark.slow
def test_a_cache_that_is_killed_at_any_moment_ends_as_an_uninterrupted_one(chat_target, data, tmp_path):
    """Every other kill is a little after something was written, the others anywhere."""

    def arguments(folder: Path) -> list[str]:
        given = ("cache", "--target", chat_target, "--data", data, "--output", folder, "--batch-size", 1)
        return [str(part) for part in given]

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    finish(start(arguments(tmp_path / "first"), before=TINY_SHARDS))
    begin = time.monotonic()
    finish(start(arguments(whole), before=TINY_SHARDS))
    life, rng, written = time.monotonic() - begin, random.Random(0), []
    for kill in range(KILLS):
        there, moment = files(cut), after(rng.uniform(0, life))
        if kill % 2:
            moment = after(rng.uniform(0, 0.02), lambda there=there: files(cut) != there)
        killed(start(arguments(cut), before=TINY_SHARDS)[0], moment)
        written.append(files(cut))
    finish(start(arguments(cut), before=TINY_SHARDS))
    print(f"files at the kills: {written}")
    assert read_manifest(whole).shards == 30 and len(set(written)) > 5
    assert contents(cut) == contents(whole)
