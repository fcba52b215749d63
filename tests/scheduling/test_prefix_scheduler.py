"""The scheduler against every possible choice, and against a slow reading of Algorithm 1.

Survivals are products of eighths and quarters and rates small whole numbers, so that float32 is exact and ties are
frequent.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.scheduling.forest import Forest, chain_forest, tree_forest
from dspark_jax.scheduling.prefix_scheduler import (
    Schedule,
    capacity,
    early_stop,
    fill,
    fixed_length,
    global_best,
    threshold,
)
from dspark_jax.scheduling.throughput import StepTable, steps_per_second_at
from tests.scheduling import reference

CASES, BUCKETS = 150, 5
FILL = jax.jit(fill)


def every_policy(forest: Forest, table: StepTable, tokens, values) -> dict[str, Schedule]:
    return {
        "early": early_stop(forest, table),
        "best": global_best(forest, table),
        "fill": fill(forest, tokens),
        "fixed": fixed_length(forest, 2),
        "threshold": threshold(forest, values),
        "capacity": capacity(forest, table),
    }


@functools.partial(jax.jit, static_argnames="tree")
def run(tree, survival, parents, depths, valid, active, table, tokens, values):
    """Every policy on a batch of cases, as one program."""

    def one(survival, parents, depths, valid, active, table, tokens, values):
        if tree:
            forest = tree_forest(survival, parents, depths, valid, active)
        else:
            forest = chain_forest(survival[:, 1:], active, valid[:, 1:])
        return forest, every_policy(forest, table, tokens, values)

    return jax.vmap(one)(survival, parents, depths, valid, active, table, tokens, values)


def tables(rng, cases: int) -> StepTable:
    """Jagged tables, some of them too short for all nodes, some with rates that grow."""
    capacities = np.sort(rng.permuted(np.tile(np.arange(1, 26), (cases, 1)), axis=1)[:, :BUCKETS], axis=1)
    rates = rng.integers(1, 200, (cases, BUCKETS))
    falling = np.sort(rates, axis=1)[:, ::-1]
    rates = np.where(rng.random((cases, 1)) < 0.7, falling, rates)
    return StepTable(jnp.asarray(capacities, jnp.int32), jnp.asarray(rates, jnp.float32))


class Cases:
    """A batch of random cases of one shape: what `run` was given, and what it gave."""

    def __init__(self, tree: bool, requests: int, nodes: int, seed: int = 0, convex: bool = False, cases: int = CASES):
        rng = np.random.default_rng(seed)
        shape = (cases, requests, nodes)
        self.parents = np.broadcast_to(np.arange(nodes) - 1, shape)
        if tree:
            self.parents = np.where(np.arange(nodes) > 0, rng.integers(0, np.maximum(np.arange(nodes), 1), shape), -1)
        edges = rng.choice([0, 0.25, 0.5, 0.75, 1], size=shape, p=[0.05, 0.2, 0.25, 0.25, 0.25])
        if convex:
            edges = rng.uniform(0.05, 0.999, shape)
        self.valid = rng.random(shape) < 0.9
        self.active = rng.random(shape[:2]) < 0.8
        self.survival, self.depths = np.ones(shape), np.zeros(shape, int)
        self.valid[..., 0] = True
        for node in range(1, nodes):
            at = (*np.indices(shape[:2]), self.parents[..., node])
            self.survival[..., node] = self.survival[at] * edges[..., node]
            self.depths[..., node] = self.depths[at] + 1
            self.valid[..., node] &= self.valid[at]
        if convex:
            count = requests * nodes
            first, more, square = rng.uniform(0.5, 5, (3, cases, 1)) * [[[1.0]], [[0.2]], [[0.01]]]
            size = np.arange(1, count + 1)[None]
            seconds = first + more * size + square * size**2
            capacities = np.broadcast_to(size, seconds.shape)
            self.table = StepTable(jnp.asarray(capacities, jnp.int32), jnp.asarray(1 / seconds, jnp.float32))
        else:
            self.table = tables(rng, cases)
        self.tokens = rng.integers(0, requests * nodes + 2, cases)
        self.values = rng.choice([0.0, 0.25, 0.5, 1.0], (cases, requests))
        given = np.where(self.valid, self.survival, rng.choice([np.nan, 1.0, 0.5], shape))
        arguments = (jnp.asarray(x, jnp.int32) for x in (self.parents, self.depths))
        flags = (jnp.asarray(x) for x in (self.valid, self.active))
        self.forest, self.schedules = jax.device_get(
            run(
                tree,
                jnp.asarray(given, jnp.float32),
                *arguments,
                *flags,
                self.table,
                jnp.asarray(self.tokens, jnp.int32),
                jnp.asarray(self.values, jnp.float32),
            )
        )
        self.exists = self.valid & self.active[..., None]
        self.steps = list(zip(np.asarray(self.table.capacities), np.asarray(self.table.steps_per_second), strict=True))

    def __len__(self) -> int:
        return len(self.survival)

    def drafts(self, name: str, case: int) -> set[tuple[int, int]]:
        nodes = self.schedules[name].nodes[case]
        return {(int(r), int(n)) for r, n in zip(*np.nonzero(nodes), strict=True) if n}

    def throughput(self, name: str, case: int) -> float:
        schedule = self.schedules[name]
        return float(schedule.expected[case]) * reference.rate(*self.steps[case], int(schedule.tokens[case]))

    def order(self, case: int) -> list[tuple[int, int]]:
        found = reference.candidates(self.survival[case], self.depths[case], self.exists[case])
        return [(request, node) for _, _, request, node in found]


@functools.cache
def random_cases(kind: str) -> Cases:
    return Cases(True, 2, 6) if kind == "trees" else Cases(False, 4, 5)


@pytest.mark.parametrize("kind", ["chains", "trees"])
def test_global_best_is_the_best_of_every_choice(kind):
    cases = random_cases(kind)
    schedule, later = cases.schedules["best"], 0
    for case in range(len(cases)):
        exists, parents = cases.exists[case], cases.parents[case]
        best, tokens = reference.best_throughput(cases.survival[case], parents, exists, *cases.steps[case])
        assert cases.throughput("best", case) == best
        assert schedule.tokens[case] == cases.schedules["capacity"][case]
        if best > 0:
            assert schedule.tokens[case] == tokens
        later += schedule.tokens[case] > cases.schedules["early"].tokens[case]
    assert later > len(cases) // 10, "jagged tables must part the two for the test to mean anything"


@pytest.mark.parametrize("kind", ["chains", "trees"])
def test_early_stop_is_algorithm_1(kind):
    cases, stopped = random_cases(kind), 0
    for case in range(len(cases)):
        exists = cases.exists[case]
        admitted = reference.algorithm_1(cases.survival[case], cases.depths[case], exists, *cases.steps[case])
        assert cases.drafts("early", case) == admitted
        stopped += 0 < len(admitted) < exists[:, 1:].sum()
    assert stopped > len(cases) // 10


@pytest.mark.parametrize(("tree", "requests", "nodes"), [(False, 4, 5), (True, 2, 6)])
def test_the_two_agree_where_the_step_time_is_convex(tree, requests, nodes):
    cases = Cases(tree, requests, nodes, seed=1, convex=True)
    early, best = cases.schedules["early"], cases.schedules["best"]
    np.testing.assert_array_equal(early.nodes, best.nodes)
    inside = (early.lengths > 0).any(axis=1) & (early.tokens < cases.exists.sum(axis=(1, 2)))
    assert inside.sum() > len(cases) // 4


@pytest.mark.parametrize("kind", ["chains", "trees"])
def test_every_schedule_is_whole(kind):
    """All active roots, no other request, no node without its parent, and the counts of what it holds."""
    cases = random_cases(kind)
    for name, schedule in cases.schedules.items():
        if name == "capacity":
            continue
        nodes = schedule.nodes
        np.testing.assert_array_equal(nodes[..., 0], cases.active)
        assert not (nodes & ~cases.exists).any()
        above = np.take_along_axis(nodes, np.maximum(cases.parents, 0), axis=2)
        assert not (nodes & ~above).any()
        np.testing.assert_array_equal(schedule.lengths, nodes[..., 1:].sum(axis=2))
        np.testing.assert_array_equal(schedule.tokens, nodes.sum(axis=(1, 2)))
        np.testing.assert_array_equal(schedule.expected, (cases.survival * nodes).sum(axis=(1, 2)))


@pytest.mark.parametrize("kind", ["chains", "trees"])
def test_the_fillers_take_the_first_in_order(kind):
    cases = random_cases(kind)
    for case in range(len(cases)):
        order, roots = cases.order(case), int(cases.active[case].sum())
        assert cases.drafts("fill", case) == set(order[: max(cases.tokens[case] - roots, 0)])
        for name in ("early", "best"):
            admitted = cases.drafts(name, case)
            assert admitted == set(order[: len(admitted)])


@pytest.mark.parametrize("kind", ["chains", "trees"])
def test_static_policies(kind):
    cases = random_cases(kind)
    np.testing.assert_array_equal(cases.schedules["fixed"].nodes, cases.exists & (cases.depths <= 2))
    confident = (cases.survival >= cases.values[..., None]) | (cases.depths == 0)
    np.testing.assert_array_equal(cases.schedules["threshold"].nodes, cases.exists & confident)


def chains(*rows, dtype=jnp.float32) -> Forest:
    return jax.jit(chain_forest)(jnp.asarray(rows, dtype), jnp.ones(len(rows), bool))


def test_ties_go_to_the_shallower_and_then_to_the_earlier_request():
    forest = chains([1, 1, 0.5], [1, 1, 0.5])
    assert [FILL(forest, jnp.asarray(tokens)).lengths.tolist() for tokens in range(9)] == [
        [0, 0],
        [0, 0],
        [0, 0],
        [1, 0],
        [1, 1],
        [2, 1],
        [2, 2],
        [3, 2],
        [3, 3],
    ]


def test_survivals_that_are_none():
    """NaN is 0, and with it all that follows; what exceeds its prefix, as rounding may, counts as the prefix."""
    forest = chains([0.5, np.nan, 0.75], [np.inf, 0.25, 0.25000003], [-1, 0.5, 0.5])
    np.testing.assert_array_equal(forest.survival, [[1, 0.5, 0, 0], [1, 1, 0.25, 0.25], [1, 0, 0, 0]])
    assert forest.valid.all()
    assert FILL(forest, jnp.asarray(7)).lengths.tolist() == [1, 3, 0]
    table = StepTable(jnp.asarray([100], jnp.int32), jnp.asarray([1], jnp.float32))
    assert jax.jit(early_stop)(forest, table).lengths.tolist() == [1, 3, 0]


def test_a_draft_after_one_that_does_not_exist_is_not_admitted():
    forest = chain_forest(
        jnp.full((2, 3), 0.5), jnp.ones(2, bool), jnp.asarray([[True, False, True], [False, True, True]])
    )
    assert fixed_length(forest, 3).lengths.tolist() == [1, 0]


def test_nodes_in_any_order():
    """A child may come before its parent, if only the root is first."""
    parents, depths = jnp.asarray([[-1, 2, 3, 0]]), jnp.asarray([[0, 3, 2, 1]])
    survival, valid = jnp.asarray([[1, 0.5, 0.5, 0.5]]), jnp.asarray([[True, True, True, True]])
    forest = tree_forest(survival, parents, depths, valid, jnp.ones(1, bool))
    found = [np.flatnonzero(FILL(forest, jnp.asarray(tokens)).nodes[0]).tolist() for tokens in (1, 2, 3, 4)]
    assert found == [[0], [0, 3], [0, 2, 3], [0, 1, 2, 3]]
    gone = tree_forest(survival, parents, depths, valid.at[0, 3].set(False), jnp.ones(1, bool))
    assert gone.valid.tolist() == [[True, False, False, False]]


def test_no_active_request_and_more_requests_than_the_largest_bucket():
    table = StepTable(jnp.asarray([1, 2], jnp.int32), jnp.asarray([9, 8], jnp.float32))
    idle = chain_forest(jnp.ones((3, 2)), jnp.zeros(3, bool))
    crowd = chain_forest(jnp.ones((3, 2)), jnp.ones(3, bool))
    for policy in (early_stop, global_best):
        policy = jax.jit(policy)
        assert (int(policy(idle, table).tokens), float(policy(idle, table).expected)) == (0, 0)
        assert policy(crowd, table).lengths.tolist() == [0, 0, 0]
    assert FILL(idle, jnp.asarray(4)).tokens == 0


def test_half_precision_survivals_are_summed_in_single():
    forest = chains([1, 1, 0.0078125], dtype=jnp.bfloat16)
    assert fixed_length(forest, 3).expected == 3.0078125


@settings(max_examples=25, deadline=None)
@given(shape=st.sampled_from([(1, 1), (1, 3), (2, 2), (3, 1), (3, 3)]), seed=st.integers(0, 2**32 - 1))
def test_more_capacity_never_verifies_less(shape, seed):
    """Over shapes: schedules of growing capacity are nested, and each policy does no worse than the one before."""
    rng = np.random.default_rng(seed)
    confidences = rng.choice([0, 0.25, 0.5, 0.75, 1], shape)
    table = jax.tree.map(lambda x: x[0], tables(rng, 1))
    nodes, theta, best = nested(jnp.asarray(np.cumprod(confidences, axis=1), jnp.float32), table)
    assert not (nodes[:-1] & ~nodes[1:]).any()
    assert nodes[-1].all()
    plain, early, highest = theta
    assert plain <= early <= highest
    np.testing.assert_array_equal(nodes[best], nodes[max(best, shape[0])])


@jax.jit
def nested(survival, table):
    forest = chain_forest(survival, jnp.ones(survival.shape[0], bool))
    every = jnp.arange(forest.valid.size + 1, dtype=jnp.int32)
    schedules = (fixed_length(forest, 0), early_stop(forest, table), global_best(forest, table))
    theta = jnp.stack([s.expected * steps_per_second_at(table, s.tokens) for s in schedules])
    return jax.vmap(lambda tokens: fill(forest, tokens).nodes)(every), theta, capacity(forest, table)


def test_one_program_whatever_the_confidences_and_the_table(compilations):
    cases = [Cases(False, 3, 4, seed, cases=2) for seed in (3, 4)]
    compilations.reset()
    cases.append(Cases(False, 3, 4, 5, cases=2))
    assert compilations.count == 0
