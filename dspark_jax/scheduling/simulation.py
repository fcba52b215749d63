"""Recorded decoding replayed under load, in simulated time: what a policy is worth on a device's throughput table.

Under greedy and coupled sampling a request's text does not depend on what is verified, and what the drafter proposes
after a prefix depends on that prefix alone. A `Replay` knows the proposal, chain or tree, at every position of every
text, so that any schedule replays exactly: a round that verifies n nodes of the accepted path commits n tokens and the
target's own, and the next one begins at a position that was recorded too.

Simulated are the rounds: one takes 1 / SPS(B) seconds, drafting included, or what the table says of a plain one where
nothing is drafted. Prompts are read in no time, as is the host's work, and that a request has ended is known at once,
where an engine has dispatched a round by then.
"""

import dataclasses
import functools

import numpy as np
from jaxtyping import Bool, Float, Int

from dspark_jax.scheduling.forest import Forest
from dspark_jax.scheduling.policy import Policy
from dspark_jax.scheduling.replayed_policy import ReplayedPolicy
from dspark_jax.scheduling.throughput import StepTable


@dataclasses.dataclass(frozen=True, eq=False)
class Replay:
    """What a drafter proposes from every position of finished requests.

    `lengths`: new tokens L of each request, at least 2. A request has L - 1 rows, one request after the other: row i is
    the round that begins when i + 1 of its tokens are committed. `forest`: the nodes of each row, in numpy arrays.
    `accepted`: the drafts that the target accepts if all are verified, a path from the root, which is not among them.
    `trees`: whether the rows are trees rather than chains.
    """

    lengths: Int[np.ndarray, "requests"]
    forest: Forest
    accepted: Bool[np.ndarray, "rows N"]
    trees: bool

    @functools.cached_property
    def begins(self) -> Int[np.ndarray, "requests"]:
        """The first row of each request."""
        return np.cumsum(self.lengths - 1) - (self.lengths - 1)

    @property
    def width(self) -> int:
        """Nodes N of a row, the root included."""
        return self.accepted.shape[1]


@dataclasses.dataclass(frozen=True, eq=False)
class Simulation:
    """The steps of one run, in order, and when its n requests arrived, got a slot and ended. Times in seconds.

    By step: `ends`, when it ended; `seconds` it took; `active` requests in it; `drafts` verified, roots excluded, and
    `accepted` of them; `committed` tokens. Tokens after a request's last are not committed and drafts of them not
    accepted. A request's first token, prefill's, is in no step.

    What is reported, the properties, is about the time between the end of the requests that began together at first and
    the last request's slot, so that neither filling up nor running empty counts; about all of it where there is none.
    """

    ends: Float[np.ndarray, "steps"]
    seconds: Float[np.ndarray, "steps"]
    active: Int[np.ndarray, "steps"]
    drafts: Int[np.ndarray, "steps"]
    accepted: Int[np.ndarray, "steps"]
    committed: Int[np.ndarray, "steps"]
    arrived: Float[np.ndarray, "n"]
    admitted: Float[np.ndarray, "n"]
    finished: Float[np.ndarray, "n"]

    @functools.cached_property
    def _window(self) -> tuple[float, float]:
        first, last = self.finished[self.admitted == self.admitted[0]].max(), self.admitted[-1]
        inside = (self.ends > first) & (self.ends <= last)
        return (first, last) if inside.any() else (self.arrived[0], self.ends[-1])

    @functools.cached_property
    def _measured(self) -> Bool[np.ndarray, "steps"]:
        begin, end = self._window
        return (self.ends > begin) & (self.ends <= end)

    def _total(self, values: np.ndarray) -> float:
        return float(values[self._measured].sum())

    @property
    def throughput(self) -> float:
        """Tokens a second of all requests together, idle time included."""
        begin, end = self._window
        return self._total(self.committed) / float(end - begin)

    @property
    def user_speed(self) -> float:
        """Tokens a second of a request while it is in a slot."""
        return self._total(self.committed) / self._total(self.active * self.seconds)

    @property
    def tau(self) -> float:
        """Tokens that a request commits in a step."""
        return self._total(self.committed) / self._total(self.active)

    @property
    def verified(self) -> float:
        """Drafts of a request verified in a step: the mean verification length."""
        return self._total(self.drafts) / self._total(self.active)

    @property
    def verified_accepted(self) -> float:
        """Drafts of a request verified and accepted in a step."""
        return self._total(self.accepted) / self._total(self.active)

    @property
    def concurrency(self) -> float:
        """Requests in a step, on average over its steps."""
        return self._total(self.active) / float(self._measured.sum())

    @property
    def wait(self) -> float:
        """Seconds from a request's arrival to its slot, on average over all requests."""
        return float((self.admitted - self.arrived).mean())


