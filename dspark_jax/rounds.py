"""The round that moves a DecodeState forward: draft → verify → commit, all shapes static."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from dspark_jax.decode_state import DecodeConfig, DecodeState, Requests
from dspark_jax.drafters import dspark
from dspark_jax.drafters.dspark import DrafterParams
from dspark_jax.drafting.propose import propose
from dspark_jax.layers.kv_cache import init_cache, move
from dspark_jax.proposals import Proposal, ancestors, chain
from dspark_jax.sampling import (
    Purpose,
    choose,
    filter_logits,
    gumbel,
    log_law,
    perturb,
    position_noise,
    purpose_keys,
    temper,
)
from dspark_jax.targets.decoder import TargetOutput, TargetParams, forward_cached, forward_tree, target_logits
from dspark_jax.verification.block import verify_block
from dspark_jax.verification.counting import count_round, zero_counts
from dspark_jax.verification.rejection import reject
from dspark_jax.verification.verifier import Verifier
from dspark_jax.verification.walk import Verdict, walk


@struct.dataclass
class Verification:
    """One pass of the target over a proposal's nodes, and what it decides. `output` has stored every node's K/V."""

    verdict: Verdict
    output: TargetOutput
    log_probabilities: Float[Array, "R depth+1"] | None


def _token_log_probabilities(logits: Float[Array, "R N V"], tokens: Int[Array, "R N"]) -> Float[Array, "R N"]:
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def _append(
    state: DecodeState, config: DecodeConfig, tokens: Int[Array, "R N"], count: Int[Array, "R"], log_probabilities
) -> DecodeState:
    """Appends the first `count` tokens of each active request, cut after the first EOS and at max_tokens."""
    index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    eos = jnp.asarray(config.eos_token_ids, jnp.int32).reshape(1, 1, -1)
    ends = jnp.any(tokens[..., None] == eos, axis=-1) & (index < count[:, None])
    first_end = jnp.min(jnp.where(ends, index, tokens.shape[1]), axis=1)
    room = state.requests.max_tokens - (state.lengths - state.prompt_lengths)
    keep = jnp.minimum(jnp.minimum(count, first_end + 1), room)
    keep = jnp.where(state.done, 0, keep)
    stopped = state.stopped | (first_end < keep)

    capacity = state.tokens.shape[1]
    rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None]
    columns = jnp.where(index < keep[:, None], state.lengths[:, None] + index, capacity)
    if log_probabilities is not None:
        log_probabilities = state.log_probabilities.at[rows, columns].set(log_probabilities, mode="drop")
    return state.replace(
        tokens=state.tokens.at[rows, columns].set(tokens, mode="drop"),
        lengths=state.lengths + keep,
        stopped=stopped,
        done=state.done | stopped | (keep == room),
        log_probabilities=log_probabilities,
    )


def prefill(
    target: TargetParams,
    drafter: DrafterParams | None,
    config: DecodeConfig,
    requests: Requests,
    tokens: Int[Array, "R P"],
    lengths: Int[Array, "R"],
) -> DecodeState:
    """Reads the prompts (right-padded to P) and commits each request's first new token."""
    count, padded = tokens.shape
    capacity = padded + config.max_new_tokens + config.width
    dtype = target.embed_tokens.weight.dtype
    lengths = lengths.astype(jnp.int32)
    cache = init_cache(config.target, count, capacity, dtype, config.target.stacked_layers)
    start = jnp.zeros(count, jnp.int32)
    with jax.named_scope("prefill"):
        out = forward_cached(target, config.target, tokens.astype(jnp.int32), start, cache, config.taps)
        last = jnp.take_along_axis(out.hidden, (lengths - 1)[:, None, None], axis=1)
        logits = target_logits(target, config.target, last)
    context = None
    if drafter is not None:
        context = dspark.init_state(config.drafter, count, capacity, dtype)
        context = dspark.extend(drafter, config.drafter, context, out.features, start)
    state = DecodeState(
        requests=requests,
        tokens=jnp.zeros((count, capacity), jnp.int32).at[:, :padded].set(tokens.astype(jnp.int32)),
        prompt_lengths=lengths,
        lengths=lengths,
        done=requests.max_tokens < 1,
        stopped=jnp.zeros(count, bool),
        cache=out.cache,
        drafter=context,
        counts=zero_counts(count, config.max_new_tokens, config.depth),
        log_probabilities=jnp.zeros((count, capacity), logits.dtype) if config.log_probabilities else None,
    )
    filtered = filter_logits(logits, requests.sampling)
    first = choose(filtered, _noise_at(config, state, lengths[:, None]), requests.sampling)
    log_probabilities = _token_log_probabilities(logits, first) if config.log_probabilities else None
    return _append(state, config, first, jnp.ones(count, jnp.int32), log_probabilities)


