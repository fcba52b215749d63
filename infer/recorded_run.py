"""A recorded run: what a drafter proposes from every position of the texts that its target decodes."""

import dataclasses
import json
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from dspark_jax import request_keys
from dspark_jax.io import InputError, Prompt, atomic_file
from dspark_jax.io.files import reported
from dspark_jax.recording import record_rounds
from dspark_jax.scheduling.calibration import prefix_survival
from dspark_jax.scheduling.simulation import Replay, accepted_drafts
from infer.batching import Request, converse, make_batch
from infer.decoding import Decoder

# Above every confidence.
_NO_DRAFT = 2.0


@dataclasses.dataclass(frozen=True, eq=False)
class RecordedRun:
    """As a `Replay`, with the confidences before calibration. `law`: models and sampling, for reports."""

    lengths: Int[np.ndarray, "requests"]
    confidence_logits: Float[np.ndarray, "rows gamma"]
    accepted: Int[np.ndarray, "rows"]
    law: dict[str, Any]

    @property
    def gamma(self) -> int:
        return self.confidence_logits.shape[1]

    def replay(self, temperatures: Float[np.ndarray, "gamma"]) -> Replay:
        return Replay(self.lengths, prefix_survival(self.confidence_logits, temperatures), self.accepted)

    def save(self, path: Path) -> None:
        with atomic_file(path) as temporary, open(temporary, "wb") as file:
            np.savez_compressed(file, **vars(self) | {"law": np.array(json.dumps(self.law))})

    @classmethod
    def load(cls, path: Path) -> Self:
        """Raises an InputError for a file that is missing or no recorded run, in one line that names the field."""
        names = [field.name for field in dataclasses.fields(cls)]
        try:
            with reported(path), np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in names}
            law = json.loads(str(arrays.pop("law")))
        except KeyError as error:
            raise InputError(f"{path}: is no recorded run: {error.args[0]}; record one with --record") from error
        except (ValueError, EOFError, TypeError, zipfile.BadZipFile) as error:
            raise InputError(f"{path}: is no recorded run, or a damaged one; record one with --record") from error
        wrong = _wrong_field(law, **arrays)
        if wrong is not None:
            raise InputError(f"{path}: {wrong}; record the run again")
        return cls(law=law, **arrays)


def _wrong_field(law: Any, lengths: np.ndarray, confidence_logits: np.ndarray, accepted: np.ndarray) -> str | None:
    if not isinstance(law, dict):
        return "law must be an object"
    if lengths.ndim != 1 or not lengths.size or lengths.dtype.kind != "i" or (lengths < 2).any():
        return "lengths must be integers of at least 2, one a request"
    rows = int((lengths - 1).sum())
    shape = confidence_logits.shape
    if len(shape) != 2 or shape[0] != rows or not shape[1] or confidence_logits.dtype.kind != "f":
        return f"confidence_logits {list(shape)} must be numbers of {rows} rounds, the positions that lengths tells of"
    if not np.isfinite(confidence_logits).all():
        return "confidence_logits are not all finite"
    if accepted.shape != (rows,) or accepted.dtype.kind != "i" or (accepted < 0).any() or (accepted > shape[1]).any():
        return f"accepted {list(accepted.shape)} must be integers of {rows} rounds, from 0 to {shape[1]}"
    return None


def record_run(
    decoder: Decoder, prompts: Sequence[Prompt], rows: int, law: dict[str, Any], done: Callable[[int], object]
) -> RecordedRun:
    """Decodes the prompts, `rows` together, one token a round: each round drafts from the next position.

    The decoder's drafter has a confidence head, and its verifier is coupled. Requests of one token, which have no
    round, are left out. `done` is told how many requests each batch has finished.

    Raises:
      InputError: no request has a round, or a confidence is not finite.
    """
    target, options, config = decoder.target, decoder.options, decoder.config
    keys, tokenizer = request_keys(options.seed, len(prompts)), target.tokenizer
    lengths, logits, accepted = [], [], []

    def answer(asked: list[Request]) -> list[str]:
        batch = make_batch(asked, rows, config.target.max_position_embeddings, config.max_new_tokens, keys)
        requests = decoder.requests(batch)
        requests = requests.replace(confidence_threshold=jnp.full_like(requests.confidence_threshold, _NO_DRAFT))
        result = record_rounds(target.params, decoder.drafter.params, batch.tokens, batch.lengths, requests, config)
        generation, recording = jax.device_get(result)
        texts = [generation.tokens[row, : generation.lengths[row]] for row in range(len(asked))]
        for row, text in enumerate(texts):
            rounds = len(text) - 1
            if not rounds:
                continue
            lengths.append(len(text))
            logits.append(recording.confidence_logits[row, :rounds].astype(np.float32))
            accepted.append(accepted_drafts(recording.draft_tokens[row, :rounds], text))
        done(len(asked))
        return ["" if tokenizer is None else tokenizer.decode(text.tolist()) for text in texts]

    converse(prompts, rows, answer)
    if not lengths:
        raise InputError("--prompts: every answer is one token, without a round; give other prompts")
    if not all(np.isfinite(values).all() for values in logits):
        raise InputError(f"--drafter {options.drafter}: gives confidences that are not finite")
    return RecordedRun(np.asarray(lengths), np.concatenate(logits), np.concatenate(accepted), law)
