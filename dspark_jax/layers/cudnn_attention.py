"""cuDNN's fused attention, for long runs of queries in bfloat16 on NVIDIA GPUs."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dspark_jax.nvidia import AMPERE, generation

_WIDEST_HEAD = 128


def _has_cudnn() -> bool:
    """Whether this machine's device is an NVIDIA GPU that it runs on."""
    device = jax.devices()[0]
    nvidia = generation(device.platform, getattr(device, "compute_capability", None))
    return nvidia is not None and nvidia >= AMPERE


def serves(q: Float[Array, "R T heads D"], k: Float[Array, "R kv_heads D S"]) -> bool:
    """Whether `cudnn_attention` can be traced here, with gradients, for such queries and keys.

    JAX asks for cuDNN's version when it traces the call, so that on a machine without a GPU it cannot be a branch that
    is merely never taken.
    """
    width, even = q.shape[-1], q.shape[1] % 2 == 0 and k.shape[-1] % 2 == 0
    return q.dtype == jnp.bfloat16 and width % 8 == 0 and width <= _WIDEST_HEAD and even and _has_cudnn()


def cudnn_attention(
    q: Float[Array, "R T heads D"],
    k: Float[Array, "R kv_heads D S"],
    v: Float[Array, "R kv_heads S D"],
    mask: Bool[Array, "R T S"],
) -> Float[Array, "R T heads D"]:
    """As `attention.attention`. The mask goes as a bias, the one form that documents, windows and cache slots share."""
    keys, values = jnp.transpose(k, (0, 3, 1, 2)), jnp.moveaxis(v, 1, 2)
    return jax.nn.dot_product_attention(q, keys, values, mask=mask[:, None], implementation="cudnn")
