"""The sequential stage's heads: a low-rank logit bias from the previous token (DSpark, Markov head)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from dspark_jax.config import DrafterConfig, MarkovHeadType
from dspark_jax.layers.linear import Embedding, Linear, declare_embedding, declare_linear, linear


@struct.dataclass
class MarkovHead:
    """`markov_w1` [V, r] embeds the previous token, `markov_w2` [V_d, r] maps the latent to a logit bias."""

    markov_w1: Embedding
    markov_w2: Linear
    gate_proj: Linear | None = None
    joint_proj: Linear | None = None


def declare_markov(config: DrafterConfig) -> MarkovHead:
    r, d, std = config.markov_rank, config.hidden_size, config.initializer_range
    gated = config.markov_head_type is MarkovHeadType.GATED
    recurrent = config.markov_head_type is MarkovHeadType.RNN
    return MarkovHead(
        markov_w1=declare_embedding(config.vocab_size, r, (None, "embed"), std),
        markov_w2=declare_linear(config.draft_vocab_size, r, ("vocab", "embed"), standard_deviation=std),
        gate_proj=declare_linear(r, d + r, (None, "embed"), True, std) if gated else None,
        joint_proj=declare_linear(3 * r, 2 * r + d, (None, "embed"), True, std) if recurrent else None,
    )


def init_state(config: DrafterConfig, shape: tuple[int, ...], dtype) -> Array | None:
    """s_0 = 0, [*shape, r], for the RNN head; None for the others."""
    if config.markov_head_type is MarkovHeadType.RNN:
        return jnp.zeros((*shape, config.markov_rank), dtype)
    return None


def step(
    params: MarkovHead,
    config: DrafterConfig,
    state: Any,
    previous: Float[Array, "*rows r"],
    hidden: Float[Array, "*rows d"],
) -> tuple[Any, Float[Array, "*rows r"]]:
    """One slot: from W1's row of the previous token and h_k, the latent whose product with W2 is the bias."""
    match config.markov_head_type:
        case MarkovHeadType.VANILLA:
            return state, previous
        case MarkovHeadType.GATED:
            gate = linear(params.gate_proj, jnp.concatenate([hidden, previous], axis=-1))
            return state, jax.nn.sigmoid(gate) * previous
        case MarkovHeadType.RNN:
            joint = linear(params.joint_proj, jnp.concatenate([state, previous, hidden], axis=-1))
            gate, candidate, output = jnp.split(joint, 3, axis=-1)
            gate = jax.nn.sigmoid(gate)
            return gate * state + (1 - gate) * jnp.tanh(candidate), jnp.tanh(output)


def latents(
    params: MarkovHead,
    config: DrafterConfig,
    previous: Float[Array, "*rows gamma r"],
    hidden: Float[Array, "*rows gamma d"],
) -> Float[Array, "*rows gamma r"]:
    """The latents of every slot when all previous tokens are known (teacher forcing)."""
    if config.markov_head_type is not MarkovHeadType.RNN:
        return step(params, config, None, previous, hidden)[1]
    state = init_state(config, previous.shape[:-2], previous.dtype)
    slots = (jnp.moveaxis(previous, -2, 0), jnp.moveaxis(hidden, -2, 0))
    _, out = jax.lax.scan(lambda carry, slot: step(params, config, carry, *slot), state, slots)
    return jnp.moveaxis(out, 0, -2)
