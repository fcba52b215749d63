"""Tree builders against slow references written from the algorithms' descriptions, and what every tree must be.

Random logits are compared in float64, where rounding is far smaller than any gap between two scores. Ties are only
compared where they are exact on both sides: rows whose best logit leads by more than 40 have log_softmax(z) =
z - max(z) without rounding, so that integer logits give integer scores; rows of equal logits tie whatever their sum.
"""

import dataclasses
import functools
import heapq
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.config import DrafterConfig, TreeKind, TreeSpec
from dspark_jax.drafters.confidence import ConfidenceHead
from dspark_jax.drafters.dspark import DrafterParams
from dspark_jax.drafters.markov import MarkovHead
from dspark_jax.drafting.ddtree import ddtree
from dspark_jax.drafting.jetspec import jetspec
from dspark_jax.drafting.pctree import pctree
from dspark_jax.drafting.top_k import two_stage_top_k
from dspark_jax.layers.linear import Embedding, Linear
from dspark_jax.proposals import Proposal
from dspark_jax.verification.walk import walk
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


def jetspec_reference(log_probs: np.ndarray, tokens: np.ndarray, budget: int) -> list[tuple[int, int, int, float]]:
    """(token, parent, depth, score) of each node in order of insertion; the anchor's token is left at -1."""
    nodes = [(-1, -1, 0, log_probs.dtype.type(0))]
    heap = [(0.0, 0)]
    while heap and len(nodes) < budget:
        _, parent = heapq.heappop(heap)
        depth, score = nodes[parent][2:]
        if depth == len(log_probs):
            continue
        for token, log_prob in zip(tokens[depth], log_probs[depth], strict=True):
            if len(nodes) < budget:
                heapq.heappush(heap, (-(score + log_prob), len(nodes)))
                nodes.append((int(token), parent, depth + 1, score + log_prob))
    return nodes


def ddtree_exhaustive(log_probs: np.ndarray, tokens: np.ndarray, budget: int) -> list[tuple[float, tuple[int, ...]]]:
    """(score, path) of the best prefixes, by listing all of them."""
    gamma, count = log_probs.shape
    listed = [(0.0, ())]
    for depth in range(1, gamma + 1):
        for ranks in itertools.product(range(count), repeat=depth):
            score = sum(log_probs[slot, rank] for slot, rank in enumerate(ranks))
            listed.append((score, tuple(int(tokens[slot, rank]) for slot, rank in enumerate(ranks))))
    return sorted(listed, key=lambda item: (-item[0], len(item[1])))[:budget]


def ddtree_heap(log_probs: np.ndarray, tokens: np.ndarray, budget: int) -> list[tuple[float, tuple[int, ...]]]:
    """(score, path) by the paper's heap of rank tuples: pop one, push its next sibling and its first child."""
    gamma, count = log_probs.shape
    taken = [(0.0, ())]
    heap = [(-log_probs[0, 0], (0,))]
    while heap and len(taken) < budget:
        cost, ranks = heapq.heappop(heap)
        taken.append((-cost, tuple(int(tokens[slot, rank]) for slot, rank in enumerate(ranks))))
        depth, last = len(ranks), ranks[-1]
        if last + 1 < count:
            sibling = cost + log_probs[depth - 1, last] - log_probs[depth - 1, last + 1]
            heapq.heappush(heap, (sibling, (*ranks[:-1], last + 1)))
        if depth < gamma:
            heapq.heappush(heap, (cost - log_probs[depth, 0], (*ranks, 0)))
    return taken


def paths(proposal: Proposal, row: int, anchor: int, gamma: int) -> dict[tuple[int, ...], float]:
    """Token paths of one request's nodes with their scores, after checking that they are a tree."""
    fields = ("tokens", "parents", "depths", "valid", "scores")
    tokens, parents, depths, valid, scores = (np.asarray(getattr(proposal, name)[row]) for name in fields)
    assert valid[0] and tokens[0] == anchor and parents[0] == -1 and depths[0] == 0 and scores[0] == 0
    found = [()]
    assert (parents[~valid] == -1).all() and (depths[~valid] == 0).all()
    for node in range(1, len(tokens)):
        if not valid[node]:
            found.append(None)
            continue
        parent = parents[node]
        assert 0 <= parent < node and valid[parent], "a node's parent comes before it and is in the tree"
        assert depths[node] == depths[parent] + 1 <= gamma
        assert scores[node] <= scores[parent]
        found.append((*found[parent], int(tokens[node])))
    named = {path: scores[node] for node, path in enumerate(found) if path is not None}
    assert len(named) == valid.sum(), "no two children of a parent have one token"
    return named


