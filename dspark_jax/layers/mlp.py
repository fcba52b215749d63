"""Gated SiLU feed-forward layer."""

from typing import Any, Self

import jax
from flax import struct
from jaxtyping import Array, Float

from dspark_jax.config import DecoderConfig
from dspark_jax.layers.linear import FusedLinear, Linear, declare_linear, fuse, linear, linears


@struct.dataclass
class MLP:
    """`gate_up_proj` stands in the place of the first two where they are fused."""

    gate_proj: Linear | None
    up_proj: Linear | None
    down_proj: Linear
    gate_up_proj: FusedLinear | None = None

    def fused(self) -> Self:
        return self.replace(gate_proj=None, up_proj=None, gate_up_proj=fuse([self.gate_proj, self.up_proj]))


def declare_mlp(config: DecoderConfig) -> MLP:
    d, hidden, std = config.hidden_size, config.intermediate_size, config.initializer_range
    return MLP(
        gate_proj=declare_linear(hidden, d, ("mlp", "embed"), config.mlp_bias, std),
        up_proj=declare_linear(hidden, d, ("mlp", "embed"), config.mlp_bias, std),
        down_proj=declare_linear(d, hidden, ("embed", "mlp"), config.mlp_bias, std),
    )


def mlp(params: MLP, x: Float[Array, "*rows d"]) -> Float[Array, "*rows d"]:
    layers: Any = params.gate_up_proj or [params.gate_proj, params.up_proj]
    gate, up = linears(layers, x)
    return linear(params.down_proj, jax.nn.silu(gate) * up)
