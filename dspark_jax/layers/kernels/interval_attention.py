"""Attention in which each query sees an interval of the keys: the jnp twin, for CPU, GPU and odd head widths.

Scores exist only for a chunk of queries times a chunk of keys (online softmax, arXiv 2205.14135), and the backward
pass computes them again. A chunk of keys that no query of a chunk sees is not visited: when intervals ascend along
the queries, that is every chunk outside [least first, largest end).

Shapes: q [B, Q, heads, D]; k, v [B, S, kv_heads, D]; query i sees the keys `first` ≤ index < `end`, both [B, Q].
Inside everything is float32, or float64 for float64 queries.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax.layers.linear import wide_dtype

# What a query that sees nothing has for its log-sum-exp: finite, so that a difference of two is not NaN.
NOTHING = -1e30

_QUERIES = 256
_KEYS = 512


def key_blocks(
    first: Int[Array, "*rows Q"], end: Int[Array, "*rows Q"], queries: int, keys: int
) -> tuple[Int[Array, "*rows tiles"], Int[Array, "*rows tiles"]]:
    """[begin, end) of the blocks of `keys` keys that tiles of `queries` queries need; 0 and 0 for an empty tile.

    `queries` divides Q. Every key that a query of the tile sees lies in these blocks, and the outermost are needed.
    """
    tiles = (*first.shape[:-1], first.shape[-1] // queries, queries)
    first, end = first.reshape(tiles), end.reshape(tiles)
    empty = end <= first
    begin = jnp.min(jnp.where(empty, jnp.iinfo(jnp.int32).max, first), axis=-1) // keys
    stop = -(-jnp.max(jnp.where(empty, 0, end), axis=-1) // keys)
    return jnp.where(stop > 0, begin, 0), stop


def query_tiles(
    begin: Int[Array, "*rows tiles"], end: Int[Array, "*rows tiles"], blocks: int
) -> tuple[Int[Array, "*rows blocks"], Int[Array, "*rows blocks"]]:
    """[begin, end) of the tiles that need each of `blocks` key blocks, from `key_blocks`; 0 and 0 where none does."""
    block = jnp.arange(blocks, dtype=jnp.int32).reshape((1,) * begin.ndim + (-1,))
    needed = (begin[..., None] <= block) & (block < end[..., None])
    tiles = begin.shape[-1]
    least = jnp.argmax(needed, axis=-2).astype(jnp.int32)
    most = tiles - jnp.argmax(jnp.flip(needed, axis=-2), axis=-2).astype(jnp.int32)
    return least, jnp.where(jnp.any(needed, axis=-2), most, 0)


def _split(x: Array, queries: int) -> Array:
    """[B, Q, …] → [chunks, B, queries, …]; the padding sees no key."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % queries), *((0, 0),) * (x.ndim - 2)))
    return jnp.moveaxis(x.reshape(x.shape[0], -1, queries, *x.shape[2:]), 1, 0)


