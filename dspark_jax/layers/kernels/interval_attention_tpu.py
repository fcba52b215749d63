"""Attention in which each query sees an interval of the keys: the Pallas kernels for TPU, beside their jnp twin.

Arguments and results are those of `interval_attention`; a head's width must be a multiple of 128. Heads are cut out
of the lanes of [B, rows, heads·D], so nothing is transposed in memory, and one program attends all query heads that
share a head of keys. Scores lie keys by queries: what belongs to a query is then a row of lanes.

The grid runs over all blocks, but a tile's blocks of keys (or a block's tiles of queries) come from prefetched bounds:
beyond them nothing is computed, and nothing is fetched because the index stays that of the last block.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from dspark_jax.layers.kernels.interval_attention import NOTHING, key_blocks, query_tiles
from dspark_jax.sharding import shard_map_by_axes

_QUERIES = 256
_KEYS = 512

_ROWS = ("batch", None)
_HEADS = ("batch", None, "heads", None)
_KV_HEADS = ("batch", None, "kv_heads", None)
_BY_HEAD = ("batch", "heads", None)

_SEMANTICS = pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"))


def _dot(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    return jax.lax.dot_general(a, b, (((contract[0],), (contract[1],)), ((), ())), preferred_element_type=jnp.float32)


def _head(ref, g: int, width: int) -> Array:
    """One head's rows [rows, D] of a block [1, rows, heads·D]."""
    return ref[0, :, g * width : (g + 1) * width]


def _seen(first, end, block, keys: int) -> Array:
    """[keys, queries]: whether each query of a tile sees each key of a block."""
    queries = first.shape[-1]
    index = block * keys + jax.lax.broadcasted_iota(jnp.int32, (keys, queries), 0)
    first, end = (jnp.broadcast_to(x[0], (keys, queries)) for x in (first, end))
    return (first <= index) & (index < end)


def _forward_kernel(begin, stop, first, end, q, k, v, out, lse, top, total, sums, *, group: int):
    keys, width = k.shape[1:]
    tile, step = (pl.program_id(0), pl.program_id(2)), pl.program_id(3)
    block = begin[tile] + step

    @pl.when(step == 0)
    def _():
        top[...] = jnp.full(top.shape, NOTHING, top.dtype)
        total[...] = jnp.zeros(total.shape, total.dtype)
        sums[...] = jnp.zeros(sums.shape, sums.dtype)

    @pl.when(block < stop[tile])
    def _():
        seen, values = _seen(first[...], end[...], block, keys), v[0].astype(jnp.float32)
        for g in range(group):
            row, part = slice(g, g + 1), slice(g * width, (g + 1) * width)
            scores = _dot(k[0], _head(q, g, width), (1, 1)) * width**-0.5
            scores = jnp.where(seen, scores, -jnp.inf)
            higher = jnp.maximum(top[row], jnp.max(scores, axis=0, keepdims=True))
            weights, shrink = jnp.exp(scores - higher), jnp.exp(top[row] - higher)
            top[row] = higher
            total[row] = total[row] * shrink + jnp.sum(weights, axis=0, keepdims=True)
            sums[part] = sums[part] * shrink + _dot(values, weights, (0, 0))

    @pl.when(step == pl.num_programs(3) - 1)
    def _():
        some = total[...] > 0
        scale = jnp.where(some, total[...], 1.0)
        lse[0, 0] = jnp.where(some, top[...] + jnp.log(scale), NOTHING)
        for g in range(group):
            part = slice(g * width, (g + 1) * width)
            out[0, :, part] = (sums[part] / scale[g : g + 1]).T


def _weights_and_change(seen, q, k, v, cotangent, lse, delta):
    """One head's softmax weights [keys, queries], and the gradient of its scaled scores."""
    scores = jnp.where(seen, _dot(k, q, (1, 1)) * q.shape[-1] ** -0.5, -jnp.inf)
    weights = jnp.exp(scores - lse)
    return weights, weights * (_dot(v, cotangent, (1, 1)) - delta)