def accepted_drafts(
    tokens: Int[np.ndarray, "L-1 N"],
    parents: Int[np.ndarray, "L-1 N"],
    depths: Int[np.ndarray, "L-1 N"],
    text: Int[np.ndarray, "L"],
) -> Bool[np.ndarray, "L-1 N"]:
    """Which drafts of each position's round agree with the text, all ancestors included; none does after its end.

    `parents` come before their children; negative at roots, and at nodes that do not exist.
    """
    rounds, count = tokens.shape
    followed = np.concatenate([text, np.full(depths.max(), -1, text.dtype)])
    agree = tokens == followed[np.arange(rounds)[:, None] + depths]
    rows, accepted = np.arange(rounds), parents < 0
    for node in range(1, count):
        parent = parents[:, node]
        accepted[:, node] = (parent >= 0) & agree[:, node] & accepted[rows, parent]
    accepted[:, 0] = False
    return accepted


def poisson_arrivals(rate: float, count: int, rng: np.random.Generator) -> Float[np.ndarray, "count"]:
    """Arrival times in seconds of independent requests, `rate` a second."""
    return np.cumsum(rng.exponential(1 / rate, count))


def simulate(
    replay: Replay,
    table: StepTable,
    policy: Policy,
    requests: Int[np.ndarray, "n"],
    arrivals: Float[np.ndarray, "n"],
    slots: int,
) -> Simulation:
    """Runs the replay's `requests`, which arrive at ascending `arrivals` and wait, in order, for one of the slots.

    If all arrive at once, `slots` is a fixed concurrency. Raises ValueError for a table that does not hold all nodes
    of all slots.
    """
    replayed = ReplayedPolicy(policy, table, slots, replay.width, replay.trees)
    admitted, finished, forest = np.zeros(len(requests)), np.zeros(len(requests)), replay.forest
    steps: list[tuple[float, ...]] = []
    members, rows, left = (np.zeros(0, np.int64) for _ in range(3))
    now, waiting = 0.0, 0
    while waiting < len(requests) or len(members):
        if not len(members):
            replayed.rest()
            now = max(now, float(arrivals[waiting]))
        arrived = int(np.searchsorted(arrivals, now, side="right"))
        new = np.arange(waiting, min(arrived, waiting + slots - len(members)))
        if len(new):
            waiting += len(new)
            admitted[new] = now
            members = np.concatenate([members, new])
            rows = np.concatenate([rows, replay.begins[requests[new]]])
            left = np.concatenate([left, replay.lengths[requests[new]] - 1])
        nodes, rate = replayed.round(Forest(forest.survival[rows], forest.depths[rows], forest.valid[rows]))
        accepted = (nodes & replay.accepted[rows]).sum(axis=1)
        committed = np.minimum(accepted + 1, left)
        now += 1 / rate
        steps.append((now, 1 / rate, len(members), nodes.sum() - len(members), accepted.sum(), committed.sum()))
        rows, left = rows + committed, left - committed
        done = left == 0
        if done.any():
            finished[members[done]] = now
            members, rows, left = members[~done], rows[~done], left[~done]
    ends, seconds = np.asarray([step[:2] for step in steps], np.float64).T
    active, drafts, accepted, committed = np.asarray([step[2:] for step in steps], np.int64).T
    return Simulation(ends, seconds, active, drafts, accepted, committed, arrivals, admitted, finished)
