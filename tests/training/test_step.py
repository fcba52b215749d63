"""The train step: accumulation, non-finite gradients, and a loss that falls."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.layers.decoder import Remat
from dspark_jax.training.optimizer import OptimizerConfig
from dspark_jax.training.step import (
    TrainConfig,
    batch_losses,
    eval_step,
    init_params,
    init_train_state,
    train_step,
    train_step_metrics,
)
from tests.models import drafter_config, random_target, target_config
from tests.training.test_losses import rows_batch

GAMMA = 3


def setup(draft_vocab_size: int = 8, steps: int = 40):
    target_settings = target_config()
    config = TrainConfig(
        target=target_settings,
        drafter=drafter_config(target_settings, num_anchors=6, draft_vocab_size=draft_vocab_size),
        total_steps=steps,
        optimizer=OptimizerConfig(learning_rate=1e-2),
    )
    ids = None if draft_vocab_size == 8 else jnp.asarray([0, 2, 3, 6, 7], jnp.int32)
    params = init_params(config.drafter, jax.random.key(1), ids)
    tokens = np.random.default_rng(0).integers(0, 8, (4, 16))
    return config, random_target(target_settings), init_train_state(config, jax.random.key(2), params), tokens


def split(batch, steps):
    return jax.tree.map(lambda x: x.reshape(steps, -1, *x.shape[1:]), batch)


@pytest.mark.parametrize("draft_vocab_size", [8, 5])
def test_loss_falls_and_metrics_are_those_of_evaluation(draft_vocab_size):
    config, target, state, tokens = setup(draft_vocab_size)
    batch = split(rows_batch(tokens), 1)
    key = jax.random.fold_in(state.key, 0)
    before = eval_step(state.params, target, rows_batch(tokens), key, config)
    expected = train_step_metrics(before, config)
    losses = []
    for _ in range(40):
        state, metrics = train_step(state, target, batch, config)
        losses.append(float(metrics["loss"]))
    assert losses[0] == pytest.approx(float(expected["loss"]), rel=1e-5)
    assert losses[-1] < 0.9 * losses[0]
    assert int(state.step) == 40
    assert 1.0 <= float(metrics["expected_accepted_length"]) <= GAMMA + 1


def test_accumulation_divides_once_by_the_whole_batch():
    """Rows with few trained tokens weigh by their tokens, not by their micro-batch."""
    config, target, state, tokens = setup()
    mask = np.ones((4, 16), bool)
    mask[0, 4:] = mask[3, 9:] = False
    batch = rows_batch(tokens, mask)
    results = []
    for steps in (1, 2, 4):
        copy = jax.tree.map(lambda x: x.copy(), state)
        results.append(train_step(copy, target, split(batch, steps), config)[1])
    for metrics in results[1:]:
        assert float(metrics["loss"]) == pytest.approx(float(results[0]["loss"]), rel=1e-5)
        assert float(metrics["gradient_norm"]) == pytest.approx(float(results[0]["gradient_norm"]), rel=1e-4)


def test_a_non_finite_gradient_changes_nothing():
    config, target, state, tokens = setup()
    batch = split(rows_batch(tokens), 1)
    state, _ = train_step(state, target, batch, config)
    kept = jax.device_get((state.params, state.optimizer.inner_state))
    broken = target.replace(norm=target.norm.replace(weight=target.norm.weight * jnp.nan))
    for count in (1, 2):
        state, metrics = train_step(state, broken, batch, config)
        assert not bool(metrics["updated"]) and int(metrics["not_finite_in_a_row"]) == count
    assert int(state.step) == 3
    for before, after in zip(
        jax.tree.leaves(kept), jax.tree.leaves((state.params, state.optimizer.inner_state)), strict=True
    ):
        np.testing.assert_array_equal(before, after)
    state, metrics = train_step(state, target, batch, config)
    assert bool(metrics["updated"]) and int(metrics["not_finite_in_a_row"]) == 0


def test_a_reduced_vocabulary_needs_its_ids():
    config = drafter_config(target_config(), draft_vocab_size=5)
    with pytest.raises(ValueError, match="draft_token_ids"):
        init_params(config, jax.random.key(0))


@pytest.mark.parametrize("remat", [Remat.PRODUCTS, Remat.FULL])
def test_what_is_computed_again_changes_nothing(remat):
    config, target, state, tokens = setup()
    batch = split(rows_batch(tokens), 2)
    copy = jax.tree.map(lambda x: x.copy(), state)
    expected, before = train_step(copy, target, batch, config)
    found, after = train_step(state, target, batch, dataclasses.replace(config, remat=remat))
    assert float(after["gradient_norm"]) == pytest.approx(float(before["gradient_norm"]), rel=1e-5)
    for one, other in zip(jax.tree.leaves(found.params), jax.tree.leaves(expected.params), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_fewer_values_are_kept_for_the_backward_pass():
    """Residuals of the losses' gradient: those of products and norms, of products alone, of neither."""
    config, target, state, tokens = setup()
    sizes = {}
    for remat in Remat:
        changed = dataclasses.replace(config, remat=remat)

        def loss(params, changed=changed):
            return batch_losses(params, target, changed, rows_batch(tokens), state.key).total_variation

        pull = jax.eval_shape(lambda params, loss=loss: jax.vjp(loss, params)[1], state.params)
        sizes[remat] = sum(x.size for x in jax.tree.leaves(pull))
    assert sizes[Remat.FULL] < sizes[Remat.PRODUCTS] < sizes[Remat.NONE]
