"""Trees in the decoding loop: what they emit, what they leave behind, and the laws of what they emit."""

import copy
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import DecodeConfig, TreeSpec, Verifier, request_keys, sampling_params
from dspark_jax.decode_state import Requests
from dspark_jax.layers.kv_cache import init_cache
from dspark_jax.proposals import Proposal, ancestors
from dspark_jax.rounds import begin_round, commit, decode_round, prefill, propose_round, target_noise, verify
from dspark_jax.targets.decoder import forward_cached, forward_documents, forward_tree, target_logits
from tests.models import HEADS, random_target, target_config
from tests.test_generation import PROMPTS, Small

PCTREE = TreeSpec(kind="pctree", k=2, width=3, budget=9)
JETSPEC = TreeSpec(kind="jetspec", k=3, budget=8)
DDTREE = TreeSpec(kind="ddtree", budget=7)
# Flat enough for the shared noise to bring drafter and target together often, peaked enough to part them.
FLAT = {"initializer_range": 0.3}
# Greedy, cold, warm and hot requests in one batch; one compiled program serves them all.
MIXED = sampling_params(4, 1.0, top_p=0.9).replace(temperature=jnp.asarray([0.0, 0.3, 1.0, 1.5], jnp.float32))


@pytest.mark.parametrize(
    ("tree", "head", "changes"),
    [
        *((PCTREE, head, {}) for head in HEADS),
        (PCTREE, "rnn", {"draft_vocab_size": 5}),
        (JETSPEC, "dflash", {"block_size": 4, "sample_from_anchor": False, "causal_block": True}),
        (DDTREE, "rnn", {}),
    ],
    ids=str,
)
def test_coupled_output_is_plain_output(tree, head, changes):
    """Token for token with the same keys, greedy and sampled, with top-p and thresholds."""
    small = Small(head, FLAT, **changes)
    thresholds = jnp.asarray([0.0, 0.5, 0.0, 0.5], jnp.float32)
    out = small.run(small.config(tree=tree), sampling=MIXED, confidence_threshold=thresholds)
    plain = small.run(small.config(drafter=None, plain_width=tree.budget), sampling=MIXED)
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    assert out.counts.rounds.sum() < plain.counts.rounds.sum()
    assert (out.counts.verified_nodes <= tree.budget).all()


def started(small: Small, config: DecodeConfig, sampling=None):
    sampling = sampling_params(4) if sampling is None else sampling
    zeros = jnp.zeros(4, jnp.float32)
    requests = Requests(request_keys(0, 4), sampling, jnp.full(4, config.max_new_tokens, jnp.int32), zeros)
    prefilled = jax.jit(prefill, static_argnames="config")
    return prefilled(small.target, small.drafter, config, requests, jnp.asarray(small.tokens), small.lengths)


@functools.partial(jax.jit, static_argnames="config")
def pruned_round(target, drafter, config, state, size):
    """A round whose tree is cut by what no honest scheduler may look at: the noise, and the realised tokens."""
    state = begin_round(state)
    noise = target_noise(config, state)
    proposal = propose_round(drafter, config, state, noise)
    by_node = jnp.take_along_axis(noise, proposal.depths[..., None], axis=1)
    lucky = jnp.take_along_axis(by_node, proposal.tokens[..., None], axis=2)[..., 0] > 0.5
    index = jnp.arange(config.width, dtype=jnp.int32)[None]
    kept = (index == 0) | (proposal.valid & (index < size) & (lucky | (proposal.tokens % 3 == 0)))
    seen = ancestors(proposal.parents, config.depth)
    whole = jnp.all(kept[:, None, :] | ~seen, axis=2)
    proposal = proposal.replace(valid=whole, parents=jnp.where(whole, proposal.parents, -1))
    verification = verify(target, config, state, proposal, noise)
    return commit(drafter, config, state, proposal, verification)


def test_no_pruning_changes_coupled_output():
    """A schedule that looks at realised tokens and noise, and another number of nodes in every round."""
    small = Small("rnn", FLAT)
    config = small.config(tree=PCTREE)
    plain = small.run(small.config(drafter=None, plain_width=PCTREE.budget), sampling=MIXED)
    state, sizes = started(small, config, MIXED), itertools.cycle([9, 2, 5, 1, 7])
    while not state.done.all():
        state = pruned_round(small.target, small.drafter, config, state, next(sizes))
    for row, prompt in enumerate(PROMPTS):
        assert state.tokens[row, len(prompt) : state.lengths[row]].tolist() == plain.tokens[row].tolist()
    nodes = np.asarray(state.counts.verified_nodes)[np.arange(12)[None] < np.asarray(state.counts.rounds)[:, None]]
    assert len(set(nodes.tolist())) > 2 and state.counts.accepted.sum() > 0


