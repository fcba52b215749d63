"""Anchor validity and the slots' masks against loops written from their definition."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.training.anchors import Batch, make_blocks, sample_anchors, valid_anchors

LENGTH = 12


def batch_of(mask, documents) -> Batch:
    tokens = jnp.arange(len(mask) * LENGTH, dtype=jnp.int32).reshape(len(mask), LENGTH)
    ids = jnp.asarray(documents, jnp.int32)
    return Batch(tokens, jnp.asarray(mask), ids, jnp.zeros_like(ids))


rows = st.lists(st.lists(st.booleans(), min_size=LENGTH, max_size=LENGTH), min_size=2, max_size=2)
borders = st.lists(st.integers(0, LENGTH), min_size=2, max_size=2)


@settings(max_examples=25, deadline=None)
@given(mask=rows, border=borders, seed=st.integers(0, 99), wanted=st.sampled_from([1, 4, 12, 40]))
def test_anchors_and_slots(mask, border, seed, wanted):
    documents = [[int(i >= b) for i in range(LENGTH)] for b in border]
    batch = batch_of(mask, documents)
    anchors, kept = (np.asarray(x) for x in sample_anchors(jax.random.key(seed), batch, wanted))
    blocks = make_blocks(batch, jnp.asarray(anchors), jnp.asarray(kept), 4)
    for r in range(2):
        valid = [
            a for a in range(LENGTH - 1) if mask[r][a] and mask[r][a + 1] and documents[r][a] == documents[r][a + 1]
        ]
        assert np.flatnonzero(valid_anchors(batch)[r]).tolist() == valid
        chosen = anchors[r][kept[r]].tolist()
        assert len(chosen) == min(len(valid), wanted, LENGTH)
        assert chosen == sorted(set(chosen)) and set(chosen) <= set(valid)
        for b, anchor in enumerate(anchors[r]):
            open_slots = bool(kept[r][b])
            for k in range(4):
                index = int(anchor) + k + 1
                open_slots = (
                    open_slots and index < LENGTH and mask[r][index] and documents[r][index] == documents[r][anchor]
                )
                assert bool(blocks.slots[r, b, k]) == open_slots
                if open_slots:
                    assert int(blocks.targets[r, b, k]) == r * LENGTH + index
                    assert int(blocks.previous[r, b, k]) == r * LENGTH + index - 1


def test_every_valid_anchor_is_drawn_as_often():
    batch = batch_of([[True] * LENGTH], [[0] * LENGTH])
    keys = jax.random.split(jax.random.key(0), 3000)
    anchors, _ = jax.vmap(lambda key: sample_anchors(key, batch, 3))(keys)
    counts = np.bincount(np.asarray(anchors).ravel(), minlength=LENGTH)[: LENGTH - 1]
    expected = 3000 * 3 / (LENGTH - 1)
    assert np.abs(counts - expected).max() < 5 * np.sqrt(expected)
