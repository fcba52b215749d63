"""Documents in packed rows: the packer's promises, and training that equals that of the same documents one a row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.drafters.kinds import first_anchor, target_features
from dspark_jax.targets.decoder import forward_documents
from dspark_jax.training.anchors import Batch, make_blocks, sample_anchors
from dspark_jax.training.features import StoredFeatures
from dspark_jax.training.losses import draft_blocks
from dspark_jax.training.optimizer import OptimizerConfig
from dspark_jax.training.packing import RowCapacity, deal, place, row_capacity, tightened
from dspark_jax.training.step import TrainConfig, eval_step, init_params, init_train_state, train_step
from tests.models import PAIR_KINDS, drafter_config, pair_config, random_drafter, random_target, target_config

# Documents of an update, of which the first two and the next three fit together into rows; the last has no anchor.
LENGTHS = (9, 7, 6, 5, 5, 3)
LENGTH = 16
KINDS = ("dspark", *PAIR_KINDS)


@settings(max_examples=100, deadline=None)
@given(
    documents=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=30),
    parts=st.integers(1, 4),
)
def test_every_document_has_one_place_and_no_row_too_much(documents, parts):
    lengths = np.asarray([length for length, _ in documents])
    anchors = np.minimum([wanted for _, wanted in documents], lengths)
    capacity = row_capacity(lengths, anchors, 40)
    assert capacity.tokens == 40 and anchors.max() <= capacity.anchors <= 40
    assert capacity.anchors % 8 == 0
    placement = place(lengths, anchors, capacity)
    taken = np.zeros((placement.count, 40), int)
    for row, start, length in zip(placement.rows, placement.starts, lengths, strict=True):
        assert start + length <= 40
        taken[row, start : start + length] += 1
    assert taken.max() == 1 and taken[:, 0].all()
    # From the left on, without holes.
    assert (np.diff(taken, axis=1) <= 0).all()
    assert np.bincount(placement.rows, anchors).max() <= capacity.anchors
    tight = tightened([(lengths, anchors)], capacity, placement.count)
    assert anchors.max() <= tight.anchors <= capacity.anchors
    assert place(lengths, anchors, tight).count <= placement.count
    again = place(lengths, anchors, capacity)
    assert (again.rows == placement.rows).all() and (again.starts == placement.starts).all()

    count = -(-placement.count // parts) * parts
    dealt = deal(placement, count, parts)
    assert dealt.count == count
    # The same rows under other numbers, as many in each part, or one less.
    pairs = set(zip(placement.rows.tolist(), dealt.rows.tolist(), strict=True))
    assert len(pairs) == len(set(dealt.rows.tolist())) == placement.count
    in_use = np.bincount(np.unique(dealt.rows) // (count // parts), minlength=parts)
    assert in_use.max() - in_use.min() <= 1


def test_rows_have_room_for_no_more_anchors_than_they_need():
    """Two documents that share no row leave the room for two together unused; a third that fits needs it."""
    two, three = np.asarray([60, 50]), np.asarray([60, 40, 40])
    batches = [(two, np.asarray([30, 30])), (three, np.asarray([30, 30, 30]))]
    assert tightened(batches[:1], RowCapacity(100, 64), 2) == RowCapacity(100, 32)
    assert tightened(batches, RowCapacity(100, 64), 2) == RowCapacity(100, 64)
    assert tightened(batches, RowCapacity(100, 64), 3) == RowCapacity(100, 32)
    assert tightened(batches[:1], RowCapacity(60, 60), 1) == RowCapacity(60, 60)


def test_what_does_not_fit_is_refused():
    capacity = RowCapacity(8, 4)
    for lengths, anchors in (([9], [1]), ([8], [5])):
        with pytest.raises(ValueError, match="does not fit"):
            place(np.asarray(lengths), np.asarray(anchors), capacity)


class Update:
    """One update from six documents, in any rows."""

    def __init__(self, kind: str):
        settings = target_config()
        drafter = drafter_config(settings) if kind == "dspark" else pair_config(settings, kind)
        self.config = TrainConfig(
            target=settings,
            drafter=type(drafter)(**{**vars(drafter), "num_anchors": 4}),
            total_steps=4,
            optimizer=OptimizerConfig(learning_rate=1e-2, warmup_fraction=0.0),
        )
        self.target = random_target(settings)
        rng = np.random.default_rng(0)
        self.tokens = [rng.integers(0, 8, length) for length in LENGTHS]
        self.masks = [np.arange(length) >= number % 3 for number, length in enumerate(LENGTHS)]

    def batch(self, row_of: tuple[int, ...], rows: int, row_anchors: int | None = None) -> Batch:
        """[rows, T], each document behind those before it in its row."""
        shape = (rows, LENGTH)
        tokens, mask = np.zeros(shape, np.int32), np.zeros(shape, bool)
        document_ids, positions, used = np.full(shape, -1, np.int32), np.zeros(shape, np.int32), [0] * rows
        for number, row in enumerate(row_of):
            at = row, slice(used[row], used[row] + LENGTHS[number])
            tokens[at], mask[at] = self.tokens[number], self.masks[number]
            document_ids[at], positions[at] = number, np.arange(LENGTHS[number])
            used[row] += LENGTHS[number]
        arrays = (jnp.asarray(x) for x in (tokens, mask, document_ids, positions))
        return Batch(*arrays, row_anchors=row_anchors)

    def alone(self) -> Batch:
        return self.batch((0, 1, 2, 3, 4, 5), 6, 4)

    def packed(self) -> Batch:
        """Three rows and an empty one; the second and third have all the anchors that they have room for."""
        return self.batch((0, 0, 1, 1, 1, 2), 4, 12)

    def params(self):
        return init_params(self.config.drafter, jax.random.key(1))

    def step(self, batch: Batch, accumulation: int = 1, steps: int = 2):
        """Parameters after a few updates, and the last one's metrics."""
        parts = jax.tree.map(lambda x: x.reshape(accumulation, -1, *x.shape[1:]), batch)
        state = init_train_state(self.config, jax.random.key(2), self.params())
        for _ in range(steps):
            state, metrics = train_step(state, self.target, parts, self.config)
        return state.params, metrics

    def sums(self, batch: Batch):
        return eval_step(self.params(), self.target, batch, jax.random.key(3), self.config)


