"""Every kind of drafter behind the same few functions; the class of the config says which."""

from typing import Any

from jaxtyping import Array, Bool, Float, Int

from dspark_jax.config import DrafterConfig, DraftModelConfig, Eagle3Config, MTPConfig
from dspark_jax.drafters import dspark, eagle3, mtp, pairs
from dspark_jax.drafters.eagle3 import Eagle3Params
from dspark_jax.drafters.mtp import MTPParams
from dspark_jax.drafters.pairs import PairState
from dspark_jax.targets.decoder import TargetOutput

DrafterParams = dspark.DrafterParams | Eagle3Params | MTPParams
DrafterState = dspark.DrafterState | PairState

_DECLARE = {
    DrafterConfig: dspark.declare_drafter,
    Eagle3Config: eagle3.declare_drafter,
    MTPConfig: mtp.declare_drafter,
}


def declare_drafter(config: DraftModelConfig) -> DrafterParams:
    return _DECLARE[type(config)](config)


def target_features(config: DraftModelConfig, out: TargetOutput) -> Float[Array, "*rows features"]:
    """What the drafter reads of a target's pass: the tapped layers, or the last hidden state."""
    features: Any = out.hidden if isinstance(config, MTPConfig) else out.features
    return features


def first_anchor(config: DraftModelConfig) -> int:
    """The least position of a token that can be drafted from."""
    return 0 if isinstance(config, DrafterConfig) else 1


def init_state(config: DraftModelConfig, requests: int, capacity: int, dtype) -> DrafterState:
    """The state of R requests of which the drafter knows nothing."""
    kind = dspark if isinstance(config, DrafterConfig) else pairs
    return kind.init_state(config, requests, capacity, dtype)


def extend(
    params: DrafterParams,
    config: DraftModelConfig,
    state: DrafterState,
    tokens: Int[Array, "R T"],
    features: Float[Array, "R T features"],
    start: Int[Array, "R"],
    count: Int[Array, "R"],
    active: Bool[Array, "R"] | None = None,
) -> DrafterState:
    """Adds T tokens that the target has read, from position `start` of each request on, of which `count` stand.

    `features` are those of `target_features` of these tokens.
    """
    if isinstance(config, DrafterConfig):
        return dspark.extend(params, config, state, features, start, active)
    return pairs.extend(params, config, state, tokens, features, start, count, active)


def block_hidden(
    params: DrafterParams,
    config: DraftModelConfig,
    state: DrafterState,
    anchor_tokens: Int[Array, "R"],
    anchor_positions: Int[Array, "R"],
) -> Float[Array, "R gamma d"] | None:
    """The parallel stage of a decoding round; None for a kind that drafts one token after the other."""
    if isinstance(config, DrafterConfig):
        return dspark.block_hidden(params, config, state, anchor_tokens, anchor_positions)
    return None
