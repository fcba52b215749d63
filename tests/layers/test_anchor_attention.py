"""Anchor attention against dense masks in float64; its kernels against their jnp twin; what is never visited."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.layers.anchor_attention import anchor_attention, first_visible
from dspark_jax.layers.kernels import interval_attention as twin
from dspark_jax.layers.kernels import interval_attention_tpu as kernels
from dspark_jax.sharding import make_mesh

ROWS, LENGTH, BLOCK, WIDTH = 2, 29, 3, 8
# Documents of the two rows; the second ends in padding.
DOCUMENTS = np.array([[0] * 11 + [1] * 6 + [2] * 12, [4] * 20 + [5] * 5 + [-1] * 4], np.int32)
# Ascending; index 0, 11 and 20 begin a document; the last two of the first row stand for blocks that are not kept.
ANCHORS = np.array([[0, 3, 10, 11, 16, 28, 0, 0], [1, 2, 9, 19, 20, 21, 22, 24]], np.int32)


def inputs(heads: int, kv_heads: int, dtype, width: int = WIDTH):
    """q, k, v of the blocks, keys and values of the context, and a cotangent."""
    rng = np.random.default_rng(heads)
    blocks = (ROWS, ANCHORS.shape[1], BLOCK)
    shapes = [(*blocks, heads, width), *[(*blocks, kv_heads, width)] * 2, *[(ROWS, LENGTH, kv_heads, width)] * 2]
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in (*shapes, shapes[0])]


def dense(q, k, v, context_keys, context_values, documents, window, causal):
    """Every slot of a row against all of [context; all blocks of the row] under one dense mask."""
    group = q.shape[3] // k.shape[3]
    count = ANCHORS.shape[1]
    out = []
    for row in range(ROWS):
        masks = np.zeros((count, BLOCK, LENGTH + count * BLOCK), bool)
        for a, anchor in enumerate(ANCHORS[row]):
            for slot in range(BLOCK):
                for key in range(LENGTH):
                    near = window is None or key > anchor + slot - window
                    same = documents is None or documents[row, key] == documents[row, anchor]
                    masks[a, slot, key] = key < anchor and same and near
                own = LENGTH + a * BLOCK
                masks[a, slot, own : own + (slot + 1 if causal else BLOCK)] = True
        keys = jnp.concatenate([context_keys[row], k[row].reshape(-1, *k.shape[3:])])
        values = jnp.concatenate([context_values[row], v[row].reshape(-1, *v.shape[3:])])
        keys, values = (jnp.repeat(x, group, axis=1) for x in (keys, values))
        scores = jnp.einsum("abhd,shd->abhs", q[row], keys) / np.sqrt(q.shape[-1])
        weights = jax.nn.softmax(jnp.where(masks[:, :, None], scores, -jnp.inf), axis=-1)
        out.append(jnp.einsum("abhs,shd->abhd", weights, values))
    return jnp.stack(out)


def attend(q, k, v, context_keys, context_values, documents, window, causal):
    documents = None if documents is None else jnp.asarray(documents)
    within = jnp.ones((BLOCK, BLOCK), bool)
    within = jnp.tril(within) if causal else within
    first = first_visible(jnp.asarray(ANCHORS), BLOCK, documents, window)
    return anchor_attention(q, k, v, context_keys, context_values, first, jnp.asarray(ANCHORS), within)


def value_and_gradients(function, arrays, *static):
    @jax.jit
    def run(*arrays):
        out, pull = jax.vjp(lambda *x: function(*x, *static), *arrays[:-1])
        return out, *pull(arrays[-1])

    return run(*arrays)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "documents", "window", "causal"),
    [
        (2, 2, None, None, False),
        (4, 2, DOCUMENTS, None, False),
        (4, 1, DOCUMENTS, 5, True),
    ],
)
def test_values_and_gradients_are_those_of_a_dense_mask(monkeypatch, heads, kv_heads, documents, window, causal):
    """In one chunk and in many, whose last reach beyond the queries and the keys."""
    with jax.enable_x64(True):
        arrays = inputs(heads, kv_heads, jnp.float64)
        expected = value_and_gradients(dense, arrays, documents, window, causal)
        for queries, keys in ((256, 512), (5, 8)):
            monkeypatch.setattr(twin, "_QUERIES", queries)
            monkeypatch.setattr(twin, "_KEYS", keys)
            for new, old in zip(value_and_gradients(attend, arrays, documents, window, causal), expected, strict=True):
                assert new.dtype == jnp.float64
                np.testing.assert_allclose(new, old, atol=1e-12)


def test_whole_lanes_have_a_kernel_but_not_on_this_platform():
    arrays = inputs(2, 1, jnp.float32, 128)
    for new, old in zip(
        value_and_gradients(attend, arrays, None, 4, False),
        value_and_gradients(dense, arrays, None, 4, False),
        strict=True,
    ):
        np.testing.assert_allclose(new, old, rtol=1e-5, atol=1e-5)


def test_bfloat16_is_rounded_at_the_end_only():
    arrays = inputs(4, 2, jnp.bfloat16)
    exact = value_and_gradients(attend, [x.astype(jnp.float32) for x in arrays], DOCUMENTS, None, False)
    for new, old in zip(value_and_gradients(attend, arrays, DOCUMENTS, None, False), exact, strict=True):
        assert new.dtype == jnp.bfloat16
        # One rounding is 2^-9; the gradients of queries and keys also see the rounded output.
        np.testing.assert_allclose(new.astype(jnp.float32), old, rtol=2**-8, atol=2**-7)


def flat(heads: int, kv_heads: int):
    """Arguments of both passes: slots in one row each, and statistics of a softmax over more than the interval."""
    q, _, _, keys, values, cotangent = inputs(heads, kv_heads, jnp.float32)
    first = first_visible(jnp.asarray(ANCHORS), BLOCK, jnp.asarray(DOCUMENTS), 9).reshape(ROWS, -1)
    end = jnp.repeat(jnp.asarray(ANCHORS), BLOCK, axis=1)
    q, cotangent = (x.reshape(ROWS, -1, heads, WIDTH) for x in (q, cotangent))
    rng = np.random.default_rng(0)
    delta = jnp.asarray(rng.normal(size=(ROWS, heads, q.shape[1])), jnp.float32)
    return (q, keys, values, first, end), cotangent, delta


def both_passes(module, arguments, cotangent, delta, **sizes):
    @jax.jit
    def run(*arguments):
        out, lse = module.forward(*arguments, **sizes)
        whole = jnp.logaddexp(lse, 1.0)
        return out, lse, *module.backward(*arguments, cotangent, whole, delta, **sizes)

    return run(*arguments)


def assert_same(new, old):
    for x, y in zip(new, old, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5 * np.abs(np.where(np.asarray(y) > -1e29, y, 0)).max())


@pytest.mark.parametrize(("heads", "kv_heads", "queries", "keys"), [(4, 2, 8, 8), (4, 1, 32, 512)])
def test_kernels_are_their_twin(heads, kv_heads, queries, keys):
    arguments, *rest = flat(heads, kv_heads)
    sizes = {"queries": queries, "keys": keys, "interpret": True}
    new, old = both_passes(kernels, arguments, *rest, **sizes), both_passes(twin, arguments, *rest)
    empty = np.asarray(arguments[4] <= arguments[3])
    assert empty.any(axis=1).all() and (np.asarray(new[0])[empty] == 0).all()
    assert (np.moveaxis(np.asarray(new[1]), 1, 2)[empty] == np.float32(twin.NOTHING)).all()
    assert_same(new, old)


def test_kernels_on_a_mesh():
    arguments, *rest = flat(4, 2)
    sizes = {"queries": 8, "keys": 16, "interpret": True}
    expected = both_passes(twin, arguments, *rest)
    with jax.set_mesh(make_mesh(2, 2, jax.devices()[:4])):
        assert_same(both_passes(kernels, arguments, *rest, **sizes), expected)


def test_bounds_are_those_of_the_mask():
    """Every block with a seen key lies in its tile's bounds; for ascending intervals, every block there has one."""
    rng = np.random.default_rng(0)
    queries, keys, length = 4, 8, 64
    for trial in range(12):
        count = 24
        end, first = rng.integers(0, length + 1, count), rng.integers(0, length, count)
        if trial % 2:
            end = np.sort(end)
            first = np.minimum(np.maximum.accumulate(np.maximum(end - 12, 0)), end)
            end[count - 2 :] = first[count - 2 :] = 0
        index = np.arange(length)
        seen = (first[:, None] <= index) & (index < end[:, None])
        needed = seen.reshape(count // queries, queries, length // keys, keys).any(axis=(1, 3))
        begin, stop = twin.key_blocks(jnp.asarray(first, jnp.int32), jnp.asarray(end, jnp.int32), queries, keys)
        blocks = np.arange(length // keys)
        visited = (np.asarray(begin)[:, None] <= blocks) & (blocks < np.asarray(stop)[:, None])
        assert (visited >= needed).all() and (visited.any(axis=1) == needed.any(axis=1)).all()
        if trial % 2:
            assert visited.sum() <= needed.sum() + len(needed), "ascending"
        least, most = (np.asarray(x) for x in twin.query_tiles(begin, stop, length // keys))
        tiles = np.arange(count // queries)[:, None]
        back = (least <= tiles) & (tiles < most)
        assert (back >= visited).all() and (back.any(axis=0) == visited.any(axis=0)).all()


def test_half_of_a_long_row_is_never_visited():
    """512 anchors drawn of 4096 positions: half of the blocks; in four documents, an eighth and their borders."""
    anchors = np.sort(np.random.default_rng(0).permutation(4096)[:512])[None].astype(np.int32)
    visited = {}
    for documents in (1, 4):
        ids = jnp.asarray(np.arange(4096) * documents // 4096, jnp.int32)[None]
        first = first_visible(jnp.asarray(anchors), 7, ids, None).reshape(1, -1)
        end = jnp.repeat(jnp.asarray(anchors), 7, axis=1)
        begin, stop = twin.key_blocks(first, end, 256, 512)
        visited[documents] = float(np.sum(stop - begin)) / (14 * 8)
    assert 0.5 < visited[1] < 0.6 and visited[4] < 0.25


@pytest.mark.parametrize("run", [twin, kernels])
def test_blocks_outside_the_bounds_are_not_read(monkeypatch, run):
    """They hold NaN, which any product with them would spread."""
    monkeypatch.setattr(twin, "_KEYS", 8)
    (q, keys, values, first, end), *rest = flat(4, 2)
    first, end = jnp.maximum(first, 9), jnp.minimum(end, 15)
    poison = jnp.full((ROWS, 8, *keys.shape[2:]), jnp.nan)
    keys, values = (x.at[:, :8].set(poison).at[:, 16:24].set(poison) for x in (keys, values))
    sizes = {} if run is twin else {"queries": 8, "keys": 8, "interpret": True}
    for x in both_passes(run, (q, keys, values, first, end), *rest, **sizes):
        assert np.isfinite(x).all()


def test_memory_does_not_grow_with_queries_times_keys():
    """Four times the queries and keys: temporaries grow as the operands, not by sixteen."""

    def temporaries(anchors: int, length: int) -> int:
        f32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
        block = [f32((1, anchors, 4, heads, 8)) for heads in (2, 1, 1)]
        first = jax.ShapeDtypeStruct((1, anchors, 4), jnp.int32)
        index = jax.ShapeDtypeStruct((1, anchors), jnp.int32)

        def gradients(q, k, v, keys, values, first, index):
            def total(*x):
                return jnp.sum(anchor_attention(*x, first, index, jnp.ones((4, 4), bool)))

            return jax.grad(total, argnums=(0, 1, 2, 3, 4))(q, k, v, keys, values)

        lowered = jax.jit(gradients).lower(*block, *[f32((1, length, 1, 8))] * 2, first, index)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temporaries(2048, 8192) < 5 * temporaries(512, 2048)
