"""The confidence head: how likely slot k is accepted, given that all earlier slots are."""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from dspark_jax.config import DrafterConfig
from dspark_jax.layers.linear import Linear, declare_linear, linear, wide_dtype


@struct.dataclass
class ConfidenceHead:
    proj: Linear


def declare_confidence(config: DrafterConfig) -> ConfidenceHead:
    width = config.hidden_size + (config.markov_rank if config.confidence_head_with_markov else 0)
    return ConfidenceHead(proj=declare_linear(1, width, (None, None), True, config.initializer_range))


def confidence_logits(
    params: ConfidenceHead,
    config: DrafterConfig,
    previous: Float[Array, "*rows r"] | None,
    hidden: Float[Array, "*rows d"],
) -> Float[Array, "*rows"]:
    """w·[h_k; W1[x_{k-1}]] + b in float32, before the sigmoid; h_k alone if the head is configured so."""
    features = hidden
    if config.confidence_head_with_markov:
        features = jnp.concatenate([hidden, previous], axis=-1)
    wide = wide_dtype(features.dtype)
    return linear(params.proj, features.astype(wide))[..., 0]
