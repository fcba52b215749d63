"""What the rounds of prompt files drafted and what became of it, pooled over requests."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from dspark_jax import DecodeConfig, Generation, request_keys, sampling_params
from dspark_jax.decode_state import Requests
from dspark_jax.io import Drafter, Prompt, Target
from dspark_jax.recording import Recording, record_rounds
from train.conversations import converse, make_batch


@dataclasses.dataclass(frozen=True, eq=False)
class Records:
    """Rows of which each belongs to a prompt, numbered from 0 in its file."""

    prompts: Int[np.ndarray, "n"]

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def for_fitting(self) -> Self:
        """The rows of every other prompt, from the first on."""
        return self._rows(self.prompts % 2 == 0)

    @property
    def for_report(self) -> Self:
        """The rows of the other prompts."""
        return self._rows(self.prompts % 2 == 1)

    def _rows(self, chosen: Bool[np.ndarray, "n"]) -> Self:
        return type(self)(**{name: value[chosen] for name, value in vars(self).items()})

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


@dataclasses.dataclass(frozen=True, eq=False)
class Rounds(Records):
    """n rounds of chains: confidence logits of all γ drafts, and how many drafts were accepted."""

    logits: Float[np.ndarray, "n gamma"]
    accepted: Int[np.ndarray, "n"]


@dataclasses.dataclass(frozen=True, eq=False)
class Edges(Records):
    """n edges of trees whose ancestors were all accepted: log q, and whether the edge was accepted too."""

    log_q: Float[np.ndarray, "n"]
    accepted: Bool[np.ndarray, "n"]


@dataclasses.dataclass(frozen=True)
class Recorder:
    """How prompts are decoded. `sampling`: keywords of `dspark_jax.sampling_params`."""

    target: Target
    drafter: Drafter
    config: DecodeConfig
    sampling: dict[str, float]
    seed: int
    batch_size: int

    def rounds(self, prompts: Sequence[Prompt], done: Callable[[int], object]) -> Rounds:
        """Decodes a file's prompts with chains. `done` is told how many prompts each step has finished."""
        parts = []
        for indices, generation, recording in self._decode(prompts, done):
            accepted = generation.counts.accepted_lengths - 1
            ran = np.arange(accepted.shape[1])[None] < generation.counts.rounds[:, None]
            owners, logits = np.broadcast_to(indices[:, None], ran.shape), np.asarray(recording.confidence_logits)
            parts.append(Rounds(owners[ran], logits[ran], accepted[ran]))
        return Rounds.concatenate(parts)

    def edges(self, prompts: Sequence[Prompt], done: Callable[[int], object]) -> Edges:
        """The same with trees."""
        parts = []
        for indices, _, recording in self._decode(prompts, done):
            edges, reached = recording.edges, recording.edges.reached
            owners = np.broadcast_to(indices[:, None, None], reached.shape)
            parts.append(Edges(owners[reached], edges.log_q[reached], edges.accepted[reached]))
        return Edges.concatenate(parts)

    def _decode(
        self, prompts: Sequence[Prompt], done: Callable[[int], object]
    ) -> Iterator[tuple[Int[np.ndarray, "R"], Generation, Recording]]:
        """(each row's prompt, what was generated, what its rounds drafted) of every batch, on the host."""
        keys, rows = request_keys(self.seed, len(prompts)), self.batch_size
        room, most = self.target.config.max_position_embeddings, self.config.max_new_tokens
        sampling, unlimited = sampling_params(rows, **self.sampling), jnp.zeros(rows, jnp.float32)
        for begin in range(0, len(prompts), rows):
            batches = []

            def answer(contexts, turn, begin=begin, batches=batches) -> Iterator[tuple[list[int], bool]]:
                batch = make_batch(contexts, begin, turn, rows, room, most, keys)
                requests = Requests(batch.keys, sampling, jnp.asarray(batch.max_tokens), unlimited)
                result = record_rounds(
                    self.target.params, self.drafter.params, batch.tokens, batch.lengths, requests, self.config
                )
                generation, recording = jax.device_get(result)
                batches.append((batch.indices, generation, recording))
                for row in range(len(contexts)):
                    yield generation.tokens[row, : generation.lengths[row]].tolist(), bool(generation.stopped[row])

            group = prompts[begin : begin + rows]
            for _ in converse(answer, group):
                pass
            yield from batches
            done(len(group))
