"""TrainState and the train step: frozen target forward, losses, and an AdamW update of float32 master weights."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, Key

from dspark_jax.config import DraftModelConfig, TargetConfig
from dspark_jax.drafters.kinds import DrafterParams, declare_drafter, first_anchor, target_features
from dspark_jax.layers.decoder import Remat
from dspark_jax.layers.linear import Linear
from dspark_jax.parameters import abstract, initialize, map_declaration
from dspark_jax.sharding import constrain_parameters, parameter_spec
from dspark_jax.targets.decoder import TargetParams, forward_documents, head_weight
from dspark_jax.training.anchors import Batch, make_blocks, sample_anchors
from dspark_jax.training.features import restore
from dspark_jax.training.losses import (
    LossConfig,
    LossSums,
    block_losses,
    draft_rows,
    slot_weights,
    total_loss,
    zero_sums,
)
from dspark_jax.training.optimizer import OptimizerConfig, make_optimizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything static about a train step."""

    target: TargetConfig
    drafter: DraftModelConfig
    total_steps: int
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    remat: Remat = Remat.NONE


@struct.dataclass
class TrainState:
    """`params`: the trainable float32 masters, without the frozen embedding and head. `key`: the run's key."""

    step: Int[Array, ""]
    params: DrafterParams
    optimizer: optax.OptState
    key: Key[Array, ""]


def _optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Leaves parameters and moments as they are when a gradient is not finite."""
    return optax.apply_if_finite(make_optimizer(config.optimizer, config.total_steps), max_consecutive_errors=2**30)


def trainable(params: DrafterParams) -> DrafterParams:
    """The float32 masters of what is trained: all but the copies of the target's embedding and maybe head."""
    trained = params.replace(**dict.fromkeys(params.FROZEN), draft_token_ids=None)
    masters = jax.tree.map(lambda x: x.astype(jnp.float32), trained)
    return masters.replace(draft_token_ids=params.draft_token_ids)


def with_frozen(params: DrafterParams, target: TargetParams) -> DrafterParams:
    """Adds the target's embedding and, unless the drafter has one of its own, the target's head, cut to the draft
    vocabulary where that is reduced.
    """
    params = params.replace(embed_tokens=target.embed_tokens)
    if "lm_head" not in params.FROZEN:
        return params
    head: Any = head_weight(target)
    if params.draft_token_ids is not None:
        head = head[params.draft_token_ids]
    return params.replace(lm_head=Linear(weight=head))


def declare_trainable(config: DraftModelConfig) -> DrafterParams:
    """The declaration of a drafter without what is the target's."""
    declaration = declare_drafter(config)
    return declaration.replace(**dict.fromkeys(declaration.FROZEN))


def init_params(
    config: DraftModelConfig, key: Key[Array, ""], draft_token_ids: Int[Array, "V_d"] | None = None
) -> DrafterParams:
    """Fresh trainable parameters. A reduced draft vocabulary needs its ascending target ids."""
    if (draft_token_ids is None) == config.reduced_vocabulary:
        raise ValueError("draft_token_ids must be given exactly when draft_vocab_size is smaller than vocab_size")
    declaration = declare_trainable(config).replace(draft_token_ids=None)
    return initialize(declaration, key).replace(draft_token_ids=draft_token_ids)


def init_train_state(config: TrainConfig, key: Key[Array, ""], params: DrafterParams) -> TrainState:
    """State before the first step, from trainable parameters."""
    weights = params.replace(draft_token_ids=None)
    return TrainState(jnp.zeros((), jnp.int32), params, _optimizer(config).init(weights), key)


def _declare_weights(config: TrainConfig) -> DrafterParams:
    return declare_trainable(config.drafter).replace(draft_token_ids=None)


