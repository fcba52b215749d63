"""Products of a few rows with int8 weights on CPU: `int8_products.cc`, called through XLA's FFI.

The twin in plain XLA is `quantized.dequantize` and a product.
"""

import ctypes
import functools
import warnings
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int8

from dspark_jax.layers.kernels import build

_TARGET = "dspark_jax_int8_products"
_SOURCE = Path(__file__).with_suffix(".cc")
# What `path` chooses: the best that the processor has, vectors of one kind, or its matrix unit.
BEST, PORTABLE, AVX2, AVX512, AMX = -1, 0, 1, 2, 3


@functools.cache
def best_path() -> int | None:
    """The best path here; None, with a warning, where the kernel cannot be built.

    The first call builds the kernel, or finds it built, and registers it with XLA.
    """
    try:
        library = build.load(_SOURCE)
    except build.BuildError as error:
        warnings.warn(f"int8 weights will be slow: {error}", RuntimeWarning, stacklevel=2)
        return None
    jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(library.int8_products), platform="cpu")
    library.int8_products_best_path.restype = ctypes.c_int64
    return library.int8_products_best_path()


def int8_products(
    x: Float[Array, "rows in"],
    weights: Sequence[tuple[Int8[Array, "blocks groups 8 32 4"], Float[Array, "blocks groups 32"]]],
    outs: Sequence[int],
    path: int = BEST,
) -> Sequence[Float[Array, "rows out"]]:
    """x · Wᵀ for each weight, as `QuantizedWeight` stores it, all in one pass; float32.

    A row's result has the same bits whatever the number of rows. AMX reads each 32 activations of a row as 23-bit
    integers times a power of two, which loses no more than float32 sums do. Only where `best_path` is not None.
    """
    results = [jax.ShapeDtypeStruct((x.shape[0], out), jnp.float32) for out in outs]
    call = jax.ffi.ffi_call(_TARGET, results)
    return call(x, *(array for weight in weights for array in weight), path=np.int64(path))
