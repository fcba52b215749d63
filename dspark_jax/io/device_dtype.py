"""Whether a device computes in the type that weights are asked for in."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax.nvidia import AMPERE, generation


def bfloat16_is_emulated(platform: str, compute_capability: str | None) -> bool:
    """Whether XLA computes bfloat16 products in float32 there, for an NVIDIA GPU older than Ampere such as a T4.

    `platform`, `compute_capability`: of a `jax.Device`, such as "gpu" and "7.5".
    """
    nvidia = generation(platform, compute_capability)
    return nvidia is not None and nvidia < AMPERE


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