def assert_same_tree(proposal: Proposal, row: int, anchor: int, gamma: int, expected: dict, atol: float = 1e-11):
    actual = paths(proposal, row, anchor, gamma)
    assert set(actual) == set(expected)
    for path, score in expected.items():
        assert actual[path] == pytest.approx(score, abs=atol)


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


def candidates(seed: int, gamma: int, count: int, vocabulary: int, dtype, rows: int = 16, ordered: bool = False):
    """Candidates of random laws in the first half of the rows, and with small integer log-probabilities in the rest."""
    rng = np.random.default_rng(seed)
    log_probs = np.log(rng.dirichlet(np.ones(vocabulary), size=(rows, gamma)))
    log_probs[rows // 2 :] = -rng.integers(0, 3, size=(rows - rows // 2, gamma, vocabulary))
    tokens = rng.permuted(np.broadcast_to(np.arange(vocabulary), log_probs.shape), axis=-1)
    if ordered:
        log_probs = -np.sort(-log_probs, axis=-1)
    anchors = rng.integers(vocabulary, size=rows)
    return log_probs[..., :count].astype(dtype), tokens[..., :count].astype(np.int32), anchors.astype(np.int32)


@pytest.mark.parametrize(
    ("gamma", "k", "budget", "dtype"),
    [
        (4, 3, 16, np.float32),
        (3, 2, 9, np.float64),
        (2, 2, 12, np.float32),
        (3, 4, 3, np.float32),
        (3, 1, 3, np.float32),
    ],
)
def test_jetspec_is_the_heaps_tree(gamma, k, budget, dtype):
    with jax.enable_x64(dtype is np.float64):
        log_probs, tokens, anchors = candidates(50 + gamma, gamma, k, 6, dtype)
        proposal = jax.device_get(jax.jit(jetspec, static_argnums=3)(log_probs, tokens, anchors, budget))
    assert proposal.tokens.shape == (len(anchors), budget)
    for row, anchor in enumerate(anchors):
        paths(proposal, row, anchor, gamma)
        expected = jetspec_reference(log_probs[row], tokens[row], budget)
        count = len(expected)
        assert proposal.valid[row].tolist() == [node < count for node in range(budget)]
        reference_tokens, parents, depths, scores = zip(*expected, strict=True)
        assert proposal.tokens[row, 1:count].tolist() == list(reference_tokens[1:])
        assert proposal.parents[row, :count].tolist() == list(parents)
        assert proposal.depths[row, :count].tolist() == list(depths)
        np.testing.assert_allclose(proposal.scores[row, :count], scores, rtol=1e-6)


@pytest.mark.parametrize(
    ("gamma", "vocabulary", "budget", "dtype"),
    [
        (3, 4, 9, np.float64),
        (4, 5, 16, np.float64),
        (2, 2, 12, np.float64),
        (3, 8, 4, np.float64),
        (1, 6, 4, np.float64),
        (4, 3, 12, np.float32),
    ],
)
def test_ddtree_holds_the_most_probable_prefixes(gamma, vocabulary, budget, dtype):
    """The very prefixes where scores differ; where they tie, as many of each score."""
    count = min(budget - 1, vocabulary)
    with jax.enable_x64(dtype is np.float64):
        log_probs, tokens, anchors = candidates(60 + gamma, gamma, count, vocabulary, dtype, ordered=True)
        proposal = jax.device_get(jax.jit(ddtree, static_argnums=3)(log_probs, tokens, anchors, budget))
    assert proposal.tokens.shape == (len(anchors), budget)
    tolerance = 1e-12 if dtype is np.float64 else 1e-5
    for row, anchor in enumerate(anchors):
        actual = paths(proposal, row, anchor, gamma)
        exact = log_probs[row].astype(np.float64)
        for reference in (ddtree_exhaustive, ddtree_heap):
            expected = reference(exact, tokens[row], budget)
            assert len(actual) == len(expected)
            np.testing.assert_allclose(
                sorted(actual.values()), sorted(score for score, _ in expected), atol=tolerance, err_msg=str(reference)
            )
            if row < len(anchors) // 2:
                assert set(actual) == {path for _, path in expected}
        log_prob = [dict(zip(tokens[row, slot].tolist(), exact[slot], strict=True)) for slot in range(gamma)]
        for path, score in actual.items():
            assert score == pytest.approx(sum(log_prob[slot][t] for slot, t in enumerate(path)), abs=tolerance)


@pytest.mark.parametrize("size", [1, 5, 127, 128, 129, 1000])
def test_two_stage_top_k_is_top_k(size):
    rng = np.random.default_rng(size)
    rows = [
        rng.standard_normal(size),
        rng.integers(0, 2, size=size),
        -rng.integers(0, 40, size=size),
        np.zeros(size),
        np.full(size, -np.inf),
        np.where(rng.random(size) < 0.97, -np.inf, 1.0),
        np.arange(size) // 128,
        -(np.arange(size) // 128),
    ]
    x = jnp.asarray(np.stack(rows).reshape(2, 4, size), jnp.float32)
    for k in sorted({1, min(7, size), min(150, size), size}):
        values, indices = jax.jit(two_stage_top_k, static_argnums=1)(x, k)
        expected_values, expected_indices = jax.lax.top_k(x, k)
        assert indices.dtype == jnp.int32 and values.dtype == x.dtype
        np.testing.assert_array_equal(values, expected_values)
        np.testing.assert_array_equal(indices, expected_indices)


def rejection_over_children(p: np.ndarray, q: np.ndarray, children: list[int]) -> np.ndarray:
    """Law of the next token if fixed children are tested with min(1, p/q) as though they had been drawn from q."""
    law, alive = np.zeros_like(p), 1.0
    for token in children:
        accept = min(1.0, p[token] / q[token])
        law[token] += alive * accept
        alive *= 1 - accept
        left = np.maximum(p - q, 0)
        p = left / left.sum() if left.sum() else q
        q = np.where(np.arange(len(q)) == token, 0, q)
        q = q / q.sum()
    return law + alive * p


def test_rejection_sampling_of_best_children_is_biased():
    rng = np.random.default_rng(70)
    distances = []
    for _ in range(100):
        p, q = rng.dirichlet(np.ones(4), size=2)
        best = np.argsort(-q)[:2].tolist()
        distances.append(0.5 * np.abs(rejection_over_children(p, q, best) - p).sum())
    assert np.mean(distances) > 0.05

    p, q = np.array([0.25, 0.25, 0.25, 0.25]), np.array([0.4, 0.3, 0.2, 0.1])
    law = rejection_over_children(p, q, [0, 1])
    assert law.sum() == pytest.approx(1)
    assert 0.5 * np.abs(law - p).sum() > 0.05


def test_walking_a_fixed_tree_with_the_targets_draws_is_exact():
    """All of the target's draws at the nodes of one tree, each path completed with the target's own law."""
    vocabulary, depth = 3, 2
    rng = np.random.default_rng(71)
    first = rng.dirichlet(np.ones(vocabulary))
    second = rng.dirichlet(np.ones(vocabulary), size=vocabulary)
    third = rng.dirichlet(np.ones(vocabulary), size=(vocabulary, vocabulary))
    tree = {(): -1, (2,): 0, (0,): 0, (2, 1): 1, (0, 0): 2}
    node_laws = [first, second[2], second[0], third[2, 1], third[0, 0]]
    chosen = np.array(list(itertools.product(range(vocabulary), repeat=len(tree))), np.int32)
    weights = np.prod([law[chosen[:, node]] for node, law in enumerate(node_laws)], axis=0)

    def batch(values):
        return jnp.broadcast_to(jnp.asarray(list(values), jnp.int32)[None], chosen.shape)

    proposal = Proposal(
        tokens=batch([0, *(path[-1] for path in tree if path)]),
        parents=batch(tree.values()),
        depths=batch(len(path) for path in tree),
        valid=jnp.ones(chosen.shape, bool),
        scores=jnp.zeros(chosen.shape, jnp.float32),
    )
    verdict = jax.device_get(walk(proposal, jnp.asarray(chosen), depth))
    expected = first[:, None, None] * second[:, :, None] * third
    law = np.zeros_like(expected)
    for weight, tokens, accepted in zip(weights, verdict.tokens, verdict.accepted, strict=True):
        head = tuple(tokens[: accepted + 1])
        law[head] += weight * expected[head] / expected[head].sum()
    assert set(verdict.accepted.tolist()) == {0, 1, 2}
    assert 0.5 * np.abs(law - expected).sum() < 1e-12
