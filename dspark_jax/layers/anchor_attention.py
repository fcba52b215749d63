"""Blocks of query slots that attend, under one softmax, to a context interval and to the keys of their block.

The two parts are computed apart and merged by their log-sum-exps, so no mask and no scores of all slots times all
keys are ever there: the context part runs in chunks, by a Pallas kernel on TPU and by its jnp twin elsewhere.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.layers.kernels import interval_attention
from dspark_jax.layers.linear import wide_dtype

# The kernel cuts heads out of the lanes of one row.
_LANES = 128


def _on_platform(name: str, q: Array, *others: Array):
    """The kernel on TPU where a head is whole lanes, else its twin. No TPU has float64."""
    twin = getattr(interval_attention, name)
    if q.shape[-1] % _LANES or q.dtype == jnp.float64:
        return twin(q, *others)
    # Here and not above: who has no such heads is spared half a second of imports.
    from dspark_jax.layers.kernels import interval_attention_tpu

    return jax.lax.platform_dependent(q, *others, tpu=getattr(interval_attention_tpu, name), default=twin)


def first_visible(
    anchors: Int[Array, "B A"], block_size: int, document_ids: Int[Array, "B S"] | None, window: int | None
) -> Int[Array, "B A block"]:
    """The first index of the context that each slot sees: its document's first, or the first in its window.

    A document is a run of equal `document_ids`; slot k stands at the anchor's index + k, and `window` counts
    positions, which inside a document differ as indices do.
    """
    first = jnp.zeros_like(anchors)
    if document_ids is not None:
        index = jnp.broadcast_to(jnp.arange(document_ids.shape[1], dtype=jnp.int32)[None], document_ids.shape)
        border = jnp.pad(document_ids[:, 1:] != document_ids[:, :-1], ((0, 0), (1, 0)))
        starts = jax.lax.cummax(jnp.where(border, index, 0), axis=1)
        first = jnp.take_along_axis(starts, anchors, axis=1)
    first = jnp.broadcast_to(first[:, :, None], (*anchors.shape, block_size))
    if window is None:
        return first
    slots = anchors[:, :, None] + jnp.arange(block_size, dtype=jnp.int32)[None, None]
    return jnp.maximum(first, slots - (window - 1))


def anchor_attention(
    q: Float[Array, "B A block heads D"],
    k: Float[Array, "B A keys kv_heads D"],
    v: Float[Array, "B A keys kv_heads D"],
    context_keys: Float[Array, "B S kv_heads D"],
    context_values: Float[Array, "B S kv_heads D"],
    first: Int[Array, "B A block"],
    anchors: Int[Array, "B A"],
    within: Bool[Array, "block keys"],
) -> Float[Array, "B A block heads D"]:
    """Softmax over [context; own block]: a slot sees the context `first` ≤ index < its anchor, and the keys of its
    block that `within` says, which must be one at least.

    Float32 inside, or float64 for float64 queries. Right for any anchors, and least work where they ascend.
    """
    context = (x.astype(q.dtype) for x in (context_keys, context_values))
    end = jnp.broadcast_to(anchors[:, :, None], first.shape)
    return _attention(q, k, v, *context, first, end, within)


@jax.custom_vjp
def _attention(q, k, v, context_keys, context_values, first, end, within):
    return _forward(q, k, v, context_keys, context_values, first, end, within)[0]


def _slots(x: Float[Array, "B A block …"]) -> Float[Array, "B A*block …"]:
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _grouped(x: Float[Array, "B A block heads D"], kv_heads: int) -> Float[Array, "B A block kv_heads n D"]:
    return x.reshape(*x.shape[:3], kv_heads, -1, x.shape[-1])


def _of_blocks(x: Float[Array, "B heads A*block"], shape: tuple[int, ...]) -> Float[Array, "B A kv_heads n block"]:
    """As rows of the block scores, whose shape is given."""
    batch, anchors, kv_heads, group, block = shape[:5]
    return jnp.transpose(x.reshape(batch, kv_heads, group, anchors, block), (0, 3, 1, 2, 4))


def _block_scores(q: Float[Array, "B A block kv_heads n D"], k, within) -> Float[Array, "B A kv_heads n block keys"]:
    scores = jnp.einsum("bagknd,bajkd->bakngj", q, k) * q.shape[-1] ** -0.5
    return jnp.where(within[None, None, None, None], scores, -jnp.inf)


def _forward(q, k, v, context_keys, context_values, first, end, within):
    kv_heads, wide = k.shape[3], wide_dtype(q.dtype)
    interval = (_slots(first), _slots(end))
    out, from_context = _on_platform("forward", _slots(q), context_keys, context_values, *interval)
    scores = _block_scores(_grouped(q.astype(wide), kv_heads), k.astype(wide), within)
    from_context = _of_blocks(from_context, scores.shape)
    lse = jnp.logaddexp(from_context, jax.nn.logsumexp(scores, axis=-1))
    share = jnp.transpose(jnp.exp(from_context - lse), (0, 1, 4, 2, 3))[..., None]
    out = share * _grouped(out.reshape(q.shape), kv_heads)
    out += jnp.einsum("bakngj,bajkd->bagknd", jnp.exp(scores - lse[..., None]), v.astype(wide))
    out = out.reshape(q.shape).astype(q.dtype)
    return out, (q, k, v, context_keys, context_values, first, end, within, out, lse)


def _backward(saved, cotangent):
    q, k, v, context_keys, context_values, first, end, within, out, lse = saved
    batch, _, _, heads, width = q.shape
    kv_heads, wide = k.shape[3], wide_dtype(q.dtype)
    queries, keys, values, gradient = (x.astype(wide) for x in (q, k, v, cotangent))
    queries, gradient = _grouped(queries, kv_heads), _grouped(gradient, kv_heads)
    delta = jnp.einsum("bagknd,bagknd->bakng", gradient, _grouped(out.astype(wide), kv_heads))

    weights = jnp.exp(_block_scores(queries, keys, within) - lse[..., None])
    change = weights * (jnp.einsum("bagknd,bajkd->bakngj", gradient, values) - delta[..., None]) * width**-0.5
    dq = jnp.einsum("bakngj,bajkd->bagknd", change, keys).reshape(q.shape)
    dk = jnp.einsum("bakngj,bagknd->bajkd", change, queries)
    dv = jnp.einsum("bakngj,bagknd->bajkd", weights, gradient)

    lse, delta = (jnp.transpose(x, (0, 2, 3, 1, 4)).reshape(batch, heads, -1) for x in (lse, delta))
    context = (context_keys, context_values, _slots(first), _slots(end))
    more, *to_context = _on_platform("backward", _slots(q), *context, _slots(cotangent), lse, delta)
    dq = dq + more.reshape(q.shape)
    gradients = zip((dq, dk, dv, *to_context), (q, k, v, context_keys, context_values), strict=True)
    return (*(new.astype(old.dtype) for new, old in gradients), None, None, None)


_attention.defvjp(_forward, _backward)
