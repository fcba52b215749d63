"""On a tree of best candidates the target's walk is exact, and rejection sampling is not."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.proposals import Proposal
from dspark_jax.verification.walk import walk


def rejection_over_children(p: np.ndarray, q: np.ndarray, children: list[int]) -> np.ndarray:
    """Law of the next token if fixed children are tested with min(1, p/q) as though they had been drawn from q."""
    law, alive = np.zeros_like(p), 1.0
    for token in children:
        accept = min(1.0, p[token] / q[token])
        law[token] += alive * accept
        alive *= 1 - accept
        left = np.maximum(p - q, 0)
        p = left / left.sum() if left.sum() else q
        q = np.where(np.arange(len(q)) == token, 0, q)
        q = q / q.sum()
    return law + alive * p


def test_rejection_sampling_of_best_children_is_biased():
    rng = np.random.default_rng(70)
    distances = []
    for _ in range(100):
        p, q = rng.dirichlet(np.ones(4), size=2)
        best = np.argsort(-q)[:2].tolist()
        distances.append(0.5 * np.abs(rejection_over_children(p, q, best) - p).sum())
    assert np.mean(distances) > 0.05

    p, q = np.array([0.25, 0.25, 0.25, 0.25]), np.array([0.4, 0.3, 0.2, 0.1])
    law = rejection_over_children(p, q, [0, 1])
    assert law.sum() == pytest.approx(1)
    assert 0.5 * np.abs(law - p).sum() > 0.05


def test_walking_a_fixed_tree_with_the_targets_draws_is_exact():
    """All of the target's draws at the nodes of one tree, each path completed with the target's own law."""
    vocabulary, depth = 3, 2
    rng = np.random.default_rng(71)
    first = rng.dirichlet(np.ones(vocabulary))
    second = rng.dirichlet(np.ones(vocabulary), size=vocabulary)
    third = rng.dirichlet(np.ones(vocabulary), size=(vocabulary, vocabulary))
    tree = {(): -1, (2,): 0, (0,): 0, (2, 1): 1, (0, 0): 2}
    node_laws = [first, second[2], second[0], third[2, 1], third[0, 0]]
    chosen = np.array(list(itertools.product(range(vocabulary), repeat=len(tree))), np.int32)
    weights = np.prod([law[chosen[:, node]] for node, law in enumerate(node_laws)], axis=0)

    def batch(values):
        return jnp.broadcast_to(jnp.asarray(list(values), jnp.int32)[None], chosen.shape)

    proposal = Proposal(
        tokens=batch([0, *(path[-1] for path in tree if path)]),
        parents=batch(tree.values()),
        depths=batch(len(path) for path in tree),
        valid=jnp.ones(chosen.shape, bool),
        scores=jnp.zeros(chosen.shape, jnp.float32),
    )
    verdict = jax.device_get(walk(proposal, jnp.asarray(chosen), depth))
    expected = first[:, None, None] * second[:, :, None] * third
    law = np.zeros_like(expected)
    for weight, tokens, accepted in zip(weights, verdict.tokens, verdict.accepted, strict=True):
        head = tuple(tokens[: accepted + 1])
        law[head] += weight * expected[head] / expected[head].sum()
    assert set(verdict.accepted.tolist()) == {0, 1, 2}
    assert 0.5 * np.abs(law - expected).sum() < 1e-12