def wide_tree(rng, prompts: int, vocabulary: int) -> Proposal:
    """Random trees of eight nodes in which every path of length 3 skips some nodes."""
    parents = np.tile([-1, 0, 0, 1, 2, 2, 4, 6], (prompts, 1)).astype(np.int32)
    depths = np.tile([0, 1, 1, 2, 2, 2, 3, 4], (prompts, 1)).astype(np.int32)
    tokens = np.stack([rng.permutation(vocabulary)[:8] for _ in range(prompts)]).astype(np.int32)
    return Proposal(jnp.asarray(tokens), jnp.asarray(parents), jnp.asarray(depths), jnp.ones(parents.shape, bool))


@functools.partial(jax.jit, static_argnames="config")
def tree_logits(target, config, prompts, lengths, proposal):
    cache = init_cache(config, len(prompts), 24, target.norm.weight.dtype, config.stacked_layers)
    cache = forward_cached(target, config, prompts, jnp.zeros_like(lengths), cache).cache
    seen = ancestors(proposal.parents, 4)
    out = forward_tree(target, config, proposal.tokens, proposal.depths, seen, lengths, cache)
    return target_logits(target, config, out.hidden)


@functools.partial(jax.jit, static_argnames="config")
def document_logits(target, config, rows):
    positions = jnp.broadcast_to(jnp.arange(rows.shape[1], dtype=jnp.int32)[None], rows.shape)
    return target_logits(target, config, forward_documents(target, config, rows, positions, rows * 0).hidden)


@pytest.mark.parametrize(
    ("dtype", "changes", "tolerance"),
    [
        ("float64", {}, 1e-10),
        ("float32", {"sliding_windows": (3, None, 4)}, 1e-4),
        ("float64", {"sliding_windows": (3, 3, 3), "stacked_layers": True}, 1e-10),
    ],
)
def test_tree_logits_are_those_of_each_path_alone(dtype, changes, tolerance):
    """Unequal prefixes in one batch; the target attends to all its context, so a leaking sibling shows."""
    with jax.enable_x64(True):
        config = target_config(12, **changes)
        target = random_target(config, dtype=jnp.dtype(dtype))
        prompts, lengths = Small().tokens, np.array([len(prompt) for prompt in PROMPTS], np.int32)
        proposal = wide_tree(np.random.default_rng(0), 4, 12)
        found = np.asarray(tree_logits(target, config, jnp.asarray(prompts), jnp.asarray(lengths), proposal))
        rows, places = np.zeros((32, 16), np.int32), []
        for row, prompt in enumerate(PROMPTS):
            for node in range(8):
                path, at = [], node
                while at >= 0:
                    path, at = [int(proposal.tokens[row, at]), *path], int(proposal.parents[row, at])
                rows[len(places), : len(prompt) + len(path)] = [*prompt, *path]
                places.append((row, node, len(prompt) + len(path) - 1))
        alone = np.asarray(document_logits(target, config, jnp.asarray(rows)))
        siblings = []
        for index, (row, node, last) in enumerate(places):
            np.testing.assert_allclose(found[row, node], alone[index, last], atol=tolerance)
            siblings.append(found[row, node])
    assert np.abs(np.diff(siblings, axis=0)).max(axis=1).min() > 1e-2, "nodes must differ for this to mean anything"


@functools.partial(jax.jit, static_argnames="config")
def path_of(target, drafter, config, state):
    """Nodes of the path that a round accepts."""
    state = begin_round(state)
    noise = target_noise(config, state)
    verdict = verify(target, config, state, propose_round(drafter, config, state, noise), noise).verdict
    return verdict.nodes, verdict.accepted


def test_what_a_round_leaves_is_what_a_fresh_prefill_makes():
    """K/V and drafter context of all committed tokens, paths that skip nodes included; then the next logits agree."""
    small = Small("gated", FLAT)
    config = small.config(tree=PCTREE)
    state = started(small, config, MIXED)
    step = jax.jit(decode_round, static_argnames="config")
    skipped = False
    for _ in range(3):
        nodes, accepted = path_of(small.target, small.drafter, config, state)
        on_path = np.arange(config.depth + 1)[None] <= np.asarray(accepted)[:, None]
        skipped |= bool((np.asarray(nodes) != np.arange(config.depth + 1)[None])[on_path].any())
        state = step(small.target, small.drafter, config, state)
    assert skipped
    width = int(state.lengths.max())
    again = copy.copy(small)
    again.tokens, again.lengths = np.asarray(state.tokens)[:, :width], state.lengths
    fresh = started(again, config, MIXED)
    for row, length in enumerate(np.asarray(state.lengths) - 1):
        for old, new in zip((*state.cache, *state.drafter), (*fresh.cache, *fresh.drafter), strict=True):
            for found, expected in zip(old.rows, new.rows, strict=True):
                np.testing.assert_allclose(found[row, :length], expected[row, :length], atol=1e-4)
    following = step(small.target, small.drafter, config, state)
    for row, length in enumerate(np.asarray(state.lengths)):
        assert int(following.tokens[row, length]) == int(fresh.tokens[row, length])


