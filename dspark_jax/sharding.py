"""Logical axes to mesh axes, in one table."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from dspark_jax.parameters import Parameter, map_declaration

# A mesh without an axis named here, or whose size does not divide the dimension, leaves that dimension whole.
RULES: dict[str, str] = {
    "batch": "data",
    "vocab": "model",
    "heads": "model",
    "kv_heads": "model",
    "mlp": "model",
}


MESH_AXES = ("data", "model")


def make_mesh(data: int, model: int, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh ("data", "model") with Auto axes, the mode the library's internals are written for."""
    return jax.make_mesh((data, model), MESH_AXES, (AxisType.Auto,) * 2, devices=devices)


def mesh_of(x: Array) -> str:
    """The mesh that an array lies on, as "data=4,model=2"; a single device is a mesh too."""
    shape = x.sharding.mesh.shape if isinstance(x.sharding, NamedSharding) else dict.fromkeys(MESH_AXES, 1)
    return ",".join(f"{axis}={size}" for axis, size in shape.items())


def partition_spec(shape: Sequence[int], axes: Sequence[str | None], mesh_shape: dict[str, int]) -> PartitionSpec:
    def place(size: int, axis: str | None) -> str | None:
        mesh_axis = RULES.get(axis) if axis else None
        return mesh_axis if mesh_axis in mesh_shape and size % mesh_shape[mesh_axis] == 0 else None

    return PartitionSpec(*(place(size, axis) for size, axis in zip(shape, axes, strict=True)))


def named_sharding(parameter: Parameter, mesh: Mesh, head_dim: int = 1) -> NamedSharding:
    """Sharding of one parameter. Projections to heads are cut between heads only, never inside one."""
    shape = [
        size // head_dim if axis in ("heads", "kv_heads") else size
        for size, axis in zip(parameter.shape, parameter.axes, strict=True)
    ]
    return NamedSharding(mesh, partition_spec(shape, parameter.axes, dict(mesh.shape)))


def shardings(declaration, mesh: Mesh, head_dim: int = 1):
    """The sharding tree of a declaration."""
    return map_declaration(lambda parameter: named_sharding(parameter, mesh, head_dim), declaration)


def constrain(x: Array, axes: Sequence[str | None]) -> Array:
    """`with_sharding_constraint` by logical axes under the mesh of `jax.set_mesh`; without a mesh, x itself."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or math.prod(mesh.shape.values()) == 1:
        return x
    return jax.lax.with_sharding_constraint(x, partition_spec(x.shape, axes, dict(mesh.shape)))


def under_auto_axes(function):
    """Bridges a caller's explicit mesh to the Auto axes that internals are written for; results are replicated."""

    @functools.wraps(function)
    def bridged(*arguments, **keywords):
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or AxisType.Explicit not in mesh.axis_types:
            return function(*arguments, **keywords)
        return jax.sharding.auto_axes(function, out_sharding=PartitionSpec())(*arguments, **keywords)

    return bridged