def _positions(config: DecodeConfig, state: DecodeState) -> Int[Array, "R depth+1"]:
    """Absolute indices of the tokens that a round chooses, after nodes of depth 0, 1, …"""
    return state.lengths[:, None] + jnp.arange(config.depth + 1, dtype=jnp.int32)[None]


def _noise_at(config: DecodeConfig, state: DecodeState, positions: Int[Array, "R T"]) -> Float[Array, "R T V"]:
    vocab_size, requests = config.target.vocab_size, state.requests
    if config.verifier is Verifier.COUPLED:
        return position_noise(requests.keys, positions, vocab_size, requests.sampling)
    return gumbel(purpose_keys(requests.keys, state.counts.rounds, positions, Purpose.RESIDUAL), vocab_size)


def target_noise(config: DecodeConfig, state: DecodeState) -> Float[Array, "R depth+1 V"]:
    """The target's noise for a round's tokens, by depth: keyed by position alone only where it is coupled."""
    return _noise_at(config, state, _positions(config, state))


def draft_hidden(drafter: DrafterParams, config: DecodeConfig, state: DecodeState) -> Float[Array, "R gamma d"]:
    """The round's parallel stage."""
    with jax.named_scope("draft.backbone"):
        return dspark.block_hidden(drafter, config.drafter, state.drafter, *state.anchors)


def draft(
    drafter: DrafterParams,
    config: DecodeConfig,
    state: DecodeState,
    hidden: Float[Array, "R gamma d"],
    noise: Float[Array, "R depth+1 V"],
) -> Proposal:
    """The round's chain or tree. `noise` is the target's."""
    requests = state.requests

    def filtered(logits):
        return filter_logits(logits, requests.sampling)

    def noisy(logits, noise):
        return perturb(filtered(logits), noise, requests.sampling)

    def noiseless(logits, noise):
        return temper(filtered(logits), requests.sampling)

    def draft_law(logits):
        return log_law(filtered(logits), requests.sampling)

    adjust, law = noisy, None
    draft_noise = noise[:, :-1]
    if drafter.draft_token_ids is not None:
        draft_noise = draft_noise[..., drafter.draft_token_ids]
    if config.verifier is Verifier.TARGET_WALK:
        adjust = noiseless
    elif config.verifier is not Verifier.COUPLED:
        law = draft_law
        keys = purpose_keys(requests.keys, state.counts.rounds, _positions(config, state)[:, :-1], Purpose.DRAFT)
        draft_noise = gumbel(keys, config.drafter.draft_vocab_size)
    anchors, _ = state.anchors
    with jax.named_scope("draft.sequential"):
        return propose(
            drafter,
            config.drafter,
            config.tree,
            hidden,
            anchors,
            draft_noise,
            adjust,
            requests.confidence_threshold,
            law,
        )


