"""Calibration errors, ROC-AUC, Sequential Temperature Scaling and the edge map, on data whose truth is known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.scheduling.calibration import (
    calibrated_confidences,
    edge_survival,
    expected_calibration_error,
    fit_edge_map,
    fit_platt,
    fit_temperatures,
    prefix_accepted,
    prefix_survival,
    reliability,
    roc_auc,
)

TRUE_TEMPERATURES = np.array([0.5, 1.6, 0.8, 2.5, 1.2])
# So many that a temperature is known to a few percent: at 20,000 the fifth is off by 10% in one trial of five.
ROUNDS = 60_000


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def synthetic(seed: int, rounds: int = ROUNDS) -> tuple[np.ndarray, np.ndarray]:
    """Logits that are off by known factors, and accepted lengths drawn slot by slot from the true confidences."""
    rng = np.random.default_rng(seed)
    true = rng.normal(3, 2.5, (rounds, len(TRUE_TEMPERATURES)))
    hits = rng.random(true.shape) < sigmoid(true)
    return true * TRUE_TEMPERATURES, np.cumprod(hits, axis=1).sum(axis=1)


def errors(logits: np.ndarray, accepted: np.ndarray, temperatures: np.ndarray) -> np.ndarray:
    survival = prefix_survival(logits, 1 / temperatures, np.zeros(5))
    outcomes = prefix_accepted(accepted, logits.shape[1])
    return np.array([expected_calibration_error(survival[:, k], outcomes[:, k]) for k in range(logits.shape[1])])


def test_temperatures_are_recovered():
    temperatures = fit_temperatures(*synthetic(0))
    np.testing.assert_allclose(temperatures, TRUE_TEMPERATURES, rtol=0.1)
    logits, accepted = synthetic(1)
    before, after = errors(logits, accepted, np.ones(5)), errors(logits, accepted, temperatures)
    assert (after < before).all(), (before, after)
    assert (after < 0.015).all(), after


def test_calibrated_confidences_stay_as_they_are():
    logits, accepted = synthetic(2)
    temperatures = fit_temperatures(logits / TRUE_TEMPERATURES, accepted)
    np.testing.assert_allclose(temperatures, 1, rtol=0.1)


def test_each_temperature_has_the_least_error_given_the_earlier_ones():
    logits, accepted = synthetic(3, 2000)
    temperatures = fit_temperatures(logits, accepted)
    for k in range(logits.shape[1]):
        for factor in (0.5, 0.8, 0.98, 1.02, 1.3, 2.0):
            other = temperatures.copy()
            other[k] *= factor
            # Off the grid by less than a step, an error may be a little smaller.
            assert errors(logits, accepted, temperatures)[k] < errors(logits, accepted, other)[k] + 2e-3


def test_the_ranking_within_a_position_is_unchanged():
    logits, accepted = synthetic(4, 2000)
    calibrated = np.asarray(calibrated_confidences(jnp.asarray(logits, jnp.float32), 1 / TRUE_TEMPERATURES, -1.0))
    for k in range(logits.shape[1]):
        order = np.argsort(logits[:, k], kind="stable")
        assert (np.diff(calibrated[order, k]) >= 0).all()
        reached = accepted >= k
        outcomes = accepted[reached] > k
        confidence = sigmoid(logits[reached, k] / TRUE_TEMPERATURES[k])
        assert roc_auc(confidence, outcomes) == roc_auc(logits[reached, k], outcomes)


def test_confidences_inside_jit():
    logits = jax.random.normal(jax.random.key(0), (3, 2, 4))
    slopes, offsets = jnp.array([2.0, 1.0, 0.5, 0.25]), jnp.array([0.0, -1.0, 0.5, 2.0])
    found = jax.jit(calibrated_confidences)(logits, slopes, offsets)
    np.testing.assert_allclose(found, sigmoid(np.asarray(logits) * np.asarray(slopes) + np.asarray(offsets)), rtol=1e-6)
    np.testing.assert_array_equal(calibrated_confidences(logits, np.ones(4), 0.0), jax.nn.sigmoid(logits))
    survival = prefix_survival(np.asarray(logits[:, 0]), np.asarray(slopes), np.asarray(offsets))
    np.testing.assert_allclose(jnp.cumprod(found[:, 0], axis=-1), survival, rtol=1e-5)


def test_platt_scaling_is_recovered_where_no_temperature_would_do():
    """Confidences that are too high as a whole, as those of rejection sampling are for coupled chains."""
    slopes, offsets = np.array([1.0, 0.7, 1.5, 1.0, 0.4]), np.array([-1.5, 0.6, 0.0, 1.0, -0.5])

    def shifted(seed: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(seed)
        logits = rng.normal(2, 2, (ROUNDS, 5))
        hits = rng.random(logits.shape) < sigmoid(slopes * logits + offsets)
        return logits, np.cumprod(hits, axis=1).sum(axis=1)

    found = fit_platt(*shifted(5))
    np.testing.assert_allclose(found, (slopes, offsets), atol=0.12)
    logits, accepted = shifted(6)
    outcomes = prefix_accepted(accepted, 5)
    survival = prefix_survival(logits, *found)
    after = np.array([expected_calibration_error(survival[:, k], outcomes[:, k]) for k in range(5)])
    assert (after < errors(logits, accepted, fit_temperatures(*shifted(5)))).all()
    assert (after < 0.015).all(), after


def test_platt_scaling_of_positions_that_were_never_reached_changes_nothing():
    slopes, offsets = fit_platt(np.array([[1.0, 2.0], [-1.0, 0.5]]), np.array([0, 0]))
    assert (slopes[1], offsets[1]) == (1, 0) and np.isfinite([slopes, offsets]).all()


def test_calibration_error_by_hand():
    # Two bins of [0, 0.5) and [0.5, 1]: means 0.2 and 0.8, rates 1/2 and 2/3.
    probabilities, outcomes = [0.1, 0.3, 0.5, 0.9, 1.0], [0, 1, 1, 1, 0]
    assert expected_calibration_error(probabilities, outcomes, 2) == pytest.approx(
        2 / 5 * abs(0.2 - 1 / 2) + 3 / 5 * abs(0.8 - 2 / 3)
    )
    diagram = reliability(probabilities, outcomes, 4)
    np.testing.assert_allclose(diagram.predicted, [0.1, 0.3, 0.5, 0.95])
    np.testing.assert_allclose(diagram.observed, [0, 1, 1, 0.5])
    np.testing.assert_array_equal(diagram.count, [1, 1, 1, 2])
    assert np.isnan(reliability([0.1], [1], 2).observed[1])
    assert np.isnan(expected_calibration_error([], []))
    assert expected_calibration_error([0.0, 1.0], [False, True]) == 0


def test_auc_by_hand():
    assert roc_auc([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1]) == 0.75
    assert roc_auc([1, 2, 3, 4], [0, 0, 1, 1]) == 1 and roc_auc([1, 2, 3, 4], [1, 1, 0, 0]) == 0
    assert roc_auc([1, 1, 1], [0, 1, 1]) == 0.5
    assert np.isnan(roc_auc([1, 2], [1, 1])) and np.isnan(roc_auc([1, 2], [0, 0])) and np.isnan(roc_auc([], []))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=30))
def test_auc_counts_pairs(samples):
    positives = [score for score, outcome in samples if outcome]
    negatives = [score for score, outcome in samples if not outcome]
    found = roc_auc([score for score, _ in samples], [outcome for _, outcome in samples])
    if not positives or not negatives:
        assert np.isnan(found)
        return
    wins = sum((p > n) + (p == n) / 2 for p in positives for n in negatives)
    assert found == pytest.approx(wins / (len(positives) * len(negatives)))


def edges(alpha: float, beta: float, count: int = ROUNDS) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    logit = rng.normal(-1, 2.5, count)
    return -np.logaddexp(0, -logit), rng.random(count) < sigmoid(alpha * logit + beta)


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.0), (0.6, -0.5), (1.5, 0.8)])
def test_the_edge_map_is_recovered(alpha, beta):
    log_q, accepted = edges(alpha, beta)
    found = fit_edge_map(log_q, accepted)
    np.testing.assert_allclose(found, (alpha, beta), atol=0.07)
    survival = np.asarray(edge_survival(jnp.asarray(log_q, jnp.float32), *found))
    assert expected_calibration_error(survival, accepted) < 0.015
    order = np.argsort(log_q)
    assert (np.diff(survival[order]) >= -1e-6).all()


def test_the_edge_map_never_falls():
    """Where acceptance falls with q the best map that does not is the rate itself."""
    log_q, accepted = edges(-1.0, 0.3)
    alpha, beta = fit_edge_map(log_q, accepted)
    assert alpha == 0
    assert sigmoid(beta) == pytest.approx(accepted.mean(), abs=1e-3)


@pytest.mark.parametrize(
    ("log_q", "accepted"),
    [([], []), ([-0.1, -3.0], [True, False]), ([0.0, 0.0, -1e-9], [True, True, True]), ([-80.0, -0.5], [False, True])],
)
def test_few_and_extreme_edges_give_a_finite_map(log_q, accepted):
    alpha, beta = fit_edge_map(log_q, accepted)
    assert np.isfinite([alpha, beta]).all() and alpha >= 0


def test_edge_survival():
    log_q = jnp.array([[0.0, -1e-9, -0.5], [-3.0, -100.0, -jnp.inf]])
    found = np.asarray(jax.jit(edge_survival)(log_q, 1.0, 0.0))
    np.testing.assert_allclose(found[:, :1], np.exp(log_q[:, :1]), rtol=1e-5)
    np.testing.assert_allclose(found[0, 2], np.exp(-0.5), rtol=1e-5)
    assert np.isfinite(found).all() and (found <= 1).all() and found[1, 1] < 1e-12
    assert np.asarray(edge_survival(log_q, 0.0, 0.0))[1].tolist() == [0.5, 0.5, 0.0]
    assert (np.asarray(edge_survival(log_q, 2.0, 5.0)) <= 1).all()
