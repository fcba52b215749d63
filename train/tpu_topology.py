"""Devices of a TPU topology that is not here, for which libtpu compiles all the same."""

import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import jax

from dspark_jax.io import InputError
from dspark_jax.planning.chips import Topology

# libtpu asks neither a metadata server nor other hosts who it is, whatever the type named, shares the machine with
# other processes that only compile, and keeps its log to itself.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_ID": "0",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}


def described_devices(topology: Topology) -> Sequence[Any]:
    """One device a chip.

    Raises:
      InputError: libtpu is not installed, or knows no such topology.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise InputError("plan compiles with libtpu, which is not installed: pip install 'dspark-jax[tpu-compile]'")
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # With libtpu there JAX would look for a TPU.
    jax.config.update("jax_platforms", "cpu")
    from jax.experimental import topologies

    options: dict[str, Any] = {}
    if topology.chip.chip_config is not None:
        options["chip_config_name"] = topology.chip.chip_config
    if topology.chips == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    try:
        devices = topologies.get_topology_desc(topology.name, "tpu", **options).devices
    except jax.errors.JaxRuntimeError as error:
        raise InputError(f"--topology {topology.name}: libtpu knows none: {str(error).splitlines()[0]}") from error
    if len(devices) != topology.chips:
        raise InputError(f"--topology {topology.name}: libtpu gives {len(devices)} devices for {topology.chips} chips")
    return devices
