"""The training loop: dispatches steps, reads each one's metrics a step later, evaluates, saves, resumes."""

import dataclasses
import math
import operator
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

from dspark_jax.drafters.kinds import DrafterParams
from dspark_jax.targets.decoder import TargetParams
from dspark_jax.training.step import TrainConfig, TrainState, eval_step, train_step, train_step_metrics
from train.checkpoints import Checkpoints
from train.data import to_batch
from train.fit_config import FitConfig
from train.metrics import HELD_OUT, MetricsLog, NoLog
from train.processes import PREEMPTED, hidden_bar, is_first, say, spread

Rows = Mapping[str, np.ndarray]
BEST_BY = "expected_accepted_length"


@dataclasses.dataclass(frozen=True)
class Best:
    """The best evaluation so far."""

    step: int
    value: float


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run is made of. `notes` is the part of a checkpoint's JSON that never changes."""

    config: FitConfig
    train: TrainConfig
    target: TargetParams
    data: grain.DatasetIterator
    held_out: Callable[[], Iterable[Rows]]
    checkpoints: Checkpoints
    notes: dict[str, Any]
    mesh: Mesh | None = None


def evaluate(run: Run, params: DrafterParams) -> dict[str, np.ndarray]:
    """Means over the held-out documents, at the same anchors each time."""
    key, sums = jax.random.key(run.config.seed), None
    if run.mesh is not None:
        key = spread(key, NamedSharding(run.mesh, PartitionSpec()))
    for index, rows in enumerate(tqdm(run.held_out(), "held out", unit=" batches", leave=False, disable=hidden_bar())):
        batch, batch_key = to_batch(rows, run.mesh), jax.random.fold_in(key, index)
        for part in range(len(batch.tokens)):
            part_of_batch = jax.tree.map(operator.itemgetter(part), batch)
            new = eval_step(params, run.target, part_of_batch, batch_key, run.train)
            sums = new if sums is None else jax.tree.map(jnp.add, sums, new)
    return jax.device_get(train_step_metrics(sums, run.train))


def fit(run: Run, state: TrainState) -> int:
    """Trains from the last checkpoint, or from `state` if there is none, and returns the best checkpoint's step.

    Raises:
      InputError: a checkpoint or the metrics could not be written or read.
      SystemExit: 143 after a SIGTERM's save, 1 after too many non-finite updates.
    """
    config, checkpoints, best, position = run.config, run.checkpoints, None, 0
    start = checkpoints.last() or 0
    if start:
        notes = checkpoints.notes(start)
        position, best = notes["metrics_bytes"], notes["best"] and Best(**notes["best"])
        state = checkpoints.restore(start, state)
        run.data.set_state(notes["data"])
        say(f"{config.output}: resumed after step {start}")
    total = run.train.total_steps
    if start == total:
        return total if best is None else best.step
    with (
        _sigterm() as stopped,
        MetricsLog(config.output, position, start) if is_first() else NoLog() as log,
        tqdm(total=total, initial=start, unit=" steps", disable=hidden_bar(), dynamic_ncols=True) as bar,
    ):
        pending = None
        for step in range(start + 1, total + 1):
            rows = next(run.data)
            state, metrics = train_step(state, run.target, to_batch(rows, run.mesh), run.train)
            if pending is not None:
                _report(config, log, bar, *pending)
            pending = (step, metrics, rows["record"])
            stop, last = _agreed(stopped, step), step == total
            evaluating = last or step % config.eval_every == 0
            if not (evaluating or stop or step % config.checkpoint_every == 0):
                continue
            _report(config, log, bar, *pending)
            pending = None
            improved = False
            if evaluating:
                held_out = evaluate(run, state.params)
                log.write(step, held_out, HELD_OUT)
                value = float(held_out[BEST_BY])
                improved = math.isfinite(value) and (best is None or value > best.value)
                best = Best(step, value) if improved else best
            if improved or stop or last or step % config.checkpoint_every == 0:
                notes = {
                    "data": run.data.get_state(),
                    "metrics_bytes": log.position,
                    "best": best and dataclasses.asdict(best),
                }
                checkpoints.save(step, state, run.notes | notes, best and best.step)
            if stop and not last:
                checkpoints.wait()
                bar.write(f"{config.output}: stopped and saved after step {step}", file=sys.stderr)
                raise SystemExit(PREEMPTED)
        checkpoints.wait()
    return total if best is None else best.step


def _report(
    config: FitConfig, log: MetricsLog | NoLog, bar: tqdm, step: int, metrics: Any, records: np.ndarray
) -> None:
    """Reads a step's metrics, for which the device may still be working on the next step."""
    values = jax.device_get(metrics)
    in_a_row = int(values.pop("not_finite_in_a_row"))
    if step % config.log_every == 0 or in_a_row:
        log.write(step, values)
        bar.set_postfix_str(f"loss {values['loss']:.3f}, length {values[BEST_BY]:.2f}", refresh=False)
    bar.update(step - bar.n)
    if in_a_row:
        names = ", ".join(map(str, sorted(records.tolist())))
        bar.write(f"step {step}: not finite, update skipped; records {names}", file=sys.stderr)
    if in_a_row >= config.max_not_finite:
        bar.write(f"{config.output}: {in_a_row} non-finite updates in a row, stopped at step {step}", file=sys.stderr)
        raise SystemExit(1)


def _agreed(stopped: threading.Event, step: int) -> bool:
    """Whether to stop after this step, in all processes: one that is told to tells the others of a step to come."""
    return multihost_utils.reached_preemption_sync_point(step) if jax.process_count() > 1 else stopped.is_set()


@contextmanager
def _sigterm() -> Iterator[threading.Event]:
    """An event that a SIGTERM sets, in the main thread, instead of ending the process; one of several has JAX's own
    handler (`_agreed`).
    """
    stopped = threading.Event()
    if jax.process_count() > 1 or threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    before = signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGTERM, before)
