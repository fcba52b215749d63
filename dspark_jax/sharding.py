"""Logical axes to mesh axes, in one table."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from dspark_jax.parameters import Parameter, map_declaration

# A mesh axis that is not there, or whose size does not divide the dimension, leaves that dimension whole. "embed" is
# the width of parameters alone: activations keep theirs whole.
RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "embed": ("fsdp",),
    "vocab": ("model",),
    "heads": ("model",),
    "kv_heads": ("model",),
    "mlp": ("model",),
}


MESH_AXES = ("data", "model")
TRAIN_MESH_AXES = ("data", "fsdp", "model")


def make_mesh(data: int, model: int, devices: Sequence[Any] | None = None, *, fsdp: int | None = None) -> Mesh:
    """A mesh ("data", "model") with Auto axes, the mode the library's internals are written for.

    `fsdp`: with it the mesh is ("data", "fsdp", "model"): rows of a batch are spread over data and fsdp, and each
    parameter over fsdp and model, to be gathered where it is used.
    """
    axes, sizes = (MESH_AXES, (data, model)) if fsdp is None else (TRAIN_MESH_AXES, (data, fsdp, model))
    devices = (jax.devices() if devices is None else devices)[: math.prod(sizes)]
    # Not `jax.make_mesh`, which cannot spread an axis of 8 over a torus of 4x4.
    placed = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    return Mesh(placed, axes, axis_types=(AxisType.Auto,) * len(axes))


def mesh_of(x: Array) -> str:
    """The mesh that an array lies on, as "data=4,model=2"; a single device is a mesh too."""
    shape = x.sharding.mesh.shape if isinstance(x.sharding, NamedSharding) else dict.fromkeys(MESH_AXES, 1)
    return ",".join(f"{axis}={size}" for axis, size in shape.items())


def partition_spec(shape: Sequence[int], axes: Sequence[str | None], mesh_shape: dict[str, int]) -> PartitionSpec:
    """The mesh axes of each dimension, by its logical axis."""

    def place(size: int, axis: str | None) -> str | tuple[str, ...] | None:
        placed: list[str] = []
        for mesh_axis in RULES.get(axis, ()) if axis else ():
            parts = math.prod(mesh_shape[name] for name in placed) * mesh_shape.get(mesh_axis, 1)
            if mesh_axis in mesh_shape and size % parts == 0:
                placed.append(mesh_axis)
        return tuple(placed) if len(placed) > 1 else placed[0] if placed else None

    return PartitionSpec(*(place(size, axis) for size, axis in zip(shape, axes, strict=True)))


def parameter_spec(parameter: Parameter, mesh_shape: dict[str, int], head_dim: int = 1) -> PartitionSpec:
    """The mesh axes of one parameter. Projections to heads are cut between heads only, never inside one."""
    shape = [
        size // head_dim if axis in ("heads", "kv_heads") else size
        for size, axis in zip(parameter.shape, parameter.axes, strict=True)
    ]
    return partition_spec(shape, parameter.axes, mesh_shape)


def named_sharding(parameter: Parameter, mesh: Mesh, head_dim: int = 1) -> NamedSharding:
    """Sharding of one parameter (`parameter_spec`)."""
    return NamedSharding(mesh, parameter_spec(parameter, dict(mesh.shape), head_dim))


def shardings(declaration, mesh: Mesh, head_dim: int = 1):
    """The sharding tree of a declaration."""
    return map_declaration(lambda parameter: named_sharding(parameter, mesh, head_dim), declaration)


def batch_axes(mesh) -> tuple[str, ...]:
    """The mesh axes that rows are spread over."""
    return tuple(axis for axis in RULES["batch"] if axis in mesh.shape)


def constrain(x: Array, axes: Sequence[str | None]) -> Array:
    """`with_sharding_constraint` by logical axes under the mesh of `jax.set_mesh`; without a mesh, x itself."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or math.prod(mesh.shape.values()) == 1:
        return x
    return jax.lax.with_sharding_constraint(x, partition_spec(x.shape, axes, dict(mesh.shape)))


def gather_width(table: Array) -> Array:
    """A table [rows, width] with whole rows, before some are taken: XLA cannot take parts of rows for parts of a batch
    without replicating both. Without "fsdp", which alone cuts rows, the table itself.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.shape.get("fsdp", 1) == 1:
        return table
    return jax.lax.with_sharding_constraint(table, PartitionSpec(PartitionSpec.UNCONSTRAINED, None))


def constrain_parameters(declaration, params, head_dim: int = 1):
    """`params`, or what has their structure such as gradients, laid out as declared; without a mesh, `params`."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or math.prod(mesh.shape.values()) == 1:
        return params

    def place(parameter: Parameter, x: Array) -> Array:
        return jax.lax.with_sharding_constraint(x, parameter_spec(parameter, dict(mesh.shape), head_dim))

    return map_declaration(place, declaration, params)


def on_own_rows(function, shared, rows):
    """`function(shared, rows)` on each device's own rows: the leading axis of every array of `rows` and of the results.
    `shared` is whole to all of them, but for its parts over the mesh's other axes, which XLA goes on to partition.

    For loops over positions: each device loops over its own, and skips what none of its own needs.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = batch_axes(mesh) if not mesh.empty else ()
    count = jax.tree.leaves(rows)[0].shape[0]
    parts = math.prod(mesh.shape[axis] for axis in axes)
    if parts == 1 or count % parts:
        return function(shared, rows)
    spec = PartitionSpec(axes)
    mapped = jax.shard_map(function, in_specs=(PartitionSpec(), spec), out_specs=spec, axis_names=set(axes))
    return mapped(shared, rows)


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
