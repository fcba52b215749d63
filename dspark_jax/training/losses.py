"""The drafters' objective: cross-entropy, total variation, forward KL and confidence, in chunks of positions.

Two distributions over the whole vocabulary are compared at every slot, so logits are recomputed chunk by chunk,
forward and backward, and never kept: 512 anchors of 7 slots over 151,936 tokens would be 2.2 GB for each of them.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.config import DrafterConfig, DraftModelConfig
from dspark_jax.drafters import dspark, markov, pairs
from dspark_jax.drafters.backbone import backbone, context_features, context_keys_values
from dspark_jax.drafters.confidence import confidence_logits
from dspark_jax.drafters.kinds import DrafterParams
from dspark_jax.layers.decoder import Remat
from dspark_jax.layers.linear import embed, matmul
from dspark_jax.sharding import on_own_rows
from dspark_jax.training.anchors import Batch, Blocks, gather_teacher, valid_anchors


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Weights of the terms; the defaults are DSpark's.

    `forward_kl`: KL(p_target ‖ q_draft) at temperature 1 (JetSpec). `soft_cross_entropy`: against the target's law
    among the draft vocabulary, where the target's best token is part of it (EAGLE-3, as SpecForge trains it).
    `decay`: draft k weighs exp(-k / decay) in every term; infinite for uniform weights. `detach_confidence_features`:
    the confidence loss does not train the backbone. `chunk`: positions whose vocabulary-sized rows exist at one time,
    on each device.
    """

    cross_entropy: float = 0.1
    total_variation: float = 0.9
    forward_kl: float = 0.0
    soft_cross_entropy: float = 0.0
    confidence: float = 1.0
    decay: float = 4.0
    detach_confidence_features: bool = False
    chunk: int = 256


@struct.dataclass
class LossSums:
    """Numerators and denominators over a batch, to be summed over devices and steps before dividing.

    `acceptance` [γ]: Σ (1 - TV) of the trained slots, `agreement` [γ]: slots whose best draft is the true token,
    `slots` [γ]: trained slots; `expected_length`: Σ over blocks of 1 + Σ_k Π_{i≤k} (1 - TV_i); `blocks`: their number.
    """

    cross_entropy: Float[Array, ""]
    cross_entropy_weight: Float[Array, ""]
    total_variation: Float[Array, ""]
    forward_kl: Float[Array, ""]
    soft_cross_entropy: Float[Array, ""]
    confidence: Float[Array, ""]
    weight: Float[Array, ""]
    acceptance: Float[Array, "gamma"]
    agreement: Float[Array, "gamma"]
    slots: Float[Array, "gamma"]
    expected_length: Float[Array, ""]
    blocks: Float[Array, ""]


def zero_sums(gamma: int) -> LossSums:
    """What sums are added to."""
    scalar, slots = jnp.zeros((), jnp.float32), jnp.zeros((gamma,), jnp.float32)
    return LossSums(scalar, scalar, scalar, scalar, scalar, scalar, scalar, slots, slots, slots, scalar, scalar)


def slot_weights(blocks: Blocks, decay: float) -> Float[Array, "B A gamma"]:
    """exp(-k / decay) on trained slots, else 0."""
    gamma = blocks.slots.shape[-1]
    weights = jnp.exp(-jnp.arange(gamma, dtype=jnp.float32) / decay)
    return jnp.where(blocks.slots, weights[None, None], 0.0)


def draft_rows(params: DrafterParams, config: DraftModelConfig, ids: Int[Array, "..."]) -> Int[Array, "..."]:
    """Rows of the draft head of target ids; -1 for ids outside a reduced draft vocabulary."""
    if params.draft_token_ids is None:
        return ids
    table = jnp.full(config.vocab_size, -1, jnp.int32)
    table = table.at[params.draft_token_ids].set(jnp.arange(config.draft_vocab_size, dtype=jnp.int32))
    return table[ids]


