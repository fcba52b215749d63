"""PCTree's builder against a slow reference written from the paper's description.

Random logits are compared in float64, where rounding is far smaller than any gap between two scores. Ties are only
compared where they are exact on both sides: rows whose best logit leads by more than 40 have log_softmax(z) =
z - max(z) without rounding, so that integer logits give integer scores; rows of equal logits tie whatever their sum.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.config import DrafterConfig, TreeKind, TreeSpec
from dspark_jax.drafters.confidence import ConfidenceHead
from dspark_jax.drafters.dspark import DrafterParams
from dspark_jax.drafters.markov import MarkovHead
from dspark_jax.drafting.pctree import pctree
from dspark_jax.layers.linear import Embedding, Linear
from dspark_jax.proposals import Proposal
from tests.drafting.trees import assert_same_tree, paths
from tests.models import HEADS, drafter_config, target_config

VOCABULARY, GAMMA, TEMPERATURE = 6, 4, 0.7


def greedy(logits, noise):
    return logits


def coupled(logits, noise):
    return logits + TEMPERATURE * noise


@functools.partial(jax.jit, static_argnames=("config", "spec", "adjust"))
def build(params, config, spec, hidden, anchors, noise, adjust, threshold):
    return pctree(params, config, spec, hidden, anchors, noise, adjust, threshold)


def pctree_spec(k: int, width: int, budget: int, spine: bool) -> TreeSpec:
    return TreeSpec(kind=TreeKind.PCTREE, k=k, width=width, budget=budget, spine=spine)


@dataclasses.dataclass
class Node:
    path: tuple[int, ...]
    score: float
    index: int
    state: np.ndarray
    spine: bool


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max()
    with np.errstate(divide="ignore"):
        return np.minimum(x - np.log(np.exp(x).sum()), 0)


@dataclasses.dataclass
class NumpyDrafter:
    """The heads of one drafter in numpy, one parent at a time."""

    params: DrafterParams
    config: DrafterConfig

    def affine(self, linear, x):
        return np.asarray(linear.weight) @ x + np.asarray(linear.bias)

    def token(self, row: int) -> int:
        ids = self.params.draft_token_ids
        return row if ids is None else int(ids[row])

    def expand(self, state: np.ndarray, token: int, hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of a parent with this token and recurrent state: its children's state and logits."""
        logits = np.asarray(self.params.lm_head.weight) @ hidden
        head = self.params.markov_head
        if head is None:
            return state, logits
        latent = np.asarray(head.markov_w1.weight)[token]
        if head.gate_proj is not None:
            latent = sigmoid(self.affine(head.gate_proj, np.concatenate([hidden, latent]))) * latent
        if head.joint_proj is not None:
            joint = self.affine(head.joint_proj, np.concatenate([state, latent, hidden]))
            gate, candidate, output = np.split(joint, 3)
            state = sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(candidate)
            latent = np.tanh(output)
        return state, logits + np.asarray(head.markov_w2.weight) @ latent

    def confidence(self, token: int, hidden: np.ndarray) -> float:
        if not self.config.enable_confidence_head:
            return 1.0
        features = hidden
        if self.config.confidence_head_with_markov:
            features = np.concatenate([hidden, np.asarray(self.params.markov_head.markov_w1.weight)[token]])
        return sigmoid(self.affine(self.params.confidence_head.proj, features)[0])

    def root(self, anchor: int) -> Node:
        return Node((), 0.0, 0, np.zeros(self.config.markov_rank), True)

    def children(self, node: Node, anchor: int, hidden, extra, k: int, first: int, threshold=0.0) -> list[Node]:
        """The k best children of one node, best first; ids count on from `first`."""
        depth = len(node.path)
        token = node.path[-1] if depth else anchor
        if self.confidence(token, hidden[depth]) < threshold:
            return []
        state, logits = self.expand(node.state, token, hidden[depth])
        law = log_softmax(logits + extra[depth])
        best = sorted(range(len(law)), key=lambda row: (-law[row], row))[:k]
        return [
            Node((*node.path, self.token(row)), node.score + law[row], first + rank, state, node.spine and not rank)
            for rank, row in enumerate(best)
            if np.isfinite(law[row])
        ]

    def chain(self, anchor: int, hidden, extra) -> tuple[int, ...]:
        node = self.root(anchor)
        for _ in range(len(hidden)):
            node = self.children(node, anchor, hidden, extra, 1, 0)[0]
        return node.path

    def tree(self, spec: TreeSpec, anchor: int, hidden, extra, threshold=0.0) -> dict[tuple[int, ...], float]:
        """PCTree's paths with their scores."""
        keep_spine = bool(spec.spine) and spec.budget >= len(hidden) + 1
        pool = frontier = [self.root(anchor)]
        for depth in range(len(hidden)):
            layer = []
            for slot, parent in enumerate(frontier):
                first = 1 + (depth * spec.width + slot) * spec.k
                layer += self.children(parent, anchor, hidden, extra, spec.k, first, threshold)
            pool = pool + layer
            frontier = sorted(layer, key=lambda c: (not (keep_spine and c.spine), -c.score, c.index))[: spec.width]
        order = sorted(pool, key=lambda c: (not (keep_spine and c.spine), -c.score, len(c.path), c.index))
        return {node.path: node.score for node in order[: spec.budget]}

    def best_prefixes(self, budget: int, anchor: int, hidden, extra) -> dict[tuple[int, ...], float]:
        """The most probable prefixes of all."""
        layer = pool = [self.root(anchor)]
        for _ in range(len(hidden)):
            layer = [c for node in layer for c in self.children(node, anchor, hidden, extra, VOCABULARY, 0)]
            pool = pool + layer
        return {node.path: node.score for node in sorted(pool, key=lambda c: -c.score)[:budget]}


