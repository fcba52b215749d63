"""JetSpec's and DDTree's builders against references written from the papers' descriptions."""

import heapq
import itertools

import jax
import numpy as np
import pytest

from dspark_jax.drafting.ddtree import ddtree
from dspark_jax.drafting.jetspec import jetspec
from tests.drafting.trees import paths


def jetspec_reference(log_probs: np.ndarray, tokens: np.ndarray, budget: int) -> list[tuple[int, int, int, float]]:
    """(token, parent, depth, score) of each node in order of insertion; the anchor's token is left at -1."""
    nodes = [(-1, -1, 0, log_probs.dtype.type(0))]
    heap = [(0.0, 0)]
    while heap and len(nodes) < budget:
        _, parent = heapq.heappop(heap)
        depth, score = nodes[parent][2:]
        if depth == len(log_probs):
            continue
        for token, log_prob in zip(tokens[depth], log_probs[depth], strict=True):
            if len(nodes) < budget:
                heapq.heappush(heap, (-(score + log_prob), len(nodes)))
                nodes.append((int(token), parent, depth + 1, score + log_prob))
    return nodes


def ddtree_exhaustive(log_probs: np.ndarray, tokens: np.ndarray, budget: int) -> list[tuple[float, tuple[int, ...]]]:
    """(score, path) of the best prefixes, by listing all of them."""
    gamma, count = log_probs.shape
    listed = [(0.0, ())]
    for depth in range(1, gamma + 1):
        for ranks in itertools.product(range(count), repeat=depth):
            score = sum(log_probs[slot, rank] for slot, rank in enumerate(ranks))
            listed.append((score, tuple(int(tokens[slot, rank]) for slot, rank in enumerate(ranks))))
    return sorted(listed, key=lambda item: (-item[0], len(item[1])))[:budget]


def ddtree_heap(log_probs: np.ndarray, tokens: np.ndarray, budget: int) -> list[tuple[float, tuple[int, ...]]]:
    """(score, path) by the paper's heap of rank tuples: pop one, push its next sibling and its first child."""
    gamma, count = log_probs.shape
    taken = [(0.0, ())]
    heap = [(-log_probs[0, 0], (0,))]
    while heap and len(taken) < budget:
        cost, ranks = heapq.heappop(heap)
        taken.append((-cost, tuple(int(tokens[slot, rank]) for slot, rank in enumerate(ranks))))
        depth, last = len(ranks), ranks[-1]
        if last + 1 < count:
            sibling = cost + log_probs[depth - 1, last] - log_probs[depth - 1, last + 1]
            heapq.heappush(heap, (sibling, (*ranks[:-1], last + 1)))
        if depth < gamma:
            heapq.heappush(heap, (cost - log_probs[depth, 0], (*ranks, 0)))
    return taken


def candidates(seed: int, gamma: int, count: int, vocabulary: int, dtype, rows: int = 16, ordered: bool = False):
    """Candidates of random laws in the first half of the rows, and with small integer log-probabilities in the rest."""
    rng = np.random.default_rng(seed)
    log_probs = np.log(rng.dirichlet(np.ones(vocabulary), size=(rows, gamma)))
    log_probs[rows // 2 :] = -rng.integers(0, 3, size=(rows - rows // 2, gamma, vocabulary))
    tokens = rng.permuted(np.broadcast_to(np.arange(vocabulary), log_probs.shape), axis=-1)
    if ordered:
        log_probs = -np.sort(-log_probs, axis=-1)
    anchors = rng.integers(vocabulary, size=rows)
    return log_probs[..., :count].astype(dtype), tokens[..., :count].astype(np.int32), anchors.astype(np.int32)


@pytest.mark.parametrize(
    ("gamma", "k", "budget", "dtype"),
    [
        (4, 3, 16, np.float32),
        (3, 2, 9, np.float64),
        (2, 2, 12, np.float32),
        (3, 4, 3, np.float32),
        (3, 1, 3, np.float32),
    ],
)
def test_jetspec_is_the_heaps_tree(gamma, k, budget, dtype):
    with jax.enable_x64(dtype is np.float64):
        log_probs, tokens, anchors = candidates(50 + gamma, gamma, k, 6, dtype)
        proposal = jax.device_get(jax.jit(jetspec, static_argnums=3)(log_probs, tokens, anchors, budget))
    assert proposal.tokens.shape == (len(anchors), budget)
    for row, anchor in enumerate(anchors):
        paths(proposal, row, anchor, gamma)
        expected = jetspec_reference(log_probs[row], tokens[row], budget)
        count = len(expected)
        assert proposal.valid[row].tolist() == [node < count for node in range(budget)]
        reference_tokens, parents, depths, scores = zip(*expected, strict=True)
        assert proposal.tokens[row, 1:count].tolist() == list(reference_tokens[1:])
        assert proposal.parents[row, :count].tolist() == list(parents)
        assert proposal.depths[row, :count].tolist() == list(depths)
        np.testing.assert_allclose(proposal.scores[row, :count], scores, rtol=1e-6)


@pytest.mark.parametrize(
    ("gamma", "vocabulary", "budget", "dtype"),
    [
        (3, 4, 9, np.float64),
        (4, 5, 16, np.float64),
        (2, 2, 12, np.float64),
        (3, 8, 4, np.float64),
        (1, 6, 4, np.float64),
        (4, 3, 12, np.float32),
    ],
)
def test_ddtree_holds_the_most_probable_prefixes(gamma, vocabulary, budget, dtype):
    """The very prefixes where scores differ; where they tie, as many of each score."""
    count = min(budget - 1, vocabulary)
    with jax.enable_x64(dtype is np.float64):
        log_probs, tokens, anchors = candidates(60 + gamma, gamma, count, vocabulary, dtype, ordered=True)
        proposal = jax.device_get(jax.jit(ddtree, static_argnums=3)(log_probs, tokens, anchors, budget))
    assert proposal.tokens.shape == (len(anchors), budget)
    tolerance = 1e-12 if dtype is np.float64 else 1e-5
    for row, anchor in enumerate(anchors):
        actual = paths(proposal, row, anchor, gamma)
        exact = log_probs[row].astype(np.float64)
        for reference in (ddtree_exhaustive, ddtree_heap):
            expected = reference(exact, tokens[row], budget)
            assert len(actual) == len(expected)
            np.testing.assert_allclose(
                sorted(actual.values()), sorted(score for score, _ in expected), atol=tolerance, err_msg=str(reference)
            )
            if row < len(anchors) // 2:
                assert set(actual) == {path for _, path in expected}
        log_prob = [dict(zip(tokens[row, slot].tolist(), exact[slot], strict=True)) for slot in range(gamma)]
        for path, score in actual.items():
            assert score == pytest.approx(sum(log_prob[slot][t] for slot, t in enumerate(path)), abs=tolerance)