def _by_head(
    x: Float[Array, "chunks B queries heads D"], kv_heads: int
) -> Float[Array, "chunks B kv_heads n queries D"]:
    chunks, batch, queries, heads, width = x.shape
    return jnp.transpose(x.reshape(chunks, batch, queries, kv_heads, heads // kv_heads, width), (0, 1, 3, 4, 2, 5))


def _from_chunks(x: Float[Array, "chunks B kv_heads n queries D"], count: int) -> Float[Array, "B Q heads D"]:
    chunks, batch, kv_heads, group, queries, width = x.shape
    x = jnp.transpose(x, (1, 0, 4, 2, 3, 5)).reshape(batch, chunks * queries, kv_heads * group, width)
    return x[:, :count]


def _rows(x: Float[Array, "B heads Q"], kv_heads: int, queries: int) -> Float[Array, "chunks B kv_heads n queries"]:
    x = jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % queries)))
    return jnp.moveaxis(x.reshape(x.shape[0], kv_heads, -1, x.shape[2] // queries, queries), 3, 0)


def _sizes(q: Array, k: Array) -> tuple[int, int]:
    return min(_QUERIES, q.shape[1]), min(_KEYS, k.shape[1])


def _bounds(first, end, keys: int):
    """The key chunks that a chunk of queries [B, queries] needs in any row."""
    begin, stop = key_blocks(first.reshape(-1), end.reshape(-1), first.size, keys)
    return begin[0], stop[0]


def _take(x: Float[Array, "B kv_heads S D"], begin, keys: int, wide) -> Float[Array, "B kv_heads keys D"]:
    return jax.lax.dynamic_slice_in_dim(x, begin, keys, axis=2).astype(wide)


def _scores(q, k, first, end, block, begin):
    """Scores of a chunk of scaled queries and keys, -inf where a query does not see the key.

    The last chunk of keys `begin`s early where it would reach beyond the keys; what it repeats is not seen either.
    """
    index = begin + jnp.arange(k.shape[2], dtype=jnp.int32)[None, None]
    seen = (first[..., None] <= index) & (index < end[..., None]) & (index >= block * k.shape[2])
    scores = jnp.einsum("bkngd,bksd->bkngs", q, k)
    return jnp.where(seen[:, None, None], scores, -jnp.inf)


def forward(
    q: Float[Array, "B Q heads D"],
    k: Float[Array, "B S kv_heads D"],
    v: Float[Array, "B S kv_heads D"],
    first: Int[Array, "B Q"],
    end: Int[Array, "B Q"],
) -> tuple[Float[Array, "B Q heads D"], Float[Array, "B heads Q"]]:
    """(output, log-sum-exp of the scaled scores), both wide; zeros and `NOTHING` for a query that sees no key."""
    batch, count, heads, width = q.shape
    kv_heads, wide = k.shape[2], wide_dtype(q.dtype)
    queries, keys = _sizes(q, k)
    k, v = (jnp.moveaxis(x, 1, 2) for x in (k, v))

    def attend(chunk):
        q, first, end = chunk
        q = q.astype(wide) * width**-0.5

        def visit(block, carry):
            top, total, out = carry
            begin = jnp.minimum(block * keys, k.shape[2] - keys)
            scores = _scores(q, _take(k, begin, keys, wide), first, end, block, begin)
            higher = jnp.maximum(top, jnp.max(scores, axis=-1))
            weights, shrink = jnp.exp(scores - higher[..., None]), jnp.exp(top - higher)
            out = out * shrink[..., None] + jnp.einsum("bkngs,bksd->bkngd", weights, _take(v, begin, keys, wide))
            return higher, total * shrink + jnp.sum(weights, axis=-1), out

        none = jnp.zeros(q.shape[:-1], wide)
        carry = (none + NOTHING, none, jnp.zeros(q.shape, wide))
        top, total, out = jax.lax.fori_loop(*_bounds(first, end, keys), visit, carry)
        some = total > 0
        total = jnp.where(some, total, 1.0)
        return out / total[..., None], jnp.where(some, top + jnp.log(total), NOTHING)

    chunks = (_by_head(_split(q, queries), kv_heads), _split(first, queries), _split(end, queries))
    out, lse = jax.lax.map(attend, chunks)
    return _from_chunks(out, count), jnp.moveaxis(lse, 0, 3).reshape(batch, heads, -1)[:, :, :count]


def backward(
    q: Float[Array, "B Q heads D"],
    k: Float[Array, "B S kv_heads D"],
    v: Float[Array, "B S kv_heads D"],
    first: Int[Array, "B Q"],
    end: Int[Array, "B Q"],
    cotangent: Float[Array, "B Q heads D"],
    lse: Float[Array, "B heads Q"],
    delta: Float[Array, "B heads Q"],
) -> tuple[Float[Array, "B Q heads D"], Float[Array, "B S kv_heads D"], Float[Array, "B S kv_heads D"]]:
    """Wide gradients of q, k and v from the output's cotangent.

    The interval may be a part of what a query sees: `lse` is the log-sum-exp over all of that, and `delta` the inner
    product of the whole output and its cotangent.
    """
    count, width = q.shape[1], q.shape[3]
    kv_heads, wide = k.shape[2], wide_dtype(q.dtype)
    queries, keys = _sizes(q, k)
    k, v = (jnp.moveaxis(x, 1, 2) for x in (k, v))

    def attend(sums, chunk):
        q, first, end, cotangent, lse, delta = chunk
        q, cotangent = q.astype(wide) * width**-0.5, cotangent.astype(wide)

        def visit(block, carry):
            dq, dk, dv = carry
            begin = jnp.minimum(block * keys, k.shape[2] - keys)
            part, values = _take(k, begin, keys, wide), _take(v, begin, keys, wide)
            weights = jnp.exp(_scores(q, part, first, end, block, begin) - lse[..., None])
            change = weights * (jnp.einsum("bkngd,bksd->bkngs", cotangent, values) - delta[..., None])
            add = functools.partial(_add, begin=begin)
            return (
                dq + jnp.einsum("bkngs,bksd->bkngd", change, part),
                add(dk, jnp.einsum("bkngs,bkngd->bksd", change, q)),
                add(dv, jnp.einsum("bkngs,bkngd->bksd", weights, cotangent)),
            )

        dq, *sums = jax.lax.fori_loop(*_bounds(first, end, keys), visit, (jnp.zeros(q.shape, wide), *sums))
        return tuple(sums), dq * width**-0.5

    chunks = (
        _by_head(_split(q, queries), kv_heads),
        _split(first, queries),
        _split(end, queries),
        _by_head(_split(cotangent, queries), kv_heads),
        _rows(lse, kv_heads, queries),
        _rows(delta, kv_heads, queries),
    )
    zeros = jnp.zeros(k.shape, wide)
    (dk, dv), dq = jax.lax.scan(attend, (zeros, zeros), chunks)
    return _from_chunks(dq, count), jnp.moveaxis(dk, 1, 2), jnp.moveaxis(dv, 1, 2)


def _add(sums: Array, new: Array, begin: Array) -> Array:
    old = jax.lax.dynamic_slice_in_dim(sums, begin, new.shape[2], axis=2)
    return jax.lax.dynamic_update_slice_in_dim(sums, old + new, begin, axis=2)
