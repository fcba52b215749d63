"""Slow readings of the scheduler, from its description, over plain lists."""

import itertools

import numpy as np


def rate(capacities, rates, tokens: int) -> float:
    """SPS(B): that of the smallest bucket that holds B."""
    return next((float(r) for capacity, r in zip(capacities, rates, strict=True) if capacity >= tokens), 0.0)


def candidates(survival, depths, valid) -> list[tuple[float, int, int, int]]:
    """(−a, depth, request, node) of every draft, in the order of admission."""
    requests, nodes = survival.shape
    return sorted(
        (-float(survival[r, n]), int(depths[r, n]), r, n)
        for r in range(requests)
        for n in range(1, nodes)
        if valid[r, n]
    )


def algorithm_1(survival, depths, valid, capacities, rates) -> set[tuple[int, int]]:
    """The paper's Algorithm 1: admit the likeliest while that raises the throughput, and stop at once when not."""
    tokens = expected = int(valid[:, 0].sum())
    best = expected * rate(capacities, rates, tokens)
    admitted = set()
    for negative, _, request, node in candidates(survival, depths, valid):
        throughput = (expected - negative) * rate(capacities, rates, tokens + 1)
        if throughput <= best:
            break
        best, tokens, expected = throughput, tokens + 1, expected - negative
        admitted.add((request, node))
    return admitted


def subtrees(parents, valid) -> list[frozenset[int]]:
    """Every set of one request's drafts that holds the parents of its nodes; for a chain, every length."""
    drafts = [node for node in range(1, len(parents)) if valid[node]]
    sets = (frozenset(s) for size in range(len(drafts) + 1) for s in itertools.combinations(drafts, size))
    return [s for s in sets if all(parents[node] == 0 or parents[node] in s for node in s)]


def best_throughput(survival, parents, valid, capacities, rates) -> tuple[float, int]:
    """The largest Θ over all prefix-closed choices of all requests together, and the fewest tokens that reach it."""
    choices = []
    for request in np.flatnonzero(valid[:, 0]):
        sets = subtrees(parents[request], valid[request])
        choices.append(np.array([(1 + len(s), 1 + survival[request, list(s)].sum()) for s in sets]))
    if not choices:
        return 0.0, 0
    total = choices[0]
    for more in choices[1:]:
        total = (total[:, None] + more[None]).reshape(-1, 2)
    steps = np.array([rate(capacities, rates, tokens) for tokens in range(int(total[:, 0].max()) + 1)])
    throughput = total[:, 1] * steps[total[:, 0].astype(int)]
    best = throughput.max()
    return float(best), int(total[throughput == best, 0].min())
