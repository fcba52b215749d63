"""DSpark's prefix scheduler: which nodes of R requests one verification step takes.

It maximises the batch's throughput Θ = τ · SPS(B): B tokens in the step, of which R are roots, τ = R + Σ a the tokens
that the step commits on average, a the prefix survival of each admitted draft, SPS the measured steps per second.
Nodes are admitted in one order: the roots, then drafts by descending survival; ties by depth, request and node. A child
never precedes its parent, so that each B admits a prefix of every chain and a subtree at every root, and of all sets
of B nodes the one with the largest τ.

Rejection and block verification keep the target's law if a schedule is non-anticipating: whether slot k of a request is
verified may depend on its tokens x_{<k}, on other requests and on older rounds, never on x_k or what follows it. Here
a_k depends on x_{<k} alone. Walk the order of admission and draw each token only once its slot is admitted: the next
slot in the order is the best of the requests' next slots, whose survivals the tokens drawn so far determine.
`early_stop` decides there whether to go on, by what is known there, and `fill` by a capacity known before the round;
later tokens, the slot's own too, are not drawn yet. `fixed_length` and `threshold` look at the slot's own survival at
most. `global_best` is different: whether it admits slot 1 depends on the survival of slot 2, and so on x_1 itself. That
is the bias of the paper's Appendix A; coupled sampling and the target's own walk do not mind it.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.scheduling.forest import Forest
from dspark_jax.scheduling.throughput import StepTable, steps_per_second_at


@struct.dataclass
class Schedule:
    """The nodes that a step verifies.

    `nodes`: a subtree at the root of each active request, the root included. `lengths`: drafts of each request, for a
    chain the verified length ℓ. `tokens`: B = Σ_active (1 + ℓ). `expected`: τ = Σ_active (1 + Σ admitted a).
    """

    nodes: Bool[Array, "R N"]
    lengths: Int[Array, "R"]
    tokens: Int[Array, ""]
    expected: Float[Array, ""]


def early_stop(forest: Forest, table: StepTable) -> Schedule:
    """The paper's Algorithm 1: admit in order, and stop before the first draft that does not raise Θ. Non-anticipating.

    On a staircase it stops at the first edge that costs more than the next draft brings.
    """
    order = _admission_order(forest)
    theta = _throughputs(forest, order, table)
    before = jnp.concatenate([jnp.full(1, jnp.inf, theta.dtype), theta[:-1]])
    tokens, roots, count = _counts(forest)
    admitted = (tokens <= roots) | ((theta > before) & (tokens <= count))
    return _first(forest, order, jnp.sum(jnp.cumprod(admitted.astype(jnp.int32)), dtype=jnp.int32))


def global_best(forest: Forest, table: StepTable) -> Schedule:
    """The schedule of the largest Θ, of the fewest tokens where several have it. Anticipating."""
    order = _admission_order(forest)
    tokens, roots, count = _counts(forest)
    possible = (tokens >= roots) & (tokens <= count)
    theta = jnp.where(possible, _throughputs(forest, order, table), -jnp.inf)
    best = jnp.argmax(theta).astype(jnp.int32) + 1
    return _first(forest, order, jnp.where(roots > 0, best, 0))


def capacity(forest: Forest, table: StepTable) -> Int[Array, ""]:
    """K, the tokens of the global best, roots included, for a later round to `fill`.

    Non-anticipating together with it as long as `forest` is of an older round; the paper's is two rounds old, which
    lets the host choose the bucket ahead. The rest of K's bucket costs nothing: see `throughput.bucket_capacity`.
    """
    return global_best(forest, table).tokens


def fill(forest: Forest, tokens: Int[Array, ""]) -> Schedule:
    """The first K = `tokens` nodes in order, fewer where there are not so many; all roots, also if they exceed K.

    Given a forest whose `valid` are the nodes of a static policy, this keeps that policy within a bucket.
    """
    _, roots, _ = _counts(forest)
    return _first(forest, _admission_order(forest), jnp.maximum(tokens.astype(jnp.int32), roots))


def fixed_length(forest: Forest, length: int | Int[Array, ""]) -> Schedule:
    """Every node down to depth `length`; 0 is plain decoding, 1 what one multi-token-prediction head does."""
    return _schedule(forest, forest.valid & (forest.depths <= length))


def threshold(forest: Forest, values: Float[Array, "R"]) -> Schedule:
    """Every node whose prefix survival is at least its request's value."""
    confident = forest.survival >= values.astype(forest.survival.dtype)[:, None]
    return _schedule(forest, forest.valid & (confident | (forest.depths == 0)))


def _counts(forest: Forest) -> tuple[Int[Array, "R*N"], Int[Array, ""], Int[Array, ""]]:
    """Every possible B from 1, the roots, which are its least, and the valid nodes, its most."""
    tokens = 1 + jnp.arange(forest.valid.size, dtype=jnp.int32)
    return tokens, jnp.sum(forest.valid[:, 0], dtype=jnp.int32), jnp.sum(forest.valid, dtype=jnp.int32)


def _admission_order(forest: Forest) -> Int[Array, "R*N"]:
    """The nodes as indices of the flattened forest; those that are not valid come last."""
    descending = jnp.where(forest.valid, -forest.survival, 1).ravel()
    index = jnp.arange(descending.size, dtype=jnp.int32)
    return jax.lax.sort((descending, forest.depths.ravel(), index), num_keys=2, is_stable=True)[-1]


def _throughputs(forest: Forest, order: Int[Array, "R*N"], table: StepTable) -> Float[Array, "R*N"]:
    """Θ of the first B nodes in order, B = 1, 2, …, in tokens a second."""
    expected = jnp.cumsum(forest.survival.ravel()[order])
    tokens, _, _ = _counts(forest)
    return expected * steps_per_second_at(table, tokens).astype(expected.dtype)


def _first(forest: Forest, order: Int[Array, "R*N"], tokens: Int[Array, ""]) -> Schedule:
    index = jnp.arange(order.size, dtype=jnp.int32)
    ranks = jnp.zeros_like(order).at[order].set(index, unique_indices=True).reshape(forest.valid.shape)
    return _schedule(forest, forest.valid & (ranks < tokens))


def _schedule(forest: Forest, nodes: Bool[Array, "R N"]) -> Schedule:
    lengths = jnp.sum(nodes[:, 1:], axis=1, dtype=jnp.int32)
    return Schedule(nodes, lengths, jnp.sum(nodes, dtype=jnp.int32), jnp.sum(jnp.where(nodes, forest.survival, 0)))
