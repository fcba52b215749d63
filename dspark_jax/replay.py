"""Texts that a target wrote once, and what any drafter is worth on them, exactly, without the target.

Under greedy and coupled sampling every drafter's output is the target's plain output. So what the target would say of a
draft is known where the draft agrees with the text so far, and nowhere else does it matter: a draft is accepted if and
only if it is the text. A round then needs of the target the states that the drafter reads, and they are recorded too.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.config import DraftModelConfig, MTPConfig
from dspark_jax.decode_state import DecodeConfig, DecodeState, Requests
from dspark_jax.drafters import kinds
from dspark_jax.drafters.kinds import DrafterParams
from dspark_jax.generation import Generation
from dspark_jax.layers.kv_cache import init_cache
from dspark_jax.proposals import Proposal
from dspark_jax.recording import observe_rounds
from dspark_jax.rounds import (
    Verification,
    anchors_alone,
    append,
    commit,
    init_state,
    propose_round,
    target_noise,
)
from dspark_jax.sampling import choose, filter_logits, position_noise
from dspark_jax.sharding import under_auto_axes
from dspark_jax.targets.decoder import TargetOutput, TargetParams, forward_cached, target_logits
from dspark_jax.verification.verifier import Verifier
from dspark_jax.verification.walk import walk


@struct.dataclass
class Texts:
    """R prompts and the target's answers to them.

    `tokens[:, :lengths]`: prompt and answer, the EOS included; after them comes what the target would go on with, so
    that a replay knows how far the last round's drafts agree. `states`: of each token that the target has read, the
    tapped layers in ascending order, then the last hidden state after the final norm.
    """

    tokens: Int[Array, "R S"]
    prompt_lengths: Int[Array, "R"]
    lengths: Int[Array, "R"]
    states: Float[Array, "R S m_and_one d"]

    def padded(self, capacity: int) -> "Texts":
        """The same with room for at least so many tokens each, so that texts of few shapes are replayed."""
        more = max(capacity - self.tokens.shape[1], 0)
        room = ((0, 0), (0, more))
        return self.replace(tokens=jnp.pad(self.tokens, room), states=jnp.pad(self.states, (*room, (0, 0), (0, 0))))

    def answers(self) -> list[list[int]]:
        """The new tokens of each request, on the host."""
        spans = zip(self.tokens, self.prompt_lengths, self.lengths, strict=True)
        return [np.asarray(row[begin:end]).tolist() for row, begin, end in jax.device_get(list(spans))]


@struct.dataclass
class _Writing:
    """Texts at work: `written` tokens stand, of which the last is not read yet; the ends are those known so far."""

    texts: Texts
    written: Int[Array, "R"]
    cache: Any


def states_of(out: TargetOutput, taps: tuple[int, ...]) -> Float[Array, "R T m_and_one d"]:
    """What `Texts.states` holds of one pass with these taps."""
    hidden = out.hidden[..., None, :]
    if not taps:
        return hidden
    tapped = out.features.reshape(*out.hidden.shape[:-1], len(taps), -1)
    return jnp.concatenate([tapped.astype(hidden.dtype), hidden], axis=-2)


def read_features(
    config: DraftModelConfig, states: Float[Array, "*rows m_and_one d"], taps: tuple[int, ...]
) -> Float[Array, "*rows features"]:
    """What a drafter reads of `Texts.states`. Raises ValueError if it taps a layer that is not among them."""
    absent = set(config.target_layer_ids) - set(taps)
    if absent:
        raise ValueError(f"target_layer_ids: layers {sorted(absent)} were not recorded, only {list(taps)}")
    layers = [len(taps)] if isinstance(config, MTPConfig) else [taps.index(layer) for layer in config.target_layer_ids]
    chosen = jnp.take(states, jnp.asarray(layers, jnp.int32), axis=-2)
    return chosen.reshape(*chosen.shape[:-2], -1)


@functools.partial(jax.jit, static_argnames=("config", "taps", "beyond"))
def record_texts(
    target: TargetParams,
    tokens: Int[Array, "R P"],
    lengths: Int[Array, "R"],
    requests: Requests,
    config: DecodeConfig,
    taps: tuple[int, ...],
    beyond: int,
) -> Texts:
    """Decodes plainly, as `generate` does with this config, which has no drafter, and `beyond` tokens past each end.

    `tokens` holds the prompts, right-padded to P, of which `lengths` are real. `taps`: ascending layers to record.
    `beyond`: the most drafts on a path of any drafter that is to be replayed.
    """
    _check_coupled(config)
    padded, width = tokens.shape[1], config.width
    capacity = padded + config.max_new_tokens + beyond + width
    eos = jnp.asarray(config.eos_token_ids, jnp.int32).reshape(1, -1)

    @under_auto_axes
    def run(target, tokens, lengths, requests):
        dtype, count = target.embed_tokens.weight.dtype, tokens.shape[0]
        rows = jnp.arange(count, dtype=jnp.int32)
        last_end = lengths + jnp.minimum(requests.max_tokens, config.max_new_tokens)

        def more(writing: _Writing) -> Bool[Array, "R"]:
            texts = writing.texts
            return (texts.lengths > texts.prompt_lengths) & (writing.written < texts.lengths + beyond)

        def step(writing: _Writing, tokens, start, last, kept: int) -> _Writing:
            """Reads tokens from `start` on, of whose states `kept` are stored, and writes the one after `last`."""
            texts, active = writing.texts, more(writing)
            out = forward_cached(target, config.target, tokens, start, writing.cache, taps, active)
            hidden = jnp.take_along_axis(out.hidden, last[:, None, None], axis=1)
            logits = filter_logits(target_logits(target, config.target, hidden), requests.sampling)
            place = writing.written[:, None]
            noise = position_noise(requests.keys, place, config.target.vocab_size, requests.sampling)
            new = choose(logits, noise, requests.sampling)
            written = writing.written + active.astype(jnp.int32)
            ended = active & jnp.any(new == eos, axis=1) & (written < texts.lengths)
            read = jnp.where(active[:, None], start[:, None] + jnp.arange(kept, dtype=jnp.int32)[None], capacity)
            texts = texts.replace(
                tokens=texts.tokens.at[rows, jnp.where(active, place[:, 0], capacity)].set(new[:, 0], mode="drop"),
                lengths=jnp.where(ended, written, texts.lengths),
                states=texts.states.at[rows[:, None], read].set(states_of(out, taps)[:, :kept], mode="drop"),
            )
            return _Writing(texts, written, out.cache)

        def body(writing: _Writing) -> _Writing:
            start = writing.written - 1
            # In passes as wide as plain decoding's, of which only the first token counts.
            anchors = jnp.broadcast_to(writing.texts.tokens[rows, start][:, None], (count, width))
            return step(writing, anchors, start, jnp.zeros_like(start), 1)

        shape = (count, capacity, len(taps) + 1, config.target.hidden_size)
        texts = Texts(jnp.pad(tokens, ((0, 0), (0, capacity - padded))), lengths, last_end, jnp.zeros(shape, dtype))
        cache = init_cache(config.target, count, capacity, dtype, config.target.stacked_layers)
        writing = step(_Writing(texts, lengths, cache), tokens, jnp.zeros_like(lengths), lengths - 1, padded)
        return jax.lax.while_loop(lambda writing: jnp.any(more(writing)), body, writing).texts

    return run(target, tokens.astype(jnp.int32), lengths.astype(jnp.int32), requests)


@functools.partial(jax.jit, static_argnames=("config", "taps"))
def replay_rounds(
    drafter: DrafterParams, texts: Texts, requests: Requests, config: DecodeConfig, taps: tuple[int, ...]
) -> tuple[Generation, Float[Array, "R rounds gamma"] | None]:
    """What `generate` gives with this drafter, and the confidence logits of each round's chain, or None for trees and
    drafters without a confidence head. A request's rows from its number of rounds on are zero.

    `requests` are those of the texts, with any confidence thresholds, and `taps` the layers that were recorded;
    `config` has the limits and EOS ids that the texts were recorded with.
    Exact but for rounding: the states are those of passes of another width.

    Raises:
      ValueError: a verifier that is not coupled, or a drafter that taps a layer that was not recorded.
    """
    _check_coupled(config)

    @under_auto_axes
    def run(drafter, texts, requests):
        def observed_round(state: DecodeState):
            proposal = propose_round(drafter, config, state, _noise(config, state))
            verification = _verify(config, texts, taps, state, proposal)
            return commit(drafter, config, state, proposal, verification), proposal.confidence_logits

        return observe_rounds(config, observed_round, _begin(drafter, config, texts, taps, requests))

    return run(drafter, texts, requests)


@functools.partial(jax.jit, static_argnames=("config", "taps"))
def replay_positions(
    drafter: DrafterParams, texts: Texts, requests: Requests, config: DecodeConfig, taps: tuple[int, ...]
) -> tuple[Int[Array, "R rounds"], Float[Array, "R rounds gamma"]]:
    """The whole chain from every position of the texts: how many of its drafts the target accepts, and their
    confidences. Row i of a request is the round that begins when i + 1 of its new tokens are committed; rows from its
    number of new tokens minus 1 on are zero. Thresholds of `requests` do not count.

    The other arguments and the errors are those of `replay_rounds`; the drafter has a confidence head.
    """
    _check_coupled(config)

    @under_auto_axes
    def run(drafter, texts, requests):
        def observed_round(state: DecodeState):
            proposal = propose_round(drafter, config, state, _noise(config, state))
            accepted = _verify(config, texts, taps, state, proposal).verdict.accepted
            alone = anchors_alone(state)
            verification = _verify(config, texts, taps, state, alone)
            observed = (accepted, jax.nn.sigmoid(proposal.confidence_logits))
            return commit(drafter, config, state, alone, verification), observed

        requests = requests.replace(confidence_threshold=jnp.zeros_like(requests.confidence_threshold))
        return observe_rounds(config, observed_round, _begin(drafter, config, texts, taps, requests))[1]

    return run(drafter, texts, requests)


def _check_coupled(config: DecodeConfig) -> None:
    if config.verifier is not Verifier.COUPLED:
        raise ValueError(
            f"verifier {config.verifier.value}: the output depends on the drafter, so that nothing recorded can be "
            f"replayed; take {Verifier.COUPLED.value}"
        )


def _begin(
    drafter: DrafterParams, config: DecodeConfig, texts: Texts, taps: tuple[int, ...], requests: Requests
) -> DecodeState:
    """The state after the prompts, with each request's first new token."""
    lengths = texts.prompt_lengths
    state = init_state(config, requests, texts.tokens.shape[1], texts.states.dtype)
    features = read_features(config.drafter, texts.states, taps)
    # What follows a prompt's last token is read before its time, and is not seen until it is read again.
    context = kinds.extend(
        drafter, config.drafter, state.drafter, texts.tokens, features, jnp.zeros_like(lengths), lengths
    )
    state = state.replace(
        tokens=texts.tokens,
        prompt_lengths=lengths,
        lengths=lengths,
        done=requests.max_tokens < 1,
        cache=None,
        drafter=context,
    )
    first = jnp.take_along_axis(texts.tokens, lengths[:, None], axis=1)
    return append(state, config, first, jnp.ones_like(lengths), None)


