"""Plain and speculative decoding of the same batch: timed in turns, and compared token by token."""

import time
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from dspark_jax import Generation
from dspark_jax.verification.statistics import count_acceptance, first_difference, score_gap
from infer.batching import Batch, Request
from infer.decoding import Decoder
from infer.results import Difference, Result

# Two scores closer than this may change places by rounding alone.
NEAR_TIE = 1e-3


def in_turns(runs: Sequence[Callable[[], Generation]], repeats: int) -> tuple[list[Generation], list[float]]:
    """Each run's last result and its median seconds. The runs take turns, so that a machine that slows down slows all.

    They must be compiled.
    """
    seconds = np.zeros((repeats, len(runs)))
    generations: list[Generation] = []
    for repeat in range(repeats):
        generations = []
        for column, run in enumerate(runs):
            begin = time.perf_counter()
            generations.append(run())
            seconds[repeat, column] = time.perf_counter() - begin
    return generations, np.median(seconds, axis=0).tolist()


def collect(
    result: Result,
    decoder: Decoder,
    requests: Sequence[Request],
    batch: Batch,
    plain: Generation,
    speculative: Generation,
    plain_seconds: float,
    seconds: float,
) -> None:
    """Adds a batch to a result, with the differences between the two outputs where they should be equal.

    `decoder`: the plain one.
    """
    result.counts = result.counts + count_acceptance(speculative.counts, speculative.lengths, speculative.stopped)
    result.requests += len(requests)
    result.prompt_tokens += sum(len(request.ids) for request in requests)
    result.plain_tokens += int(plain.lengths.sum())
    result.tokens += int(speculative.lengths.sum())
    result.plain_seconds += plain_seconds
    result.seconds += seconds
    if not result.comparable:
        return
    for row, request in enumerate(requests):
        expected = np.asarray(plain.tokens[row, : plain.lengths[row]])
        found = np.asarray(speculative.tokens[row, : speculative.lengths[row]])
        position = first_difference(expected, found)
        if position is not None:
            gap = _gap(decoder, batch, row, request, expected, found, position)
            result.differences.append(Difference(request.index, request.turn, position, gap, gap < NEAR_TIE))


def _gap(
    decoder: Decoder, batch: Batch, row: int, request: Request, expected: np.ndarray, found: np.ndarray, position: int
) -> float:
    """How far apart the two tokens' scores are where the outputs first differ."""
    if position >= min(len(expected), len(found)):
        return float("inf")
    tokens = np.zeros((1, batch.shape[1] + decoder.config.max_new_tokens), np.int32)
    length = len(request.ids) + position
    tokens[0, :length] = [*request.ids, *expected[:position]]
    pair = (jnp.asarray(sequence[position : position + 1], jnp.int32) for sequence in (expected, found))
    gap = score_gap(
        decoder.target.params,
        decoder.config.target,
        jnp.asarray(tokens),
        jnp.asarray([length], jnp.int32),
        *pair,
        batch.keys[row : row + 1],
        decoder.options.sampling(1),
    )
    return float(gap[0])
