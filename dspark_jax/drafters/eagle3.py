"""The Eagle3 drafter's parameters, and what its layer reads (EAGLE-3, arXiv 2503.01840). `pairs` runs the layer.

Keys, queries and values are made from 2d numbers: the normed embedding of a token and the normed hidden state before
it. That state is fc of the target's tapped layers, or, from the second draft on, the layer's own last output.
"""

from typing import ClassVar

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from dspark_jax.config import Eagle3Config
from dspark_jax.layers.attention import Attention, declare_attention
from dspark_jax.layers.linear import Embedding, Linear, declare_embedding, declare_linear, linear
from dspark_jax.layers.mlp import MLP, declare_mlp
from dspark_jax.layers.norm import Norm, declare_norm, rms_norm
from dspark_jax.parameters import Parameter


@struct.dataclass
class Midlayer:
    """The layer; `input_layernorm` is of the embedding, `hidden_norm` of the hidden state."""

    input_layernorm: Norm
    hidden_norm: Norm
    self_attn: Attention
    post_attention_layernorm: Norm
    mlp: MLP


@struct.dataclass
class Eagle3Params:
    """Field paths are the tensor names of EAGLE-3 and SpecForge.

    `embed_tokens` is a frozen copy of the target's; the head is the drafter's own. `draft_token_ids` lists, ascending,
    the target id of each row of a reduced draft vocabulary; it is None when the vocabulary is whole.
    """

    FROZEN: ClassVar[tuple[str, ...]] = ("embed_tokens",)

    embed_tokens: Embedding | None
    fc: Linear
    midlayer: Midlayer
    norm: Norm
    lm_head: Linear | None
    draft_token_ids: Int[Array, "V_d"] | None = None


def declare_drafter(config: Eagle3Config) -> Eagle3Params:
    d, std = config.hidden_size, config.initializer_range
    return Eagle3Params(
        embed_tokens=declare_embedding(config.vocab_size, d, standard_deviation=std),
        fc=declare_linear(d, len(config.target_layer_ids) * d, ("embed", None), standard_deviation=std),
        midlayer=Midlayer(
            input_layernorm=declare_norm(d),
            hidden_norm=declare_norm(d),
            self_attn=declare_attention(config, 2 * d),
            post_attention_layernorm=declare_norm(d),
            mlp=declare_mlp(config),
        ),
        norm=declare_norm(d),
        lm_head=declare_linear(config.draft_vocab_size, d, ("vocab", "embed"), standard_deviation=std),
        draft_token_ids=Parameter((config.draft_vocab_size,), (None,), dtype=jnp.int32)
        if config.reduced_vocabulary
        else None,
    )


def layer(params: Eagle3Params) -> Midlayer:
    return params.midlayer


def fuse(params: Eagle3Params, config: Eagle3Config, features: Float[Array, "*rows features"]) -> Array:
    """The hidden state [*rows, d] that stands for the tapped layers."""
    return linear(params.fc, features)


def mix(
    params: Eagle3Params, config: Eagle3Config, embedded: Float[Array, "*rows d"], hidden: Float[Array, "*rows d"]
) -> tuple[Float[Array, "*rows d"], Float[Array, "*rows 2d"]]:
    """(what the layer adds to, what its attention reads) of pairs of a token and the hidden state before it."""
    norms, eps = params.midlayer, config.rms_norm_eps
    normed = (rms_norm(norms.input_layernorm, embedded, eps), rms_norm(norms.hidden_norm, hidden, eps))
    return hidden, jnp.concatenate(normed, axis=-1)
