"""Training Eagle3 and multi-token prediction: the training-time test against dense masks, and a loss that falls."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.drafters.kinds import first_anchor, target_features
from dspark_jax.layers.kernels import interval_attention
from dspark_jax.targets.decoder import forward_documents, head_weight, target_logits
from dspark_jax.training.anchors import Batch, make_blocks, sample_anchors
from dspark_jax.training.losses import LossConfig, block_losses, draft_blocks, total_loss
from dspark_jax.training.optimizer import OptimizerConfig
from dspark_jax.training.step import TrainConfig, eval_step, init_params, init_train_state, train_step
from tests.drafters.pair_reference import PairReference, softmax
from tests.models import pair_config, random_drafter, random_target, target_config

LENGTHS = (9, 6)
LENGTH = sum(LENGTHS)
SOFT = LossConfig(
    cross_entropy=0.0, total_variation=0.0, soft_cross_entropy=1.0, confidence=0.0, decay=-1 / math.log(0.8), chunk=7
)


def packed_batch(rows: int = 2) -> Batch:
    """Rows of two documents; a few tokens of the first are not trained."""
    tokens = np.random.default_rng(0).integers(0, 8, (rows, LENGTH))
    mask = np.ones((rows, LENGTH), bool)
    mask[0, :3] = False
    documents = np.concatenate([[i] * n for i, n in enumerate(LENGTHS)])[None] + 2 * np.arange(rows)[:, None]
    positions = np.broadcast_to(np.concatenate([np.arange(n) for n in LENGTHS]), (rows, LENGTH))
    ids = (jnp.asarray(x, jnp.int32) for x in (documents, positions))
    return Batch(jnp.asarray(tokens, jnp.int32), jnp.asarray(mask), *ids)


class Problem:
    """A drafter, a target's outputs of a batch, and every anchor of it as a block."""

    def __init__(self, kind: str, draft_vocab_size: int):
        settings = target_config()
        self.config = pair_config(settings, kind, draft_vocab_size=draft_vocab_size)
        self.target = random_target(settings)
        self.drafter = random_drafter(self.config, self.target)
        self.batch = packed_batch()
        row = (self.batch.tokens, self.batch.positions, self.batch.document_ids)
        out = forward_documents(self.target, settings, *row, self.config.target_layer_ids)
        self.features, self.hidden = target_features(self.config, out), out.hidden
        self.teacher = np.asarray(target_logits(self.target, settings, out.hidden), np.float64)
        anchors, kept = sample_anchors(jax.random.key(0), self.batch, LENGTH, first_anchor(self.config))
        self.blocks = make_blocks(self.batch, anchors, kept, self.config.num_drafts)

    def reference_outputs(self) -> np.ndarray:
        """The layer's outputs [B, T, γ, d] of step k of the block whose anchor is at t + 1, by dense masks.

        Row t of step k reads the token at t + 1 + k, sees the first step's keys up to row t of its document, and of
        the keys of steps 1 to k those of its own row.
        """
        reference = PairReference(self.drafter, self.config)
        out = []
        for tokens, features, documents, positions in zip(
            *(np.asarray(x) for x in (self.batch.tokens, self.features, self.batch.document_ids, self.batch.positions)),
            strict=True,
        ):
            hidden = reference.fuse(features.astype(np.float64))
            causal = np.tril(np.ones((LENGTH, LENGTH), bool)) & (documents[:, None] == documents[None])
            keys, values, masks, steps = [], [], [], []
            for k in range(self.config.num_drafts):
                read = tokens[np.minimum(np.arange(LENGTH) + 1 + k, LENGTH - 1)]
                residual, q, key, value = reference.parts(read, hidden, positions + k)
                keys.append(key)
                values.append(value)
                masks.append(np.eye(LENGTH, dtype=bool) if k else causal)
                seen = np.concatenate(masks, axis=1)
                hidden = reference.finish(residual, q, np.concatenate(keys), np.concatenate(values), seen)
                steps.append(hidden)
            out.append(np.stack(steps, axis=1))
        return np.array(out)


