"""Drafting with Eagle3 and multi-token prediction: caches and scans against a recursion that recomputes everything."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import DecodeConfig, TreeSpec, Verifier, request_keys, sampling_params
from dspark_jax.config import Eagle3Config, MTPConfig
from dspark_jax.decode_state import Requests
from dspark_jax.drafters.kinds import target_features
from dspark_jax.rounds import begin_round, commit, init_state, prefill_chunk, propose_round, target_noise, verify
from dspark_jax.targets.decoder import forward_documents
from tests.drafters.pair_reference import PairReference, softmax
from tests.models import pair_config, random_drafter, random_target, target_config

PROMPTS = ((1, 4, 0, 2, 5, 5, 3), (3, 2, 0, 1, 1))
CHUNK, ROUNDS, MOST = 4, 6, 30


@functools.partial(jax.jit, static_argnames="config")
def one_round(target, drafter, config, state):
    state = begin_round(state)
    noise = target_noise(config, state)
    proposal = propose_round(drafter, config, state, noise)
    return commit(drafter, config, state, proposal, verify(target, config, state, proposal, noise)), proposal


@functools.partial(jax.jit, static_argnames="config")
def features_of(target, config, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    out = forward_documents(target, config.target, tokens, positions, jnp.zeros_like(tokens), config.taps)
    return target_features(config.drafter, out)


@pytest.mark.parametrize(("kind", "draft_vocab_size"), [("eagle3", 4), ("mtp", 6)])
def test_drafts_follow_the_recursion(kind, draft_vocab_size):
    """After a prefill in chunks and after every round, whatever was accepted in it."""
    with jax.enable_x64(True):
        settings = target_config(6)
        draft = pair_config(settings, kind, draft_vocab_size=draft_vocab_size)
        target = random_target(settings, dtype=jnp.float64)
        drafter = random_drafter(draft, target)
        reference = PairReference(drafter, draft)
        ids = np.arange(6) if drafter.draft_token_ids is None else np.asarray(drafter.draft_token_ids)
        config = DecodeConfig(target=settings, drafter=draft, max_new_tokens=MOST, verifier=Verifier.REJECTION)
        count = len(PROMPTS)
        most, threshold = jnp.full(count, MOST, jnp.int32), jnp.zeros(count, jnp.float32)
        requests = Requests(request_keys(3, count), sampling_params(count, 1.0), most, threshold)
        state = init_state(config, requests, 2 * CHUNK + MOST + config.width, jnp.float64)
        tokens = np.zeros((count, 2 * CHUNK), np.int32)
        for row, prompt in enumerate(PROMPTS):
            tokens[row, : len(prompt)] = prompt
        lengths = jnp.asarray([len(prompt) for prompt in PROMPTS], jnp.int32)
        read = jax.jit(prefill_chunk, static_argnames="config")
        for start in (0, CHUNK):
            chunk = jnp.asarray(tokens[:, start : start + CHUNK])
            state = read(target, drafter, config, state, chunk, jnp.full(count, start, jnp.int32), lengths)

        accepted = []
        for _ in range(ROUNDS):
            known, length = np.asarray(state.tokens), np.asarray(state.lengths)
            features = np.asarray(features_of(target, config, state.tokens))
            state, proposal = one_round(target, drafter, config, state)
            for row in range(count):
                anchor = length[row] - 1
                drafts = np.asarray(proposal.tokens)[row, 1:]
                logits = reference.draft_logits(known[row, : anchor + 1], features[row, :anchor], drafts)
                expected = np.zeros((config.depth, 6))
                expected[:, ids] = softmax(logits)
                np.testing.assert_allclose(np.exp(np.asarray(proposal.log_q)[row]), expected, atol=1e-6)
            accepted += (np.asarray(state.lengths) - length - 1).tolist()
    assert 0 in accepted and max(accepted) > 0, "rounds must accept something and reject something"


def test_what_makes_no_drafter():
    settings = target_config()
    for make, message in (
        (lambda: pair_config(settings, num_hidden_layers=2), "num_hidden_layers 2"),
        (lambda: pair_config(settings, sliding_windows=(4,)), "sliding_window"),
        (lambda: pair_config(settings, target_layer_ids=(0, 2)), "the last layer's output is not a tap"),
        (lambda: pair_config(settings, target_layer_ids=()), "target_layer_ids is empty"),
        (lambda: pair_config(settings, block_size=0), "block_size 0 must be at least 1"),
        (lambda: pair_config(settings, draft_vocab_size=9), r"draft_vocab_size 9 is outside 1\.\.8"),
        (lambda: pair_config(settings, "mtp", block_size=2), "block_size 2: .* drafts one token"),
        (lambda: pair_config(settings, "mtp", target_layer_ids=(0,)), "no tapped layer"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_trees_are_refused(kind):
    settings = target_config()
    config = pair_config(settings, kind)
    assert isinstance(config, Eagle3Config if kind == "eagle3" else MTPConfig) and not config.enable_confidence_head
    with pytest.raises(ValueError, match="tree: Eagle3 and multi-token prediction draft chains only"):
        DecodeConfig(target=settings, drafter=config, tree=TreeSpec())
