"""Counts of what rounds came to, kept inside the decoding program."""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from dspark_jax.proposals import Proposal
from dspark_jax.verification.walk import Verdict


@struct.dataclass
class Counts:
    """What the rounds of each request came to.

    `rounds`; by round `accepted_lengths`, tokens with the bonus, and `verified_nodes`, nodes of the verification pass
    with the root. By slot (depth): `reached`, rounds in which all earlier drafts were accepted and a draft of this slot
    was verified, and `accepted`, those in which one was accepted. `missed_first`: nodes on accepted paths with two or
    more children, of which the first was not the target's choice; `took_second`: the second was.
    """

    rounds: Int[Array, "R"]
    accepted_lengths: Int[Array, "R rounds"]
    verified_nodes: Int[Array, "R rounds"]
    reached: Int[Array, "R depth"]
    accepted: Int[Array, "R depth"]
    missed_first: Int[Array, "R"]
    took_second: Int[Array, "R"]


def zero_counts(requests: int, rounds: int, depth: int) -> Counts:
    """The counts of no round, with room for so many."""

    def zeros(*shape: int) -> Int[Array, "..."]:
        return jnp.zeros((requests, *shape), jnp.int32)

    return Counts(zeros(), zeros(rounds), zeros(rounds), zeros(depth), zeros(depth), zeros(), zeros())


def count_round(counts: Counts, proposal: Proposal, verdict: Verdict, active: Bool[Array, "R"]) -> Counts:
    """Adds a round's outcome for the active requests; `counts.rounds` counts it already."""
    visited = _visited(verdict) & active[:, None]
    children = (proposal.parents[:, None] == verdict.nodes[:, :, None]) & proposal.valid[:, None]
    children &= visited[:, :, None]
    count = jnp.sum(children, axis=2, dtype=jnp.int32)
    first = jnp.argmax(children, axis=2)
    second = jnp.argmax(children & (jnp.arange(children.shape[2])[None, None] > first[:, :, None]), axis=2)
    missed = (count > 1) & (jnp.take_along_axis(proposal.tokens, first, axis=1) != verdict.tokens)
    took = missed & (jnp.take_along_axis(proposal.tokens, second, axis=1) == verdict.tokens)

    requests = jnp.arange(active.shape[0], dtype=jnp.int32)
    column = jnp.where(active, counts.rounds - 1, counts.accepted_lengths.shape[1])
    nodes = jnp.sum(proposal.valid, axis=1, dtype=jnp.int32)

    def add(total: Int[Array, "R slots"], events: Bool[Array, "R slots"]):
        return total + events.astype(total.dtype)

    return counts.replace(
        accepted_lengths=counts.accepted_lengths.at[requests, column].set(verdict.accepted + 1, mode="drop"),
        verified_nodes=counts.verified_nodes.at[requests, column].set(nodes, mode="drop"),
        reached=add(counts.reached, count[:, :-1] > 0),
        accepted=add(counts.accepted, visited[:, 1:]),
        missed_first=counts.missed_first + jnp.sum(missed, axis=1, dtype=jnp.int32),
        took_second=counts.took_second + jnp.sum(took, axis=1, dtype=jnp.int32),
    )


def _visited(verdict: Verdict) -> Bool[Array, "R depth+1"]:
    """Which entries of the verdict lie on the accepted path, the anchor included."""
    return jnp.arange(verdict.nodes.shape[1], dtype=jnp.int32)[None] <= verdict.accepted[:, None]
