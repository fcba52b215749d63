"""DecodeState, and the round that moves it forward: draft → verify → commit, all shapes static."""

import dataclasses
import enum
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from dspark_jax.config import DrafterConfig, TargetConfig
from dspark_jax.drafters import dspark
from dspark_jax.drafters.dspark import DrafterParams
from dspark_jax.drafting.chain import propose_chain
from dspark_jax.layers.kv_cache import init_cache
from dspark_jax.proposals import Proposal, chain
from dspark_jax.sampling import (
    Purpose,
    SamplingParams,
    choose,
    filter_logits,
    gumbel,
    log_law,
    position_noise,
    purpose_keys,
)
from dspark_jax.targets.decoder import TargetParams, forward_cached, target_logits
from dspark_jax.verification.rejection import reject
from dspark_jax.verification.walk import Verdict, walk


class Verifier(enum.Enum):
    """How drafts are accepted at T > 0; both keep the target's law, and at T = 0 both are greedy matching.

    COUPLED: noise keyed by absolute position and shared by drafter and target; the output equals plain sampling with
    the same key, token for token. REJECTION: the paper's min(1, p/q) with residual sampling.
    """

    COUPLED = "coupled"
    REJECTION = "rejection"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """Everything static about decoding; one compiled program for each value.

    `drafter` None is plain autoregressive decoding. `plain_width`: tokens in each of its passes, of which only the
    first counts; num_drafts + 1 makes it bit-comparable with a speculative run (a matrix product's rows differ in
    the last bit between widths). `log_probabilities`: also return the target's log-probability of each token.
    """

    target: TargetConfig
    drafter: DrafterConfig | None = None
    max_new_tokens: int = 128
    eos_token_ids: tuple[int, ...] = ()
    verifier: Verifier = Verifier.COUPLED
    plain_width: int = 1
    log_probabilities: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens {self.max_new_tokens} must be at least 1")
        drafter, target = self.drafter, self.target
        if drafter is None:
            return
        for field in ("vocab_size", "hidden_size"):
            if getattr(drafter, field) != getattr(target, field):
                raise ValueError(
                    f"{field}: the drafter was made for {getattr(drafter, field)}, the target has "
                    f"{getattr(target, field)}"
                )
        if drafter.num_target_layers != target.num_hidden_layers:
            raise ValueError(
                f"num_target_layers: the drafter was made for {drafter.num_target_layers}, the target has "
                f"{target.num_hidden_layers}"
            )

    @property
    def width(self) -> int:
        """Nodes of one verification pass, the anchor included."""
        return self.plain_width if self.drafter is None else self.drafter.num_drafts + 1

    @property
    def taps(self) -> tuple[int, ...]:
        return () if self.drafter is None else self.drafter.target_layer_ids


@struct.dataclass
class Requests:
    """What each request asks for. `confidence_threshold`: drafts from the first less confident slot on are cut."""

    keys: Key[Array, "R"]
    sampling: SamplingParams
    max_tokens: Int[Array, "R"]
    confidence_threshold: Float[Array, "R"]


@struct.dataclass
class DecodeState:
    """R slots. `lengths` counts committed tokens, prompt included; the last of them, the anchor, is in no cache yet.

    `reached[k]`: rounds in which slot k was verified and every earlier draft accepted; `accepted[k]`: those in
    which it was accepted too. `verified`: drafts verified. `stopped`: ended by an EOS token.
    """

    requests: Requests
    tokens: Int[Array, "R capacity"]
    prompt_lengths: Int[Array, "R"]
    lengths: Int[Array, "R"]
    done: Bool[Array, "R"]
    stopped: Bool[Array, "R"]
    cache: Any
    drafter: dspark.DrafterState | None
    rounds: Int[Array, "R"]
    accepted_lengths: Int[Array, "R rounds"]
    reached: Int[Array, "R drafts"]
    accepted: Int[Array, "R drafts"]
    verified: Int[Array, "R"]
    log_probabilities: Float[Array, "R capacity"] | None