def _query_kernel(begin, stop, first, end, q, k, v, cotangent, lse, delta, dq, sums, *, group: int):
    keys, width = k.shape[1:]
    tile, step = (pl.program_id(0), pl.program_id(2)), pl.program_id(3)
    block = begin[tile] + step

    @pl.when(step == 0)
    def _():
        sums[...] = jnp.zeros(sums.shape, sums.dtype)

    @pl.when(block < stop[tile])
    def _():
        seen, wide_keys = _seen(first[...], end[...], block, keys), k[0].astype(jnp.float32)
        for g in range(group):
            row, heads = slice(g, g + 1), (_head(q, g, width), k[0], v[0], _head(cotangent, g, width))
            _, change = _weights_and_change(seen, *heads, lse[0, 0, row], delta[0, 0, row])
            sums[g * width : (g + 1) * width] += _dot(wide_keys, change, (0, 0))

    @pl.when(step == pl.num_programs(3) - 1)
    def _():
        for g in range(group):
            part = slice(g * width, (g + 1) * width)
            dq[0, :, part] = sums[part].T * width**-0.5


def _key_kernel(begin, stop, first, end, q, k, v, cotangent, lse, delta, dk, dv, key_sums, value_sums, *, group: int):
    keys, width = k.shape[1:]
    row, block, step = pl.program_id(0), pl.program_id(2), pl.program_id(3)

    @pl.when(step == 0)
    def _():
        key_sums[...] = jnp.zeros(key_sums.shape, key_sums.dtype)
        value_sums[...] = jnp.zeros(value_sums.shape, value_sums.dtype)

    @pl.when(begin[row, block] + step < stop[row, block])
    def _():
        seen = _seen(first[...], end[...], block, keys)
        for g in range(group):
            of_head = slice(g, g + 1)
            queries, gradient = _head(q, g, width), _head(cotangent, g, width)
            weights, change = _weights_and_change(
                seen, queries, k[0], v[0], gradient, lse[0, 0, of_head], delta[0, 0, of_head]
            )
            key_sums[...] += _dot(change, queries.astype(jnp.float32), (1, 0))
            value_sums[...] += _dot(weights, gradient.astype(jnp.float32), (1, 0))

    @pl.when(step == pl.num_programs(3) - 1)
    def _():
        dk[0] = key_sums[...] * width**-0.5
        dv[0] = value_sums[...]


class _Call:
    """Padded operands of one call, its block specs, and its grid in either order."""

    def __init__(self, q, k, first, end, queries: int, keys: int) -> None:
        self.batch, self.count, heads, self.width = q.shape
        self.length, self.kv_heads = k.shape[1:3]
        self.group = heads // self.kv_heads
        self.queries, self.keys = queries, min(keys, -(-self.length // 8) * 8)
        self.first, self.end = (jnp.pad(x, ((0, 0), (0, -self.count % queries))) for x in (first, end))
        self.tiles = self.first.shape[1] // queries
        self.blocks = -(-self.length // self.keys)
        self.by_tile = key_blocks(self.first, self.end, queries, self.keys)
        self.by_block = query_tiles(*self.by_tile, self.blocks)

    def lanes(self, x: Float[Array, "B rows heads D"], step: int) -> Float[Array, "B padded heads*D"]:
        return jnp.pad(x.reshape(*x.shape[:2], -1), ((0, 0), (0, -x.shape[1] % step), (0, 0)))

    def of_slots(self, x):
        return self.lanes(x, self.queries)

    def of_keys(self, x):
        return self.lanes(x, self.keys)

    def by_group(self, x: Float[Array, "B heads Q"]) -> Float[Array, "B kv_heads n padded"]:
        x = jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % self.queries)))
        return x.reshape(self.batch, self.kv_heads, self.group, -1)

    def run(self, kernel, over_keys: bool, operands, outputs, scratch, interpret: bool):
        """`operands` and `outputs` are pairs of what a spec is for and an array or shape.

        The grid is (row, head of keys, outer, inner); the inner index follows the bounds of the outer one.
        """
        bounds, most = (self.by_block, self.tiles) if over_keys else (self.by_tile, self.blocks)

        def inner(b, outer, step, begin, stop):
            last = jnp.maximum(stop[b, outer] - 1, 0)
            return jnp.minimum(begin[b, outer] + step, last)

        def tile(b, outer, step, bounds):
            return inner(b, outer, step, *bounds) if over_keys else outer

        def block(b, outer, step, bounds):
            return outer if over_keys else inner(b, outer, step, *bounds)

        specs = {
            "interval": pl.BlockSpec((1, 1, self.queries), lambda b, h, o, s, *n: (b, 0, tile(b, o, s, n))),
            "slots": pl.BlockSpec(
                (1, self.queries, self.group * self.width), lambda b, h, o, s, *n: (b, tile(b, o, s, n), h)
            ),
            "keys": pl.BlockSpec((1, self.keys, self.width), lambda b, h, o, s, *n: (b, block(b, o, s, n), h)),
            "rows": pl.BlockSpec((1, 1, self.group, self.queries), lambda b, h, o, s, *n: (b, h, 0, tile(b, o, s, n))),
        }
        intervals = [("interval", x[:, None]) for x in (self.first, self.end)]
        operands = [*intervals, *operands]
        return pl.pallas_call(
            functools.partial(kernel, group=self.group),
            out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for _, shape in outputs],
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=(self.batch, self.kv_heads, self.blocks if over_keys else self.tiles, most),
                in_specs=[specs[name] for name, _ in operands],
                out_specs=[specs[name] for name, _ in outputs],
                scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
            ),
            compiler_params=_SEMANTICS,
            interpret=interpret,
        )(*bounds, *(x for _, x in operands))


