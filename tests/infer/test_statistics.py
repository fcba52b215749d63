"""Acceptance statistics against counts made by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import request_keys, sampling_params
from dspark_jax.io import load_target
from dspark_jax.verification.counting import Counts
from dspark_jax.verification.statistics import (
    AcceptanceCounts,
    count_acceptance,
    first_difference,
    rounds_until,
    score_gap,
)


def simulated(seed: int, requests: int = 5, drafts: int = 3, rounds: int = 7) -> dict[str, np.ndarray]:
    """Random rounds of chains, and the sums that the decoder would keep of them, by plain loops."""
    random = np.random.default_rng(seed)
    ran = random.integers(1, rounds + 1, requests)
    fields = {
        "accepted_lengths": random.integers(0, 9, (requests, rounds)),
        "rounds": ran,
        "lengths": np.zeros(requests, int),
        "stopped": random.random(requests) < 0.5,
        # Rounds that were not run hold anything.
        "verified_nodes": random.integers(0, 9, (requests, rounds)),
        "reached": np.zeros((requests, drafts), int),
        "accepted": np.zeros((requests, drafts), int),
    }
    for request in range(requests):
        for index in range(ran[request]):
            verified = random.integers(0, drafts + 1)
            accepted = random.integers(0, verified + 1)
            fields["accepted_lengths"][request, index] = accepted + 1
            fields["verified_nodes"][request, index] = verified + 1
            for slot in range(drafts):
                fields["reached"][request, slot] += slot < verified and slot <= accepted
                fields["accepted"][request, slot] += slot < accepted
        cut = random.integers(0, fields["accepted_lengths"][request, ran[request] - 1])
        fields["lengths"][request] = 1 + fields["accepted_lengths"][request, : ran[request]].sum() - cut
    return fields


def counted(fields: dict[str, np.ndarray]) -> AcceptanceCounts:
    none = np.zeros(len(fields["rounds"]), int)
    counts = {name: value for name, value in fields.items() if name not in ("lengths", "stopped")}
    return count_acceptance(Counts(**counts, missed_first=none, took_second=none), fields["lengths"], fields["stopped"])


@pytest.mark.parametrize("seed", range(3))
def test_counts(seed):
    fields = simulated(seed)
    counts = counted(fields)
    tokens = to_end = nodes = 0
    for request, rounds in enumerate(fields["rounds"]):
        own = sum(fields["accepted_lengths"][request, :rounds])
        tokens += own
        nodes += sum(fields["verified_nodes"][request, :rounds])
        to_end += fields["lengths"][request] - 1 if fields["stopped"][request] else own
    rounds = sum(fields["rounds"])
    assert counts.tau == pytest.approx(tokens / rounds)
    assert counts.tau_to_end == pytest.approx(to_end / rounds)
    assert counts.tau_to_end <= counts.tau
    assert counts.verified_nodes == nodes and counts.verified == nodes - rounds
    assert counts.committed_share == pytest.approx(tokens / nodes)
    np.testing.assert_allclose(counts.prefix_survival, fields["accepted"].sum(0) / rounds)
    np.testing.assert_allclose(counts.conditional_acceptance, fields["accepted"].sum(0) / fields["reached"].sum(0))
    # Each accepted draft and each round's bonus is a token.
    assert counts.tau == pytest.approx(1 + counts.prefix_survival.sum())


def test_full_blocks_survive_as_the_product_of_conditionals():
    counts = AcceptanceCounts(100, 0, 0, 400, np.array([100, 80, 40]), np.array([80, 40, 10]), 0, 0)
    np.testing.assert_allclose(counts.conditional_acceptance, [0.8, 0.5, 0.25])
    np.testing.assert_allclose(counts.prefix_survival, np.cumprod([0.8, 0.5, 0.25]))


def test_pooling_adds_counts():
    first, second = simulated(1), simulated(2)
    both = {name: np.concatenate([first[name], second[name]]) for name in first}
    pooled = AcceptanceCounts.zero(3) + counted(first) + counted(second)
    whole = counted(both)
    assert pooled.tau == whole.tau and pooled.tau_to_end == whole.tau_to_end and pooled.verified == whole.verified
    np.testing.assert_array_equal(pooled.prefix_survival, whole.prefix_survival)


def test_nothing_decoded_is_undefined_not_zero():
    counts = AcceptanceCounts.zero(2)
    assert np.isnan(counts.tau) and np.isnan(counts.conditional_acceptance).all()
    assert not counts.collapsed


@pytest.mark.parametrize(
    ("reached", "accepted", "collapsed"),
    [([200, 160], [160, 10], True), ([200, 160], [160, 80], False), ([30, 20], [20, 0], False), ([200], [100], False)],
)
def test_collapse(reached, accepted, collapsed):
    counts = AcceptanceCounts(200, 0, 0, 0, np.array(reached), np.array(accepted), 0, 0)
    assert counts.collapsed is collapsed


def test_rounds_until():
    accepted_lengths = np.array([2, 1, 3])
    assert [rounds_until(accepted_lengths, length) for length in range(1, 9)] == [0, 1, 1, 2, 3, 3, 3, 3]


def test_first_difference():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == 2
    assert first_difference([], []) is None


def test_score_gap(models, golden_requests):
    target = load_target(models["target"])
    tokens = jnp.asarray([entry["output"][:100] for entry in golden_requests], jnp.int32)
    lengths = jnp.full(4, 80, jnp.int32)
    chosen = tokens[jnp.arange(4), lengths]
    keys = request_keys(0, 4)

    def gap(second, temperature):
        sampling = sampling_params(4, temperature)
        return np.asarray(score_gap(target.params, target.config, tokens, lengths, chosen, second, keys, sampling))

    assert (gap(chosen, 0.0) == 0).all()
    everything = np.stack([gap(jnp.full(4, token, jnp.int32), 0.0) for token in range(0, 257, 16)])
    assert (everything >= 0).all() and everything.max() > 1
    assert (gap(chosen - 1, 0.0) != gap(chosen - 1, 1.0)).all(), "the noise counts at T > 0"
