"""Meshes as options write them: data=4,model=2."""

import math
import re
from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from dspark_jax.io.errors import InputError
from dspark_jax.sharding import make_mesh


def mesh_sizes(option: str, text: str, axes: Sequence[str]) -> dict[str, int]:
    """The size of every axis, in order, 1 for those that `text` does not name.

    Raises:
      InputError: a part of it is no axis and its size, or an axis is named twice.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in axes or axis in sizes or not re.fullmatch("[1-9][0-9]{0,8}", size):
            example = ",".join(f"{name}=2" for name in axes)
            raise InputError(f"{option} {text}: {part!r} is no axis and its size; write it as {example}")
        sizes[axis] = int(size)
    return {axis: sizes.get(axis, 1) for axis in axes}


def mesh_of_devices(option: str, text: str, axes: Sequence[str]) -> Mesh:
    """The mesh of all devices, of all processes.

    Raises:
      InputError: as `mesh_sizes`, or for another number of devices.
    """
    sizes = mesh_sizes(option, text, axes)
    asked, there = math.prod(sizes.values()), jax.device_count()
    if asked != there:
        raise InputError(f"{option} {text}: is about {asked} devices, but there are {there}")
    return make_mesh(**sizes)
