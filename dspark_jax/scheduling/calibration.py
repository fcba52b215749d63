"""Confidences that mean what they say: calibration fitted after training, on rounds whose drafts were all verified.

Sequential Temperature Scaling (DSpark): c_k = σ(logit_k / T_k), so that the prefix survival a_k = Π_{i≤k} c_i is the
share of rounds whose first k drafts are accepted. Platt scaling (Platt 1999), c_k = σ(slope_k·logit_k + offset_k), also
mends confidences that are too high or too low as a whole: the head learns rejection sampling's acceptance at
temperature 1, and greedy or coupled decoding accepts more, or less. For trees an edge survives with σ(α·logit(q) + β).
Fitting is numpy on the host; `calibrated_confidences` and `edge_survival` run inside compiled programs too.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

# Symmetric around 1, which is in it: 2% from one temperature to the next.
_GRID = np.geomspace(0.2, 5, 161)
# q this close to 0 or 1 is not told from it: rounding in float32 ends there.
_LEAST_LOG_Q, _LARGEST_LOG_Q = -30.0, -1e-6
_NEWTON_STEPS = 50


@dataclasses.dataclass(frozen=True, eq=False)
class Reliability:
    """A reliability diagram: in bins of equal width over [0, 1], NaN where a bin is empty."""

    predicted: Float[np.ndarray, "bins"]
    observed: Float[np.ndarray, "bins"]
    count: Int[np.ndarray, "bins"]


def reliability(probabilities: Float[ArrayLike, "n"], outcomes: Bool[ArrayLike, "n"], bins: int = 15) -> Reliability:
    """Mean predicted probability, observed rate and count of each bin; a bin holds its lower edge, the last both."""
    probabilities, outcomes = np.asarray(probabilities, np.float64), np.asarray(outcomes, np.float64)
    index = np.minimum((probabilities * bins).astype(np.int64), bins - 1)
    count = np.bincount(index, minlength=bins)

    def mean(values: np.ndarray) -> np.ndarray:
        total = np.bincount(index, weights=values, minlength=bins)
        return np.divide(total, count, out=np.full(bins, np.nan), where=count > 0)

    return Reliability(mean(probabilities), mean(outcomes), count)


def expected_calibration_error(
    probabilities: Float[ArrayLike, "n"], outcomes: Bool[ArrayLike, "n"], bins: int = 15
) -> float:
    """ECE = Σ_b (n_b / n)·|mean predicted − observed rate| over bins of equal width. NaN without a sample."""
    diagram = reliability(probabilities, outcomes, bins)
    total = diagram.count.sum()
    if not total:
        return float("nan")
    return float(np.nansum(diagram.count * np.abs(diagram.predicted - diagram.observed)) / total)


def roc_auc(scores: Float[ArrayLike, "n"], outcomes: Bool[ArrayLike, "n"]) -> float:
    """The chance that a positive scores above a negative, equal scores counted half. NaN if one of them is missing."""
    outcomes = np.asarray(outcomes, bool)
    positives = int(outcomes.sum())
    negatives = len(outcomes) - positives
    if not positives or not negatives:
        return float("nan")
    _, index, count = np.unique(np.asarray(scores), return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count - 1) / 2)[index]
    return float((ranks[outcomes].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def calibrated_confidences(
    logits: Float[Array, "*rows gamma"], slopes: Float[ArrayLike, "gamma"], offsets: Float[ArrayLike, "gamma"]
) -> Float[Array, "*rows gamma"]:
    """c_k = σ(slope_k·logit_k + offset_k); slopes of 1 and offsets of 0 change nothing, slopes of 1/T_k are STS."""
    slopes, offsets = (jnp.broadcast_to(jnp.asarray(x, logits.dtype), logits.shape) for x in (slopes, offsets))
    return jax.nn.sigmoid(slopes * logits + offsets)


def prefix_survival(
    logits: Float[np.ndarray, "n gamma"], slopes: Float[ArrayLike, "gamma"], offsets: Float[ArrayLike, "gamma"]
) -> Float[np.ndarray, "n gamma"]:
    """a_k = Π_{i≤k} σ(slope_i·logit_i + offset_i), in float64."""
    return np.cumprod(_sigmoid(np.asarray(slopes) * np.asarray(logits, np.float64) + np.asarray(offsets)), axis=1)


def prefix_accepted(accepted_lengths: Int[ArrayLike, "n"], gamma: int) -> Bool[np.ndarray, "n gamma"]:
    """Whether drafts 0 to k were all accepted, from the numbers of accepted drafts (without the bonus)."""
    return np.asarray(accepted_lengths)[:, None] > np.arange(gamma)


def fit_temperatures(
    logits: Float[ArrayLike, "n gamma"], accepted_lengths: Int[ArrayLike, "n"]
) -> Float[np.ndarray, "gamma"]:
    """Sequential Temperature Scaling over n rounds, of which `accepted_lengths` drafts were accepted.

    From the first position to the last, T_k is that of a grid with the least ECE of a_k = a_{k-1}·σ(logit_k / T_k)
    against "the first k drafts were accepted"; of equals the one nearest to 1.
    """
    logits = np.asarray(logits, np.float64)
    outcomes = prefix_accepted(accepted_lengths, logits.shape[1])
    grid = _GRID[np.argsort(np.abs(np.log(_GRID)), kind="stable")]
    survival, temperatures = np.ones(len(logits)), np.ones(logits.shape[1])
    for k in range(logits.shape[1]):
        errors = [
            expected_calibration_error(survival * _sigmoid(logits[:, k] / temperature), outcomes[:, k])
            for temperature in grid
        ]
        temperatures[k] = grid[np.argmin(errors)]
        survival = survival * _sigmoid(logits[:, k] / temperatures[k])
    return temperatures


def fit_platt(
    logits: Float[ArrayLike, "n gamma"], accepted_lengths: Int[ArrayLike, "n"]
) -> tuple[Float[np.ndarray, "gamma"], Float[np.ndarray, "gamma"]]:
    """Slopes, at least 0, and offsets over n rounds, of which `accepted_lengths` drafts were accepted.

    A position's are fitted by logistic regression over the rounds whose earlier drafts were all accepted.
    """
    logits, accepted = np.asarray(logits, np.float64), np.asarray(accepted_lengths)
    fits = [_fit_logistic(logits[accepted >= k, k], accepted[accepted >= k] > k) for k in range(logits.shape[1])]
    slopes, offsets = np.asarray(fits).T
    return slopes, offsets


def edge_survival(
    log_q: Float[Array, "*edges"], alpha: Float[ArrayLike, ""], beta: Float[ArrayLike, ""]
) -> Float[Array, "*edges"]:
    """The chance σ(α·logit(q) + β) that a tree's edge is accepted once its ancestors are; 0 where log q is -inf.

    It grows with q, but products of it along two paths may be ordered otherwise than products of q.
    """
    alpha, beta = (jnp.asarray(x, log_q.dtype) for x in (alpha, beta))
    bounded = jnp.clip(log_q, _LEAST_LOG_Q, _LARGEST_LOG_Q)
    logit = bounded - jnp.log(-jnp.expm1(bounded))
    return jnp.where(jnp.isneginf(log_q), 0, jax.nn.sigmoid(alpha * logit + beta))


def fit_edge_map(log_q: Float[ArrayLike, "n"], accepted: Bool[ArrayLike, "n"]) -> tuple[float, float]:
    """(α, β), α ≥ 0, of `edge_survival` by logistic regression over edges whose ancestors were all accepted."""
    bounded = np.clip(np.asarray(log_q, np.float64), _LEAST_LOG_Q, _LARGEST_LOG_Q)
    return _fit_logistic(bounded - np.log(-np.expm1(bounded)), np.asarray(accepted))


def _fit_logistic(logits: Float[np.ndarray, "n"], accepted: Bool[np.ndarray, "n"]) -> tuple[float, float]:
    """(α, β), α ≥ 0, of the likeliest σ(α·logit + β).

    One pseudo-observation for the identity, α = 1 and β = 0, keeps the fit finite where samples are few or separable.
    """
    features = np.stack([logits, np.ones_like(logits)], axis=1)
    outcomes, identity = accepted.astype(np.float64), np.array([1.0, 0.0])

    def loss(weights: np.ndarray) -> float:
        scores = features @ weights
        return float(np.sum(np.logaddexp(0, scores) - outcomes * scores) + np.sum((weights - identity) ** 2) / 2)

    def fit(free: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Newton's method over the free ones of the two weights, with halved steps where one would go too far."""
        for _ in range(_NEWTON_STEPS):
            rate = _sigmoid(features @ weights)
            gradient = features.T @ (rate - outcomes) + weights - identity
            curvature = (features * (rate * (1 - rate))[:, None]).T @ features + np.eye(2)
            step = np.zeros(2)
            step[free] = np.linalg.solve(curvature[np.ix_(free, free)], gradient[free])
            before, scale = loss(weights), 1.0
            while loss(weights - scale * step) > before and scale > 1e-9:
                scale /= 2
            weights = weights - scale * step
            if np.abs(step).max() < 1e-10:
                break
        return weights

    weights = fit(np.array([0, 1]), identity)
    if weights[0] < 0:
        weights = fit(np.array([1]), np.zeros(2))
    return float(weights[0]), float(weights[1])


def _sigmoid(x: np.ndarray) -> np.ndarray:
    """σ without overflow."""
    return 0.5 * (1 + np.tanh(x / 2))
