"""generate(): the whole decoding loop as one jitted program; generate_chunks() for streaming."""

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from dspark_jax.decode_state import DecodeConfig, DecodeState, Requests
from dspark_jax.drafters.kinds import DrafterParams
from dspark_jax.rounds import decode_round, prefill
from dspark_jax.sampling import SamplingParams, sampling_params
from dspark_jax.sharding import under_auto_axes
from dspark_jax.targets.decoder import TargetParams
from dspark_jax.verification.counting import Counts


@struct.dataclass
class Generation:
    """New tokens of R requests, and what each round accepted.

    `tokens[:, :lengths]` are the new tokens, the EOS included. `stopped`: ended by an EOS token, else by max_tokens.
    `counts.accepted_lengths[:, :rounds]`: tokens of each round, bonus included, the last one uncut; prefill's token
    belongs to no round. `log_probabilities`: of each new token under the target's unfiltered logits at temperature 1,
    or None.
    """

    tokens: Int[Array, "R max_new_tokens"]
    lengths: Int[Array, "R"]
    done: Bool[Array, "R"]
    stopped: Bool[Array, "R"]
    counts: Counts
    log_probabilities: Float[Array, "R max_new_tokens"] | None


def generation_of(config: DecodeConfig, state: DecodeState) -> Generation:
    """What the slots have generated so far."""
    lengths = state.lengths - state.prompt_lengths
    index = jnp.arange(config.max_new_tokens, dtype=jnp.int32)[None]
    columns = state.prompt_lengths[:, None] + index

    def new(x: Array) -> Array:
        return jnp.where(index < lengths[:, None], jnp.take_along_axis(x, columns, axis=1), 0)

    return Generation(
        tokens=new(state.tokens),
        lengths=lengths,
        done=state.done,
        stopped=state.stopped,
        counts=state.counts,
        log_probabilities=None if state.log_probabilities is None else new(state.log_probabilities),
    )


def _requests(config: DecodeConfig, keys, sampling, max_tokens, confidence_threshold) -> Requests:
    count = keys.shape[0]
    most = jnp.full(count, config.max_new_tokens, jnp.int32)
    return Requests(
        keys=keys,
        sampling=sampling_params(count) if sampling is None else sampling,
        max_tokens=most if max_tokens is None else jnp.minimum(most, max_tokens),
        confidence_threshold=jnp.zeros(count, jnp.float32) if confidence_threshold is None else confidence_threshold,
    )


@functools.partial(jax.jit, static_argnames="config")
def generate(
    target: TargetParams,
    drafter: DrafterParams | None,
    tokens: Int[Array, "R P"],
    lengths: Int[Array, "R"],
    keys: Key[Array, "R"],
    config: DecodeConfig,
    sampling: SamplingParams | None = None,
    max_tokens: Int[Array, "R"] | None = None,
    confidence_threshold: Float[Array, "R"] | None = None,
) -> Generation:
    """Decodes R requests to their ends in one compiled program; the output's law is exactly the target's.

    `tokens` holds the prompts, right-padded to P; `lengths` (at least 1) says how much of each is real. `keys`: one
    typed key a request (`sampling.request_keys`). `sampling`: greedy by default. `max_tokens`: at most
    `config.max_new_tokens`, the default. `confidence_threshold`: see `drafting.chain.confident_length`; 0 cuts nothing.
    Arguments other than `config` are arrays: a drafter of the same shape, other prompts of the same P and other
    sampling settings compile nothing. May be jitted, vmapped and sharded by the caller.
    """

    @under_auto_axes
    def run(target, drafter, tokens, lengths, requests):
        state = prefill(target, drafter, config, requests, tokens, lengths)
        state = jax.lax.while_loop(
            lambda state: ~jnp.all(state.done), lambda state: decode_round(target, drafter, config, state), state
        )
        return generation_of(config, state)

    requests = _requests(config, keys, sampling, max_tokens, confidence_threshold)
    return run(target, drafter, tokens, lengths, requests)


@functools.partial(jax.jit, static_argnames="config")
def _start(target, drafter, tokens, lengths, keys, config, sampling, max_tokens, confidence_threshold) -> DecodeState:
    @under_auto_axes
    def run(target, drafter, tokens, lengths, requests):
        return prefill(target, drafter, config, requests, tokens, lengths)

    requests = _requests(config, keys, sampling, max_tokens, confidence_threshold)
    return run(target, drafter, tokens, lengths, requests)


@functools.partial(jax.jit, static_argnames="config", donate_argnames="state")
def _advance(target, drafter, state, rounds, config) -> tuple[DecodeState, Generation]:
    @under_auto_axes
    def run(target, drafter, state, rounds):
        def more(carry):
            state, left = carry
            return ~jnp.all(state.done) & (left > 0)

        def body(carry):
            state, left = carry
            return decode_round(target, drafter, config, state), left - 1

        state, _ = jax.lax.while_loop(more, body, (state, rounds))
        return state, generation_of(config, state)

    return run(target, drafter, state, rounds)


@functools.partial(jax.jit, donate_argnames="state")
def _cut(state: DecodeState, lengths: Int[Array, "R"]) -> DecodeState:
    """Ends each request with a length of at least 0 after so many new tokens."""
    cut = lengths >= 0
    return state.replace(
        lengths=jnp.where(cut, state.prompt_lengths + lengths, state.lengths),
        done=state.done | cut,
        stopped=state.stopped | cut,
    )


def generate_chunks(
    target: TargetParams,
    drafter: DrafterParams | None,
    tokens: Int[Array, "R P"],
    lengths: Int[Array, "R"],
    keys: Key[Array, "R"],
    config: DecodeConfig,
    sampling: SamplingParams | None = None,
    max_tokens: Int[Array, "R"] | None = None,
    confidence_threshold: Float[Array, "R"] | None = None,
    rounds_per_chunk: int = 4,
    stop: Callable[[int, np.ndarray], int | None] | None = None,
) -> Iterator[Generation]:
    """As `generate`, but yields after every `rounds_per_chunk` rounds all that was generated so far.

    `stop(request, new_tokens)` is asked about each request with new tokens; a number it returns ends the request
    after so many tokens (stop strings need the host, which knows the text). The last value is the whole result.
    Under a mesh with explicit axes every device holds the whole state between two chunks, its caches too; under one
    with Auto axes each holds its part.
    """
    state = _start(target, drafter, tokens, lengths, keys, config, sampling, max_tokens, confidence_threshold)
    budget = jnp.asarray(rounds_per_chunk, jnp.int32)
    seen = np.zeros(state.done.shape[0], np.int32)
    while True:
        state, result = _advance(target, drafter, state, budget, config)
        new_lengths, done = np.asarray(result.lengths), np.asarray(result.done)
        if stop is not None:
            rows, cuts = np.asarray(result.tokens), np.full(len(seen), -1, np.int32)
            for request in np.flatnonzero(new_lengths > seen):
                keep = stop(int(request), rows[request, : new_lengths[request]])
                cuts[request] = -1 if keep is None else keep
            if (cuts >= 0).any():
                state = _cut(state, jnp.asarray(cuts))
                state, result = _advance(target, drafter, state, jnp.asarray(0, jnp.int32), config)
                new_lengths, done = np.asarray(result.lengths), np.asarray(result.done)
        seen = new_lengths
        yield result
        if done.all():
            return
