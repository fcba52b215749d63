"""Whether a device computes in the type that weights are asked for in."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp

# Ampere's; before it there is no bfloat16 arithmetic.
_FIRST_WITH_BFLOAT16 = (8, 0)


def bfloat16_is_emulated(platform: str, compute_capability: str | None) -> bool:
    """Whether XLA computes bfloat16 products in float32 there, for an NVIDIA GPU older than Ampere such as a T4.

    `platform`, `compute_capability`: JAX's, such as "gpu" and "7.5"; other makers' GPUs have none of the kind.
    """
    numbers = (compute_capability or "").split(".")
    if platform != "gpu" or not all(number.isdecimal() for number in numbers):
        return False
    return tuple(map(int, numbers)) < _FIRST_WITH_BFLOAT16


def warn_if_emulated(dtype: Any, device: Any = None) -> None:
    """Warns that bfloat16 saves memory but no time on the device, by default the first one; the type stays as asked."""
    if dtype == "int8" or jnp.dtype(dtype) != jnp.bfloat16:
        return
    device = jax.devices()[0] if device is None else device
    capability = getattr(device, "compute_capability", None)
    if bfloat16_is_emulated(device.platform, capability):
        warnings.warn(
            f"bfloat16: {device.device_kind} (compute capability {capability}) has no bfloat16 arithmetic; it "
            "is converted to float32 for each product, which saves memory and no time; take float32 where that fits",
            RuntimeWarning,
            stacklevel=2,
        )
