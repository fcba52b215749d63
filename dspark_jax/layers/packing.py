"""The scheduled nodes of all requests on one token axis, so that matrix products run on them and on nothing else."""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int


@struct.dataclass
class Packing:
    """Which node of which request each of C packed tokens is (the marker tensor), and where each node went.

    `request`, `node`: R and 0 for padding. `place`: C for nodes that are not packed.
    """

    request: Int[Array, "C"]
    node: Int[Array, "C"]
    place: Int[Array, "R N"]

    def gather(self, x: Array) -> Array:
        """[R, N, …] → [C, …]; padding repeats some node's value."""
        return x[jnp.minimum(self.request, x.shape[0] - 1), self.node]

    def scatter(self, x: Array, fill=0) -> Array:
        """[C, …] → [R, N, …], `fill` where nothing is packed."""
        return x.at[self.place].get(mode="fill", fill_value=fill)

    def at_nodes(self, x: Array, nodes: Int[Array, "R T"]) -> Array:
        """[C, …] → [R, T, …], the values of these nodes of each request; 0 where one is not packed."""
        return x.at[jnp.take_along_axis(self.place, nodes, axis=1)].get(mode="fill", fill_value=0)


def pack(nodes: Bool[Array, "R N"], capacity: int) -> Packing:
    """Packs the chosen nodes in order of request and node; what does not fit in `capacity` tokens is left out."""
    requests, count = nodes.shape
    flat = nodes.reshape(-1)
    place = jnp.where(flat, jnp.cumsum(flat, dtype=jnp.int32) - 1, capacity)
    place = jnp.minimum(place, capacity)
    source = jnp.full(capacity, requests * count, jnp.int32)
    source = source.at[place].set(jnp.arange(requests * count, dtype=jnp.int32), mode="drop")
    real = source < requests * count
    return Packing(source // count, jnp.where(real, source % count, 0), place.reshape(requests, count))