def verify(
    target: TargetParams,
    config: DecodeConfig,
    state: DecodeState,
    proposal: Proposal,
    noise: Float[Array, "R depth+1 V"],
) -> Verification:
    """One pass of the target over the proposal: which drafts stand, and its own token after them."""
    start, active = state.lengths - 1, ~state.done
    with jax.named_scope("verify"):
        if config.tree is None:
            out = forward_cached(target, config.target, proposal.tokens, start, state.cache, config.taps, active)
        else:
            seen = ancestors(proposal.parents, config.depth)
            nodes = (proposal.tokens, proposal.depths, seen)
            out = forward_tree(target, config.target, *nodes, start, state.cache, config.taps, active)
            noise = jnp.take_along_axis(noise, proposal.depths[..., None], axis=1)
        logits = target_logits(target, config.target, out.hidden)
        verdict = _decide(config, state, proposal, filter_logits(logits, state.requests.sampling), noise)
    log_probabilities = None
    if config.log_probabilities:
        on_path = jnp.take_along_axis(logits, verdict.nodes[..., None], axis=1)
        log_probabilities = _token_log_probabilities(on_path, verdict.tokens)
    return Verification(verdict, out, log_probabilities)


def _decide(
    config: DecodeConfig, state: DecodeState, proposal: Proposal, filtered: Array, noise: Float[Array, "R N V"]
) -> Verdict:
    sampling = state.requests.sampling
    if config.drafter is None or config.verifier in (Verifier.COUPLED, Verifier.TARGET_WALK):
        return walk(proposal, choose(filtered, noise, sampling), config.depth)
    keys = purpose_keys(state.requests.keys, state.counts.rounds, _positions(config, state)[:, :-1], Purpose.ACCEPT)
    uniform = jax.vmap(jax.vmap(jax.random.uniform))(keys).astype(filtered.dtype)
    accept = reject if config.verifier is Verifier.REJECTION else verify_block
    return accept(proposal, log_law(filtered, sampling), uniform, noise)


def commit(
    drafter: DrafterParams | None,
    config: DecodeConfig,
    state: DecodeState,
    proposal: Proposal,
    verification: Verification,
) -> DecodeState:
    """Appends what was accepted. A tree's accepted path is compacted: its K/V and features move behind the prefix."""
    verdict, out, active = verification.verdict, verification.output, ~state.done
    start = state.lengths - 1
    cache, features = out.cache, out.features
    with jax.named_scope("commit"):
        if config.tree is not None:
            index = jnp.arange(config.depth + 1, dtype=jnp.int32)[None]
            accepted = (index <= verdict.accepted[:, None]) & active[:, None]
            destination = jnp.where(accepted, start[:, None] + index, state.tokens.shape[1])
            cache = move(cache, start[:, None] + verdict.nodes, destination)
            features = jnp.take_along_axis(features, verdict.nodes[..., None], axis=1)
        context = state.drafter
        if drafter is not None:
            context = dspark.extend(drafter, config.drafter, context, features, start, active)
    counts = count_round(state.counts, proposal, verdict, active)
    state = state.replace(cache=cache, drafter=context, counts=counts)
    return _append(state, config, verdict.tokens, verdict.accepted + 1, verification.log_probabilities)


def propose_round(
    drafter: DrafterParams | None, config: DecodeConfig, state: DecodeState, noise: Float[Array, "R depth+1 V"]
) -> Proposal:
    """Both stages of drafting; in plain decoding the anchor alone."""
    if drafter is None:
        anchors, _ = state.anchors
        tokens = jnp.broadcast_to(anchors[:, None], (anchors.shape[0], config.width))
        return chain(tokens, jnp.zeros(anchors.shape[0], jnp.int32))
    return draft(drafter, config, state, draft_hidden(drafter, config, state), noise)


def begin_round(state: DecodeState) -> DecodeState:
    """Counts the round that begins, from 1: prefill's own token was drawn in round 0."""
    rounds = state.counts.rounds + (~state.done).astype(jnp.int32)
    return state.replace(counts=state.counts.replace(rounds=rounds))


def decode_round(
    target: TargetParams, drafter: DrafterParams | None, config: DecodeConfig, state: DecodeState
) -> DecodeState:
    """One round for every request that is not done. A pure function; no host, no dynamic shape."""
    state = begin_round(state)
    noise: Any = target_noise(config, state)
    proposal = propose_round(drafter, config, state, noise)
    return commit(drafter, config, state, proposal, verify(target, config, state, proposal, noise))
