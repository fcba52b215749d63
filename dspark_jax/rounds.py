"""The round that moves a DecodeState forward: draft → verify → commit, all shapes static."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from dspark_jax.decode_state import DecodeConfig, DecodeState, Requests
from dspark_jax.drafters import kinds
from dspark_jax.drafters.kinds import DrafterParams
from dspark_jax.drafting.propose import propose
from dspark_jax.layers.kv_cache import init_cache, move
from dspark_jax.layers.linear import wide_dtype
from dspark_jax.layers.packing import Packing, pack
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
from dspark_jax.targets.decoder import (
    TargetParams,
    forward_cached,
    forward_packed,
    forward_tree,
    target_logits,
)
from dspark_jax.verification.block import verify_block
from dspark_jax.verification.counting import count_round, zero_counts
from dspark_jax.verification.rejection import reject
from dspark_jax.verification.verifier import Verifier
from dspark_jax.verification.walk import Verdict, walk


@struct.dataclass
class Verification:
    """One pass of the target over a proposal's nodes, and what it decides.

    `cache` holds every node's K/V, at the slots behind the prefix. `features` [R, T, …], T up to depth + 1, are those
    along the accepted path.
    """

    verdict: Verdict
    cache: Any
    features: Float[Array, "R T features"] | None
    log_probabilities: Float[Array, "R depth+1"] | None


def _token_log_probabilities(logits: Float[Array, "R N V"], tokens: Int[Array, "R N"]) -> Float[Array, "R N"]:
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def append(
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


def init_state(config: DecodeConfig, requests: Requests, capacity: int, dtype) -> DecodeState:
    """R empty slots of `capacity` positions, all done."""
    count = requests.max_tokens.shape[0]
    zeros = jnp.zeros(count, jnp.int32)
    wide = wide_dtype(dtype)
    return DecodeState(
        requests=requests,
        tokens=jnp.zeros((count, capacity), jnp.int32),
        prompt_lengths=zeros,
        lengths=zeros,
        done=jnp.ones(count, bool),
        stopped=jnp.zeros(count, bool),
        cache=init_cache(config.target, count, capacity, dtype, config.target.stacked_layers),
        drafter=None if config.drafter is None else kinds.init_state(config.drafter, count, capacity, dtype),
        counts=zero_counts(count, config.max_new_tokens, config.depth),
        log_probabilities=jnp.zeros((count, capacity), wide) if config.log_probabilities else None,
    )


def prefill_chunk(
    target: TargetParams,
    drafter: DrafterParams | None,
    config: DecodeConfig,
    state: DecodeState,
    tokens: Int[Array, "R P"],
    start: Int[Array, "R"],
    lengths: Int[Array, "R"],
) -> DecodeState:
    """Reads P tokens of each prompt from position `start` on. `lengths`: of the whole prompts.

    The chunk that holds a prompt's last token commits the first new one; until then the request is done.
    """
    count, padded = tokens.shape
    tokens, lengths = tokens.astype(jnp.int32), lengths.astype(jnp.int32)
    with jax.named_scope("prefill"):
        out = forward_cached(target, config.target, tokens, start, state.cache, config.taps)
        last = jnp.clip(lengths - 1 - start, 0, padded - 1)
        hidden = jnp.take_along_axis(out.hidden, last[:, None, None], axis=1)
        logits = target_logits(target, config.target, hidden)
    context = state.drafter
    if drafter is not None:
        features = kinds.target_features(config.drafter, out)
        context = kinds.extend(drafter, config.drafter, context, tokens, features, start, last + 1)
    columns = start[:, None] + jnp.arange(padded, dtype=jnp.int32)[None]
    whole = start + padded >= lengths
    state = state.replace(
        tokens=state.tokens.at[jnp.arange(count, dtype=jnp.int32)[:, None], columns].set(tokens, mode="drop"),
        prompt_lengths=lengths,
        lengths=lengths,
        done=(state.requests.max_tokens < 1) | ~whole,
        stopped=jnp.zeros_like(whole),
        cache=out.cache,
        drafter=context,
        counts=jax.tree.map(jnp.zeros_like, state.counts),
    )
    filtered = filter_logits(logits, state.requests.sampling)
    first = choose(filtered, _noise_at(config, state, lengths[:, None]), state.requests.sampling)
    log_probabilities = _token_log_probabilities(logits, first) if config.log_probabilities else None
    return append(state, config, first, jnp.ones(count, jnp.int32), log_probabilities)


def prefill(
    target: TargetParams,
    drafter: DrafterParams | None,
    config: DecodeConfig,
    requests: Requests,
    tokens: Int[Array, "R P"],
    lengths: Int[Array, "R"],
) -> DecodeState:
    """Reads the prompts (right-padded to P) and commits each request's first new token."""
    capacity = tokens.shape[1] + config.max_new_tokens + config.width
    state = init_state(config, requests, capacity, target.embed_tokens.weight.dtype)
    return prefill_chunk(target, drafter, config, state, tokens, jnp.zeros_like(state.lengths), lengths)