def test_ends_inside_a_path():
    """EOS and max_tokens cut what a tree accepted; rounds that accept nothing and everything occur."""
    small = Small("vanilla", FLAT)
    free = small.run(small.config(tree=PCTREE), sampling=MIXED)
    ran = np.arange(12)[None] < free.counts.rounds[:, None]
    lengths = set(free.counts.accepted_lengths[ran].tolist())
    assert {1, 4} <= lengths, "no draft accepted, and all of a path"
    eos = (int(free.tokens[0, 4]), int(free.tokens[2, 6]))
    most_tokens = jnp.asarray([12, 5, 12, 1], jnp.int32)
    cut = small.run(small.config(tree=PCTREE, eos_token_ids=eos), sampling=MIXED, max_tokens=most_tokens)
    for row, most in enumerate([12, 5, 12, 1]):
        whole = free.tokens[row, :most].tolist()
        ends = [index for index, token in enumerate(whole) if token in eos]
        expected = whole[: ends[0] + 1] if ends else whole
        assert cut.tokens[row, : cut.lengths[row]].tolist() == expected
        assert bool(cut.stopped[row]) == bool(ends)


@functools.partial(jax.jit, static_argnames="configs")
def both_rounds(target, drafter, configs, state):
    """Drafts that each config's verification accepts from one state, and the state after the first's round."""
    state = begin_round(state)
    accepted = []
    for config in configs:
        noise = target_noise(config, state)
        proposal = propose_round(drafter, config, state, noise)
        accepted.append(verify(target, config, state, proposal, noise).verdict.accepted)
    return accepted


def test_a_tree_with_its_spine_never_accepts_less_than_the_chain():
    small = Small("vanilla", FLAT, block_size=4)
    spined = TreeSpec(k=3, width=3, budget=6)
    configs = tuple(
        small.config(tree=tree, max_new_tokens=40) for tree in (None, spined, dataclasses.replace(spined, spine=False))
    )
    state = started(small, configs[1], sampling_params(4, 0.7))
    step = jax.jit(decode_round, static_argnames="config")
    gains, losses = 0, 0
    while not state.done.all():
        chain, tree, loose = (np.asarray(x) for x in both_rounds(small.target, small.drafter, configs, state))
        assert (tree >= chain).all()
        gains += (tree > chain).sum()
        losses += (loose < chain).sum()
        state = step(small.target, small.drafter, configs[1], state)
    assert gains > 0 and losses > 0, "the spine must matter for this to mean anything"


@pytest.mark.parametrize("verifier", [Verifier.COUPLED, Verifier.TARGET_WALK])
def test_a_tree_batch_equals_single_requests(verifier):
    small = Small("rnn", FLAT)
    config = small.config(tree=PCTREE, verifier=verifier)
    together = small.run(config, sampling=MIXED)
    padded = small.tokens
    for row in range(4):
        # The same padded batch with the request in another place, among others.
        order = np.roll(np.arange(4), row)
        small.tokens, small.lengths = padded[order], np.array([len(PROMPTS[i]) for i in order], np.int32)
        keys = request_keys(0, 4)[order]
        moved = jax.tree.map(lambda x, order=order: x[order], MIXED)
        out = small.run(config, sampling=moved, keys=keys)
        np.testing.assert_array_equal(out.tokens, together.tokens[order])
        np.testing.assert_array_equal(out.counts.accepted_lengths, together.counts.accepted_lengths[order])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"verifier": Verifier.REJECTION}, "rejection is for chains: on a tree it would change the target's law"),
        ({"verifier": Verifier.BLOCK}, "block is for chains"),
        ({"drafter": None}, "tree: plain decoding has no drafter"),
        ({"tree": TreeSpec(k=9)}, "tree k 9: the draft vocabulary has only 8 tokens"),
    ],
)
def test_trees_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        Small().config(**({"tree": PCTREE} | changes))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "ddtree", "k": 3}, "tree k: a ddtree tree has none"),
        ({"kind": "jetspec", "width": 3}, "tree width: a jetspec tree has none"),
        ({"kind": "jetspec", "spine": True}, "tree spine: a jetspec tree has none"),
        ({"budget": 1}, r"tree budget 1 must be in 2\.\.1024"),
        ({"k": 0}, r"tree k 0 must be in 1\.\.1024"),
        ({"width": 1025}, r"tree width 1025 must be in 1\.\.1024"),
        ({"kind": "beam"}, "beam"),
    ],
)
def test_specs_that_cannot_be(fields, message):
    with pytest.raises(ValueError, match=message):
        TreeSpec(**fields)
