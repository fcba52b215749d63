"""From named tensors in files to parameter trees on devices, each device reading only its own part."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dspark_jax.io.errors import InputError
from dspark_jax.layers.quantized import QuantizedWeight, quantize
from dspark_jax.parameters import Parameter, is_parameter, named_leaves
from dspark_jax.sharding import named_sharding

Index = tuple[slice, ...]

# In place of a dtype: weights of products in int8, everything else in float32.
INT8 = "int8"


class TensorSource(Protocol):
    """Named tensors of a checkpoint. `path` is what errors name."""

    path: Path

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor."""
        ...

    def read(self, name: str, index: Index) -> np.ndarray:
        """A part of one tensor, in the dtype that the file stores."""
        ...


@runtime_checkable
class QuantizedSource(TensorSource, Protocol):
    """A source that may hold int8 weights, which it reads dequantised."""

    def quantized(self, name: str) -> QuantizedWeight | None:
        """A weight as it is stored; None for one that is not stored in int8."""
        ...


def stored_names(path: str, parameter: Parameter) -> list[str]:
    """The tensors that make one parameter: one, or one a layer where layers are stacked.

    `path` is the parameter's dotted path; a stacked one lacks the layer's number after `layers`.
    """
    if parameter.axes[:1] != ("layers",):
        return [path]
    before, _, after = path.partition("layers.")
    return [f"{before}layers.{layer}.{after}" for layer in range(parameter.shape[0])]


def check_tensors(
    source: TensorSource, declaration: Any, rename: Callable[[str], str] = str, ignored: Collection[str] = ()
) -> None:
    """Raises an InputError that names the first tensor that is missing, extra or of another shape."""
    found, expected = source.shapes(), {}
    for path, parameter in named_leaves(declaration).items():
        names = stored_names(path, parameter)
        shape = parameter.shape if names == [path] else parameter.shape[1:]
        expected |= {rename(name): shape for name in names}
    for name, shape in expected.items():
        if name not in found:
            raise InputError(f"{source.path}: tensor {name} {list(shape)} is missing")
        if found[name] != shape:
            raise InputError(
                f"{source.path}: tensor {name} has shape {list(found[name])}, but its config asks for {list(shape)}"
            )
    extra = sorted(set(found) - set(expected) - set(ignored))
    if extra:
        raise InputError(f"{source.path}: tensor {extra[0]} is not part of the model that its config describes")


def _read_weights(source: TensorSource, name: str, index: Index, dtype: Any) -> np.ndarray:
    part = source.read(name, index)
    if not jnp.issubdtype(part.dtype, jnp.floating):
        raise InputError(f"{source.path}: tensor {name} is stored as {part.dtype}; weights must be floating-point")
    with np.errstate(over="ignore"):
        part = part.astype(dtype)
    if not _finite(part):
        raise InputError(
            f"{source.path}: tensor {name} has values that are not finite in {dtype}; the checkpoint is damaged, get "
            "or make it again"
        )
    return part


def _finite(part: np.ndarray) -> bool:
    if part.dtype == jnp.bfloat16:
        # By the bits, five times as fast: NaN and infinity have all bits of the exponent.
        return not part.size or bool(np.max(part.view(np.uint16) & 0x7FFF) < 0x7F80)
    return bool(np.isfinite(part).all())


def load_parameters(
    source: TensorSource,
    declaration: Any,
    dtype: Any,
    *,
    rename: Callable[[str], str] = str,
    mesh: Mesh | None = None,
    head_dim: int = 1,
) -> Any:
    """The parameters of a declaration in `dtype` or "int8", checked before with `check_tensors`.

    With "int8" those that are `quantizable` are stored as `QuantizedWeight`, the others in float32; what the source
    holds in int8, a single layer's weight, is taken as it is. `rename` turns
    dotted paths into the file's names. With a mesh every array is sharded as its declaration says, otherwise arrays lie
    on the default device.

    Raises:
      InputError: a tensor that is not floating-point, or not finite in `dtype`.
      ValueError: "int8" with a mesh.
    """
    int8 = dtype == INT8
    if int8 and mesh is not None:
        raise ValueError("int8 weights cannot be sharded: load them without a mesh, or in another dtype")
    structure = jax.tree.structure(declaration, is_leaf=is_parameter)

    def load(path: str, parameter: Parameter) -> jax.Array | QuantizedWeight:
        leaf_dtype = jnp.dtype(parameter.dtype or (jnp.float32 if int8 else dtype))
        names = [rename(name) for name in stored_names(path, parameter)]

        def read(index: Index) -> np.ndarray:
            if parameter.axes[:1] != ("layers",):
                return _read_weights(source, names[0], index, leaf_dtype)
            return np.stack([_read_weights(source, name, index[1:], leaf_dtype) for name in names[index[0]]])

        whole = (slice(None),) * len(parameter.shape)
        if int8 and parameter.quantizable:
            stored = source.quantized(names[0]) if isinstance(source, QuantizedSource) and len(names) == 1 else None
            return quantize(read(whole)) if stored is None else stored
        if mesh is None:
            return jnp.asarray(read(whole))
        parts: dict[str, np.ndarray] = {}

        def read_once(index: Index) -> np.ndarray:
            """Devices that hold the same part share one reading of it."""
            key = repr(index)
            if key not in parts:
                parts[key] = read(index)
            return parts[key]

        return jax.make_array_from_callback(parameter.shape, named_sharding(parameter, mesh, head_dim), read_once)

    return structure.unflatten([load(path, parameter) for path, parameter in named_leaves(declaration).items()])
