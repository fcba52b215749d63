"""A run's checkpoints: all that is needed to go on exactly where a killed run was. Only here Orbax writes and reads.

One checkpoint holds the trainable parameters, the rest of the train state, and JSON (settings, the position of the
input pipeline, the best checkpoint so far, how far the metrics file had grown): nothing that belongs to a mesh or to
one of several processes.
"""

import functools
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging

from dspark_jax.drafters.kinds import DrafterParams
from dspark_jax.io import InputError
from dspark_jax.training.step import TrainState
from train.storage import storage_cause

# What the JSON of a checkpoint holds.
_NOTES: dict[str, type | tuple[type, ...]] = {
    "settings": dict, "drafter": dict, "target": str, "dtype": str, "data": dict,
    "metrics_bytes": int, "best": (dict, type(None)),
}  # fmt: skip


class _BestAndLast(ocp.checkpoint_managers.PreservationPolicy):
    """Keeps the newest checkpoint and the one that is best so far."""

    def __init__(self) -> None:
        self.best: int | None = None

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        steps = [checkpoint.step for checkpoint in checkpoints]
        return [step in (self.best, max(steps)) for step in steps]


@functools.cache
def _silence_failed_writes() -> None:
    """What Orbax logs about a failed write, `Checkpoints` says in one line.

    TensorStore's pending callbacks then find their event loop closed, which nothing else could catch.
    """
    logging.set_verbosity(logging.FATAL)
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    sys.unraisablehook = hook


def _barrier(*, key: str, timeout_ms: int) -> None:
    """Where the threads that write wait for those of other processes.

    Orbax brings a process that could not write here too, in a `finally`: it would wait for processes that wait for its
    part, and all of them for many minutes.
    """
    error = sys.exc_info()[1]
    if error is not None:
        raise error
    ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)


class Checkpoints:
    """The checkpoints in one folder; written in the background, whole or not at all, best and last kept.

    Raises:
      InputError: nothing can be written or read there. A checkpoint that could not be written leaves the earlier ones.
    """

    def __init__(self, folder: str | os.PathLike, read_only: bool = False) -> None:
        _silence_failed_writes()
        self.folder = Path(folder).absolute()
        self._policy = _BestAndLast()
        self._saving: int | None = None
        if read_only and not self.folder.is_dir():
            raise InputError(f"{folder}: no such folder; expected the checkpoints of a run")
        with self._reported("opened"):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._manager = ocp.CheckpointManager(
                self.folder,
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=self._policy,
                    cleanup_tmp_directories=not read_only,
                    read_only=read_only,
                    async_options=ocp.AsyncOptions(barrier_sync_fn=_barrier),
                ),
            )

    def last(self) -> int | None:
        """The newest whole checkpoint's step."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, notes: dict[str, Any], best: int | None) -> None:
        """Begins to write a checkpoint once the one before is written. `best`: the step of the best so far."""
        self.wait()
        self._policy.best, self._saving = best, step
        with self._reported("written"):
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    params=ocp.args.StandardSave(state.params),
                    rest=ocp.args.StandardSave(_rest(state)),
                    notes=ocp.args.JsonSave(notes),
                ),
            )

    def wait(self) -> None:
        """Returns when the last save is on disk."""
        with self._reported("written"):
            self._manager.wait_until_finished()

    def notes(self, step: int) -> dict[str, Any]:
        """The JSON of a checkpoint."""
        with self._reported("read", step):
            notes = self._manager.restore(step, args=ocp.args.Composite(notes=ocp.args.JsonRestore()))["notes"]
            for name, kind in _NOTES.items():
                if name not in notes or not isinstance(notes[name], kind):
                    raise ValueError(f"{name} is missing from its notes or malformed")
            if notes["best"] and type(notes["best"].get("step")) is not int:
                raise ValueError("best.step is missing from its notes or malformed")
            return notes

    def restore(self, step: int, state: TrainState) -> TrainState:
        """The saved state, in the shapes and shardings of `state`."""
        with self._reported("read", step):
            saved = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    params=ocp.args.StandardRestore(_abstract(state.params)),
                    rest=ocp.args.StandardRestore(_abstract(_rest(state))),
                ),
            )
        rest = saved["rest"]
        return TrainState(rest["step"], saved["params"], rest["optimizer"], jax.random.wrap_key_data(rest["key"]))

    def restore_params(self, step: int, params: DrafterParams, sharding: jax.sharding.Sharding) -> DrafterParams:
        """Only the trainable parameters, in the shapes of `params` (which may be abstract), laid out as `sharding` says
        whatever mesh they were trained on.
        """
        with self._reported("read", step):
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), params)
            arguments = ocp.args.Composite(params=ocp.args.StandardRestore(shapes))
            return self._manager.restore(step, args=arguments)["params"]

    def close(self) -> None:
        """Waits for the last save."""
        with self._reported("written"):
            self._manager.close()

    @contextmanager
    def _reported(self, what: str, step: int | None = None) -> Iterator[None]:
        """Orbax and TensorStore raise many kinds of errors for one broken or full disk."""
        try:
            yield
        except InputError:
            raise
        except Exception as error:
            step = self._saving if step is None else step
            cause = storage_cause(error)
            remedy = "remove it to go on from an earlier one" if what == "read" else "earlier ones are intact"
            place = self.folder if step is None else f"{self.folder}: checkpoint {step}"
            raise InputError(f"{place} could not be {what}: {cause}; {remedy}") from error


def _rest(state: TrainState) -> dict[str, Any]:
    return {"step": state.step, "optimizer": state.optimizer, "key": jax.random.key_data(state.key)}


def _abstract(tree: Any) -> Any:
    return jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)