def _token_log_probabilities(logits: Float[Array, "R N V"], tokens: Int[Array, "R N"]) -> Float[Array, "R N"]:
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def _commit(
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
    drafts = config.width - 1
    state = DecodeState(
        requests=requests,
        tokens=jnp.zeros((count, capacity), jnp.int32).at[:, :padded].set(tokens.astype(jnp.int32)),
        prompt_lengths=lengths,
        lengths=lengths,
        done=requests.max_tokens < 1,
        stopped=jnp.zeros(count, bool),
        cache=out.cache,
        drafter=context,
        rounds=jnp.zeros(count, jnp.int32),
        accepted_lengths=jnp.zeros((count, config.max_new_tokens), jnp.int32),
        reached=jnp.zeros((count, drafts), jnp.int32),
        accepted=jnp.zeros((count, drafts), jnp.int32),
        verified=jnp.zeros(count, jnp.int32),
        log_probabilities=jnp.zeros((count, capacity), logits.dtype) if config.log_probabilities else None,
    )
    filtered = filter_logits(logits, requests.sampling)
    noise = _target_noise(config, state, lengths[:, None])
    first = choose(filtered, noise, requests.sampling)
    log_probabilities = _token_log_probabilities(logits, first) if config.log_probabilities else None
    return _commit(state, config, first, jnp.ones(count, jnp.int32), log_probabilities)


def _target_noise(config: DecodeConfig, state: DecodeState, positions: Int[Array, "R N"]) -> Float[Array, "R N V"]:
    """The target's noise for the tokens at `positions`: keyed by position alone only where it is coupled."""
    vocab_size, requests = config.target.vocab_size, state.requests
    if config.verifier is Verifier.COUPLED:
        return position_noise(requests.keys, positions, vocab_size, requests.sampling)
    return gumbel(purpose_keys(requests.keys, state.rounds, positions, Purpose.RESIDUAL), vocab_size)


def draft(
    drafter: DrafterParams | None,
    config: DecodeConfig,
    state: DecodeState,
    positions: Int[Array, "R N"],
    noise: Float[Array, "R N V"],
) -> Proposal:
    """The round's proposal. `positions` are the absolute indices of the tokens to be chosen, `noise` the target's."""
    anchor_positions = state.lengths - 1
    anchors = jnp.take_along_axis(state.tokens, anchor_positions[:, None], axis=1)
    requests = state.requests
    if drafter is None:
        tokens = jnp.broadcast_to(anchors, (anchors.shape[0], config.width))
        return chain(tokens, jnp.zeros(anchors.shape[0], jnp.int32))

    def filtered(logits):
        return filter_logits(logits, requests.sampling)

    def choose_row(logits, slot_noise):
        return choose(filtered(logits), slot_noise, requests.sampling)

    def draft_law(logits):
        return log_law(filtered(logits), requests.sampling)

    if config.verifier is Verifier.COUPLED:
        law = None
        draft_noise = noise[:, :-1]
        if drafter.draft_token_ids is not None:
            draft_noise = draft_noise[..., drafter.draft_token_ids]
    else:
        law = draft_law
        keys = purpose_keys(requests.keys, state.rounds, positions[:, :-1], Purpose.DRAFT)
        draft_noise = gumbel(keys, config.drafter.draft_vocab_size)
    return propose_chain(
        drafter,
        config.drafter,
        state.drafter,
        anchors[:, 0],
        anchor_positions,
        draft_noise,
        choose_row,
        requests.confidence_threshold,
        law,
    )


def verify(
    config: DecodeConfig,
    state: DecodeState,
    proposal: Proposal,
    logits: Float[Array, "R N V"],
    positions: Int[Array, "R N"],
    noise: Float[Array, "R N V"],
) -> Verdict:
    """Which drafts stand, and the target's own token after them."""
    sampling = state.requests.sampling
    filtered = filter_logits(logits, sampling)
    if config.verifier is Verifier.COUPLED or config.drafter is None:
        return walk(proposal, choose(filtered, noise, sampling), config.width - 1)
    keys = purpose_keys(state.requests.keys, state.rounds, positions[:, :-1], Purpose.ACCEPT)
    uniform = jax.vmap(jax.vmap(jax.random.uniform))(keys)
    return reject(proposal, log_law(filtered, sampling), uniform.astype(logits.dtype), noise)


def decode_round(
    target: TargetParams, drafter: DrafterParams | None, config: DecodeConfig, state: DecodeState
) -> DecodeState:
    """One round for every request that is not done. A pure function; no host, no dynamic shape."""
    active = ~state.done
    # Rounds count from 1 here: prefill's own token was drawn in round 0.
    state = state.replace(rounds=state.rounds + active.astype(jnp.int32))
    start = state.lengths - 1
    positions = state.lengths[:, None] + jnp.arange(config.width, dtype=jnp.int32)[None]
    noise = _target_noise(config, state, positions)
    proposal = draft(drafter, config, state, positions, noise)
    with jax.named_scope("verify"):
        out = forward_cached(target, config.target, proposal.tokens, start, state.cache, config.taps, active)
        logits = target_logits(target, config.target, out.hidden)
        verdict = verify(config, state, proposal, logits, positions, noise)
    context = state.drafter
    if drafter is not None:
        context = dspark.extend(drafter, config.drafter, context, out.features, start, active)
    log_probabilities = None
    if config.log_probabilities:
        log_probabilities = _token_log_probabilities(
            jnp.take_along_axis(logits, verdict.nodes[..., None], axis=1), verdict.tokens
        )

    slot = jnp.arange(config.width - 1, dtype=jnp.int32)[None]
    reached = proposal.valid[:, 1:] & (slot <= verdict.accepted[:, None]) & active[:, None]
    accepted = (slot < verdict.accepted[:, None]) & active[:, None]
    requests = jnp.arange(state.done.shape[0], dtype=jnp.int32)
    column = jnp.where(active, state.rounds - 1, state.accepted_lengths.shape[1])
    state = state.replace(
        cache=out.cache,
        drafter=context,
        accepted_lengths=state.accepted_lengths.at[requests, column].set(verdict.accepted + 1, mode="drop"),
        reached=state.reached + reached.astype(jnp.int32),
        accepted=state.accepted + accepted.astype(jnp.int32),
        verified=state.verified + jnp.where(active, jnp.sum(proposal.valid[:, 1:], axis=1, dtype=jnp.int32), 0),
    )
    return _commit(state, config, verdict.tokens, verdict.accepted + 1, log_probabilities)
