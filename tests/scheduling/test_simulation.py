"""Replay under load: the schedules are the library's, nothing is lost, and throughput follows the table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.scheduling import stale_capacity
from dspark_jax.scheduling.forest import Forest, tree_forest
from dspark_jax.scheduling.policy import Policy, PolicyKind
from dspark_jax.scheduling.prefix_scheduler import early_stop, fill, fixed_length, global_best, threshold
from dspark_jax.scheduling.replayed_policy import ReplayedPolicy
from dspark_jax.scheduling.simulation import Replay, accepted_drafts, poisson_arrivals, simulate
from dspark_jax.scheduling.throughput import StepTable, bucket_capacity

GAMMA, REQUESTS = 7, 5
PLAIN, WHOLE = (Policy(kind=PolicyKind.FIXED, length=length) for length in (0, GAMMA))
EARLY_STOP, GLOBAL_BEST, STALE = (
    Policy(kind=kind) for kind in (PolicyKind.EARLY_STOP, PolicyKind.GLOBAL_BEST, PolicyKind.STALE_CAPACITY)
)
CONFIDENT = Policy(kind=PolicyKind.THRESHOLD, threshold=0.5)
SHALLOW = Policy(kind=PolicyKind.FIXED, length=2)


def step_table(seconds, capacities=tuple(2**i for i in range(10))) -> StepTable:
    """A table of buckets that take `seconds(capacity)`."""
    rates = [1 / seconds(capacity) for capacity in capacities]
    return StepTable(jnp.asarray(capacities, jnp.int32), jnp.asarray(rates, jnp.float32))


FLAT = step_table(lambda tokens: 0.01)
STEEP = step_table(lambda tokens: 0.001 * tokens)
KNEE = step_table(lambda tokens: 0.01 + 0.0002 * max(tokens - 64, 0))


make_forest = jax.jit(tree_forest)


@jax.jit
def schedules(forest, table, limit):
    """What the library schedules: early stop, global best, threshold 0.5, depth 2, and the first `limit` in order."""
    values = jnp.full(REQUESTS, 0.5, jnp.float32)
    shallow = fixed_length(forest, 2)
    return (
        early_stop(forest, table),
        global_best(forest, table),
        threshold(forest, values),
        shallow,
        fill(forest, limit),
    )


def random_forest(rng, trees: bool) -> Forest:
    """Chains, or trees of which some nodes do not exist; survivals are products of quarters, so that ties are many."""
    shape = (REQUESTS, GAMMA + 1)
    parents, valid = np.tile(np.arange(GAMMA + 1) - 1, (REQUESTS, 1)), np.ones(shape, bool)
    if trees:
        parents[:, 1:] = rng.integers(0, np.arange(1, GAMMA + 1), (REQUESTS, GAMMA))
        valid[:, 1:] = rng.random((REQUESTS, GAMMA)) < 0.9
    survival, depths = rng.choice([0.25, 0.5, 0.75, 1.0], shape), np.zeros(shape, int)
    survival[:, 0] = 1
    for request, node in np.ndindex(REQUESTS, GAMMA):
        parent = parents[request, node + 1]
        survival[request, node + 1] *= survival[request, parent]
        depths[request, node + 1] = depths[request, parent] + 1
        valid[request, node + 1] &= valid[request, parent]
    arrays = (jnp.asarray(survival, jnp.float32), jnp.asarray(parents, jnp.int32), jnp.asarray(depths, jnp.int32))
    return make_forest(*arrays, jnp.asarray(valid), jnp.ones(REQUESTS, bool))


def chain_replay(lengths, survival, accepted) -> Replay:
    """Chains of which each row's first `accepted` drafts are accepted."""
    rows, gamma = survival.shape
    depths = np.broadcast_to(np.arange(gamma + 1), (rows, gamma + 1))
    forest = Forest(np.pad(survival, ((0, 0), (1, 0)), constant_values=1), depths, np.ones(depths.shape, bool))
    return Replay(lengths, forest, (depths > 0) & (depths <= accepted[:, None]), trees=False)