@struct.dataclass
class TeacherSummary:
    """What a reduced draft vocabulary's losses need of the target's whole law: log Σ exp of its logits, its best id."""

    log_normalizer: Float[Array, "*rows"]
    best: Int[Array, "*rows"]


# Positions of a chunk of `summarize_teacher`: few, so that chunks of prompts and of padding are skipped.
_SUMMARY_CHUNK = 64


def summarize_teacher(
    teacher_head: Float[Array, "V d"],
    hidden: Float[Array, "B T d"],
    wanted: Bool[Array, "B T"],
    num_valid_tokens: int,
) -> TeacherSummary:
    """[B, T], once for each position however many blocks read it; an infinite normalizer and no id, -1, where none is
    `wanted`."""
    rows, length, width = hidden.shape
    ids = jnp.arange(teacher_head.shape[0], dtype=jnp.int32)
    chunk = min(_SUMMARY_CHUNK, rows * length)
    padding = -(rows * length) % chunk

    def summarize(hidden):
        logits = _teacher_logits(hidden, teacher_head, ids, num_valid_tokens)
        return jax.nn.logsumexp(logits, axis=-1), jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def skip(hidden):
        return jnp.full_like(hidden[:, 0], jnp.inf, jnp.float32), jnp.full_like(hidden[:, 0], -1, jnp.int32)

    parts = jnp.pad(hidden.reshape(-1, width), ((0, padding), (0, 0))).reshape(-1, chunk, width)
    needed = jnp.any(jnp.pad(wanted.reshape(-1), (0, padding)).reshape(-1, chunk), axis=1)
    out = jax.lax.map(lambda part: jax.lax.cond(part[0], summarize, skip, part[1]), (needed, parts))
    log_normalizer, best = (x.reshape(-1)[: rows * length].reshape(rows, length) for x in out)
    return TeacherSummary(jnp.where(wanted, log_normalizer, jnp.inf), jnp.where(wanted, best, -1))


def _teacher_logits(hidden: Array, head: Array, ids: Int[Array, "rows"], num_valid_tokens: int) -> Array:
    """Logits of the ids that are the head's rows, in float32; -inf for rows that only pad the vocabulary."""
    logits = matmul(hidden, head, jnp.float32)
    return jnp.where((ids < num_valid_tokens)[None], logits, -jnp.inf)


