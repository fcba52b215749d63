"""What a frozen target computes of each token, made once and stored: tapped layers and last hidden state."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from dspark_jax.config import DraftModelConfig, MTPConfig, TargetConfig
from dspark_jax.targets.decoder import TargetParams, forward_documents

Storage = Literal["bfloat16", "int8"]


@struct.dataclass
class StoredFeatures:
    """`states`: the m tapped layers in ascending order, then the last hidden state after the final norm; bfloat16, or
    int8 in units of `scales` (float32, one for each token and layer; None with bfloat16).
    """

    states: Float[Array, "*rows m_and_one d"] | Int[Array, "*rows m_and_one d"]
    scales: Float[Array, "*rows m_and_one"] | None = None


def store(states: Float[Array, "*rows m_and_one d"], storage: Storage) -> StoredFeatures:
    """Rounds to bfloat16 (relative error up to 2**-9), or to int8: an error up to 1/254 of the largest magnitude among
    the d values of the same token and layer. A value that is not finite stays one, or makes its d values so.
    """
    if storage == "bfloat16":
        return StoredFeatures(states.astype(jnp.bfloat16))
    wide = states.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=-1)
    scales = jnp.where(largest == 0, 1.0, largest / 127.0)
    units = jnp.round(wide / scales[..., None])
    return StoredFeatures(jnp.clip(units, -127, 127).astype(jnp.int8), scales)


def restore(
    stored: StoredFeatures, config: DraftModelConfig, dtype
) -> tuple[Float[Array, "B T features"], Float[Array, "B T d"]]:
    """What a drafter trains on, in `dtype`: its features, and the target's last hidden state.

    The stored layers must be those that `config` taps.
    """
    states = stored.states
    if stored.scales is not None:
        states = states.astype(jnp.float32) * stored.scales[..., None]
    states = states.astype(dtype)
    hidden = states[..., -1, :]
    features = hidden if isinstance(config, MTPConfig) else states[..., :-1, :].reshape(*hidden.shape[:-1], -1)
    return features, hidden


@functools.partial(jax.jit, static_argnames=("config", "taps", "storage"))
def compute_features(
    params: TargetParams,
    config: TargetConfig,
    taps: tuple[int, ...],
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    storage: Storage,
) -> StoredFeatures:
    """The target's pass over one document a row, stored. Tokens from `lengths` on are padding, and their values too."""
    index = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    real = index < lengths[:, None]
    document_ids = jnp.where(real, 0, -1)
    out = forward_documents(params, config, tokens, jnp.where(real, index, 0), document_ids, taps)
    states = out.hidden[..., None, :]
    if out.features is not None:
        tapped = out.features.reshape(*tokens.shape, len(taps), config.hidden_size).astype(states.dtype)
        states = jnp.concatenate([tapped, states], axis=-2)
    return store(states, storage)
