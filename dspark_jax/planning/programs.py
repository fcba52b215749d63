"""The programs of training and decoding, lowered for devices that need not be here, from shapes alone.

The lowering runs under `jax.set_mesh(mesh)`, the making of arguments without it: it computes a little, which devices
that are not there cannot. A lowered program is compiled by `.compile()`, which takes minutes.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from dspark_jax.config import DraftModelConfig, TargetConfig
from dspark_jax.decode_state import DecodeState, Requests
from dspark_jax.drafters.kinds import declare_drafter
from dspark_jax.layers.kv_cache import CACHE_AXES, LayerCache
from dspark_jax.parameters import abstract
from dspark_jax.sampling import request_keys, sampling_params
from dspark_jax.scheduling.policy import Policy
from dspark_jax.scheduling.survival import uncalibrated
from dspark_jax.scheduling.throughput import StepTable
from dspark_jax.serving.config import EngineConfig
from dspark_jax.serving.programs import draft_and_schedule, empty_state, verify_and_commit
from dspark_jax.sharding import partition_spec, shardings
from dspark_jax.targets.decoder import TargetParams, declare_target
from dspark_jax.training.anchors import Batch
from dspark_jax.training.step import TrainConfig, TrainState, abstract_train_state, train_step


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on each chip. `held`: what a program takes over from the one before, by name. `temporary`: activations and
    other values of its own. `program`: its code. `peak`: the most that is there at one time, by the compiler's account.
    """

    held: dict[str, int]
    temporary: int
    program: int
    peak: int


def bytes_per_chip(tree: Any) -> int:
    """Of the arrays of an abstract tree, which have shardings."""

    def size(x) -> int:
        shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
        # A key is two words.
        width = 8 if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x.dtype.itemsize
        return math.prod(shape) * width

    return sum(map(size, jax.tree.leaves(tree)))


def memory_of(compiled: jax.stages.Compiled, held: dict[str, Any]) -> Memory:
    """The compiler's account of a program whose arguments are the abstract trees `held`."""
    analysis = compiled.memory_analysis()
    arguments = analysis.argument_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    program = analysis.generated_code_size_in_bytes
    peak = max(analysis.peak_memory_in_bytes, arguments + analysis.temp_size_in_bytes) + program
    return Memory(
        {name: bytes_per_chip(tree) for name, tree in held.items()}, analysis.temp_size_in_bytes, program, peak
    )


def _placed(declaration: Any, mesh: Mesh, head_dim: int, dtype: Any) -> Any:
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        abstract(declaration, dtype),
        shardings(declaration, mesh, head_dim),
    )


def abstract_target(config: TargetConfig, mesh: Mesh, dtype: Any) -> TargetParams:
    """Shapes, dtypes and shardings of a target's parameters."""
    return _placed(declare_target(config), mesh, config.head_dim, dtype)


def abstract_drafter(config: DraftModelConfig, mesh: Mesh, dtype: Any) -> Any:
    """Shapes, dtypes and shardings of a whole drafter's parameters."""
    return _placed(declare_drafter(config), mesh, config.head_dim, dtype)


def abstract_batch(mesh: Mesh, parts: int, rows: int, length: int, anchors: int) -> Batch:
    """A global batch of `parts` times `rows` documents, one a row with so many anchors, spread over the mesh."""
    spec = partition_spec((parts, rows, length), (None, "batch", None), dict(mesh.shape))

    def array(dtype):
        return jax.ShapeDtypeStruct((parts, rows, length), dtype, sharding=NamedSharding(mesh, spec))

    ids, mask = array(jnp.int32), array(jnp.bool_)
    return Batch(ids, mask, ids, ids, row_anchors=min(anchors, length))


def train_arguments(
    config: TrainConfig, mesh: Mesh, dtype: Any, *, parts: int, rows: int, length: int
) -> tuple[TrainState, TargetParams, Batch]:
    """The arguments of `train_step`, abstract. `rows`: of all chips in one of the `parts`."""
    state = abstract_train_state(config, mesh)
    batch = abstract_batch(mesh, parts, rows, length, config.drafter.num_anchors)
    return state, abstract_target(config.target, mesh, dtype), batch


def lower_train_step(config: TrainConfig, state: TrainState, target: TargetParams, batch: Batch) -> jax.stages.Lowered:
    """The train step itself, which takes its state over."""
    return train_step.lower(state, target, batch, config=config)


def _blank_state(config: EngineConfig, dtype: Any) -> DecodeState:
    slots = config.slots
    requests = Requests(
        keys=request_keys(0, slots),
        sampling=sampling_params(slots),
        max_tokens=jnp.zeros(slots, jnp.int32),
        confidence_threshold=jnp.zeros(slots, jnp.float32),
    )
    return empty_state(config.decode, requests, config.capacity, dtype)


def _by_slot(tree: Any, mesh: Mesh, slots: int) -> Any:
    """Shardings by slot: of caches as they constrain themselves, of all else by their first axis."""

    def sharding(x, axes: Sequence[str | None]):
        spec = partition_spec(x.shape, axes, dict(mesh.shape))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    def place(node):
        if isinstance(node, LayerCache):
            return jax.tree.map(lambda x: sharding(x, ("layers", *CACHE_AXES)[-x.ndim :]), node)
        batched = node.ndim > 0 and node.shape[0] == slots
        return sharding(node, ("batch" if batched else None, *(None,) * (node.ndim - 1))[: node.ndim])

    return jax.tree.map(place, tree, is_leaf=lambda node: isinstance(node, LayerCache))


def verify_arguments(config: EngineConfig, mesh: Mesh, dtype: Any) -> tuple[TargetParams, Any, DecodeState, Any]:
    """Target, drafter, state and drafts: the arrays that `verify_and_commit` takes, abstract."""
    decode = config.decode
    target, drafter = abstract_target(decode.target, mesh, dtype), abstract_drafter(decode.drafter, mesh, dtype)
    state = _by_slot(jax.eval_shape(lambda: _blank_state(config, dtype)), mesh, config.slots)
    ended = jax.ShapeDtypeStruct((config.slots,), jnp.bool_)
    limit = jax.ShapeDtypeStruct((), jnp.int32)
    buckets = len(config.buckets)
    table = StepTable(
        jax.ShapeDtypeStruct((buckets,), jnp.int32), jax.ShapeDtypeStruct((buckets,), jnp.float32)
    )  # fmt: skip
    draft = functools.partial(draft_and_schedule, config=decode, policy=Policy())
    survival = uncalibrated(decode.depth)
    _, drafted = jax.eval_shape(
        lambda drafter, state, table, ended, limit: draft(
            drafter, table=table, survival=survival, state=state, ended=ended, limit=limit
        ),
        drafter,
        state,
        table,
        ended,
        limit,
    )
    return target, drafter, state, _by_slot(drafted, mesh, config.slots)


def lower_verify_step(
    config: EngineConfig, target: TargetParams, drafter: Any, state: DecodeState, drafted: Any
) -> jax.stages.Lowered:
    """The verification of the largest bucket, and the commit."""
    return verify_and_commit.lower(target, drafter, config.decode, config.buckets[-1], state, drafted)