@functools.cache
def update(kind: str) -> Update:
    return Update(kind)


def assert_near(found, expected, rtol=2e-6, atol=1e-6):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=rtol, atol=atol)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_train_as_alone(kind):
    problem = update(kind)
    expected = problem.step(problem.alone())
    assert float(expected[1]["updated"]) and float(expected[1]["gradient_norm"]) > 0.1
    assert_near(problem.step(problem.packed()), expected)
    assert float(expected[1]["blocks"]) == sum(
        min(4, len(mask) - 1 - max(number % 3, first_anchor(problem.config.drafter)))
        for number, mask in enumerate(problem.masks)
    )


@pytest.mark.parametrize("accumulation", [2, 4])
def test_accumulation_of_packed_rows_changes_rounding_only(accumulation):
    problem = update("dspark")
    assert_near(problem.step(problem.packed(), accumulation), problem.step(problem.packed()))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_leaks_from_one_document_into_another(kind):
    """Other tokens of one document leave every number of the others as it is, to the last bit."""
    problem = update(kind)
    config, batch = problem.config.drafter, problem.packed()
    drafter = random_drafter(config, problem.target)

    @jax.jit
    def run(batch):
        row = (batch.tokens, batch.positions, batch.document_ids)
        out = forward_documents(problem.target, problem.config.target, *row, config.target_layer_ids)
        features = target_features(config, out)
        anchors, kept = sample_anchors(jax.random.key(0), batch, config.num_anchors, first_anchor(config))
        blocks = make_blocks(batch, anchors, kept, config.num_drafts)
        return (features, out.hidden), blocks, draft_blocks(drafter, config, features, batch, blocks)

    before = jax.device_get(run(batch))
    ids = np.asarray(batch.document_ids)
    for changed in range(len(LENGTHS)):
        tokens = np.where(ids == changed, (np.asarray(batch.tokens) + 1) % 8, batch.tokens)
        after = jax.device_get(run(batch.replace(tokens=jnp.asarray(tokens))))
        for one, other in zip(after[0], before[0], strict=True):
            np.testing.assert_array_equal(one[ids != changed], other[ids != changed])
            assert not np.allclose(one[ids == changed], other[ids == changed], atol=1e-2)
        blocks = after[1]
        np.testing.assert_array_equal(blocks.anchors, before[1].anchors)
        np.testing.assert_array_equal(blocks.slots, before[1].slots)
        of_changed = np.take_along_axis(ids, blocks.anchors, axis=1) == changed
        others = blocks.slots & ~of_changed[..., None]
        for one, other in (
            (blocks.previous, before[1].previous),
            (blocks.targets, before[1].targets),
            (after[2], before[2]),
        ):
            np.testing.assert_array_equal(one[others], other[others])
        mine = blocks.slots & of_changed[..., None]
        assert mine.any() == (changed != len(LENGTHS) - 1)
        assert not mine.any() or not np.allclose(after[2][mine], before[2][mine], atol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_stored_features_in_packed_rows_are_the_target_s_own(kind):
    """Computed for each document alone, and laid where the document is."""
    problem = update(kind)
    taps = problem.config.drafter.target_layer_ids
    alone, packed = problem.alone(), problem.packed()
    row = (alone.tokens, alone.positions, alone.document_ids)
    out = forward_documents(problem.target, problem.config.target, *row, taps)
    parts = [] if out.features is None else np.split(np.asarray(out.features), len(taps), axis=-1)
    states = np.stack([*parts, np.asarray(out.hidden)], axis=-2)
    ids = np.asarray(packed.document_ids)
    laid = np.zeros((*ids.shape, *states.shape[2:]), np.float32)
    for number, length in enumerate(LENGTHS):
        laid[ids == number] = states[number, :length]
    expected = problem.sums(packed)
    assert_near(problem.sums(packed.replace(stored=StoredFeatures(jnp.asarray(laid)))), expected, rtol=1e-5)
    assert_near(problem.sums(alone), expected, rtol=1e-5)