def abstract_train_state(config: TrainConfig, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of a state whose masters and moments are spread over the mesh."""
    declaration, optimizer = _declare_weights(config), _optimizer(config)
    whole = NamedSharding(mesh, PartitionSpec())

    def place(parameter, x):
        spec = parameter_spec(parameter, dict(mesh.shape), config.drafter.head_dim)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    def keep(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole)

    weights = abstract(declaration)
    moments = jax.eval_shape(optimizer.init, weights)
    ids = None
    if config.drafter.reduced_vocabulary:
        ids = keep(jax.ShapeDtypeStruct((config.drafter.draft_vocab_size,), jnp.int32))
    return TrainState(
        step=keep(jax.ShapeDtypeStruct((), jnp.int32)),
        params=map_declaration(place, declaration, weights).replace(draft_token_ids=ids),
        optimizer=optax.tree.map_params(
            optimizer, lambda x, parameter: place(parameter, x), moments, declaration, transform_non_params=keep
        ),
        key=keep(jax.eval_shape(lambda: jax.random.key(0))),
    )


def _constrain_optimizer(config: TrainConfig, state: optax.OptState) -> optax.OptState:
    def place(x, parameter):
        return constrain_parameters(parameter, x, config.drafter.head_dim)

    return optax.tree.map_params(_optimizer(config), place, state, _declare_weights(config))


def _blocks(config: TrainConfig, key, batch: Batch):
    anchors, kept = sample_anchors(key, batch, config.drafter.num_anchors, first_anchor(config.drafter))
    return make_blocks(batch, anchors, kept, config.drafter.num_drafts)


def _target_outputs(target: TargetParams, config: TrainConfig, batch: Batch) -> tuple[Array, Array]:
    """The drafter's features [B, T, features] and the last hidden state [B, T, d]."""
    dtype = target.embed_tokens.weight.dtype
    if batch.stored is not None:
        return restore(batch.stored, config.drafter, dtype)
    out = forward_documents(
        target, config.target, batch.tokens, batch.positions, batch.document_ids, config.drafter.target_layer_ids
    )
    return target_features(config.drafter, out).astype(dtype), out.hidden


def batch_losses(
    params: DrafterParams, target: TargetParams, config: TrainConfig, batch: Batch, key: Key[Array, ""]
) -> LossSums:
    """Loss sums of one batch [B, T] for trainable parameters; the target runs in the same program, frozen.

    Of a batch with `stored` features only the target's embedding and head are used.
    """
    features, hidden = jax.lax.stop_gradient(_target_outputs(target, config, batch))
    return block_losses(
        with_frozen(params, target),
        config.drafter,
        config.loss,
        head_weight(target),
        features,
        hidden,
        batch,
        _blocks(config, key, batch),
        config.target.num_valid_tokens,
        config.remat,
    )


def _denominators(params: DrafterParams, config: TrainConfig, batch: Batch, key) -> tuple[Array, Array]:
    blocks = _blocks(config, key, batch)
    weights = slot_weights(blocks, config.loss.decay)
    present = draft_rows(params, config.drafter, blocks.targets) >= 0
    return jnp.sum(weights), jnp.sum(jnp.where(present, weights, 0.0))


def train_step_metrics(sums: LossSums, config: TrainConfig) -> dict[str, Array]:
    """Means of the whole batch; `acceptance` and `agreement` are [γ], by slot."""
    weight = jnp.maximum(sums.weight, 1e-6)
    slots = jnp.maximum(sums.slots, 1.0)
    return {
        "loss": total_loss(sums, config.loss, sums.weight, sums.cross_entropy_weight),
        "cross_entropy": sums.cross_entropy / jnp.maximum(sums.cross_entropy_weight, 1e-6),
        "total_variation": 0.5 * sums.total_variation / weight,
        "forward_kl": sums.forward_kl / weight,
        "soft_cross_entropy": sums.soft_cross_entropy / weight,
        "confidence_loss": sums.confidence / weight,
        "acceptance": sums.acceptance / slots,
        "agreement": sums.agreement / slots,
        "expected_accepted_length": sums.expected_length / jnp.maximum(sums.blocks, 1.0),
        "blocks": sums.blocks,
    }


@functools.partial(jax.jit, static_argnames="config", donate_argnames="state")
def train_step(
    state: TrainState, target: TargetParams, batch: Batch, config: TrainConfig
) -> tuple[TrainState, dict[str, Array]]:
    """One update from a batch whose arrays are [accumulation steps, B, T].

    Anchors are drawn by document, and numerators are divided by denominators summed over the whole batch, so neither
    accumulation nor the documents' places in rows change anything but rounding. A non-finite gradient changes nothing
    but the step count; `updated` and `not_finite_in_a_row` say so. Under a mesh (`jax.set_mesh`) with the state laid
    out as `abstract_train_state` says, each device keeps its part of masters, moments and gradients.
    """
    key = jax.random.fold_in(state.key, state.step)
    ids = state.params.draft_token_ids
    weights = state.params.replace(draft_token_ids=None)
    denominators = jax.vmap(lambda part: _denominators(state.params, config, part, key))(batch)
    weight, cross_entropy_weight = (jnp.sum(x) for x in denominators)

    def constrain(weights):
        return constrain_parameters(_declare_weights(config), weights, config.drafter.head_dim)

    def objective(weights, part):
        sums = batch_losses(weights.replace(draft_token_ids=ids), target, config, part, key)
        return total_loss(sums, config.loss, weight, cross_entropy_weight), sums

    def accumulate(carry, part):
        (_, sums), gradient = jax.value_and_grad(objective, has_aux=True)(weights, part)
        gradient = constrain(gradient)
        return jax.tree.map(jnp.add, carry, (gradient, sums)), None

    zeros = (jax.tree.map(jnp.zeros_like, weights), zero_sums(config.drafter.num_drafts))
    (gradient, sums), _ = jax.lax.scan(accumulate, zeros, batch)
    optimizer = _optimizer(config)
    # optax raises a Python float to an integer count, which a caller's strict promotion mode would refuse.
    with jax.numpy_dtype_promotion("standard"):
        updates, optimizer_state = optimizer.update(gradient, state.optimizer, weights)
    weights = constrain(optax.apply_updates(weights, updates))
    optimizer_state = _constrain_optimizer(config, optimizer_state)
    metrics = train_step_metrics(sums, config) | {
        "gradient_norm": optax.tree.norm(gradient),
        "updated": optimizer_state.last_finite,
        "not_finite_in_a_row": optimizer_state.notfinite_count,
    }
    return TrainState(state.step + 1, weights.replace(draft_token_ids=ids), optimizer_state, state.key), metrics


@functools.partial(jax.jit, static_argnames="config")
def eval_step(
    params: DrafterParams, target: TargetParams, batch: Batch, key: Key[Array, ""], config: TrainConfig
) -> LossSums:
    """Loss sums of one batch [B, T], without an update."""
    return batch_losses(params, target, config, batch, key)
