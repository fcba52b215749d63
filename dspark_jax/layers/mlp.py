"""Gated SiLU feed-forward layer."""

import jax
from flax import struct
from jaxtyping import Array, Float

from dspark_jax.config import DecoderConfig
from dspark_jax.layers.linear import Linear, declare_linear, linear, linears


@struct.dataclass
class MLP:
    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear


def declare_mlp(config: DecoderConfig) -> MLP:
    d, hidden, std = config.hidden_size, config.intermediate_size, config.initializer_range
    return MLP(
        gate_proj=declare_linear(hidden, d, ("mlp", "embed"), config.mlp_bias, std),
        up_proj=declare_linear(hidden, d, ("mlp", "embed"), config.mlp_bias, std),
        down_proj=declare_linear(d, hidden, ("embed", "mlp"), config.mlp_bias, std),
    )


def mlp(params: MLP, x: Float[Array, "*rows d"]) -> Float[Array, "*rows d"]:
    gate, up = linears([params.gate_proj, params.up_proj], x)
    return linear(params.down_proj, jax.nn.silu(gate) * up)
