"""One multi-token-prediction module (DeepSeek-V3, arXiv 2412.19437, section 2.2): its parameters, and what its layer
reads. `pairs` runs the layer.

The module's input is a projection of the normed embedding of a token and the normed last hidden state before it, in
the order in which DeepSeek's weights are stored (the paper writes them the other way round).
"""

from typing import ClassVar

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from dspark_jax.config import MTPConfig
from dspark_jax.layers.decoder import DecoderLayer, declare_layer
from dspark_jax.layers.linear import Embedding, Linear, declare_embedding, declare_linear, linear
from dspark_jax.layers.norm import Norm, declare_norm, rms_norm
from dspark_jax.parameters import Parameter


@struct.dataclass
class MTPParams:
    """`embed_tokens` and `lm_head` are frozen copies of the target's, or of those of its rows that a reduced draft
    vocabulary has: `draft_token_ids`, ascending, else None.
    """

    FROZEN: ClassVar[tuple[str, ...]] = ("embed_tokens", "lm_head")

    embed_tokens: Embedding | None
    enorm: Norm
    hnorm: Norm
    eh_proj: Linear
    block: DecoderLayer
    norm: Norm
    lm_head: Linear | None
    draft_token_ids: Int[Array, "V_d"] | None = None


def declare_drafter(config: MTPConfig) -> MTPParams:
    d, std = config.hidden_size, config.initializer_range
    return MTPParams(
        embed_tokens=declare_embedding(config.vocab_size, d, standard_deviation=std),
        enorm=declare_norm(d),
        hnorm=declare_norm(d),
        eh_proj=declare_linear(d, 2 * d, ("embed", None), standard_deviation=std),
        block=declare_layer(config),
        norm=declare_norm(d),
        lm_head=declare_linear(config.draft_vocab_size, d, ("vocab", "embed"), standard_deviation=std),
        draft_token_ids=Parameter((config.draft_vocab_size,), (None,), dtype=jnp.int32)
        if config.reduced_vocabulary
        else None,
    )


def layer(params: MTPParams) -> DecoderLayer:
    return params.block


def fuse(params: MTPParams, config: MTPConfig, features: Float[Array, "*rows d"]) -> Float[Array, "*rows d"]:
    """The feature itself, which is the target's last hidden state."""
    return features


def mix(
    params: MTPParams, config: MTPConfig, embedded: Float[Array, "*rows d"], hidden: Float[Array, "*rows d"]
) -> tuple[Float[Array, "*rows d"], Float[Array, "*rows d"]]:
    """(what the layer adds to, what its attention reads) of pairs of a token and the hidden state before it."""
    eps = config.rms_norm_eps
    normed = (rms_norm(params.enorm, embedded, eps), rms_norm(params.hnorm, hidden, eps))
    x = linear(params.eh_proj, jnp.concatenate(normed, axis=-1))
    return x, rms_norm(params.block.input_layernorm, x, eps)