@pytest.mark.parametrize(("kind", "draft_vocab_size"), [("eagle3", 5), ("mtp", 8)])
def test_the_training_time_test_equals_dense_masks(kind, draft_vocab_size, monkeypatch):
    """Hidden states and the weighted loss, at every anchor of packed documents; also in small chunks."""
    problem = Problem(kind, draft_vocab_size)
    blocks, gamma = problem.blocks, problem.config.num_drafts
    slots, anchors = np.asarray(blocks.slots), np.asarray(blocks.anchors)
    assert slots.any(axis=(0, 1)).all() and not slots.all(axis=-1).all()
    reference = PairReference(problem.drafter, problem.config)
    outputs = problem.reference_outputs()
    expected = reference.norm("norm", outputs)[np.arange(len(anchors))[:, None], np.maximum(anchors - 1, 0)]

    def trained(drafter):
        return draft_blocks(drafter, problem.config, problem.features, problem.batch, blocks)

    whole = jax.jit(trained)(problem.drafter)
    np.testing.assert_allclose(np.asarray(whole)[slots], expected[slots], atol=2e-4)
    monkeypatch.setattr(interval_attention, "_QUERIES", 4)
    monkeypatch.setattr(interval_attention, "_KEYS", 4)
    # Another function, so that it is traced again.
    few = jax.jit(lambda drafter: trained(drafter))(problem.drafter)
    np.testing.assert_allclose(np.asarray(few)[slots], expected[slots], atol=2e-4)

    # Slot k of an anchor at a is compared with the target's law after the token at a + k.
    after = np.minimum(anchors[..., None] + np.arange(gamma), LENGTH - 1)
    teacher = problem.teacher[np.arange(len(anchors))[:, None, None], after]
    drafter_ids = problem.drafter.draft_token_ids
    ids = np.arange(8) if drafter_ids is None else np.asarray(drafter_ids)
    soft = -(softmax(teacher[..., ids]) * np.log(softmax(reference.logits(expected_outputs(outputs, anchors))))).sum(-1)
    soft = np.where(np.isin(teacher.argmax(-1), ids), soft, 0)
    weights = slots * 0.8 ** np.arange(gamma)
    sums = jax.jit(block_losses, static_argnums=(1, 2, 8))(
        problem.drafter, problem.config, SOFT, head_weight(problem.target), problem.features, problem.hidden,
        problem.batch, blocks, 8,
    )  # fmt: skip
    loss = float(total_loss(sums, SOFT, sums.weight, sums.cross_entropy_weight))
    assert loss == pytest.approx((weights * soft).sum() / weights.sum(), rel=1e-4)


def expected_outputs(outputs: np.ndarray, anchors: np.ndarray) -> np.ndarray:
    return outputs[np.arange(len(anchors))[:, None], np.maximum(anchors - 1, 0)]


@pytest.mark.parametrize(
    ("kind", "draft_vocab_size", "loss"),
    [("eagle3", 5, SOFT), ("mtp", 8, LossConfig(cross_entropy=1.0, total_variation=0.0, confidence=0.0))],
)
def test_the_loss_falls(kind, draft_vocab_size, loss):
    """Eagle3's own head is trained, the target's is not; a document's first token is no anchor."""
    settings = target_config()
    config = TrainConfig(
        target=settings,
        drafter=pair_config(settings, kind, num_anchors=LENGTH, draft_vocab_size=draft_vocab_size),
        total_steps=40,
        loss=loss,
        optimizer=OptimizerConfig(learning_rate=1e-2),
    )
    ids = None if draft_vocab_size == 8 else jnp.asarray([0, 2, 3, 6, 7], jnp.int32)
    target, params = random_target(settings), init_params(config.drafter, jax.random.key(1), ids)
    assert (params.lm_head is None) == (kind == "mtp") and params.embed_tokens is None
    batch = packed_batch()
    # Of n trained tokens n - 1 have a successor; where the first is a document's first, it is no anchor either.
    expected = (LENGTHS[0] - 3 - 1) + (LENGTHS[0] - 2) + 2 * (LENGTHS[1] - 2)
    assert float(eval_step(params, target, batch, jax.random.key(0), config).blocks) == expected
    before = None if params.lm_head is None else np.asarray(params.lm_head.weight)
    state, losses = init_train_state(config, jax.random.key(2), params), []
    for _ in range(40):
        state, metrics = train_step(state, target, jax.tree.map(lambda x: x[None], batch), config)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.8 * losses[0]
    assert before is None or np.abs(np.asarray(state.params.lm_head.weight) - before).max() > 1e-3
