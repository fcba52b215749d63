"""One declaration of each parameter, from which come its initial value, abstract shape, sharding and checks.

A declaration is a tree of the same structure as the parameters, with a `Parameter` at each leaf.
"""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


class Initializer(enum.Enum):
    NORMAL = "normal"
    ONES = "ones"
    ZEROS = "zeros"


@dataclasses.dataclass(frozen=True)
class Parameter:
    """Shape, logical axes (names of `sharding.RULES`, or None), initial value and an optional fixed dtype.

    A `quantizable` one, [out, in], may be stored as a `QuantizedWeight`.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    initializer: Initializer = Initializer.NORMAL
    standard_deviation: float = 0.02
    dtype: Any = None
    quantizable: bool = False

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"shape {self.shape} and axes {self.axes} differ in length")


def is_parameter(leaf: Any) -> bool:
    return isinstance(leaf, Parameter)


def map_declaration(function, declaration, *rest):
    """`jax.tree.map` that treats every `Parameter` as a leaf."""
    return jax.tree.map(function, declaration, *rest, is_leaf=is_parameter)


def initialize(declaration, key: jax.Array, dtype=jnp.float32):
    """Draws every parameter; the same key gives the same values whatever the mesh."""
    leaves, structure = jax.tree.flatten(declaration, is_leaf=is_parameter)
    keys = jax.random.split(key, len(leaves))

    def draw(parameter: Parameter, leaf_key: jax.Array) -> jax.Array:
        leaf_dtype = parameter.dtype or dtype
        match parameter.initializer:
            case Initializer.ONES:
                return jnp.ones(parameter.shape, leaf_dtype)
            case Initializer.ZEROS:
                return jnp.zeros(parameter.shape, leaf_dtype)
            case Initializer.NORMAL:
                normal = jax.random.normal(leaf_key, parameter.shape, jnp.float32)
                return (normal * parameter.standard_deviation).astype(leaf_dtype)

    return structure.unflatten([draw(leaf, leaf_key) for leaf, leaf_key in zip(leaves, keys, strict=True)])


def abstract(declaration, dtype=jnp.float32):
    """The tree of `jax.ShapeDtypeStruct` that the parameters have."""
    return map_declaration(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype or dtype), declaration)


def stack(declaration, count: int):
    """The declaration of `count` equal modules stored with a leading axis."""
    return map_declaration(
        lambda p: dataclasses.replace(p, shape=(count, *p.shape), axes=("layers", *p.axes)), declaration
    )


def named_leaves(tree, is_leaf: Callable[[Any], bool] = is_parameter) -> dict[str, Any]:
    """Leaves by dotted path, such as `layers.0.self_attn.q_proj.weight`."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in paths}


def count(declaration) -> int:
    """Number of scalars."""
    total = 0
    for parameter in jax.tree.leaves(declaration, is_leaf=is_parameter):
        size = 1
        for dimension in parameter.shape:
            size *= dimension
        total += size
    return total
