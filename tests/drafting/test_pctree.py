"""PCTree's builder against a slow reference written from the paper's description.

Random logits are compared in float64, where rounding is far smaller than any gap between two scores. Ties are only
compared where they are exact on both sides: rows whose best logit leads by more than 40 have log_softmax(z) =
z - max(z) without rounding, so that integer logits give integer scores; rows of equal logits tie whatever their sum.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.config import TreeKind, TreeSpec
from tests.drafting.pctree_reference import (
    GAMMA,
    VOCABULARY,
    Inputs,
    NumpyDrafter,
    coupled,
    greedy,
    head_drafter,
    head_inputs,
    pctree_spec,
    random_inputs,
    table_config,
    tied_inputs,
    uniform_inputs,
)
from tests.drafting.trees import assert_same_tree, paths
from tests.models import HEADS

GRID = [
    # k, width, budget, spine, γ
    (3, 1, 8, True, GAMMA),
    (1, 3, 5, False, GAMMA),
    (2, 2, 6, True, GAMMA),
    (3, 2, 9, False, GAMMA),
    (2, 5, 12, True, GAMMA),
    (4, 4, 16, True, GAMMA),
    (4, 4, 16, False, GAMMA),
    (6, 2, 3, False, GAMMA),
    (3, 2, 4, True, GAMMA),
    (3, 3, 36, True, GAMMA),
    (3, 2, 5, True, 1),
]


@pytest.mark.parametrize(("k", "width", "budget", "spine", "gamma"), GRID)
def test_pctree_is_the_references_tree(k, width, budget, spine, gamma):
    spec, config = pctree_spec(k, width, budget, spine), table_config(gamma)
    with jax.enable_x64(True):
        cases = [random_inputs(1, gamma=gamma), random_inputs(2, gamma=gamma, flat=True)]
        cases += [tied_inputs(3, gamma=gamma), uniform_inputs(gamma=gamma)]
        for inputs in cases:
            drafter = NumpyDrafter(inputs.params, config)
            proposal = inputs.build(config, spec)
            assert proposal.tokens.shape == (len(inputs.anchors), budget)
            for row, anchor, hidden in inputs.rows():
                expected = drafter.tree(spec, anchor, hidden, inputs.extra(row))
                assert_same_tree(proposal, row, anchor, gamma, expected)


def test_pctree_breaks_float32_ties_by_depth_and_id():
    spec, config = pctree_spec(3, 4, 10, True), table_config(GAMMA)
    inputs = tied_inputs(5, rows=64, dtype=np.float32)
    drafter = NumpyDrafter(inputs.params, config)
    proposal = inputs.build(config, spec)
    assert proposal.scores.dtype == np.float32
    boundary_ties = 0
    for row, anchor, hidden in inputs.rows():
        expected = drafter.tree(spec, anchor, hidden, inputs.extra(row))
        assert_same_tree(proposal, row, anchor, GAMMA, expected, atol=0)
        more = drafter.tree(pctree_spec(3, 4, 11, True), anchor, hidden, inputs.extra(row))
        boundary_ties += min(expected.values()) == min(more.values())
    assert boundary_ties > 16, "the budget must cut through ties for the test to mean anything"


@pytest.mark.parametrize("budget", [GAMMA + 1, GAMMA - 1, GAMMA + 3])
def test_one_child_and_width_one_is_the_greedy_chain(budget):
    spec, config = TreeSpec(kind="pctree", k=1, budget=budget), table_config(GAMMA)
    with jax.enable_x64(True):
        inputs = random_inputs(7)
        drafter = NumpyDrafter(inputs.params, config)
        proposal = inputs.build(config, spec)
        nodes = min(budget, GAMMA + 1)
        index = np.arange(nodes)
        for row, anchor, hidden in inputs.rows():
            chain = drafter.chain(anchor, hidden, inputs.extra(row))
            assert proposal.tokens[row, :nodes].tolist() == [anchor, *chain[: nodes - 1]]
            assert proposal.parents[row, :nodes].tolist() == (index - 1).tolist()
            assert proposal.depths[row, :nodes].tolist() == index.tolist()
            assert proposal.valid[row].tolist() == [node < nodes for node in range(budget)]


@pytest.mark.parametrize(("k", "budget"), [(6, 6), (6, 20)])
def test_wide_pctree_holds_the_most_probable_prefixes(k, budget):
    gamma = 3
    spec, config = pctree_spec(k, budget, budget, False), table_config(gamma)
    with jax.enable_x64(True):
        for inputs in (random_inputs(11, 8, gamma), random_inputs(12, 8, gamma, flat=True)):
            drafter = NumpyDrafter(inputs.params, config)
            proposal = inputs.build(config, spec)
            for row, anchor, hidden in inputs.rows():
                expected = drafter.best_prefixes(budget, anchor, hidden, inputs.extra(row))
                assert_same_tree(proposal, row, anchor, gamma, expected)


@pytest.mark.parametrize("draft_vocab_size", [9, 6])
@pytest.mark.parametrize("head", HEADS)
def test_heads_states_and_vocabularies_follow_each_path(head, draft_vocab_size):
    """Greedy and coupled, whole and reduced vocabularies: W1 is read by target id, the RNN's state by path."""
    spec = pctree_spec(3, 3, 14, draft_vocab_size == 9)
    adjust = greedy if draft_vocab_size == 9 else coupled
    with jax.enable_x64(True):
        drafter = head_drafter(head, 20, draft_vocab_size)
        inputs = head_inputs(drafter, 21)
        proposal = inputs.build(drafter.config, spec, adjust)
        if drafter.config.reduced_vocabulary:
            assert np.isin(proposal.tokens[:, 1:], drafter.params.draft_token_ids).all()
        for row, anchor, hidden in inputs.rows():
            expected = drafter.tree(spec, anchor, hidden, inputs.extra(row, adjust))
            assert_same_tree(proposal, row, anchor, GAMMA, expected)