def vocabulary_terms(
    params: DrafterParams,
    teacher_head: Float[Array, "V d"],
    hidden: Float[Array, "n d"],
    latents: Float[Array, "n r"] | None,
    teacher: Float[Array, "n d"],
    rows: Int[Array, "n"],
    num_valid_tokens: int,
    chunk: int,
    summary: TeacherSummary | None = None,
) -> tuple[Float[Array, "n"], Float[Array, "n"], Float[Array, "n"], Float[Array, "n"], Float[Array, "n"]]:
    """Cross-entropy against the draft row, ‖p_d - p_t‖₁ (0 to 2), KL(p_t ‖ p_d), soft cross-entropy, whether the best
    row is the true one.

    Temperature 1, float32. A row of -1 (true token outside the draft vocabulary) gives cross-entropy 0. Mass of the
    target outside the draft vocabulary counts fully in the L1 distance. There the KL, which would be infinite, is the
    sum of p_t·log(p_t / p_d) over the tokens that are present, p_t not renormalised, and may be under 0. The soft
    cross-entropy is -Σ p·log p_d, p being p_t renormalised over the present tokens; it is 0 where the target's best
    token is not among them. Gradients flow to `hidden`, `latents`, W2 and a head of the drafter's own.

    `summary` [n]: given exactly with a reduced draft vocabulary; the target's other logits are then not computed.
    """
    count = hidden.shape[0]
    chunk = min(chunk, count)
    padding = -count % chunk
    head = params.lm_head.weight
    if "lm_head" in params.FROZEN:
        head = jax.lax.stop_gradient(head)
    ids, reduced = params.draft_token_ids, params.draft_token_ids is not None
    ids = ids if reduced else jnp.arange(teacher_head.shape[0], dtype=jnp.int32)
    teacher_head = jax.lax.stop_gradient(teacher_head[ids] if reduced else teacher_head)
    known = None
    if reduced:
        known = (summary.log_normalizer, jnp.isin(summary.best, ids))

    @jax.checkpoint
    def terms(part):
        hidden, latents, teacher, rows, known = part
        logits = matmul(hidden, head, jnp.float32)
        if latents is not None:
            logits = logits + matmul(latents, params.markov_head.markov_w2.weight, jnp.float32)
        teacher_logits = _teacher_logits(teacher, teacher_head, ids, num_valid_tokens)
        if known is None:
            p_target = jax.nn.softmax(teacher_logits, axis=-1)
            absent, best_is_present = jnp.zeros(rows.shape, jnp.float32), jnp.ones(rows.shape, bool)
        else:
            log_normalizer, best_is_present = known
            p_target = jnp.exp(teacher_logits - log_normalizer[:, None])
            absent = jnp.maximum(1.0 - jnp.sum(p_target, axis=-1), 0.0)
        log_draft = jax.nn.log_softmax(logits, axis=-1)
        distance = jnp.sum(jnp.abs(jnp.exp(log_draft) - p_target), axis=-1) + absent
        forward_kl = jnp.sum(jax.scipy.special.xlogy(p_target, p_target) - p_target * log_draft, axis=-1)
        mass = jnp.sum(p_target, axis=-1)
        soft = -jnp.sum(p_target * log_draft, axis=-1) / jnp.where(best_is_present, mass, 1.0)
        soft = jnp.where(best_is_present, soft, 0.0)
        present = rows >= 0
        truth = jnp.take_along_axis(log_draft, jnp.maximum(rows, 0)[:, None], axis=-1)[:, 0]
        best = jnp.argmax(logits, axis=-1).astype(rows.dtype)
        agreement = (best == rows).astype(jnp.float32)
        return jnp.where(present, -truth, 0.0), distance, forward_kl, soft, agreement

    def split(x):
        x = jnp.pad(x, ((0, padding), *((0, 0),) * (x.ndim - 1)))
        return x.reshape(-1, chunk, *x.shape[1:])

    parts = jax.tree.map(split, (hidden, latents, jax.lax.stop_gradient(teacher), rows, known))
    out = jax.lax.map(terms, parts)
    return tuple(x.reshape(-1)[:count] for x in out)


def _vocabulary_params(params: DrafterParams) -> DrafterParams:
    """What `vocabulary_terms` reads of them."""
    read = ("lm_head", "markov_head", "draft_token_ids")
    others = [field.name for field in dataclasses.fields(params) if field.name not in read]
    params = params.replace(**dict.fromkeys(others))
    if getattr(params, "markov_head", None) is None:
        return params
    return params.replace(markov_head=params.markov_head.replace(markov_w1=None))


def draft_blocks(
    params: DrafterParams,
    config: DraftModelConfig,
    features: Float[Array, "B T features"],
    batch: Batch,
    blocks: Blocks,
    remat: Remat = Remat.NONE,
) -> Float[Array, "B A gamma d"]:
    """h of every draft of every block: the parallel stage, or all steps of a kind without one, trained. Such a kind
    keeps each step's input alone, whatever `remat`.
    """
    if not isinstance(config, DrafterConfig):
        row = (batch.tokens, batch.positions, batch.document_ids)
        return pairs.teacher_forced(params, config, features, *row, blocks.anchors, blocks.previous)
    context = context_features(params.fc, params.hidden_norm, config, features)
    layers = context_keys_values(params.layers, config, context, batch.positions)
    anchor_tokens = jnp.take_along_axis(batch.tokens, blocks.anchors, axis=1)
    block = dspark.block_embeddings(params, config, anchor_tokens, features.dtype)
    return backbone(
        params.layers, params.norm, config, block, blocks.anchors, layers, batch.positions, batch.document_ids, remat
    )


