"""The engine against `generate`: policies, trees, stops, meshes and refusals, in programs of few shapes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax
from dspark_jax import DecodeConfig, TreeSpec, Verifier, request_keys
from dspark_jax.drafters.dspark import declare_drafter
from dspark_jax.scheduling.policy import Policy
from dspark_jax.scheduling.throughput import StepTable
from dspark_jax.serving import Engine, EngineConfig, Request, measure_steps
from dspark_jax.sharding import make_mesh, shardings
from dspark_jax.targets.decoder import declare_target
from tests.models import pad
from tests.test_generation import Small

COUNT, SLOTS, MOST = 24, 4, 10


def steep(config: EngineConfig) -> StepTable:
    """A table on which verifying more costs more, so that the scheduler has something to decide."""
    capacities = jnp.asarray(config.buckets, jnp.int32)
    return StepTable(capacities, 100.0 / (4.0 + capacities.astype(jnp.float32)))


class Served:
    """Random prompts for a small model, and what `generate` gives for each."""

    def __init__(self, seed: int = 0, tree=None, head: str = "rnn"):
        rng = np.random.default_rng(seed)
        self.small = Small(head, {"initializer_range": 0.3})
        self.decode = self.small.config(max_new_tokens=MOST, tree=tree)
        self.prompts = [rng.integers(0, 8, rng.integers(1, 20)).tolist() for _ in range(COUNT)]
        self.max_tokens = rng.integers(1, MOST + 1, COUNT)
        self.temperatures = rng.choice([0.0, 0.7, 1.3], COUNT)
        self.keys = request_keys(7, COUNT)

    def requests(self) -> list[Request]:
        return [
            Request(
                id=index,
                input_ids=prompt,
                key=self.keys[index],
                max_tokens=int(self.max_tokens[index]),
                temperature=float(self.temperatures[index]),
            )
            for index, prompt in enumerate(self.prompts)
        ]

    def expected(self) -> list[list[int]]:
        tokens, lengths = pad(self.prompts)
        sampling = dspark_jax.sampling_params(COUNT).replace(temperature=jnp.asarray(self.temperatures, jnp.float32))
        out = dspark_jax.generate(
            self.small.target,
            None,
            jnp.asarray(tokens),
            jnp.asarray(lengths),
            self.keys,
            DecodeConfig(target=self.decode.target, max_new_tokens=MOST),
            sampling=sampling,
            max_tokens=jnp.asarray(self.max_tokens, jnp.int32),
        )
        return [out.tokens[row, : out.lengths[row]].tolist() for row in range(COUNT)]

    def engine(self, policy: Policy | None = None, table=steep, **changes) -> Engine:
        settings = {"decode": self.decode, "slots": SLOTS, "capacity": 48, "prefill_tokens": 8}
        config = EngineConfig(**(settings | {"policy": policy or Policy()} | changes))
        return Engine(self.small.target, self.small.drafter, config, table(config))


@pytest.mark.parametrize(
    "policy",
    [
        Policy(),
        Policy(kind="global-best"),
        Policy(kind="early-stop"),
        Policy(kind="fixed", length=1),
        Policy(kind="fixed", length=0),
        Policy(kind="threshold", threshold=0.4),
    ],
    ids=lambda policy: f"{policy.kind.value} {policy.length}",
)
def test_every_policy_gives_each_request_its_own_plain_tokens(policy):
    """Coupled sampling: the tokens of plain decoding with the request's key, whatever the company and the schedule."""
    served = Served()
    expected = served.expected()
    engine = served.engine(policy)
    results = {result.id: result for result in engine.generate(served.requests())}
    assert len(results) == COUNT
    for index, result in results.items():
        assert list(result.tokens) == expected[index]
        assert result.finish_reason == "length"
        accepted = sum(result.accepted_lengths)
        assert len(result.tokens) <= 1 + accepted and len(result.accepted_lengths) == len(result.verified_nodes)
        assert all(1 <= nodes <= 4 for nodes in result.verified_nodes)
    statistics = engine.statistics
    assert 0 < statistics.scheduled_tokens <= statistics.bucket_tokens
    assert sum(sum(result.verified_nodes) for result in results.values()) == statistics.scheduled_tokens


def test_plain_steps_where_they_are_faster():
    """On a table on which drafting never pays nearly all steps are plain after the first, and the tokens the same."""
    served = Served()
    expected = served.expected()

    def table(config):
        rates = steep(config)
        return rates.replace(plain_steps_per_second=100 * rates.steps_per_second)

    engine = served.engine(table=table)
    for result in engine.generate(served.requests()):
        assert list(result.tokens) == expected[result.id]
    statistics = engine.statistics
    assert 0 < statistics.rounds - statistics.plain < statistics.rounds / 4


def test_a_measured_table_serves():
    served = Served()
    config = served.engine().config
    table = measure_steps(served.small.target, served.small.drafter, config, context=8, repeats=1)
    assert table.capacities.tolist() == list(config.buckets)
    assert (np.asarray(table.steps_per_second) > 0).all() and (np.asarray(table.plain_steps_per_second) > 0).all()
    engine = Engine(served.small.target, served.small.drafter, config, table)
    assert len(list(engine.generate(served.requests()[:3]))) == 3


