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


def shard_map_by_axes(function, in_axes: Sequence[Sequence[str | None]], out_axes: Sequence[Sequence[str | None]]):
    """`function` on each device's own part, by the logical axes of its arguments and of the tuple it returns; for what
    XLA cannot partition, such as a kernel. Without a mesh, the function itself.

    Heads are cut only where heads of keys can be cut too, so that each query head stays with its keys.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or math.prod(mesh.shape.values()) == 1:
        return function

    def sharded(*arguments):
        sizes: dict[str, int] = {}
        for x, axes in zip(arguments, in_axes, strict=True):
            for size, axis in zip(x.shape, axes, strict=True):
                if axis is not None:
                    sizes[axis] = math.gcd(size, sizes.get(axis, 0))
        sizes["heads"] = sizes["kv_heads"]

        def specs(all_axes):
            shape_of = dict(mesh.shape)
            return tuple(partition_spec([sizes.get(a, 1) for a in axes], axes, shape_of) for axes in all_axes)

        # Replicas do the same work, which the checker cannot see through a kernel.
        mapped = jax.shard_map(function, in_specs=specs(in_axes), out_specs=specs(out_axes), check_vma=False)
        return mapped(*arguments)

    return sharded


def under_auto_axes(function):
    """Bridges a caller's explicit mesh to the Auto axes that internals are written for; results are replicated."""

    @functools.wraps(function)
    def bridged(*arguments, **keywords):
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or AxisType.Explicit not in mesh.axis_types:
            return function(*arguments, **keywords)
        return jax.sharding.auto_axes(function, out_sharding=PartitionSpec())(*arguments, **keywords)

    return bridged
