"""The host loop of continuous batching. It always has the next round's programs under way before it reads a round."""

import collections
import contextlib
import dataclasses
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dspark_jax.decode_state import Requests
from dspark_jax.drafters.kinds import DrafterParams
from dspark_jax.sampling import request_keys, sampling_params
from dspark_jax.scheduling.policy import PolicyKind
from dspark_jax.scheduling.stale_capacity import StaleCapacity
from dspark_jax.scheduling.survival import SurvivalMap, uncalibrated
from dspark_jax.scheduling.throughput import StepTable, validate_table
from dspark_jax.serving.config import EngineConfig
from dspark_jax.serving.programs import (
    Report,
    admit,
    draft_and_schedule,
    empty_state,
    plain_step,
    verify_and_commit,
)
from dspark_jax.serving.requests import Request, Result, Update
from dspark_jax.targets.decoder import TargetParams


@dataclasses.dataclass(eq=False)
class _Running:
    """A request in a slot. `read`: tokens of its prompt that were dispatched for reading."""

    request: Request
    slot: int
    read: int = 0
    tokens: list[int] = dataclasses.field(default_factory=list)
    accepted_lengths: list[int] = dataclasses.field(default_factory=list)
    verified_nodes: list[int] = dataclasses.field(default_factory=list)

    @property
    def active(self) -> bool:
        return self.read >= len(self.request.input_ids)


@dataclasses.dataclass(frozen=True, eq=False)
class _Pending:
    """A program that was dispatched and not yet read. `round`: or else a prefill of its only member."""

    report: Report
    members: list[_Running]
    round: bool
    drafted: bool = False


@dataclasses.dataclass
class Statistics:
    """`rounds` dispatched, of which `plain` drafted nothing, and `late` were dispatched only after the device had
    finished the round before: the host kept it waiting. `scheduled_tokens` over `bucket_tokens`: how full buckets were.
    """

    rounds: int = 0
    plain: int = 0
    late: int = 0
    prefills: int = 0
    bucket_tokens: int = 0
    scheduled_tokens: int = 0