def _noise(config: DecodeConfig, state: DecodeState) -> Float[Array, "R depth+1 V"]:
    """The target's noise that drafts share; the last token of a round is in the text, and needs none."""
    return jnp.pad(target_noise(config, state, config.depth - 1), ((0, 0), (0, 1), (0, 0)))


def _verify(
    config: DecodeConfig, texts: Texts, taps: tuple[int, ...], state: DecodeState, proposal: Proposal
) -> Verification:
    """As `rounds.verify`, by the text. What it says of nodes off the text's path is of no matter: none is reached."""
    last = texts.tokens.shape[1] - 1
    chosen = jnp.take_along_axis(texts.tokens, jnp.minimum(state.lengths[:, None] + proposal.depths, last), axis=1)
    steps = jnp.arange(config.depth + 1, dtype=jnp.int32)[None]
    read = jnp.minimum(state.lengths[:, None] - 1 + steps, last)
    rows = jnp.arange(read.shape[0], dtype=jnp.int32)[:, None]
    features = read_features(config.drafter, texts.states[rows, read], taps)
    return Verification(walk(proposal, chosen, config.depth), None, features, None)


@dataclasses.dataclass(frozen=True, eq=False)
class ThresholdCounts:
    """What rounds came to under each of n confidence thresholds; counts of disjoint requests add.

    `tokens`: accepted lengths, bonus included, each request's last round uncut; `verified`: drafts.
    """

    rounds: Int[np.ndarray, "n"]
    tokens: Int[np.ndarray, "n"]
    verified: Int[np.ndarray, "n"]

    def __add__(self, other: "ThresholdCounts") -> "ThresholdCounts":
        return ThresholdCounts(self.rounds + other.rounds, self.tokens + other.tokens, self.verified + other.verified)


