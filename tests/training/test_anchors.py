"""Anchor validity and the slots' masks against loops written from their definition."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.training.anchors import Batch, make_blocks, sample_anchors, valid_anchors

LENGTH = 12


def positions_of(documents) -> np.ndarray:
    """The index of each token in its document."""
    ids = np.asarray(documents)
    index = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    begins = np.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)))
    return index - np.maximum.accumulate(np.where(begins, index, 0), axis=1)


def batch_of(mask, documents, row_anchors=None) -> Batch:
    tokens = jnp.arange(len(mask) * LENGTH, dtype=jnp.int32).reshape(len(mask), LENGTH)
    ids, positions = (jnp.asarray(x, jnp.int32) for x in (documents, positions_of(documents)))
    return Batch(tokens, jnp.asarray(mask), ids, positions, row_anchors=row_anchors)


rows = st.lists(st.lists(st.booleans(), min_size=LENGTH, max_size=LENGTH), min_size=2, max_size=2)
borders = st.lists(st.integers(0, LENGTH), min_size=2, max_size=2)
sample = jax.jit(sample_anchors, static_argnums=(2, 3))


@settings(max_examples=25, deadline=None)
@given(
    mask=rows,
    border=borders,
    seed=st.integers(0, 99),
    wanted=st.sampled_from([1, 4, 40]),
    first=st.integers(0, 1),
)
def test_anchors_and_slots(mask, border, seed, wanted, first):
    documents = [[2 * r + int(i >= b) for i in range(LENGTH)] for r, b in enumerate(border)]
    positions = positions_of(documents)
    batch = batch_of(mask, documents)
    anchors, kept = (np.asarray(x) for x in sample(jax.random.key(seed), batch, wanted, first))
    blocks = make_blocks(batch, jnp.asarray(anchors), jnp.asarray(kept), 4)
    for r in range(2):
        valid = [
            a for a in range(LENGTH - 1) if mask[r][a] and mask[r][a + 1] and documents[r][a] == documents[r][a + 1]
        ]
        assert np.flatnonzero(valid_anchors(batch)[r]).tolist() == valid
        allowed = [a for a in valid if positions[r][a] >= first]
        chosen = anchors[r][kept[r]].tolist()
        assert chosen == sorted(set(chosen)) and set(chosen) <= set(allowed)
        for document in {0, 1}:
            mine, drawn = ([a for a in some if documents[r][a] == 2 * r + document] for some in (allowed, chosen))
            assert len(drawn) == min(len(mine), wanted)
        assert kept[r].tolist() == sorted(kept[r].tolist(), reverse=True) and not anchors[r][~kept[r]].any()
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
    """In both documents of a row."""
    batch = batch_of([[True] * LENGTH], [[0] * 7 + [1] * 5], row_anchors=5)
    keys = jax.random.split(jax.random.key(0), 3000)
    anchors, kept = jax.vmap(lambda key: sample_anchors(key, batch, 3))(keys)
    # The row has room for five of the six; the last is the second document's.
    assert kept.all() and anchors.shape == (3000, 1, 5)
    anchors, _ = jax.vmap(lambda key: sample_anchors(key, batch.replace(row_anchors=6), 3))(keys)
    counts = np.bincount(np.asarray(anchors).ravel(), minlength=LENGTH)
    for document, valid in ((slice(0, 7), 6), (slice(7, 12), 4)):
        expected = 3000 * 3 / valid
        assert np.abs(counts[document][:valid] - expected).max() < 5 * np.sqrt(expected)
        assert counts[document][valid] == 0


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(1, LENGTH), min_size=1, max_size=5),
    seed=st.integers(0, 99),
    order=st.permutations(range(5)),
)
def test_a_document_s_anchors_do_not_depend_on_its_row(lengths, seed, order):
    """Alone in a row, or in rows that are packed in any order."""
    mask = np.random.default_rng(seed).random((len(lengths), LENGTH)) < 0.8
    alone = {number: (number, 0) for number in range(len(lengths))}
    packed, row, used = {}, 0, 0
    for number in (number for number in order if number < len(lengths)):
        row, used = (row, used) if used + lengths[number] <= LENGTH else (row + 1, 0)
        packed[number] = row, used
        used += lengths[number]

    def drawn(places):
        documents, trained = np.full((5, LENGTH), -1), np.zeros((5, LENGTH), bool)
        for number, (row, start) in places.items():
            at = row, slice(start, start + lengths[number])
            documents[at], trained[at] = number, mask[number, : lengths[number]]
        anchors, kept = sample(jax.random.key(seed), batch_of(trained, documents), 3, 0)
        found = np.zeros((5, LENGTH), bool)
        for row in range(5):
            found[row, np.asarray(anchors[row])[np.asarray(kept[row])]] = True
        return [
            np.flatnonzero(found[row, start : start + lengths[number]]).tolist()
            for number, (row, start) in sorted(places.items())
        ]

    assert drawn(alone) == drawn(packed)
