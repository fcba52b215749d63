"""A slow PCTree, and inputs of which every logit is known."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.config import DrafterConfig, TreeKind, TreeSpec
from dspark_jax.drafters.confidence import ConfidenceHead
from dspark_jax.drafters.dspark import DrafterParams
from dspark_jax.drafters.markov import MarkovHead
from dspark_jax.drafting.pctree import pctree
from dspark_jax.layers.linear import Embedding, Linear
from dspark_jax.proposals import Proposal
from tests.models import drafter_config, target_config

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
