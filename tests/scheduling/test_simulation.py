"""Replay under load: the schedules are the library's, nothing is lost, and throughput follows the table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.scheduling.forest import chain_forest
from dspark_jax.scheduling.policy import Policy, PolicyKind
from dspark_jax.scheduling.prefix_scheduler import early_stop, fill, fixed_length, global_best, threshold
from dspark_jax.scheduling.simulation import Replay, Scheduler, accepted_drafts, poisson_arrivals, simulate
from dspark_jax.scheduling.throughput import StepTable, bucket_capacity

GAMMA = 7
PLAIN, WHOLE = (Policy(kind=PolicyKind.FIXED, length=length) for length in (0, GAMMA))
EARLY_STOP, GLOBAL_BEST, STALE = (
    Policy(kind=kind) for kind in (PolicyKind.EARLY_STOP, PolicyKind.GLOBAL_BEST, PolicyKind.STALE_CAPACITY)
)
CONFIDENT = Policy(kind=PolicyKind.THRESHOLD, threshold=0.5)


def step_table(seconds, capacities=tuple(2**i for i in range(10))) -> StepTable:
    """A table of buckets that take `seconds(capacity)`."""
    rates = [1 / seconds(capacity) for capacity in capacities]
    return StepTable(jnp.asarray(capacities, jnp.int32), jnp.asarray(rates, jnp.float32))


FLAT = step_table(lambda tokens: 0.01)
STEEP = step_table(lambda tokens: 0.001 * tokens)
KNEE = step_table(lambda tokens: 0.01 + 0.0002 * max(tokens - 64, 0))


@pytest.fixture(scope="module")
def replay() -> Replay:
    """Requests of 2 to 60 tokens whose confidences are right: easy, middling and hard positions."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 61, 40)
    rows = int((lengths - 1).sum())
    confidence = np.clip(rng.beta(5, 2, (rows, 1)) + rng.normal(0, 0.1, (rows, GAMMA)), 0.02, 0.98)
    accepted = np.cumprod(rng.random((rows, GAMMA)) < confidence, axis=1).sum(axis=1)
    return Replay(lengths, np.cumprod(confidence, axis=1), accepted)


def closed(replay: Replay, table: StepTable, policy: Policy, slots: int, count: int = 400):
    requests = np.resize(np.arange(len(replay.lengths)), count)
    return simulate(replay, table, policy, requests, np.zeros(len(requests)), slots)


@pytest.mark.parametrize("table", [FLAT, STEEP, KNEE], ids=["flat", "steep", "knee"])
def test_schedules_are_the_librarys(table):
    rng = np.random.default_rng(1)
    schedulers = {policy: Scheduler(policy, table, 5 * (GAMMA + 1)) for policy in (EARLY_STOP, GLOBAL_BEST, CONFIDENT)}
    schedulers[WHOLE] = Scheduler(WHOLE, table, 5 * (GAMMA + 1))
    algorithms = [jax.jit(function) for function in (early_stop, global_best, threshold, fixed_length, fill)]
    early, whole_best, confident, fixed, filled = algorithms
    stale, best = Scheduler(STALE, table, 5 * (GAMMA + 1)), [5 * GAMMA, 5 * GAMMA]
    for _ in range(20):
        survival = np.cumprod(rng.choice([0.25, 0.5, 0.9, 1.0], (5, GAMMA)), axis=1).astype(np.float32)
        forest = chain_forest(jnp.asarray(survival), jnp.ones(5, bool))
        expected = {
            EARLY_STOP: early(forest, table),
            GLOBAL_BEST: whole_best(forest, table),
            CONFIDENT: confident(forest, jnp.full(5, 0.5, jnp.float32)),
            WHOLE: fixed(forest, jnp.asarray(GAMMA, jnp.int32)),
        }
        for policy, schedule in expected.items():
            lengths, rate = schedulers[policy].step(survival)
            np.testing.assert_array_equal(lengths, schedule.lengths)
            bucket = int(jnp.argmax(table.capacities >= schedule.tokens))
            assert rate == pytest.approx(float(table.steps_per_second[bucket]))
        drafts = 5 * GAMMA if table is FLAT else best[-2]
        limit = bucket_capacity(table, jnp.asarray(5 + drafts, jnp.int32))
        lengths, _ = stale.step(survival)
        np.testing.assert_array_equal(lengths, filled(forest, limit).lengths)
        best.append(int(expected[GLOBAL_BEST].tokens) - 5)