def sweep_thresholds(
    accepted: Int[np.ndarray, "R rounds"],
    confidences: Float[np.ndarray, "R rounds gamma"],
    lengths: Int[np.ndarray, "R"],
    thresholds: Float[np.ndarray, "n"],
) -> ThresholdCounts:
    """What decoding comes to if each chain is cut before its first draft whose confidence is under a threshold.

    The first two are those of `replay_positions`; `lengths`: new tokens of each request.
    """
    confident = confidences[None] >= thresholds.astype(confidences.dtype)[:, None, None, None]
    verified = np.cumprod(confident, axis=3).sum(axis=3)
    rows, levels = np.arange(len(lengths))[None], np.arange(len(thresholds))[:, None]
    place = np.zeros((len(thresholds), len(lengths)), np.int64)
    counts = ThresholdCounts(*(np.zeros(len(thresholds), np.int64) for _ in range(3)))
    while (active := place < lengths[None] - 1).any():
        now = np.minimum(place, confidences.shape[1] - 1)
        cut = verified[levels, rows, now]
        committed = np.minimum(accepted[rows, now], cut) + 1
        sums = (np.where(active, x, 0).sum(axis=1) for x in (np.ones_like(cut), committed, cut))
        counts = counts + ThresholdCounts(*sums)
        place = np.where(active, place + committed, place)
    return counts