@pytest.fixture(scope="module")
def replay() -> Replay:
    """Requests of 2 to 60 tokens whose confidences are right: easy, middling and hard positions."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 61, 40)
    rows = int((lengths - 1).sum())
    confidence = np.clip(rng.beta(5, 2, (rows, 1)) + rng.normal(0, 0.1, (rows, GAMMA)), 0.02, 0.98)
    accepted = np.cumprod(rng.random((rows, GAMMA)) < confidence, axis=1).sum(axis=1)
    return chain_replay(lengths, np.cumprod(confidence, axis=1), accepted)


def closed(replay: Replay, table: StepTable, policy: Policy, slots: int, count: int = 400):
    requests = np.resize(np.arange(len(replay.lengths)), count)
    return simulate(replay, table, policy, requests, np.zeros(len(requests)), slots)


@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("table", [FLAT, STEEP, KNEE], ids=["flat", "steep", "knee"])
def test_schedules_are_the_librarys(table, trees):
    rng = np.random.default_rng(1)
    policies = (EARLY_STOP, GLOBAL_BEST, CONFIDENT, SHALLOW, STALE)
    replayed = {policy: ReplayedPolicy(policy, table, REQUESTS, GAMMA + 1, trees) for policy in policies}
    best = [REQUESTS * GAMMA] * 2
    for _ in range(20):
        forest = random_forest(rng, trees)
        drafts = REQUESTS * GAMMA if table is FLAT else min(best[-2], REQUESTS * GAMMA)
        limit = bucket_capacity(table, jnp.asarray(REQUESTS + drafts, jnp.int32))
        expected, found = schedules(forest, table, limit), jax.device_get(forest)
        for policy, schedule in zip(policies, expected, strict=True):
            nodes, rate = replayed[policy].round(found)
            np.testing.assert_array_equal(nodes, schedule.nodes)
            tokens = schedule.tokens
            if policy is STALE:
                tokens = limit
            elif policy is SHALLOW and trees:
                tokens = REQUESTS * (GAMMA + 1)
            bucket = int(jnp.argmax(table.capacities >= tokens))
            assert rate == pytest.approx(float(table.steps_per_second[bucket]))
        best.append(int(expected[1].tokens) - REQUESTS)


def test_switching_is_the_engines(monkeypatch):
    """Scripted confidences, read afresh: a round reports after the next is decided, plain ones nothing."""
    for name, value in (("_FEWEST_PLAIN_ROUNDS", 2), ("_MOST_PLAIN_ROUNDS", 4), ("_MEMORY", 10)):
        monkeypatch.setattr(stale_capacity, name, value)
    table = step_table(lambda tokens: 0.01 + 0.001 * tokens, (8, 16, 32, 64))
    table = table.replace(plain_steps_per_second=jnp.full(4, 1.6 * float(table.steps_per_second[0]), jnp.float32))
    replayed = ReplayedPolicy(STALE, table, 2, GAMMA + 1, False)
    rates, plain = np.asarray(table.steps_per_second, float), float(table.plain_steps_per_second[0])
    curve, seen, unread, plain_in_a_row, patience, kinds = np.zeros(GAMMA), 0, [], 0, 2, []
    for chance in [0.9] * 6 + [0.2] * 30 + [0.95] * 20:
        survival = np.tile(np.cumprod(np.full(GAMMA, chance)), (2, 1))
        nodes, rate = replayed.round(chain_replay(np.array([3]), survival, np.zeros(2, int)).forest)
        if len(unread) == 2 and (report := unread.pop(0)) is not None:
            seen = min(seen + 2, 10)
            curve = curve + 2 / seen * (report - curve)
        pays = not seen or any(
            (1 + curve[:n].sum()) * rates[next(i for i, size in enumerate((8, 16, 32, 64)) if size >= 2 + 2 * n)]
            >= plain
            for n in range(GAMMA + 1)
        )
        drafting = pays or plain_in_a_row == patience
        if drafting:
            plain_in_a_row, patience = 0, 2 if pays else min(2 * patience, 4)
            assert nodes.sum() > 2
        else:
            plain_in_a_row += 1
            assert nodes.sum() == 2 and rate == pytest.approx(plain)
        kinds.append(drafting)
        unread.append(survival[0] if drafting else None)
    text = "".join("D" if drafted else "p" for drafted in kinds)
    # While little survives, a round asks again now and then, ever more rarely; soon after much does, every one drafts.
    assert "DppDppppDppppD" in text and text.startswith("DDDDDDDD") and text.endswith("DDDDD")


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
    replay = chain_replay(np.array([5]), np.full((4, 3), 0.5), np.array([2, 3, 0, 1]))
    table = step_table(lambda tokens: 0.5, (4,))
    everything = simulate(replay, table, Policy(kind=PolicyKind.FIXED, length=3), np.array([0]), np.array([1.0]), 1)
    np.testing.assert_array_equal(everything.committed, [3, 1])
    np.testing.assert_array_equal(everything.drafts, [3, 3])
    np.testing.assert_array_equal(everything.ends, [1.5, 2.0])
    assert everything.throughput == everything.user_speed == 4 and everything.tau == 2
    one = simulate(replay, table, Policy(kind=PolicyKind.FIXED, length=1), np.array([0]), np.array([1.0]), 1)
    np.testing.assert_array_equal(one.committed, [2, 1, 1])
    np.testing.assert_array_equal(one.accepted, [1, 0, 1])
    text, tokens = np.array([7, 1, 2, 1]), np.array([[7, 1, 2, 2], [1, 2, 1, 0], [2, 2, 1, 1]])
    index = np.broadcast_to(np.arange(4), tokens.shape)
    np.testing.assert_array_equal(accepted_drafts(tokens, index - 1, index, text).sum(axis=1), [2, 2, 0])


def test_a_tree_by_hand():
    """Two first drafts, two after the second of them, and a node that does not exist; the third text ends at once."""
    tokens, parents = np.tile([5, 1, 2, 1, 3, 3], (3, 1)), np.tile([-1, 0, 0, 2, 2, -1], (3, 1))
    depths, valid = np.tile([0, 1, 1, 2, 2, 0], (3, 1)), np.tile(np.arange(6) < 5, (3, 1))
    accepted = accepted_drafts(tokens, parents, depths, np.array([5, 2, 3, 2]))
    assert [np.flatnonzero(row).tolist() for row in accepted] == [[2, 4], [], [2]]
    forest = Forest(np.tile([1, 0.5, 0.25, 0.125, 0.0625, 0], (3, 1)), depths, valid)
    replay, table = (
        Replay(np.array([4]), forest, accepted, trees=True),
        step_table(lambda tokens: tokens / 8, (2, 4, 8)),
    )

    def steps(policy):
        run = simulate(replay, table, policy, np.array([0]), np.zeros(1), 1)
        return run.drafts.tolist(), run.accepted.tolist(), run.committed.tolist(), run.ends.tolist()

    assert steps(Policy(kind=PolicyKind.THRESHOLD, threshold=0)) == ([4], [2], [3], [1])
    assert steps(Policy(kind=PolicyKind.THRESHOLD, threshold=0.25)) == ([2, 2], [1, 1], [2, 1], [0.5, 1])
    # As in an engine, which cannot know how many nodes are so deep, at the cost of the whole tree.
    assert steps(Policy(kind=PolicyKind.FIXED, length=1)) == ([2, 2], [1, 1], [2, 1], [1, 2])


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
