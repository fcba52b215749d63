"""The engine under random use: every request gets one result, which is plain decoding's or a beginning of it."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax
from dspark_jax import DecodeConfig, request_keys, sampling_params
from dspark_jax.serving import Engine, EngineConfig, Request
from tests.serving.test_engine import steep
from tests.test_generation import Small

SLOTS, MOST, CAPACITY, LONGEST = 4, 10, 48, 19


class World:
    """A small model, prompts for it, and what `generate` gives for each, one request at a time."""

    def __init__(self, seed: int, prompts: int, greedy: bool):
        self.rng = np.random.default_rng(seed)
        self.small = Small("rnn", {"initializer_range": 0.3})
        self.prompts = [self.rng.integers(0, 8, self.rng.integers(1, LONGEST + 1)).tolist() for _ in range(prompts)]
        self.temperatures = np.zeros(prompts) if greedy else self.rng.choice([0.0, 1.0], prompts)
        self.keys = request_keys(seed, prompts)
        self.expected = [self._alone(index) for index in range(prompts)]
        config = EngineConfig(
            decode=self.small.config(max_new_tokens=MOST), slots=SLOTS, capacity=CAPACITY, prefill_tokens=8
        )
        self.engine = Engine(self.small.target, self.small.drafter, config, steep(config))
        self.streamed, self.results = {}, {}

    def _alone(self, index: int) -> list[int]:
        tokens = np.zeros((1, LONGEST), np.int32)
        tokens[0, : len(self.prompts[index])] = self.prompts[index]
        out = dspark_jax.generate(
            self.small.target,
            None,
            jnp.asarray(tokens),
            jnp.asarray([len(self.prompts[index])], jnp.int32),
            self.keys[index : index + 1],
            DecodeConfig(target=self.small.target_config, max_new_tokens=MOST),
            sampling=sampling_params(1, float(self.temperatures[index])),
        )
        return out.tokens[0, : out.lengths[0]].tolist()

    def request(self, id, index: int, **fields) -> Request:
        values = {"input_ids": self.prompts[index], "temperature": float(self.temperatures[index])}
        return Request(id=id, key=self.keys[index], **values | fields)

    def take(self, update) -> None:
        self.streamed.setdefault(update.id, []).extend(update.tokens)
        if update.result is not None:
            assert update.id not in self.results
            self.results[update.id] = update.result

    def finish(self) -> None:
        """Runs the engine until nothing is left in it."""
        while self.engine.busy:
            for update in self.engine.step():
                self.take(update)
        assert self.engine.free == SLOTS and not self.engine.step()
        assert {id: list(result.tokens) for id, result in self.results.items()} == self.streamed


def test_64_greedy_requests_come_and_are_cancelled_at_random():
    count = 64
    world = World(1, count, greedy=True)
    most, asked = world.rng.integers(1, MOST + 1, count), set()
    waiting = [world.request(index, index, max_tokens=int(most[index])) for index in range(count)]
    while waiting or world.engine.busy:
        for _ in range(world.rng.integers(0, 3)):
            if waiting:
                world.engine.submit(waiting.pop(0))
        unfinished = [id for id in range(count - len(waiting)) if id not in world.results]
        if unfinished and world.rng.random() < 0.2:
            asked.add(chosen := int(world.rng.choice(unfinished)))
            world.engine.cancel(chosen)
        for update in world.engine.step():
            world.take(update)
    world.finish()
    assert sorted(world.results) == list(range(count))
    cancelled = {id for id, result in world.results.items() if result.finish_reason == "cancelled"}
    assert 4 < len(cancelled) < count / 2 and cancelled <= asked
    for id, result in world.results.items():
        whole = world.expected[id][: most[id]]
        assert list(result.tokens) == (whole[: len(result.tokens)] if id in cancelled else whole)


BAD = [
    {"input_ids": []},
    {"input_ids": [1, 8]},
    {"input_ids": [-1]},
    {"input_ids": [True]},
    {"input_ids": [np.True_]},
    {"input_ids": [1.5]},
    {"input_ids": ["1"]},
    {"input_ids": [None]},
    {"input_ids": [1] * CAPACITY},
    {"max_tokens": 0},
    {"max_tokens": -3},
    {"max_tokens": 2.5},
    {"max_tokens": True},
    {"temperature": float("nan")},
    {"temperature": -1.0},
    {"top_k": -1},
    {"top_k": 2**40},
    {"top_p": 0.0},
    {"min_p": 2.0},
]


def stop_after(count: int):
    return lambda tokens: count if len(tokens) >= count else None


class Fuzz(World):
    """Random operations. `unfinished`: what each request that got no result yet should give, in tokens."""

    def __init__(self, seed: int):
        super().__init__(seed, 12, greedy=False)
        self.ids, self.due, self.cancelled = itertools.count(), {}, set()

    def fresh(self) -> Request:
        id, index = next(self.ids), int(self.rng.integers(len(self.prompts)))
        most = [None, 1, 2, int(self.rng.integers(1, MOST + 1))][self.rng.integers(4)]
        stop = [None, None, 0, 1, int(self.rng.integers(MOST))][self.rng.integers(5)]
        whole = self.expected[index][:most]
        self.due[id] = (whole, "length") if stop is None or stop > len(whole) else (whole[:stop], "stop")
        return self.request(id, index, max_tokens=most, stop=None if stop is None else stop_after(stop))

    def submit(self) -> None:
        assert self.engine.submit(self.fresh()) is None

    def submit_bad(self) -> None:
        index = int(self.rng.integers(len(BAD)))
        update = self.engine.submit(self.request(("bad", next(self.ids)), 0, **BAD[index]))
        assert update.result.finish_reason == "error" and "\n" not in update.result.error and not update.tokens

    def submit_twice(self) -> None:
        unfinished = [id for id in self.due if id not in self.results]
        if unfinished:
            id = unfinished[self.rng.integers(len(unfinished))]
            assert "unfinished" in self.engine.submit(self.request(id, 0)).result.error

    def cancel(self) -> None:
        """Any id: waiting, running, finished, unknown, and of a request to come."""
        newest = max(self.due, default=0)
        id = max(0, newest + 3 - int(self.rng.integers([10, newest + 4][self.rng.integers(2)])))
        if id in self.due and id not in self.results:
            self.cancelled.add(id)
        self.engine.cancel(id)
        self.engine.cancel(("unknown", id))

    def step(self) -> None:
        for update in self.engine.step():
            self.take(update)

    def stream(self) -> None:
        """Requests through a generator, with cancels on the way, that is left at any point."""
        wanted = [self.fresh() for _ in range(self.rng.integers(4))]
        taken = []

        def source():
            for request in wanted:
                taken.append(request.id)
                yield request

        updates = self.engine.updates(source())
        for update in itertools.islice(updates, int(self.rng.integers(12))):
            self.take(update)
            if self.rng.random() < 0.2:
                self.cancel()
        updates.close()
        for request in wanted:
            if request.id not in taken:
                # Never taken from the iterator: the engine knows nothing of it.
                del self.due[request.id]
                self.cancelled.discard(request.id)


@pytest.mark.parametrize("seed", range(5))
def test_random_operations(seed):
    fuzz = Fuzz(seed)
    operations = [fuzz.submit, fuzz.submit_bad, fuzz.submit_twice, fuzz.cancel, fuzz.step, fuzz.stream]
    odds = np.array([3, 1, 1, 1, 4, 0.5])
    for chosen in fuzz.rng.choice(len(operations), 300, p=odds / odds.sum()):
        operations[chosen]()
    fuzz.finish()
    assert fuzz.results.keys() == fuzz.due.keys() and len(fuzz.due) > 20
    for id, result in fuzz.results.items():
        tokens, reason = fuzz.due[id]
        if result.finish_reason == "cancelled":
            assert id in fuzz.cancelled and list(result.tokens) == tokens[: len(result.tokens)]
        else:
            assert (list(result.tokens), result.finish_reason) == (tokens, reason)
    reasons = {result.finish_reason for result in fuzz.results.values()}
    assert reasons == {"length", "stop", "cancelled"}
    again = fuzz.engine.generate([fuzz.request(index, index) for index in range(len(fuzz.prompts))])
    assert {result.id: list(result.tokens) for result in again} == dict(enumerate(fuzz.expected))