def test_drafts_one_after_the_other_are_served():
    """Eagle3, whose cache takes each token with the feature before it, over chunks of prompts and reused slots."""
    served = Served(head="eagle3")
    expected = served.expected()
    lengths, engine = [], served.engine(buckets=(4 * SLOTS,))
    for result in engine.generate(served.requests()):
        assert list(result.tokens) == expected[result.id]
        lengths += result.accepted_lengths
    assert max(lengths) > 1


def test_trees_are_served():
    served = Served(tree=TreeSpec(k=2, budget=6))
    expected = served.expected()
    engine = served.engine()
    lengths = []
    for result in engine.generate(served.requests()):
        assert list(result.tokens) == expected[result.id]
        lengths += result.accepted_lengths
    assert max(lengths) > 1


def test_a_bad_request_fails_alone_and_a_full_engine_waits():
    served = Served()
    expected = served.expected()
    bad = [
        ([], {}, "input_ids is empty"),
        ([1, 8], {}, "outside the vocabulary of 8"),
        ([1] * 60, {}, "has 60 tokens, but a slot has room for 43"),
        ([1], {"temperature": -1.0}, "temperature -1.0"),
        ([1], {"max_tokens": 0}, "max_tokens 0"),
    ]
    requests = served.requests()[:8]
    wrong = [
        Request(id=f"bad {i}", input_ids=ids, key=served.keys[0], **fields) for i, (ids, fields, _) in enumerate(bad)
    ]
    engine = served.engine()
    for request in requests:
        assert engine.submit(request) is None
    assert "unfinished" in engine.submit(requests[0]).result.error
    for request, (_, _, message) in zip(wrong, bad, strict=True):
        result = engine.submit(request).result
        assert result.finish_reason == "error" and message in result.error
    results = {result.id: result for result in engine.generate([])}
    assert {index: list(result.tokens) for index, result in results.items()} == {i: expected[i] for i in range(8)}


def test_stops_and_eos():
    served = Served()
    expected = served.expected()
    served.max_tokens[:] = MOST
    whole = {result.id: list(result.tokens) for result in served.engine().generate(served.requests())}

    def stop(tokens):
        return 3 if len(tokens) >= 3 else None

    requests = [dataclasses.replace(request, stop=stop) for request in served.requests()]
    for result in served.engine().generate(requests):
        assert list(result.tokens) == whole[result.id][:3] and result.finish_reason == "stop"
    eos = expected[0][-1]
    served.decode = dataclasses.replace(served.decode, eos_token_ids=(eos,))
    for result in served.engine().generate(served.requests()):
        tokens = whole[result.id]
        ends = tokens.index(eos) + 1 if eos in tokens else len(tokens)
        assert list(result.tokens) == tokens[:ends]
        assert result.finish_reason == ("stop" if eos in tokens else "length")


def test_one_program_a_bucket_and_none_after_warm_up(compilations):
    served = Served(2)
    engine = served.engine()
    list(engine.generate(served.requests()))
    again = [dataclasses.replace(request, temperature=0.9) for request in served.requests()]
    compilations.reset()
    tokens = [result.tokens for result in engine.generate(again)]
    assert compilations.count == 0 and len(tokens) == COUNT


def test_the_round_after_next_is_dispatched_before_a_round_is_read():
    """After each step with active requests exactly one program is unread: the round just dispatched."""
    served = Served(3)
    engine = served.engine()
    for request in served.requests():
        engine.submit(request)
    while engine.busy:
        engine.step()
        if any(running.active for running in engine._running.values()) and engine._pending:
            assert len(engine._pending) == 1 and engine._pending[0].round
    assert engine.statistics.rounds > 0


@pytest.mark.parametrize("verifier", [Verifier.REJECTION, Verifier.BLOCK])
def test_anticipating_policies_are_refused_with_rejection(verifier):
    served = Served()
    served.decode = dataclasses.replace(served.decode, verifier=verifier)
    with pytest.raises(ValueError, match="global-best"):
        served.engine(Policy(kind="global-best"))


def test_rejection_sampling_is_served():
    served = Served()
    served.decode = dataclasses.replace(served.decode, verifier=Verifier.REJECTION)
    results = list(served.engine().generate(served.requests()[:4]))
    assert sorted(len(result.tokens) for result in results) == sorted(served.max_tokens[:4].tolist())


@pytest.mark.slow
def test_eight_devices_serve_the_same_tokens():
    served = Served()
    expected = served.expected()
    mesh = make_mesh(4, 2)
    config = served.engine().config
    decode = served.decode
    target = jax.device_put(served.small.target, shardings(declare_target(decode.target), mesh, 8))
    drafter = jax.device_put(served.small.drafter, shardings(declare_drafter(decode.drafter), mesh, 8))
    engine = Engine(target, drafter, config, steep(config), mesh=mesh)
    for result in engine.generate(served.requests()[:10]):
        assert list(result.tokens) == expected[result.id]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots": 0}, "slots 0"),
        ({"capacity": 3}, "capacity 3"),
        ({"buckets": (4, 8)}, "the largest is 8, but 4 slots have up to 16"),
        ({"buckets": (16, 8)}, "ascending"),
    ],
)
def test_shapes_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        Served().engine(**changes)