def forward(
    q: Float[Array, "B Q heads D"],
    k: Float[Array, "B S kv_heads D"],
    v: Float[Array, "B S kv_heads D"],
    first: Int[Array, "B Q"],
    end: Int[Array, "B Q"],
    *,
    queries: int = _QUERIES,
    keys: int = _KEYS,
    interpret: bool = False,
) -> tuple[Float[Array, "B Q heads D"], Float[Array, "B heads Q"]]:
    """As the twin's; `queries` and `keys` are the sides of a tile of scores."""

    def run(q, k, v, first, end):
        call = _Call(q, k, first, end, queries, keys)
        slots = call.of_slots(q)
        side = (call.group, queries)
        out, lse = call.run(
            _forward_kernel,
            False,
            [("slots", slots), ("keys", call.of_keys(k)), ("keys", call.of_keys(v))],
            [("slots", slots.shape), ("rows", (call.batch, call.kv_heads, call.group, slots.shape[1]))],
            [side, side, (call.group * call.width, queries)],
            interpret,
        )
        lse = lse.reshape(call.batch, -1, slots.shape[1])[:, :, : call.count]
        return out[:, : call.count].reshape(q.shape), lse

    axes = (_HEADS, _KV_HEADS, _KV_HEADS, _ROWS, _ROWS)
    return shard_map_by_axes(run, axes, (_HEADS, _BY_HEAD))(q, k, v, first, end)


def backward(
    q: Float[Array, "B Q heads D"],
    k: Float[Array, "B S kv_heads D"],
    v: Float[Array, "B S kv_heads D"],
    first: Int[Array, "B Q"],
    end: Int[Array, "B Q"],
    cotangent: Float[Array, "B Q heads D"],
    lse: Float[Array, "B heads Q"],
    delta: Float[Array, "B heads Q"],
    *,
    queries: int = _QUERIES,
    keys: int = _KEYS,
    interpret: bool = False,
) -> tuple[Float[Array, "B Q heads D"], Float[Array, "B S kv_heads D"], Float[Array, "B S kv_heads D"]]:
    """As the twin's."""

    def run(q, k, v, first, end, cotangent, lse, delta):
        call = _Call(q, k, first, end, queries, keys)
        slots, padded = call.of_slots(q), call.of_keys(k)
        operands = [
            ("slots", slots),
            ("keys", padded),
            ("keys", call.of_keys(v)),
            ("slots", call.of_slots(cotangent)),
            ("rows", call.by_group(lse)),
            ("rows", call.by_group(delta)),
        ]
        sums = [(call.group * call.width, queries)]
        (dq,) = call.run(_query_kernel, False, operands, [("slots", slots.shape)], sums, interpret)
        outputs, sums = [("keys", padded.shape)] * 2, [(call.keys, call.width)] * 2
        dk, dv = (
            x[:, : call.length].reshape(k.shape)
            for x in call.run(_key_kernel, True, operands, outputs, sums, interpret)
        )
        return dq[:, : call.count].reshape(q.shape), dk, dv

    axes = (_HEADS, _KV_HEADS, _KV_HEADS, _ROWS, _ROWS, _HEADS, _BY_HEAD, _BY_HEAD)
    out = (_HEADS, _KV_HEADS, _KV_HEADS)
    return shard_map_by_axes(run, axes, out)(q, k, v, first, end, cotangent, lse, delta)
