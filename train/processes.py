"""The processes of one training job, one a host as a rule: how they find each other, and who writes files."""

import os
import sys
import threading
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from orbax.checkpoint import multihost

from dspark_jax.io import InputError

_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
# Exit status of a run that a SIGTERM ended after its save: 128 + 15.
PREEMPTED = 143
# Seconds without a sign of life after which a process counts as dead, and JAX ends all others.
_HEARTBEAT = 30
# Seconds that a process which has failed waits for the others to end as well.
_PATIENCE = 10
# Milliseconds, ten days: how long one waits for another that is alive. JAX ends it if that one dies.
_LONGEST_WAIT = 10 * 24 * 3600 * 1000


def join() -> None:
    """Makes this process one of the job's, whose devices are then `jax.devices()`. Before anything else of JAX runs.

    The three variables say how many there are and where the first one listens; without them JAX asks the TPU pod, Slurm
    or Kubernetes that the processes run on.

    Raises:
      InputError: some of the variables are set, or nothing says where the others are.
    """
    address, *numbers = (os.environ.get(name) for name in _VARIABLES)
    if any(numbers):
        for name, value in zip(_VARIABLES, (address, *numbers), strict=True):
            if value is None or (name != _VARIABLES[0] and not value.isdecimal()):
                raise InputError(f"--distributed: {name} is {value}; set all of {', '.join(_VARIABLES)}, or none")
        count, number = map(int, numbers)
        if number >= count:
            raise InputError(f"--distributed: JAX_PROCESS_ID {number} must be under JAX_NUM_PROCESSES {count}")
        jax.distributed.initialize(address, count, number, heartbeat_timeout_seconds=_HEARTBEAT)
        return
    try:
        jax.distributed.initialize(heartbeat_timeout_seconds=_HEARTBEAT)
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"--distributed: {reason}; set {', '.join(_VARIABLES)} in every process") from error


def leave(code: int) -> NoReturn:
    """Ends this process, which has printed what was wrong, with an exit code.

    One of several that has failed does not wait at exit for others that wait for it: when it is gone, JAX ends them,
    and says so. Where all fail alike each ends by itself.
    """
    if code in (0, PREEMPTED) or not jax.distributed.is_initialized():
        sys.exit(code)
    number, count = jax.process_index(), jax.process_count()
    print(f"train: process {number} of {count} failed, and the others end with it", file=sys.stderr)
    together = threading.Thread(target=jax.distributed.shutdown, daemon=True)
    together.start()
    together.join(_PATIENCE)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def wait_for_all(name: str) -> None:
    """Returns when all processes have come here. `name`: of this place, where a process waits once."""
    multihost.get_barrier_sync_fn()(key=name, timeout_ms=_LONGEST_WAIT)


def is_first() -> bool:
    """Whether this process is the one that prints and writes files."""
    return jax.process_index() == 0


def say(line: str) -> None:
    """Prints a line once, whatever the number of processes."""
    if is_first():
        print(line)


def hidden_bar() -> bool | None:
    """tqdm's `disable`: all processes but the first hide their bars, and that one where nobody looks."""
    return None if is_first() else True


def spread(tree: Any, shardings: Any) -> Any:
    """Values that every process has whole, on the devices of all: each process gives its own devices' parts.

    `shardings`: one for all, or a tree of them.
    """
    if isinstance(shardings, Sharding):
        shardings = jax.tree.map(lambda _: shardings, tree)

    def put(x, sharding):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(put(jax.random.key_data(x), sharding))
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return jax.device_put(x, sharding)
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(put, tree, shardings)


def whole(tree: Any) -> Any:
    """The numpy values of arrays of any sharding, in every process; all processes must ask for them."""

    def gather(x):
        if isinstance(x.sharding, NamedSharding) and not x.is_fully_replicated:
            x = jax.device_put(x, NamedSharding(x.sharding.mesh, PartitionSpec()))
        return np.asarray(x)

    return jax.tree.map(gather, tree)