class Engine:
    """Requests come and go in slots of one compiled program's state; the output's law is exactly the target's.

    `table`: steps per second of each bucket (`measure_steps`). With a flat one everything is verified; where it says
    that plain steps are faster, a stale capacity drafts nothing and asks again now and then. `survival`: calibration,
    by default none. With a mesh, weights are expected sharded over it.
    """

    def __init__(
        self,
        target: TargetParams,
        drafter: DrafterParams | None,
        config: EngineConfig,
        table: StepTable,
        survival: SurvivalMap | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        validate_table(table)
        if tuple(np.asarray(table.capacities).tolist()) != config.buckets:
            raise ValueError(
                f"step table of buckets {np.asarray(table.capacities).tolist()}, but the engine's are "
                f"{list(config.buckets)}; measure for these"
            )
        self.config, self.statistics = config, Statistics()
        self._target, self._drafter, self._table, self._mesh = target, drafter, table, mesh
        self._survival = uncalibrated(config.decode.depth) if survival is None else survival
        self._stale = StaleCapacity(table)
        self._waiting: collections.deque[Request] = collections.deque()
        self._running: dict[int, _Running] = {}
        self._pending: collections.deque[_Pending] = collections.deque()
        self._cancelled: set[Hashable] = set()
        self._undelivered: collections.deque[Update] = collections.deque()
        self._ended = np.zeros(config.slots, bool)
        dtype = target.embed_tokens.weight.dtype
        with self._on_mesh():
            self._state = empty_state(config.decode, self._requests([]), config.capacity, dtype)

    def submit(self, request: Request) -> Update | None:
        """Queues a request. One that can never run is answered at once, with an error."""
        error = self._refusal(request)
        if error is not None:
            return Update(id=request.id, tokens=(), result=_failed(request, error))
        self._waiting.append(request)
        return None

    def cancel(self, request_id: Hashable) -> None:
        """Ends a request soon; its result holds what was generated until then. Unknown ids are ignored."""
        if request_id in self._unfinished():
            self._cancelled.add(request_id)

    @property
    def busy(self) -> bool:
        """Whether anything is waiting, running, unread or not yet handed out."""
        return bool(self._waiting or self._running or self._pending or self._undelivered)

    @property
    def free(self) -> int:
        """Slots without a request, less those that wait for one."""
        return max(self.config.slots - len(self._running) - len(self._waiting), 0)

    def step(self) -> list[Update]:
        """Dispatches prefills and one round, then reads what was dispatched before them."""
        with self._on_mesh():
            updates = [*self._undelivered, *self._drop_cancelled()]
            self._undelivered.clear()
            self._prefill()
            active = [running for running in self._running.values() if running.active]
            if active:
                self._round(active)
            keep = 1 if active else 0
            while len(self._pending) > keep:
                updates += self._read(self._pending.popleft())
        return updates

    def updates(self, requests: Iterable[Request]) -> Iterator[Update]:
        """Runs requests, taken as slots become free, and yields new tokens as they come.

        What it has not yielded when it is closed early, the next one or the next `step` gives.
        """
        source, exhausted = iter(requests), False
        while not exhausted or self.busy:
            while not exhausted and self.free:
                request = next(source, None)
                exhausted = request is None
                refused = None if request is None else self.submit(request)
                if refused is not None:
                    yield refused
            self._undelivered.extend(self.step())
            while self._undelivered:
                yield self._undelivered.popleft()

    def generate(self, requests: Iterable[Request]) -> Iterator[Result]:
        """Runs requests, taken as slots become free, and yields results as they finish."""
        for update in self.updates(requests):
            if update.result is not None:
                yield update.result

    def _on_mesh(self) -> Any:
        return contextlib.nullcontext() if self._mesh is None else jax.set_mesh(self._mesh)

    def _unfinished(self) -> set[Hashable]:
        """Ids of requests whose result was not handed out."""
        running = {running.request.id for running in self._running.values()}
        return running | {request.id for request in self._waiting} | {update.id for update in self._undelivered}

    def _refusal(self, request: Request) -> str | None:
        ids, decode = request.input_ids, self.config.decode
        if request.id in self._unfinished():
            return f"id {request.id!r} belongs to an unfinished request"
        if not len(ids):
            return "input_ids is empty"
        vocabulary = decode.target.vocab_size
        wrong = [token for token in ids if not (_is_integer(token) and 0 <= token < vocabulary)]
        if wrong:
            return f"input_ids has {wrong[0]!r}, outside the vocabulary of {vocabulary}"
        room = min(self.config.capacity - decode.width, decode.target.max_position_embeddings) - len(ids)
        if room < 1:
            return f"input_ids has {len(ids)} tokens, but a slot has room for {room + len(ids) - 1} and a new one"
        if request.max_tokens is not None and not (_is_integer(request.max_tokens) and request.max_tokens >= 1):
            return f"max_tokens {request.max_tokens} must be an integer of at least 1"
        try:
            sampling_params(1, request.temperature, request.top_k, request.top_p, request.min_p)
        except ValueError as error:
            return str(error)
        return None

    def _room(self, request: Request) -> int:
        decode = self.config.decode
        room = min(self.config.capacity - decode.width, decode.target.max_position_embeddings) - len(request.input_ids)
        most = decode.max_new_tokens if request.max_tokens is None else request.max_tokens
        return min(room, most, decode.max_new_tokens)

    def _requests(self, requests: Sequence[Request]) -> Requests:
        """Device arrays of requests; of none, blanks for all slots."""
        count = len(requests) or self.config.slots
        sampling = sampling_params(count)
        if requests:
            values = {name: [getattr(r, name) for r in requests] for name in ("temperature", "top_k", "top_p", "min_p")}
            sampling = sampling.replace(
                **{name: jnp.asarray(value, getattr(sampling, name).dtype) for name, value in values.items()}
            )
        return Requests(
            keys=jnp.stack([request.key for request in requests]) if requests else request_keys(0, count),
            sampling=sampling,
            max_tokens=jnp.asarray([self._room(request) for request in requests] or [0] * count, jnp.int32),
            confidence_threshold=jnp.zeros(count, jnp.float32),
        )

    def _drop_cancelled(self) -> list[Update]:
        updates, cancelled = [], self._cancelled
        self._cancelled = set()
        for request in [request for request in self._waiting if request.id in cancelled]:
            self._waiting.remove(request)
            updates.append(Update(id=request.id, tokens=(), result=_finished(_Running(request, -1), "cancelled")))
        for running in [running for running in self._running.values() if running.request.id in cancelled]:
            updates.append(self._finish(running, (), "cancelled", on_device=False))
        return updates

    def _prefill(self) -> None:
        """Gives free slots to waiting requests, and reads chunks of prompts."""
        free = [slot for slot in range(self.config.slots) if slot not in self._running]
        for slot, _ in zip(free, list(self._waiting), strict=False):
            self._running[slot] = _Running(self._waiting.popleft(), slot)
        reading = [running for running in self._running.values() if not running.active]
        decoding = len(reading) < len(self._running)
        budget = self.config.prefills_per_round if decoding else len(reading)
        for running in reading[:budget]:
            self._read_chunk(running)

    def _read_chunk(self, running: _Running) -> None:
        ids = running.request.input_ids
        left = len(ids) - running.read
        size = next((size for size in self.config.prefill_buckets if size >= left), self.config.prefill_tokens)
        # A chunk must not reach beyond the slot's cache.
        start = max(0, min(running.read, self.config.capacity - size))
        tokens = np.zeros((1, size), np.int32)
        chunk = ids[start : start + size]
        tokens[0, : len(chunk)] = chunk
        self._ended[running.slot] = False
        self._state, report = admit(
            self._target,
            self._drafter,
            self.config.decode,
            self._state,
            jnp.asarray(running.slot, jnp.int32),
            self._requests([running.request]),
            jnp.asarray(tokens),
            jnp.asarray(start, jnp.int32),
            jnp.asarray(len(ids), jnp.int32),
        )
        running.read = start + size
        self.statistics.prefills += 1
        if running.active:
            self._pending.append(_Pending(report, [running], False))

    def _round(self, active: list[_Running]) -> None:
        statistics, policy = self.statistics, self.config.policy
        if self._pending and all(leaf.is_ready() for leaf in jax.tree.leaves(self._pending[-1].report)):
            statistics.late += 1
        statistics.rounds += 1
        if self._plainly(len(active)):
            bucket = self._bucket(len(active))
            self._state, report = plain_step(
                self._target, self._drafter, self.config.decode, bucket, self._state, jnp.asarray(self._ended)
            )
            self._pending.append(_Pending(report, active, True))
            statistics.plain += 1
            statistics.bucket_tokens += bucket
            return
        bucket = self._bucket(self._wanted(len(active)))
        self._state, drafted = draft_and_schedule(
            self._drafter,
            self.config.decode,
            policy,
            self._table,
            self._survival,
            self._state,
            jnp.asarray(self._ended),
            jnp.asarray(bucket, jnp.int32),
        )
        if policy.kind not in (PolicyKind.STALE_CAPACITY, PolicyKind.FIXED):
            # These policies know only now how much they verify: the host has to wait for them.
            bucket = self._bucket(int(drafted.tokens))
        self._state, report = verify_and_commit(
            self._target, self._drafter, self.config.decode, bucket, self._state, drafted
        )
        self._pending.append(_Pending(report, active, True, drafted=True))
        statistics.bucket_tokens += bucket

    def _plainly(self, active: int) -> bool:
        """Whether the next round drafts nothing: by policy, or because rounds that draft were found slower."""
        policy = self.config.policy
        if self._drafter is None or (policy.kind is PolicyKind.FIXED and policy.length == 0):
            return True
        return policy.kind is PolicyKind.STALE_CAPACITY and self._stale.plainly(active)

    def _wanted(self, active: int) -> int:
        """Tokens of the next verification as far as they are known before it is drafted."""
        decode, policy = self.config.decode, self.config.policy
        if policy.kind is PolicyKind.FIXED and decode.tree is None:
            return active * (1 + min(policy.length or 0, decode.depth))
        if policy.kind is PolicyKind.STALE_CAPACITY:
            return self._stale.wanted(active, decode.width)
        return active * decode.width

    def _bucket(self, tokens: int) -> int:
        return next(bucket for bucket in self.config.buckets if bucket >= tokens)

    def _read(self, pending: _Pending) -> list[Update]:
        """Hands out what a finished program did for the requests that were in it and have not ended since."""
        host: Report = jax.tree.map(np.asarray, pending.report)
        updates = []
        for running in pending.members:
            if self._running.get(running.slot) is not running:
                continue
            row = 0
            if pending.round:
                row = running.slot
                running.accepted_lengths.append(int(host.accepted_lengths[row]))
                running.verified_nodes.append(int(host.verified_nodes[row]))
                self.statistics.scheduled_tokens += running.verified_nodes[-1]
            new = host.tokens[row, : host.kept[row]].tolist()
            stop, already = running.request.stop, len(running.tokens)
            cut = None if stop is None else stop([*running.tokens, *new])
            if cut is not None:
                updates.append(self._finish(running, new[: max(cut - already, 0)], "stop", on_device=False))
            elif host.done[row]:
                updates.append(self._finish(running, new, "stop" if host.stopped[row] else "length", on_device=True))
            elif new:
                running.tokens += new
                updates.append(Update(id=running.request.id, tokens=tuple(new)))
        # A round that was dispatched before its last requests were known to have ended says nothing.
        if pending.drafted and host.kept.any():
            self._stale.learn(int(host.best_drafts), host.survival, int(np.count_nonzero(host.verified_nodes)))
        return updates

    def _finish(self, running: _Running, new: Sequence[int], reason: str, on_device: bool) -> Update:
        running.tokens += new
        del self._running[running.slot]
        if not on_device:
            self._ended[running.slot] = True
        return Update(id=running.request.id, tokens=tuple(new), result=_finished(running, reason))


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _finished(running: _Running, reason: str) -> Result:
    return Result(
        id=running.request.id,
        tokens=tuple(running.tokens),
        finish_reason=reason,
        accepted_lengths=tuple(running.accepted_lengths),
        verified_nodes=tuple(running.verified_nodes),
    )


def _failed(request: Request, error: str) -> Result:
    return Result(id=request.id, tokens=(), finish_reason="error", error=error)
