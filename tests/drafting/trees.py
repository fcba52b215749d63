"""What every tree must be."""

import numpy as np
import pytest

from dspark_jax.proposals import Proposal


def paths(proposal: Proposal, row: int, anchor: int, gamma: int) -> dict[tuple[int, ...], float]:
    """Token paths of one request's nodes with their scores, after checking that they are a tree."""
    fields = ("tokens", "parents", "depths", "valid", "scores")
    tokens, parents, depths, valid, scores = (np.asarray(getattr(proposal, name)[row]) for name in fields)
    assert valid[0] and tokens[0] == anchor and parents[0] == -1 and depths[0] == 0 and scores[0] == 0
    found = [()]
    assert (parents[~valid] == -1).all() and (depths[~valid] == 0).all()
    for node in range(1, len(tokens)):
        if not valid[node]:
            found.append(None)
            continue
        parent = parents[node]
        assert 0 <= parent < node and valid[parent], "a node's parent comes before it and is in the tree"
        assert depths[node] == depths[parent] + 1 <= gamma
        assert scores[node] <= scores[parent]
        found.append((*found[parent], int(tokens[node])))
    named = {path: scores[node] for node, path in enumerate(found) if path is not None}
    assert len(named) == valid.sum(), "no two children of a parent have one token"
    return named


def assert_same_tree(proposal: Proposal, row: int, anchor: int, gamma: int, expected: dict, atol: float = 1e-11):
    actual = paths(proposal, row, anchor, gamma)
    assert set(actual) == set(expected)
    for path, score in expected.items():
        assert actual[path] == pytest.approx(score, abs=atol)
