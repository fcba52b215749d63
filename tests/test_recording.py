"""Recorded rounds are those of `generate`, with every draft's confidence and every decided edge of a tree."""

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import TreeSpec, Verifier, generate, request_keys, sampling_params
from dspark_jax.decode_state import Requests
from dspark_jax.proposals import Proposal
from dspark_jax.recording import decided_edges, record_rounds
from dspark_jax.verification.walk import Verdict
from tests.test_generation import Small


class Recorded:
    """Four small requests at T = 1: a whole one, a short one, one with a threshold, and one that asks for nothing."""

    def __init__(self, **changes) -> None:
        small = Small()
        self.models, self.prompts = (small.target, small.drafter), (small.tokens, small.lengths)
        self.config = small.config(**changes)
        self.requests = Requests(
            keys=request_keys(0, 4),
            sampling=sampling_params(4, 1.0),
            max_tokens=jnp.asarray([12, 5, 12, 0], jnp.int32),
            confidence_threshold=jnp.asarray([0.0, 0.0, 0.5, 0.0], jnp.float32),
        )
        recorded = record_rounds(*self.models, *self.prompts, self.requests, self.config)
        self.generation, self.recording = jax.tree.map(np.asarray, recorded)
        self.ran = np.arange(12)[None] < self.generation.counts.rounds[:, None]
        assert self.ran[:3].any(axis=1).all() and not self.ran[3].any()


def test_a_chain():
    recorded = Recorded(verifier=Verifier.REJECTION)
    generation, requests, ran = recorded.generation, recorded.requests, recorded.ran
    settings = (requests.sampling, requests.max_tokens, requests.confidence_threshold)
    plain = generate(*recorded.models, *recorded.prompts, requests.keys, recorded.config, *settings)
    jax.tree.map(np.testing.assert_array_equal, generation, plain)
    assert recorded.recording.edges is None
    logits = recorded.recording.confidence_logits
    drafts = recorded.recording.draft_tokens
    assert logits.shape == drafts.shape == (4, 12, 3)
    assert (logits[ran] != 0).all() and (logits[~ran] == 0).all()
    # What was accepted of the first round follows prefill's token.
    accepted = generation.counts.accepted_lengths[:3, 0] - 1
    assert accepted.any()
    for row, count in enumerate(accepted):
        np.testing.assert_array_equal(drafts[row, 0, :count], generation.tokens[row, 1 : 1 + count])
    # The threshold cuts by the recorded confidences, which it does not cut.
    confident = np.cumprod(logits[2] >= 0, axis=1).sum(axis=1)
    np.testing.assert_array_equal(generation.counts.verified_nodes[2][ran[2]], 1 + confident[ran[2]])


def test_a_tree():
    tree = TreeSpec(k=3, budget=8)
    recorded = Recorded(tree=tree)
    assert recorded.recording.confidence_logits is None and recorded.recording.draft_tokens is None
    edges, ran = recorded.recording.edges, recorded.ran
    log_q, reached, accepted = edges.log_q, edges.reached, edges.accepted
    tokens = recorded.generation.counts.accepted_lengths[ran]
    assert not reached[~ran].any() and (accepted <= reached).all() and not reached[..., 0].any()
    np.testing.assert_array_equal(accepted.sum(axis=2)[ran], tokens - 1)
    assert 0 < accepted.sum() < reached.sum()
    # Each accepted parent, the root too, has at most k children, whose q add up to at most 1.
    assert (reached.sum(axis=2)[ran] <= tree.k * tokens).all()
    assert (log_q[reached] <= 0).all()
    q = np.exp(np.where(reached, log_q, -np.inf))
    assert (q.sum(axis=2)[ran] <= tokens + 1e-4).all()


def test_edges_by_hand():
    """The root's children are nodes 1 and 2; 1's are 3 and 4, 2's is 5; 6 is blank. Nodes 1 and 4 are accepted."""
    parents = jnp.asarray([[-1, 0, 0, 1, 1, 2, -1]], jnp.int32)
    scores = jnp.asarray([[0.0, -0.5, -1.0, -0.75, -2.5, -1.25, -jnp.inf]])
    blank, valid = jnp.zeros((1, 7), jnp.int32), jnp.isfinite(scores)
    proposal = Proposal(blank, parents, jnp.asarray([[0, 1, 1, 2, 2, 2, 0]], jnp.int32), valid, scores=scores)
    verdict = Verdict(jnp.zeros((1, 4), jnp.int32), jnp.asarray([[0, 1, 4, 4]], jnp.int32), jnp.asarray([2], jnp.int32))
    edges = decided_edges(proposal, verdict)
    inf = np.inf
    np.testing.assert_array_equal(edges.log_q, [[-inf, -0.5, -1.0, -0.25, -2.0, -0.25, -inf]])
    np.testing.assert_array_equal(np.flatnonzero(edges.reached), [1, 2, 3, 4])
    np.testing.assert_array_equal(np.flatnonzero(edges.accepted), [1, 4])
