"""The processes of one training job, one a host as a rule: how they find each other, and who writes files."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from dspark_jax.io import InputError

_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


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
        jax.distributed.initialize(address, count, number)
        return
    try:
        jax.distributed.initialize()
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"--distributed: {reason}; set {', '.join(_VARIABLES)} in every process") from error


def is_first() -> bool:
    """Whether this process is the one that prints and writes files."""
    return jax.process_index() == 0


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
