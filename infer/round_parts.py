"""One speculative round in parts, each a program of its own: for timing them and for looking inside."""

import functools
import time
from collections.abc import Iterator

import jax
import numpy as np

from dspark_jax.decode_state import DecodeConfig, DecodeState
from dspark_jax.drafters.kinds import DrafterParams
from dspark_jax.proposals import Proposal
from dspark_jax.rounds import Verification, begin_round, commit, draft, draft_hidden, prefill, target_noise, verify
from dspark_jax.targets.decoder import TargetParams
from dspark_jax.verification.walk import Verdict
from infer.batching import Batch
from infer.decoding import Decoder

PARTS = ("backbone", "tree", "verify", "commit")

_prefill = jax.jit(prefill, static_argnames="config")


@functools.partial(jax.jit, static_argnames="config")
def _backbone(drafter: DrafterParams, config: DecodeConfig, state: DecodeState):
    state = begin_round(state)
    return state, draft_hidden(drafter, config, state)


@functools.partial(jax.jit, static_argnames="config")
def _tree(drafter: DrafterParams, config: DecodeConfig, state: DecodeState, hidden):
    noise = target_noise(config, state)
    return draft(drafter, config, state, hidden, noise), noise


@functools.partial(jax.jit, static_argnames="config", donate_argnames="cache")
def _verify(target: TargetParams, config: DecodeConfig, state: DecodeState, cache, proposal: Proposal, noise):
    return verify(target, config, state.replace(cache=cache), proposal, noise)


@functools.partial(jax.jit, static_argnames="config", donate_argnames=("state", "cache"))
def _commit(
    drafter: DrafterParams,
    config: DecodeConfig,
    state: DecodeState,
    cache,
    proposal: Proposal,
    verification: Verification,
) -> DecodeState:
    return commit(drafter, config, state, proposal, verification.replace(cache=cache))


def rounds_in_parts(decoder: Decoder, batch: Batch) -> Iterator[tuple[Proposal, Verdict, list[float]]]:
    """Decodes a batch round by round. Yields each round's proposal and verdict, and the seconds of each of `PARTS`,
    dispatch included; the first round's hold compilation too.
    """
    target, drafter, config = decoder.target.params, decoder.drafter.params, decoder.config
    state = _prefill(target, drafter, config, decoder.requests(batch), batch.tokens, batch.lengths)
    while not np.asarray(state.done).all():
        seconds: list[float] = []

        def timed(function, *inputs, seconds=seconds):
            begin = time.perf_counter()
            result = jax.block_until_ready(function(*inputs))
            seconds.append(time.perf_counter() - begin)
            return result

        state, hidden = timed(_backbone, drafter, config, state)
        proposal, noise = timed(_tree, drafter, config, state, hidden)
        before, cache = state.replace(cache=None), state.cache
        verification = timed(_verify, target, config, before, cache, proposal, noise)
        cache, verification = verification.cache, verification.replace(cache=None)
        state = timed(_commit, drafter, config, before, cache, proposal, verification)
        yield *jax.tree.map(np.asarray, (proposal, verification.verdict)), seconds


def part_milliseconds(decoder: Decoder, batch: Batch, rounds: int) -> dict[str, float]:
    """Median milliseconds of each part over the first rounds of a batch, the very first not counted."""
    seconds = []
    for _, (*_, taken) in zip(range(rounds + 1), rounds_in_parts(decoder, batch), strict=False):
        seconds.append(taken)
    if len(seconds) < 2:
        return dict.fromkeys(PARTS, float("nan"))
    return dict(zip(PARTS, 1e3 * np.median(seconds[1:], axis=0), strict=True))
