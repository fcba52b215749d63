"""Recorded decoding replayed under load, in simulated time: what a policy is worth on a device's throughput table.

Under greedy and coupled sampling a request's text does not depend on what is verified, and what the drafter proposes
after a prefix depends on that prefix alone. A `Replay` knows the proposal at every position of every text, so that any
schedule replays exactly: a round that verifies ℓ drafts commits min(accepted, ℓ) + 1 tokens, and the next one begins at
a position that was recorded too.

Simulated are the rounds: one takes 1 / SPS(B) seconds, drafting included. Plain decoding is a fixed length of 0, at the
table's plain rates where it has them. Prompts are read in no time, as is the host's work; a stale capacity drafts in
every round, which an engine with plain rates does not.

The schedules are those of `prefix_scheduler` for chains, in numpy: a step is a few microseconds of work, less than a
compiled program takes to start.
"""

import collections
import dataclasses
import functools

import numpy as np
from jaxtyping import Bool, Float, Int

from dspark_jax.scheduling.policy import Policy, PolicyKind
from dspark_jax.scheduling.throughput import StepTable, is_flat

# Rounds between the confidences that a stale capacity is chosen from and the round that it is for.
_STALENESS = 2


@dataclasses.dataclass(frozen=True, eq=False)
class Replay:
    """What a drafter proposes from every position of finished requests.

    `lengths`: new tokens L of each request, at least 2. A request has L - 1 rows, one request after the other: row i is
    the round that begins when i + 1 of its tokens are committed. `survival`: a_k of the row's drafts, not increasing
    along a row. `accepted`: how many of them the target accepts if all are verified.
    """

    lengths: Int[np.ndarray, "requests"]
    survival: Float[np.ndarray, "rows gamma"]
    accepted: Int[np.ndarray, "rows"]

    @functools.cached_property
    def begins(self) -> Int[np.ndarray, "requests"]:
        """The first row of each request."""
        return np.cumsum(self.lengths - 1) - (self.lengths - 1)


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


def accepted_drafts(drafts: Int[np.ndarray, "L-1 gamma"], text: Int[np.ndarray, "L"]) -> Int[np.ndarray, "L-1"]:
    """How many drafts of each position's round agree with the text; those after its end do not."""
    rounds, gamma = drafts.shape
    followed = np.concatenate([text, np.full(gamma, -1, text.dtype)])
    index = 1 + np.arange(rounds)[:, None] + np.arange(gamma)
    return np.cumprod(drafts == followed[index], axis=1, dtype=np.int64).sum(axis=1)


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

    If all arrive at once, `slots` is a fixed concurrency. Raises ValueError for a table that does not hold all drafts
    of all slots.
    """
    scheduler = Scheduler(policy, table, slots * (1 + replay.survival.shape[1]))
    admitted, finished = np.zeros(len(requests)), np.zeros(len(requests))
    steps: list[tuple[float, ...]] = []
    members, rows, left = (np.zeros(0, np.int64) for _ in range(3))
    now, waiting = 0.0, 0
    while waiting < len(requests) or len(members):
        if not len(members):
            now = max(now, float(arrivals[waiting]))
        arrived = int(np.searchsorted(arrivals, now, side="right"))
        new = np.arange(waiting, min(arrived, waiting + slots - len(members)))
        if len(new):
            waiting += len(new)
            admitted[new] = now
            members = np.concatenate([members, new])
            rows = np.concatenate([rows, replay.begins[requests[new]]])
            left = np.concatenate([left, replay.lengths[requests[new]] - 1])
        lengths, rate = scheduler.step(replay.survival[rows])
        accepted = np.minimum(replay.accepted[rows], lengths)
        committed = np.minimum(accepted + 1, left)
        now += 1 / rate
        steps.append((now, 1 / rate, len(members), lengths.sum(), accepted.sum(), committed.sum()))
        rows, left = rows + committed, left - committed
        done = left == 0
        if done.any():
            finished[members[done]] = now
            members, rows, left = members[~done], rows[~done], left[~done]
    ends, seconds = np.asarray([step[:2] for step in steps], np.float64).T
    active, drafts, accepted, committed = np.asarray([step[2:] for step in steps], np.int64).T
    return Simulation(ends, seconds, active, drafts, accepted, committed, arrivals, admitted, finished)


class Scheduler:
    """A policy's verified lengths, step by step; it remembers what a stale capacity is chosen from.

    `most`: tokens of the largest step there can be, roots included.
    """

    def __init__(self, policy: Policy, table: StepTable, most: int) -> None:
        self._policy, self._capacities = policy, np.asarray(table.capacities)
        if self._capacities[-1] < most:
            raise ValueError(f"step table: its largest bucket is {self._capacities[-1]}, but a step has up to {most}")
        buckets = np.searchsorted(self._capacities, np.arange(most + 1))
        rates = table.steps_per_second
        if policy.kind is PolicyKind.FIXED and policy.length == 0 and table.plain_steps_per_second is not None:
            rates = table.plain_steps_per_second
        self._buckets, self._rates = buckets, np.asarray(rates, np.float64)[buckets]
        self._flat = is_flat(table)
        self._best: collections.deque[int] = collections.deque(maxlen=_STALENESS)

    def step(self, survival: Float[np.ndarray, "A gamma"]) -> tuple[Int[np.ndarray, "A"], float]:
        """The verified length of each active request, and the steps a second of the bucket that they run in."""
        match self._policy.kind:
            case PolicyKind.FIXED:
                lengths = np.full(len(survival), min(self._policy.length or 0, survival.shape[1]))
            case PolicyKind.THRESHOLD:
                lengths = (survival >= self._policy.threshold).sum(axis=1)
            case _:
                lengths = self._scheduled(survival)
        return lengths, float(self._rates[len(survival) + lengths.sum()])

    def _scheduled(self, survival: Float[np.ndarray, "A gamma"]) -> Int[np.ndarray, "A"]:
        requests = len(survival)
        by_depth = survival.T.ravel()
        order = np.argsort(-by_depth, kind="stable")
        expected = requests + np.concatenate([[0], np.cumsum(by_depth[order])])
        theta = expected * self._rates[requests : requests + len(expected)]
        if self._policy.kind is PolicyKind.EARLY_STOP:
            stops = np.flatnonzero(theta[1:] <= theta[:-1])
            drafts = int(stops[0]) if len(stops) else len(order)
        else:
            drafts = int(np.argmax(theta))
        if self._policy.kind is PolicyKind.STALE_CAPACITY:
            drafts = self._stale(drafts, requests, len(order))
        return np.bincount(order[:drafts] % requests, minlength=requests)

    def _stale(self, best: int, requests: int, most: int) -> int:
        """Drafts that fill the bucket of the best schedule two rounds ago; all until there was one."""
        known = len(self._best) == _STALENESS and not self._flat
        drafts = min(self._best[0], most) if known else most
        self._best.append(best)
        return min(int(self._capacities[self._buckets[requests + drafts]]) - requests, most)
