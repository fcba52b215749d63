"""Training batches, and the anchors at which blocks are trained."""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from dspark_jax.training.features import StoredFeatures


@struct.dataclass
class Batch:
    """Rows of tokens. `loss_mask`: tokens the target wrote. A document is one run of consecutive `positions` from 0 on
    and of one of `document_ids`, its number in the whole batch; padding has document id -1. All are [B, T]; a leading
    axis holds accumulation steps. `stored`: what the target computes of these tokens, where it need not run.
    `row_anchors`: A, the blocks that are made of a row at most, in the row's order; None: as many as it has tokens.
    """

    tokens: Int[Array, "B T"]
    loss_mask: Bool[Array, "B T"]
    document_ids: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    stored: StoredFeatures | None = None
    row_anchors: int | None = struct.field(pytree_node=False, default=None)


@struct.dataclass
class Blocks:
    """A blocks in each of B rows. `anchors`: index of each anchor in its row. `slots`: whether draft k is trained.

    `previous`, `targets`: the true token before and at each draft. Draft k predicts index anchor + k + 1.
    """

    anchors: Int[Array, "B A"]
    kept: Bool[Array, "B A"]
    slots: Bool[Array, "B A gamma"]
    previous: Int[Array, "B A gamma"]
    targets: Int[Array, "B A gamma"]


def valid_anchors(batch: Batch) -> Bool[Array, "B T"]:
    """Index a may be an anchor iff it and its successor are both trained and of one document."""
    following = batch.loss_mask[:, 1:] & (batch.document_ids[:, 1:] == batch.document_ids[:, :-1])
    return jnp.pad(batch.loss_mask[:, :-1] & following, ((0, 0), (0, 1)))


def _scores(key: Key[Array, ""], batch: Batch) -> UInt32[Array, "B T"]:
    """32 random bits of each token, by its document and position alone: the same in whatever row it is."""

    def score(document, position):
        key_of_token = jax.random.fold_in(jax.random.fold_in(key, document), position)
        return jax.random.bits(key_of_token, dtype=jnp.uint32)

    return jax.vmap(jax.vmap(score))(batch.document_ids, batch.positions)


def sample_anchors(
    key: Key[Array, ""], batch: Batch, count: int, first: int = 0
) -> tuple[Int[Array, "B A"], Bool[Array, "B A"]]:
    """Draws up to `count` distinct valid anchors of each document, at positions from `first` on.

    Their indices in the row ascend; the unkept rest come last, at index 0. A document's anchors are the same whatever
    rows a batch is packed into, as long as each row has room for those of all its documents.
    """
    rows, length = batch.tokens.shape
    capacity = length if batch.row_anchors is None else min(batch.row_anchors, length)
    nowhere = jnp.iinfo(jnp.int32).max
    index = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (rows, length))
    valid = valid_anchors(batch) & (batch.positions >= first)
    documents = jnp.where(valid, batch.document_ids, nowhere)
    documents, _, drawn = jax.lax.sort((documents, _scores(key, batch), index), dimension=1, num_keys=2)
    # Each document's valid tokens are one run now, in random order, of which the first are taken.
    begins = jnp.pad(documents[:, 1:] != documents[:, :-1], ((0, 0), (1, 0)))
    rank = index - jax.lax.cummax(jnp.where(begins, index, 0), axis=1)
    taken = (documents != nowhere) & (rank < count)
    anchors = jnp.sort(jnp.where(taken, drawn, length), axis=1)[:, :capacity]
    kept = anchors < length
    return jnp.where(kept, anchors, 0), kept


def make_blocks(batch: Batch, anchors: Int[Array, "B A"], kept: Bool[Array, "B A"], num_drafts: int) -> Blocks:
    """Blocks at given anchors; an index beyond the row is clamped to its last token, and its draft is not trained."""
    rows, length = batch.tokens.shape
    count = anchors.shape[1]
    index = anchors[:, :, None] + jnp.arange(num_drafts + 1, dtype=anchors.dtype)[None, None]
    clamped = jnp.minimum(index, length - 1).reshape(rows, -1)

    def at(x: Array) -> Array:
        return jnp.take_along_axis(x, clamped, axis=1).reshape(rows, count, num_drafts + 1)

    tokens, documents = at(batch.tokens), at(batch.document_ids)
    trained = at(batch.loss_mask) & (index < length) & (documents == documents[:, :, :1]) & kept[:, :, None]
    slots = jnp.cumprod(trained[:, :, 1:].astype(jnp.int32), axis=-1).astype(bool)
    return Blocks(anchors, kept, slots, tokens[:, :, :-1], tokens[:, :, 1:])


def gather_teacher(hidden: Float[Array, "B T d"], anchors: Int[Array, "B A"], num_drafts: int) -> Array:
    """The target's post-norm hidden states [B, A, γ, d] that predict the drafts' tokens: draft k's is at anchor + k."""
    rows, length, width = hidden.shape
    index = anchors[:, :, None] + jnp.arange(num_drafts, dtype=anchors.dtype)[None, None]
    clamped = jnp.minimum(index, length - 1).reshape(rows, -1)
    taken = jnp.take_along_axis(hidden, clamped[..., None], axis=1)
    return taken.reshape(rows, anchors.shape[1], num_drafts, width)
