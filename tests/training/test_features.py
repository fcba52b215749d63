"""Stored features: rounding, and losses that equal those of the target's own pass."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.config import DraftModelConfig
from dspark_jax.drafters.kinds import target_features
from dspark_jax.targets.decoder import TargetOutput, forward_documents
from dspark_jax.training.features import StoredFeatures, compute_features, restore, store
from dspark_jax.training.losses import LossSums
from dspark_jax.training.step import TrainConfig, eval_step, init_params, train_step_metrics
from tests.models import drafter_config, pair_config, random_target, target_config
from tests.training.test_losses import rows_batch

TARGET = target_config()


def drafter(kind: str) -> DraftModelConfig:
    if kind == "dspark":
        return drafter_config(TARGET, num_anchors=12)
    return pair_config(TARGET, kind, num_anchors=12)


TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 8, (3, 14)), jnp.int32)
LENGTHS = jnp.full(3, 14, jnp.int32)


class Problem:
    """The losses of one batch, from any features of it."""

    def __init__(self) -> None:
        self.config = TrainConfig(target=TARGET, drafter=drafter("dspark"), total_steps=1)
        self.target = random_target(TARGET)
        self.params = init_params(self.config.drafter, jax.random.key(1))

    def losses(self, stored: StoredFeatures | None) -> LossSums:
        # Nothing but the embedding and the head is there to compute with.
        target = self.target if stored is None else self.target.replace(layers=(), norm=None)
        batch = rows_batch(TOKENS).replace(stored=stored)
        return eval_step(self.params, target, batch, jax.random.key(2), self.config)

    def stored(self, storage: str) -> StoredFeatures:
        taps = self.config.drafter.target_layer_ids
        return compute_features(self.target, TARGET, taps, TOKENS, LENGTHS, storage)

    def loss(self, sums: LossSums) -> float:
        return float(train_step_metrics(sums, self.config)["loss"])


@pytest.fixture(scope="module")
def problem() -> Problem:
    return Problem()


def exact_output(target, taps) -> TargetOutput:
    row = (rows_batch(TOKENS).positions, jnp.zeros_like(TOKENS))
    return jax.jit(forward_documents, static_argnums=(1, 5))(target, TARGET, TOKENS, *row, taps)


def test_losses_of_bfloat16_features_are_the_target_s(problem):
    """Equal to the last bit where the same rounding is made of the target's own; near it where none is."""
    taps, stored = problem.config.drafter.target_layer_ids, problem.stored("bfloat16")
    out = exact_output(problem.target, taps)
    states = np.stack([*np.split(np.asarray(out.features), len(taps), axis=-1), np.asarray(out.hidden)], axis=-2)
    rounded = states.astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(stored.states), rounded)
    online, cached = problem.losses(None), problem.losses(stored)
    # The same values in float32, as the target's pass gives them.
    again = problem.losses(StoredFeatures(jnp.asarray(rounded.astype(np.float32))))
    for one, other in zip(jax.tree.leaves(cached), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    unrounded = problem.losses(StoredFeatures(jnp.asarray(states)))
    for one, other in zip(jax.tree.leaves(online), jax.tree.leaves(unrounded), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-5, atol=1e-6)
    assert problem.loss(cached) != problem.loss(online)
    assert problem.loss(cached) == pytest.approx(problem.loss(online), rel=2**-7)


@pytest.mark.parametrize("kind", ["dspark", "eagle3", "mtp"])
def test_every_kind_gets_what_it_reads_of_the_target(kind, problem):
    config = drafter(kind)
    out = exact_output(problem.target, config.target_layer_ids)
    stored = compute_features(problem.target, TARGET, config.target_layer_ids, TOKENS, LENGTHS, "bfloat16")
    for got, expected in zip(
        restore(stored, config, jnp.float32), (target_features(config, out), out.hidden), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(expected).astype(jnp.bfloat16).astype(np.float32))


def test_losses_of_int8_features_are_near(problem):
    stored = problem.stored("int8")
    assert stored.states.dtype == jnp.int8 and stored.scales.shape == (3, 14, 3)
    online, cached = problem.loss(problem.losses(None)), problem.loss(problem.losses(stored))
    assert cached != online and cached == pytest.approx(online, rel=0.05)


def test_the_error_of_int8_is_bounded_by_each_layer_s_largest_value():
    states = jax.random.normal(jax.random.key(0), (2, 5, 3, 64)) * jnp.asarray([1e-3, 1.0, 1e4])[None, None, :, None]
    states = states.at[0, 0, 0].set(0.0)
    config = dataclasses.replace(drafter_config(TARGET), hidden_size=64)
    features, hidden = restore(store(states, "int8"), config, jnp.float32)
    restored = np.concatenate([np.asarray(features).reshape(2, 5, 2, 64), np.asarray(hidden)[:, :, None]], axis=2)
    largest = np.abs(np.asarray(states)).max(axis=-1, keepdims=True)
    assert (np.abs(restored - np.asarray(states)) <= largest / 254 * 1.0001).all()
    assert (restored[0, 0, 0] == 0).all()


@pytest.mark.parametrize("storage", ["bfloat16", "int8"])
def test_what_is_not_finite_stays_so(storage):
    states = jnp.ones((1, 2, 2, 16)).at[0, 0, 1, 3].set(jnp.nan).at[0, 1, 1, 3].set(jnp.inf)
    features, hidden = restore(store(states, storage), drafter_config(TARGET, target_layer_ids=(0,)), jnp.float32)
    assert np.isfinite(np.asarray(features)).all()
    assert not np.isfinite(np.asarray(hidden)).all(axis=-1).any()


def test_padding_and_company_change_nothing():
    """A document alone in its row, and beside a longer one."""
    target = random_target(TARGET)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 8, (2, 9)), jnp.int32)
    both = compute_features(target, TARGET, (0, 1), tokens, jnp.asarray([9, 5], jnp.int32), "int8")
    alone = compute_features(target, TARGET, (0, 1), tokens[1:, :5], jnp.asarray([5], jnp.int32), "int8")
    states, expected = (np.asarray(x.states, np.float32) * np.asarray(x.scales)[..., None] for x in (both, alone))
    np.testing.assert_allclose(states[1, :5], expected[0], atol=0.03)