def table_config(gamma: int) -> DrafterConfig:
    """A vanilla head whose logits of slot k after token p are hidden[k] + bias[p]."""
    return drafter_config(
        target_config(VOCABULARY),
        hidden_size=VOCABULARY,
        markov_rank=VOCABULARY,
        block_size=gamma,
        enable_confidence_head=False,
    )


def bare_params(lm_head, **fields) -> DrafterParams:
    return DrafterParams(None, None, None, (), None, Linear(weight=jnp.asarray(lm_head)), **fields)


def table_params(bias: np.ndarray) -> DrafterParams:
    one_hot = np.eye(VOCABULARY, dtype=bias.dtype)
    head = MarkovHead(markov_w1=Embedding(jnp.asarray(one_hot)), markov_w2=Linear(jnp.asarray(bias.T)))
    return bare_params(one_hot, markov_head=head)


@dataclasses.dataclass
class Inputs:
    """A vanilla drafter given by its table of biases, and one block of each of several requests."""

    params: DrafterParams
    hidden: np.ndarray
    anchors: np.ndarray
    noise: np.ndarray

    def build(self, config, spec, adjust=greedy, threshold=0.0) -> Proposal:
        rows = len(self.anchors)
        arrays = (jnp.asarray(self.hidden), jnp.asarray(self.anchors, jnp.int32), jnp.asarray(self.noise))
        thresholds = jnp.full(rows, threshold, jnp.float32)
        return jax.device_get(build(self.params, config, spec, *arrays, adjust, thresholds))

    def extra(self, row: int, adjust=greedy) -> np.ndarray:
        return TEMPERATURE * self.noise[row] if adjust is coupled else np.zeros_like(self.noise[row])

    def rows(self):
        return [(row, int(anchor), self.hidden[row]) for row, anchor in enumerate(self.anchors)]


def make_inputs(rng, params, rows: int, gamma: int, hidden: np.ndarray, vocabulary: int = VOCABULARY) -> Inputs:
    noise = rng.gumbel(size=(rows, gamma, params.lm_head.weight.shape[0])).astype(hidden.dtype)
    return Inputs(params, hidden, rng.integers(vocabulary, size=rows), noise)


def random_inputs(seed: int, rows: int = 24, gamma: int = GAMMA, flat: bool = False) -> Inputs:
    rng = np.random.default_rng(seed)
    scale = 0.01 if flat else 1.5
    bias = scale * rng.standard_normal((VOCABULARY, VOCABULARY))
    hidden = scale * rng.standard_normal((rows, gamma, VOCABULARY))
    return make_inputs(rng, table_params(bias), rows, gamma, hidden)


def tied_inputs(seed: int, rows: int = 24, gamma: int = GAMMA, dtype=np.float64) -> Inputs:
    """Integer logits of which one, after each parent, leads by more than 40: integer scores with many exact ties."""
    rng = np.random.default_rng(seed)
    bias = -rng.integers(45, 47, size=(VOCABULARY, VOCABULARY)).astype(dtype)
    bias[np.arange(VOCABULARY), rng.integers(VOCABULARY, size=VOCABULARY)] = 0
    hidden = rng.integers(0, 2, size=(rows, gamma, VOCABULARY)).astype(dtype)
    return make_inputs(rng, table_params(bias), rows, gamma, hidden)


def uniform_inputs(rows: int = 24, gamma: int = GAMMA) -> Inputs:
    rng = np.random.default_rng(0)
    hidden = np.zeros((rows, gamma, VOCABULARY))
    return make_inputs(rng, table_params(np.zeros((VOCABULARY, VOCABULARY))), rows, gamma, hidden)


def head_drafter(head: str, seed: int, draft_vocab_size: int, **changes) -> NumpyDrafter:
    """A drafter of any head with random parameters, in float64."""
    rng = np.random.default_rng(seed)
    vocabulary, d = 9, 4
    if head != "dflash":
        changes = {"markov_rank": 3} | changes
    config = drafter_config(
        target_config(vocabulary), head, hidden_size=d, block_size=GAMMA, draft_vocab_size=draft_vocab_size, **changes
    )
    r = config.markov_rank

    def weight(*shape):
        return jnp.asarray(1.2 * rng.standard_normal(shape))

    fields = {}
    if r:
        fields["markov_head"] = MarkovHead(
            markov_w1=Embedding(weight(vocabulary, r)),
            markov_w2=Linear(weight(draft_vocab_size, r)),
            gate_proj=Linear(weight(r, d + r), weight(r)) if head == "gated" else None,
            joint_proj=Linear(weight(3 * r, 2 * r + d), weight(3 * r)) if head == "rnn" else None,
        )
    if config.enable_confidence_head:
        width = d + (r if config.confidence_head_with_markov else 0)
        fields["confidence_head"] = ConfidenceHead(Linear(weight(1, width), weight(1)))
    if config.reduced_vocabulary:
        ids = np.sort(rng.permutation(vocabulary)[:draft_vocab_size])
        fields["draft_token_ids"] = jnp.asarray(ids, jnp.int32)
    return NumpyDrafter(bare_params(weight(draft_vocab_size, d), **fields), config)


def head_inputs(drafter: NumpyDrafter, seed: int, rows: int = 16) -> Inputs:
    rng = np.random.default_rng(seed)
    hidden = rng.standard_normal((rows, GAMMA, drafter.config.hidden_size))
    return make_inputs(rng, drafter.params, rows, GAMMA, hidden, drafter.config.vocab_size)


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
