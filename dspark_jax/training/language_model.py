"""Next-token training of a target model itself: the loss in chunks of positions, the state and the step."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Float, Int

from dspark_jax.config import TargetConfig
from dspark_jax.targets.decoder import TargetParams, forward_documents, target_logits
from dspark_jax.training.anchors import Batch
from dspark_jax.training.optimizer import OptimizerConfig, make_optimizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModelConfig:
    """Everything static about a step. `chunk`: positions of each row whose logits exist at one time."""

    target: TargetConfig
    total_steps: int
    optimizer: OptimizerConfig = OptimizerConfig()
    chunk: int = 256


@struct.dataclass
class LanguageModelState:
    """`step` counts updates made; `params` are the float32 masters."""

    step: Int[Array, ""]
    params: TargetParams
    optimizer: optax.OptState


def next_token_loss(
    params: TargetParams, config: TargetConfig, batch: Batch, chunk: int = 256
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Cross-entropy of a batch [B, T]: (its sum in nats, the number of predicted tokens), both float32.

    A token is predicted from the tokens before it in its own document; a document's first token is not. Only tokens
    with `loss_mask` count. Logits exist for `chunk` positions of each row at a time, forward and backward.
    """
    out = forward_documents(params, config, batch.tokens, batch.positions, batch.document_ids)
    same = batch.document_ids[:, 1:] == batch.document_ids[:, :-1]
    predicted = (batch.loss_mask[:, 1:] & same).astype(jnp.float32)
    hidden, following = out.hidden[:, :-1], batch.tokens[:, 1:]
    length = following.shape[1]
    chunk = min(chunk, length)
    padding = -length % chunk

    @jax.checkpoint
    def nats(part):
        hidden, following, predicted = part
        logits = target_logits(params, config, hidden)
        losses = jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, following[..., None], axis=-1)[..., 0]
        return jnp.sum(losses * predicted)

    def split(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, padding), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)

    return jnp.sum(jax.lax.map(nats, jax.tree.map(split, (hidden, following, predicted)))), jnp.sum(predicted)


def _optimizer(config: LanguageModelConfig) -> optax.GradientTransformation:
    return make_optimizer(config.optimizer, config.total_steps)


def init_state(config: LanguageModelConfig, params: TargetParams) -> LanguageModelState:
    """State before the first step, from float32 parameters."""
    return LanguageModelState(jnp.zeros((), jnp.int32), params, _optimizer(config).init(params))


@functools.partial(jax.jit, static_argnames="config", donate_argnames="state")
def language_model_step(
    state: LanguageModelState, batch: Batch, config: LanguageModelConfig
) -> tuple[LanguageModelState, Float[Array, ""]]:
    """One update from a batch [B, T]. Returns the new state and the loss before it, in nats a token."""

    def loss(params: TargetParams) -> Float[Array, ""]:
        nats, count = next_token_loss(params, config.target, batch, config.chunk)
        return nats / jnp.maximum(count, 1.0)

    value, gradient = jax.value_and_grad(loss)(state.params)
    # optax raises a Python float to an integer count, which a caller's strict promotion mode would refuse.
    with jax.numpy_dtype_promotion("standard"):
        updates, optimizer = make_optimizer(config.optimizer, config.total_steps).update(
            gradient, state.optimizer, state.params
        )
    return LanguageModelState(state.step + 1, optax.apply_updates(state.params, updates), optimizer), value


@functools.partial(jax.jit, static_argnames=("config", "chunk"))
def language_model_loss(
    params: TargetParams, batch: Batch, config: TargetConfig, chunk: int = 256
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """`next_token_loss`, compiled."""
    return next_token_loss(params, config, batch, chunk)