def _positions(state: DecodeState, depth: int) -> Int[Array, "R depth+1"]:
    """Absolute indices of the tokens that a round chooses, after nodes of depth 0, 1, …"""
    return state.lengths[:, None] + jnp.arange(depth + 1, dtype=jnp.int32)[None]


def _noise_at(config: DecodeConfig, state: DecodeState, positions: Int[Array, "R T"]) -> Float[Array, "R T V"]:
    vocab_size, requests = config.target.vocab_size, state.requests
    if config.verifier is Verifier.COUPLED:
        return position_noise(requests.keys, positions, vocab_size, requests.sampling)
    return gumbel(purpose_keys(requests.keys, state.counts.rounds, positions, Purpose.RESIDUAL), vocab_size)


def target_noise(config: DecodeConfig, state: DecodeState, depth: int | None = None) -> Float[Array, "R depth+1 V"]:
    """The target's noise for a round's tokens, by depth: keyed by position alone only where it is coupled.

    `depth`: of the deepest node, by default what drafts may reach.
    """
    return _noise_at(config, state, _positions(state, config.depth if depth is None else depth))


def draft_hidden(drafter: DrafterParams, config: DecodeConfig, state: DecodeState) -> Float[Array, "R gamma d"] | None:
    """The round's parallel stage; None for a drafter that has none."""
    with jax.named_scope("draft.backbone"):
        return kinds.block_hidden(drafter, config.drafter, state.drafter, *state.anchors)