@pytest.mark.parametrize(
    "policy", [PLAIN, WHOLE, CONFIDENT, EARLY_STOP, GLOBAL_BEST, STALE], ids=lambda p: p.kind.value
)
def test_every_token_comes_once(replay, policy):
    rng = np.random.default_rng(2)
    requests = rng.integers(0, len(replay.lengths), 100)
    arrivals = poisson_arrivals(20.0, 100, rng)
    run, again = (simulate(replay, KNEE, policy, requests, arrivals, 8) for _ in range(2))
    assert run.committed.sum() + len(requests) == replay.lengths[requests].sum()
    assert (run.accepted <= run.drafts).all() and (run.active <= 8).all()
    assert (run.arrived <= run.admitted).all() and (run.admitted < run.finished).all()
    assert (np.diff(run.admitted) >= 0).all() and run.ends[-1] == run.finished.max()
    for name, values in vars(again).items():
        np.testing.assert_array_equal(values, vars(run)[name])


def test_one_request_by_hand():
    """Five tokens; the first round accepts two of three drafts, the round from there is cut by the text's end."""
    replay = Replay(np.array([5]), np.full((4, 3), 0.5), np.array([2, 3, 0, 1]))
    table = step_table(lambda tokens: 0.5, (4,))
    everything = simulate(replay, table, Policy(kind=PolicyKind.FIXED, length=3), np.array([0]), np.array([1.0]), 1)
    np.testing.assert_array_equal(everything.committed, [3, 1])
    np.testing.assert_array_equal(everything.drafts, [3, 3])
    np.testing.assert_array_equal(everything.ends, [1.5, 2.0])
    assert everything.throughput == everything.user_speed == 4 and everything.tau == 2
    one = simulate(replay, table, Policy(kind=PolicyKind.FIXED, length=1), np.array([0]), np.array([1.0]), 1)
    np.testing.assert_array_equal(one.committed, [2, 1, 1])
    np.testing.assert_array_equal(one.accepted, [1, 0, 1])
    text, drafts = np.array([7, 1, 2, 1]), np.array([[1, 2, 2], [2, 1, 0], [2, 1, 1]])
    np.testing.assert_array_equal(accepted_drafts(drafts, text), [2, 2, 0])


def test_throughput_follows_the_table(replay):
    """On a flat table everything pays, where each token costs as much nothing does."""
    for slots in (1, 16):
        plain, whole = (closed(replay, FLAT, policy, slots) for policy in (PLAIN, WHOLE))
        assert whole.throughput > 2 * plain.throughput
        assert plain.tau == 1 and plain.throughput == pytest.approx(slots * 100)
        assert closed(replay, FLAT, STALE, slots).throughput == whole.throughput
        assert whole.user_speed == pytest.approx(whole.throughput / slots)
        plain, whole = (closed(replay, STEEP, policy, slots) for policy in (PLAIN, WHOLE))
        assert plain.throughput > 1.5 * whole.throughput


def test_a_stale_capacity_keeps_up_with_every_fixed_length(replay):
    total = dict.fromkeys(range(GAMMA + 1), 0.0)
    scheduled = []
    for slots in (1, 4, 16, 64):
        fixed = {
            length: closed(replay, KNEE, Policy(kind=PolicyKind.FIXED, length=length), slots).throughput
            for length in total
        }
        scheduled.append((closed(replay, KNEE, STALE, slots).throughput, max(fixed.values())))
        total = {length: total[length] + np.log(fixed[length]) for length in total}
    assert all(found > 0.97 * best for found, best in scheduled)
    assert np.log([found for found, _ in scheduled]).sum() > max(total.values())


def test_open_loop(replay):
    rng = np.random.default_rng(3)
    arrivals = poisson_arrivals(5.0, 4000, rng)
    assert arrivals[-1] / 4000 == pytest.approx(1 / 5, rel=0.05)
    requests = rng.integers(0, len(replay.lengths), 4000)
    run = simulate(replay, FLAT, WHOLE, requests, arrivals, 64)
    offered = 5.0 * (replay.lengths[requests] - 1).mean()
    assert run.throughput == pytest.approx(offered, rel=0.05)
    assert run.wait < 0.01 and run.concurrency < 3
    flooded = simulate(replay, FLAT, WHOLE, requests[:200], arrivals[:200] / 1000, 1)
    assert flooded.concurrency == 1 and flooded.wait > 1


def test_a_table_must_hold_every_slot(replay):
    with pytest.raises(ValueError, match="largest bucket is 512, but a step has up to 520"):
        closed(replay, KNEE, PLAIN, 65)
