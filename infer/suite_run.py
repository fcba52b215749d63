"""Measures the drafters of a suite: the target writes each text once, and every method is replayed on it."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from dspark_jax import DecodeConfig, request_keys, sampling_params
from dspark_jax.decode_state import Requests
from dspark_jax.io import Drafter, Prompt, Target
from dspark_jax.replay import (
    Texts,
    ThresholdCounts,
    record_texts,
    replay_positions,
    replay_rounds,
    sweep_thresholds,
)
from dspark_jax.verification.statistics import AcceptanceCounts, count_acceptance
from infer.batching import Request, converse, make_batch
from infer.methods import MethodName
from infer.suite_file import SuiteDrafter

THRESHOLDS = np.linspace(0, 1, 21).round(2)


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """A row of the tables: a drafter with one method."""

    spec: SuiteDrafter
    method: MethodName
    drafter: Drafter
    config: DecodeConfig

    @property
    def name(self) -> str:
        return self.spec.row(self.method)

    @property
    def confident(self) -> bool:
        """It drafts chains with a confidence for each draft."""
        return self.method == "chain" and self.drafter.config.enable_confidence_head


@dataclasses.dataclass(frozen=True, eq=False)
class Measured:
    """One row on some texts; of disjoint texts they add.

    `confidences`: of each draft whose earlier ones were all accepted, whole chains being verified, and `accepted`,
    whether it was too. `sweep`: by the `THRESHOLDS`. They are empty and None where drafts have no confidence.
    """

    counts: AcceptanceCounts
    confidences: Float[np.ndarray, "n"]
    accepted: Bool[np.ndarray, "n"]
    sweep: ThresholdCounts | None

    def __add__(self, other: "Measured") -> "Measured":
        return Measured(
            self.counts + other.counts,
            np.concatenate([self.confidences, other.confidences]),
            np.concatenate([self.accepted, other.accepted]),
            None if self.sweep is None or other.sweep is None else self.sweep + other.sweep,
        )


@dataclasses.dataclass(frozen=True)
class TextCounts:
    """Sums over the texts of one prompt file. `ended`: those that ended with an EOS."""

    requests: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    ended: int = 0

    def __add__(self, other: "TextCounts") -> "TextCounts":
        sums = {name: value + getattr(other, name) for name, value in vars(self).items()}
        return TextCounts(**sums)


@dataclasses.dataclass(frozen=True, eq=False)
class Recorder:
    """How texts are written: `rows` together, at most `max_new_tokens` each. `taps`: layers to record, those of all
    drafters; `beyond`: the most drafts of any; `capacity`: tokens that there is room for where texts are replayed.
    """

    target: Target
    rows: int
    max_new_tokens: int
    seed: int
    taps: tuple[int, ...]
    beyond: int
    capacity: int

    @property
    def config(self) -> DecodeConfig:
        target = self.target
        return DecodeConfig(
            target=target.config, max_new_tokens=self.max_new_tokens, eos_token_ids=target.eos_token_ids
        )


def measure_file(
    recorder: Recorder,
    rows: Sequence[Row],
    prompts: Sequence[Prompt],
    temperature: float,
    done: Callable[[int], object],
) -> tuple[TextCounts, dict[str, Measured]]:
    """One prompt file at one temperature: its texts, and what each row came to, by its name.

    `done` is told of each batch how many requests it has, once when their texts are written and once for each row.
    """
    target = recorder.target
    keys, context = request_keys(recorder.seed, len(prompts)), target.config.max_position_embeddings
    written: list[TextCounts] = []
    parts: dict[str, list[Measured]] = {row.name: [] for row in rows}

    def answer(asked: list[Request]) -> list[str]:
        batch = make_batch(asked, recorder.rows, context, recorder.max_new_tokens, keys)
        sampling, unlimited = sampling_params(recorder.rows, temperature), jnp.zeros(recorder.rows, jnp.float32)
        requests = Requests(batch.keys, sampling, batch.max_tokens, unlimited)
        texts = record_texts(
            target.params, batch.tokens, batch.lengths, requests, recorder.config, recorder.taps, recorder.beyond
        )
        # One shape for all files where it can be: each method is then compiled once.
        texts = texts.padded(recorder.capacity)
        answers = texts.answers()[: len(asked)]
        ended = sum(new[-1] in target.eos_token_ids for new in answers if new)
        read, new = sum(len(request.ids) for request in asked), sum(map(len, answers))
        written.append(TextCounts(len(asked), read, new, ended))
        done(len(asked))
        for row in rows:
            parts[row.name].append(_measure(row, texts, requests, recorder.taps))
            done(len(asked))
        tokenizer = target.tokenizer
        return ["" if tokenizer is None else tokenizer.decode(new) for new in answers]

    converse(prompts, recorder.rows, answer)
    return sum(written, TextCounts()), {name: total(measured) for name, measured in parts.items()}


def total(parts: Sequence[Measured]) -> Measured:
    """All of them together; at least one."""
    first, *others = parts
    for other in others:
        first = first + other
    return first


def _measure(row: Row, texts: Texts, requests: Requests, taps: tuple[int, ...]) -> Measured:
    arguments = (row.drafter.params, texts, requests, row.config, taps)
    generation, logits = jax.device_get(replay_rounds(*arguments))
    counts = count_acceptance(generation.counts, generation.lengths, generation.stopped)
    if not row.confident:
        return Measured(counts, np.zeros(0, np.float32), np.zeros(0, bool), None)
    ran = np.arange(logits.shape[1])[None] < generation.counts.rounds[:, None]
    accepted = (generation.counts.accepted_lengths - 1)[ran][:, None]
    slots = np.arange(logits.shape[2])[None]
    reached = slots <= accepted
    confidences = np.asarray(jax.nn.sigmoid(logits[ran]), np.float32)
    accepted_everywhere, confidence_everywhere = jax.device_get(replay_positions(*arguments))
    sweep = sweep_thresholds(accepted_everywhere, confidence_everywhere, generation.lengths, THRESHOLDS)
    return Measured(counts, confidences[reached], (slots < accepted)[reached], sweep)