def test_rows_do_not_depend_on_their_batch():
    spec = pctree_spec(3, 3, 14, False)
    with jax.enable_x64(True):
        drafter = head_drafter("rnn", 20, 6)
        inputs = head_inputs(drafter, 22)
        together = inputs.build(drafter.config, spec, coupled)
        for row in range(6):
            one = slice(row, row + 1)
            alone = Inputs(drafter.params, inputs.hidden[one], inputs.anchors[one], inputs.noise[one])
            alone = alone.build(drafter.config, spec, coupled)
            for name in ("tokens", "parents", "depths", "valid"):
                np.testing.assert_array_equal(getattr(alone, name)[0], getattr(together, name)[row], err_msg=name)
            valid = alone.valid[0]
            np.testing.assert_allclose(alone.scores[0][valid], together.scores[row][valid], atol=1e-12)


@pytest.mark.parametrize("with_markov", [True, False])
def test_unconfident_parents_have_no_children(with_markov):
    spec = pctree_spec(3, 3, 14, True)
    with jax.enable_x64(True):
        drafter = head_drafter("gated", 30, 9, confidence_head_with_markov=with_markov)
        inputs = head_inputs(drafter, 31)
        sizes = {}
        for threshold in (0.0, 0.1, 0.3, 1.0):
            proposal = inputs.build(drafter.config, spec, greedy, threshold)
            sizes[threshold] = int(proposal.valid.sum())
            for row, anchor, hidden in inputs.rows():
                expected = drafter.tree(spec, anchor, hidden, inputs.extra(row), np.float32(threshold))
                assert_same_tree(proposal, row, anchor, GAMMA, expected)
        assert sizes[0.0] == 14 * len(inputs.anchors)
        assert sizes[0.0] > sizes[0.1] > sizes[0.3] > sizes[1.0] == len(inputs.anchors)


def test_confidence_at_the_threshold_is_not_cut():
    spec = pctree_spec(3, 3, 14, True)
    with jax.enable_x64(True):
        drafter = head_drafter("gated", 30, 9)
        flat = jax.tree.map(jnp.zeros_like, drafter.params.confidence_head)
        inputs = head_inputs(drafter, 31)
        inputs.params = drafter.params.replace(confidence_head=flat)
        assert inputs.build(drafter.config, spec, greedy, 0.5).valid.all()
        assert inputs.build(drafter.config, spec, greedy, 0.51).valid.sum() == len(inputs.anchors)


def test_nothing_is_cut_without_a_confidence_head():
    spec, config = pctree_spec(4, 4, 16, True), table_config(GAMMA)
    with jax.enable_x64(True):
        assert random_inputs(1).build(config, spec, greedy, 1.0).valid.all()


def only_first_two(logits, noise):
    rows = jnp.arange(VOCABULARY, dtype=jnp.int32).reshape(1, 1, -1)
    return jnp.where(rows < 2, logits, -jnp.inf)


def test_impossible_tokens_are_never_proposed():
    """Children of probability 0 leave padding behind, and no NaN in what is kept."""
    spec, config = pctree_spec(4, 4, 16, True), table_config(GAMMA)
    with jax.enable_x64(True):
        inputs = random_inputs(1)
        drafter = NumpyDrafter(inputs.params, config)
        proposal = inputs.build(config, spec, only_first_two)
        excluded = np.where(np.arange(VOCABULARY) < 2, 0, -np.inf)
        for row, anchor, hidden in inputs.rows():
            expected = drafter.tree(spec, anchor, hidden, np.tile(excluded, (GAMMA, 1)))
            assert_same_tree(proposal, row, anchor, GAMMA, expected)


def test_the_spine_is_in_the_tree_only_if_asked_for():
    config = table_config(GAMMA)
    with jax.enable_x64(True):
        kept = {}
        for inputs in (random_inputs(40), random_inputs(41, flat=True)):
            drafter = NumpyDrafter(inputs.params, config)
            for spine in (True, False):
                proposal = inputs.build(config, pctree_spec(4, 4, 16, spine))
                kept[spine] = [
                    drafter.chain(anchor, hidden, inputs.extra(row)) in paths(proposal, row, anchor, GAMMA)
                    for row, anchor, hidden in inputs.rows()
                ]
            assert all(kept[True])
        assert not any(kept[False]), "flat laws put every node of depth 2 before the chain's fourth"


def test_the_spine_alone_fills_the_smallest_budget():
    """At N = γ+1 the tree with a spine is the greedy chain, whatever its width."""
    config = table_config(GAMMA)
    with jax.enable_x64(True):
        inputs = random_inputs(42, flat=True)
        drafter = NumpyDrafter(inputs.params, config)
        proposal = inputs.build(config, TreeSpec(kind=TreeKind.PCTREE, k=3, budget=GAMMA + 1))
        for row, anchor, hidden in inputs.rows():
            chain = drafter.chain(anchor, hidden, inputs.extra(row))
            assert set(paths(proposal, row, anchor, GAMMA)) == {chain[:depth] for depth in range(GAMMA + 1)}


def test_spec_defaults():
    spec = TreeSpec(kind="pctree", k=3, budget=8)
    assert spec == TreeSpec(kind=TreeKind.PCTREE, k=3, width=3, budget=8, spine=True)
    assert hash(spec) == hash(TreeSpec(kind=TreeKind.PCTREE, k=3, width=3, budget=8, spine=True))
