"""A policy's schedules round by round, on the host: those of `prefix_scheduler` for forests, in numpy.

A round is microseconds of work, less than a compiled program takes to start.
"""

import collections

import numpy as np
from jaxtyping import Bool, Float, Int

from dspark_jax.scheduling.forest import Forest
from dspark_jax.scheduling.policy import Policy, PolicyKind
from dspark_jax.scheduling.stale_capacity import StaleCapacity
from dspark_jax.scheduling.throughput import StepTable

# An engine has dispatched one round, and read none since, when it decides about the next.
_UNREAD = 1


class ReplayedPolicy:
    """What an engine of so many slots verifies, round by round; it remembers what a stale capacity has learned.

    `trees`: whether its forests are of trees, not chains. `width`: nodes of each request, roots included. Its rounds
    are of active requests only, whose roots are valid.

    Raises:
      ValueError: a table that does not hold all nodes of all slots.
    """

    def __init__(self, policy: Policy, table: StepTable, slots: int, width: int, trees: bool) -> None:
        self._policy, self._width, self._trees = policy, width, trees
        capacities = np.asarray(table.capacities)
        most = slots * width
        if capacities[-1] < most:
            raise ValueError(f"step table: its largest bucket is {capacities[-1]}, but a step has up to {most}")
        buckets = np.searchsorted(capacities, np.arange(most + 1))
        self._bucket = capacities[buckets]
        self._rates = np.asarray(table.steps_per_second, np.float64)[buckets]
        plain = table.steps_per_second if table.plain_steps_per_second is None else table.plain_steps_per_second
        self._plain_rates = np.asarray(plain, np.float64)[buckets]
        self._stale = StaleCapacity(table)
        self._unread: collections.deque[tuple[int, Float[np.ndarray, "N-1"], int] | None] = collections.deque()

    def round(self, forest: Forest) -> tuple[Bool[np.ndarray, "A N"], float]:
        """The nodes that the next round verifies, and the steps a second of the bucket that it runs in.

        `forest` holds numpy arrays [A, N].
        """
        policy, active = self._policy, len(forest.valid)
        match policy.kind:
            case PolicyKind.FIXED if policy.length == 0:
                return self._plain(forest)
            case PolicyKind.FIXED:
                nodes = forest.valid & (forest.depths <= (policy.length or 0))
                # How many nodes of a tree are so deep is known too late for its bucket.
                rate = self._rates[active * self._width if self._trees else nodes.sum()]
            case PolicyKind.THRESHOLD:
                nodes = _roots(forest) | (forest.valid & (forest.survival >= (policy.threshold or 0.0)))
                rate = self._rates[nodes.sum()]
            case PolicyKind.STALE_CAPACITY:
                return self._stale_round(forest)
            case _:
                order = _admission_order(forest)
                count = self._drafts(forest, order)
                nodes = _first(forest, order, count)
                rate = self._rates[active + count]
        return np.asarray(nodes), float(rate)

    def rest(self) -> None:
        """No request is active: an engine reads what it has dispatched."""
        self._read(0)

    def _read(self, unread: int) -> None:
        while len(self._unread) > unread:
            report = self._unread.popleft()
            if report is not None:
                self._stale.learn(*report)

    def _plain(self, forest: Forest) -> tuple[Bool[np.ndarray, "A N"], float]:
        return _roots(forest), float(self._plain_rates[len(forest.valid)])

    def _stale_round(self, forest: Forest) -> tuple[Bool[np.ndarray, "A N"], float]:
        active = len(forest.valid)
        self._read(_UNREAD)
        if self._stale.plainly(active):
            self._unread.append(None)
            return self._plain(forest)
        wanted = self._stale.wanted(active, self._width)
        order = _admission_order(forest)
        ranked = -np.sort(-forest.survival[:, 1:], axis=1)
        self._unread.append((self._drafts(forest, order), ranked.mean(axis=0), active))
        return _first(forest, order, self._bucket[wanted] - active), float(self._rates[wanted])

    def _drafts(self, forest: Forest, order: Int[np.ndarray, "drafts"]) -> int:
        """How many drafts, of the first in order, raise the throughput: until one does not, or those of the best."""
        active = len(forest.valid)
        expected = active + np.concatenate([[0.0], np.cumsum(forest.survival.ravel()[order])])
        theta = expected * self._rates[active : active + len(expected)]
        if self._policy.kind is not PolicyKind.EARLY_STOP:
            return int(np.argmax(theta))
        stops = np.flatnonzero(theta[1:] <= theta[:-1])
        return int(stops[0]) if len(stops) else len(order)


def _roots(forest: Forest) -> Bool[np.ndarray, "A N"]:
    return np.asarray(forest.valid & (forest.depths == 0))


def _admission_order(forest: Forest) -> Int[np.ndarray, "drafts"]:
    """The drafts as indices of the flattened forest."""
    index = np.flatnonzero(forest.valid & (forest.depths > 0))
    return index[np.lexsort((forest.depths.ravel()[index], -forest.survival.ravel()[index]))]


def _first(forest: Forest, order: Int[np.ndarray, "drafts"], count: int) -> Bool[np.ndarray, "A N"]:
    nodes = _roots(forest).ravel()
    nodes[order[:count]] = True
    return nodes.reshape(forest.valid.shape)