def block_losses(
    params: DrafterParams,
    config: DraftModelConfig,
    loss: LossConfig,
    teacher_head: Float[Array, "V d"],
    features: Float[Array, "B T features"],
    last_hidden: Float[Array, "B T d"],
    batch: Batch,
    blocks: Blocks,
    num_valid_tokens: int,
    remat: Remat = Remat.NONE,
) -> LossSums:
    """Sums of the terms over a batch. `features`: `target_features` of the frozen target, `last_hidden` post-norm."""
    hidden = draft_blocks(params, config, features, batch, blocks, remat)
    previous = latents = None
    if config.markov_rank:
        previous = embed(params.markov_head.markov_w1, blocks.previous, hidden.dtype)
        latents = markov.latents(params.markov_head, config, previous, hidden)
    teacher = gather_teacher(last_hidden, blocks.anchors, config.num_drafts)
    rows = draft_rows(params, config, blocks.targets)
    summary = None
    if config.reduced_vocabulary:

        def summarize(head, inputs):
            hidden, wanted = inputs
            return summarize_teacher(head, hidden, wanted, num_valid_tokens)

        summary = on_own_rows(summarize, teacher_head, (last_hidden, valid_anchors(batch)))
        summary = jax.tree.map(
            lambda x: gather_teacher(x[..., None], blocks.anchors, config.num_drafts)[..., 0], summary
        )

    def terms(shared, inputs):
        params, head = shared
        shape = inputs[-1].shape
        hidden, latents, teacher, summary, rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[3:]), inputs)
        found = vocabulary_terms(params, head, hidden, latents, teacher, rows, num_valid_tokens, loss.chunk, summary)
        return tuple(x.reshape(shape) for x in found)

    shared = (_vocabulary_params(params), teacher_head)
    found = on_own_rows(terms, shared, (hidden, latents, teacher, summary, rows))
    cross_entropy, distance, forward_kl, soft, agreement = found
    weights = slot_weights(blocks, loss.decay)
    confidence = jnp.zeros((), jnp.float32)
    accept = 1.0 - 0.5 * distance
    if config.enable_confidence_head:
        inputs = (previous, hidden)
        if loss.detach_confidence_features:
            inputs = jax.lax.stop_gradient(inputs)
        logits = confidence_logits(params.confidence_head, config, *inputs)
        label = jax.lax.stop_gradient(accept)
        confidence = jnp.sum(weights * optax.sigmoid_binary_cross_entropy(logits, label))
    slots = blocks.slots.astype(jnp.float32)
    survival = jnp.cumprod(accept * slots, axis=-1)
    return LossSums(
        cross_entropy=jnp.sum(weights * cross_entropy),
        cross_entropy_weight=jnp.sum(jnp.where(rows >= 0, weights, 0.0)),
        total_variation=jnp.sum(weights * distance),
        forward_kl=jnp.sum(weights * forward_kl),
        soft_cross_entropy=jnp.sum(weights * soft),
        confidence=confidence,
        weight=jnp.sum(weights),
        acceptance=jnp.sum(accept * slots, axis=(0, 1)),
        agreement=jnp.sum(agreement * slots, axis=(0, 1)),
        slots=jnp.sum(slots, axis=(0, 1)),
        expected_length=jnp.sum(jnp.where(blocks.kept, 1.0 + jnp.sum(survival, axis=-1), 0.0)),
        blocks=jnp.sum(blocks.kept.astype(jnp.float32)),
    )


def total_loss(sums: LossSums, loss: LossConfig, weight, cross_entropy_weight) -> Float[Array, ""]:
    """The weighted objective of these numerators under the denominators of the whole global batch."""
    weight = jnp.maximum(weight, 1e-6)
    cross_entropy_weight = jnp.maximum(cross_entropy_weight, 1e-6)
    return (
        loss.cross_entropy * sums.cross_entropy / cross_entropy_weight
        + loss.total_variation * sums.total_variation / weight
        + loss.forward_kl * sums.forward_kl / weight
        + loss.soft_cross_entropy * sums.soft_cross_entropy / weight
        + loss.confidence * sums.confidence / weight
    )
