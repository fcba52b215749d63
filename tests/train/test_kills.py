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


@pytest.mark.slow
def test_a_run_that_is_killed_at_any_moment_ends_as_an_uninterrupted_one(fit_arguments, tmp_path):
    """Kills while it starts, around checkpoints, and after the last of them."""
    whole, cut, steps = tmp_path / "whole", tmp_path / "cut", 1000
    options = ("--steps", steps, "--eval-every", 50, "--checkpoint-every", 10)
    # A first run compiles.
    finish(start(fit_arguments(tmp_path / "first", *options, "--steps", 60)))
    begin, processes = time.monotonic(), start(fit_arguments(whole, *options))
    wait_until(lambda: trains(whole), processes)
    first = time.monotonic() - begin
    wait_until(lambda: last(whole) == steps, processes)
    begin = time.monotonic()
    finish(processes)
    end = time.monotonic() - begin
    rng, kills, saved = random.Random(0), 0, []
    for kill in range(KILLS):
        if kill % 4 == 0:
            goal, seconds = 0, rng.uniform(0, first)
        elif kill < KILLS - 5:
            goal, seconds = last(cut) + 10 * rng.randint(1, 12), rng.uniform(0, 0.2)
        else:
            goal, seconds = steps, rng.uniform(0, end)
        kills += killed(start(fit_arguments(cut, *options))[0], after(seconds, lambda goal=goal: last(cut) >= goal))
        saved.append(last(cut))
    finish(start(fit_arguments(cut, *options)))
    print(f"{kills} kills, after them the last checkpoints {saved}")
    assert kills > KILLS // 2 and steps in saved and len(set(saved)) > 5
    assert metrics(cut) == metrics(whole)
    for file in ("config.json", "model.safetensors"):
        assert (cut / "drafter" / file).read_bytes() == (whole / "drafter" / file).read_bytes()


@pytest.mark.slow
def test_a_cache_that_is_killed_at_any_moment_ends_as_an_uninterrupted_one(chat_target, records, write_rows, tmp_path):
    """Kills while it starts, while shards are written, and around the last of them."""
    data, shards = write_rows(tmp_path / "data.jsonl", records * 4), 120

    def arguments(folder: Path) -> list[str]:
        given = ("cache", "--target", chat_target, "--data", data, "--output", folder, "--batch-size", 1)
        return [str(part) for part in given]

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    finish(start(arguments(tmp_path / "first"), before=TINY_SHARDS))
    begin, processes = time.monotonic(), start(arguments(whole), before=TINY_SHARDS)
    wait_until(whole.exists, processes)
    first = time.monotonic() - begin
    finish(processes)
    rng, kills, written = random.Random(0), 0, []
    for kill in range(KILLS):
        goal, seconds = files(cut) + rng.randint(1, 10), rng.uniform(0, 0.02)
        if kill % 4 == 0:
            goal, seconds = 0, rng.uniform(0, first)
        elif kill >= KILLS - 4:
            goal = files(whole) - 4
        moment = after(seconds, lambda goal=goal: files(cut) >= goal)
        kills += killed(start(arguments(cut), before=TINY_SHARDS)[0], moment)
        written.append(files(cut))
    finish(start(arguments(cut), before=TINY_SHARDS))
    print(f"{kills} kills, after them so many files {written}")
    assert read_manifest(whole).shards == shards and kills > KILLS // 2 and len(set(written)) > 5
    assert contents(cut) == contents(whole)