def draft(
    drafter: DrafterParams,
    config: DecodeConfig,
    state: DecodeState,
    hidden: Float[Array, "R gamma d"] | None,
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
        keys = purpose_keys(requests.keys, state.counts.rounds, _positions(state, config.depth)[:, :-1], Purpose.DRAFT)
        draft_noise = gumbel(keys, config.drafter.draft_vocab_size)
    if hidden is not None:
        hidden = hidden[:, : config.depth]
    with jax.named_scope("draft.sequential"):
        return propose(
            drafter,
            config.drafter,
            config.tree,
            state.drafter,
            hidden,
            *state.anchors,
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
    capacity: int | None = None,
) -> Verification:
    """One pass of the target over the proposal: which drafts stand, and its own token after them.

    With a `capacity` only the valid nodes of active requests run, packed on an axis of so many tokens, which must hold
    them all.
    """
    start, active = state.lengths - 1, ~state.done
    taps, packing = config.taps, None
    with jax.named_scope("verify"):
        if config.tree is None and capacity is None:
            out = forward_cached(target, config.target, proposal.tokens, start, state.cache, taps, active)
        else:
            nodes = (proposal.tokens, proposal.depths, ancestors(proposal.parents, config.depth), start, state.cache)
            if capacity is None:
                out = forward_tree(target, config.target, *nodes, taps, active)
            else:
                packing = pack(proposal.valid & active[:, None], capacity)
                out = forward_packed(target, config.target, packing, *nodes, taps)
        logits = target_logits(target, config.target, out.hidden)
        verdict = _decide(config, state, proposal, logits, noise, packing)

    def on_path(x: Array, nodes: Int[Array, "R T"]) -> Array:
        if packing is None:
            return jnp.take_along_axis(x, nodes[..., None], axis=1)
        return packing.at_nodes(x, nodes)

    log_probabilities = None
    if config.log_probabilities:
        log_probabilities = _token_log_probabilities(on_path(logits, verdict.nodes), verdict.tokens)
    features = None if config.drafter is None else kinds.target_features(config.drafter, out)
    if features is not None and (config.tree is not None or packing is not None):
        features = on_path(features, verdict.nodes[:, : proposal.tokens.shape[1]])
    return Verification(verdict, out.cache, features, log_probabilities)


def _decide(
    config: DecodeConfig,
    state: DecodeState,
    proposal: Proposal,
    logits: Array,
    noise: Float[Array, "R depth+1 V"],
    packing: Packing | None,
) -> Verdict:
    """`logits` [R, N, V], or [C, V] of packed nodes. `noise` is by depth; no node's is copied that does not run."""
    sampling, own_noise, depths = state.requests.sampling, noise, proposal.depths
    if packing is not None:
        request = jnp.minimum(packing.request, depths.shape[0] - 1)
        sampling = jax.tree.map(lambda x: x[request], sampling)
        logits, own_noise = logits[:, None], noise[request, packing.gather(depths)][:, None]
    elif config.tree is not None:
        own_noise = jnp.take_along_axis(noise, depths[..., None], axis=1)
    filtered = filter_logits(logits, sampling)

    def spread(x: Array) -> Array:
        return x if packing is None else packing.scatter(x[:, 0])

    if config.drafter is None or proposal.tokens.shape[1] == 1 or not config.verifier.chains_only:
        return walk(proposal, spread(choose(filtered, own_noise, sampling)), config.depth)
    keys = purpose_keys(
        state.requests.keys, state.counts.rounds, _positions(state, config.depth)[:, :-1], Purpose.ACCEPT
    )
    uniform = jax.vmap(jax.vmap(jax.random.uniform))(keys).astype(filtered.dtype)
    accept = reject if config.verifier is Verifier.REJECTION else verify_block
    return accept(proposal, spread(log_law(filtered, sampling)), uniform, noise)


def commit(
    drafter: DrafterParams | None,
    config: DecodeConfig,
    state: DecodeState,
    proposal: Proposal,
    verification: Verification,
) -> DecodeState:
    """Appends what was accepted. A tree's accepted path is compacted: its K/V moves behind the prefix.

    A replay, in which the target does not run, has no cache of it.
    """
    verdict, cache, active = verification.verdict, verification.cache, ~state.done
    start = state.lengths - 1
    with jax.named_scope("commit"):
        if config.tree is not None and cache is not None:
            index = jnp.arange(config.depth + 1, dtype=jnp.int32)[None]
            accepted = (index <= verdict.accepted[:, None]) & active[:, None]
            destination = jnp.where(accepted, start[:, None] + index, state.tokens.shape[1])
            cache = move(cache, start[:, None] + verdict.nodes, destination)
        context = state.drafter
        if drafter is not None:
            features, (anchors, _) = verification.features, state.anchors
            # The tokens that the features are of: the anchor and, as far as they stand, the drafts.
            tokens = jnp.concatenate([anchors[:, None], verdict.tokens], axis=1)[:, : features.shape[1]]
            count = verdict.accepted + 1
            context = kinds.extend(drafter, config.drafter, context, tokens, features, start, count, active)
    counts = count_round(state.counts, proposal, verdict, active)
    state = state.replace(cache=cache, drafter=context, counts=counts)
    return append(state, config, verdict.tokens, verdict.accepted + 1, verification.log_probabilities)


def anchors_alone(state: DecodeState, width: int = 1) -> Proposal:
    """No drafts: a plain decoding step, in a pass of `width` nodes."""
    anchors, _ = state.anchors
    tokens = jnp.broadcast_to(anchors[:, None], (anchors.shape[0], width))
    return chain(tokens, jnp.zeros(anchors.shape[0], jnp.int32))


def propose_round(
    drafter: DrafterParams | None, config: DecodeConfig, state: DecodeState, noise: Float[Array, "R depth+1 V"]
) -> Proposal:
    """Both stages of drafting; in plain decoding the anchor alone."""
    if drafter is None:
        return anchors_alone(state, config.width)
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
