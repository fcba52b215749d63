"""Prompt files: one JSON object a line, with exactly one of `input_ids`, `prompt`, `turns` and `messages`."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from dspark_jax.io.errors import InputError
from dspark_jax.io.files import numbered_jsonl
from dspark_jax.io.tokenizer import Tokenizer

_SHORTEST = 32

_KINDS = ("input_ids", "prompt", "turns", "messages")


@dataclasses.dataclass(frozen=True, eq=False)
class PromptEncoder:
    """How prompts become ids, and the limits they must keep: ids under `vocab_size`, `max_length` ids at most."""

    tokenizer: Tokenizer | None
    vocab_size: int
    max_length: int
    enable_thinking: bool | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Prompt:
    """One valid prompt line: exactly one of the four contents is not None.

    `prompt` is raw text, `turns` and `messages` go through the chat template. `location` is file and line.
    """

    location: str
    encoder: PromptEncoder
    input_ids: tuple[int, ...] | None = None
    prompt: str | None = None
    turns: tuple[str, ...] | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None

    @property
    def num_turns(self) -> int:
        """How many outputs the prompt asks for."""
        return 1 if self.turns is None else len(self.turns)

    def turn_messages(self, turn: int, replies: Sequence[str] = ()) -> list[Mapping[str, Any]]:
        """The conversation up to turn `turn` (from 0) of `turns`, with the replies to the earlier ones."""
        questions = self.turns or ()
        conversation: list[Mapping[str, Any]] = []
        for question, reply in zip(questions[:turn], replies[:turn], strict=True):
            conversation += [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
        return [*conversation, {"role": "user", "content": questions[turn]}]

    def turn_ids(self, turn: int = 0, replies: Sequence[str] = ()) -> list[int]:
        """Ids of what the model sees at turn `turn`, given the assistant's replies to the earlier turns.

        Raises:
          InputError: no ids, too many, or one outside the vocabulary; no tokenizer, or one without chat template.
        """
        ids = self._encode(turn, replies) if self.input_ids is None else list(self.input_ids)
        self._check(ids)
        return ids

    def _encode(self, turn: int, replies: Sequence[str]) -> list[int]:
        tokenizer = self.encoder.tokenizer
        if tokenizer is None:
            raise InputError(f"{self.location}: text needs a tokenizer, and the target has none; give input_ids")
        try:
            if self.prompt is not None:
                return tokenizer.encode(self.prompt)
            messages = self.turn_messages(turn, replies) if self.messages is None else self.messages
            return tokenizer.encode_chat(messages, enable_thinking=self.encoder.enable_thinking)
        except InputError as error:
            raise InputError(f"{self.location}: {error}") from error

    def _check(self, ids: Sequence[int]) -> None:
        if not ids:
            raise InputError(f"{self.location}: the prompt is empty; give at least one token")
        if len(ids) > self.encoder.max_length:
            raise InputError(
                f"{self.location}: the prompt has {len(ids)} tokens, more than the {self.encoder.max_length} that the "
                "context has room for; shorten it"
            )
        for index in ids:
            if not 0 <= index < self.encoder.vocab_size:
                raise InputError(
                    f"{self.location}: token id {index} is outside the vocabulary of {self.encoder.vocab_size}"
                )


def padded_length(length: int) -> int:
    """The padded length of a prompt, for each is a compiled program: 32, 48, 64, 96, 128, 192, …; from 32 on less than
    half too long."""
    size = _SHORTEST
    while size < length:
        size += size // 2 if size & (size - 1) == 0 else size // 3
    return size


def read_prompts(path: str | os.PathLike, encoder: PromptEncoder) -> list[Prompt]:
    """All prompts of a file, each validated, the first turn's length and ids included. Other keys are ignored.

    Raises:
      InputError: a missing, empty or malformed file or line, named with its number.
    """
    prompts = []
    for number, row in numbered_jsonl(path):
        prompt = parse_prompt(row, f"{path}, line {number}", encoder)
        prompt.turn_ids()
        prompts.append(prompt)
    return prompts


def parse_prompt(row: Mapping[str, Any], location: str, encoder: PromptEncoder) -> Prompt:
    """The prompt in one object. InputError, beginning with `location`, if it is not valid."""
    present = [kind for kind in _KINDS if row.get(kind) is not None]
    if len(present) != 1:
        found = " and ".join(present) if present else "none"
        raise InputError(f"{location}: expected exactly one of {', '.join(_KINDS)}; found {found}")
    kind, value = present[0], row[present[0]]
    match kind:
        case "input_ids":
            if not isinstance(value, list) or any(type(index) is not int for index in value):
                raise InputError(f"{location}: input_ids must be a list of integers")
            return Prompt(location, encoder, input_ids=tuple(value))
        case "prompt":
            if not isinstance(value, str):
                raise InputError(f"{location}: prompt must be a string")
            return Prompt(location, encoder, prompt=value)
        case "turns":
            if not isinstance(value, list) or not value or any(not isinstance(turn, str) for turn in value):
                raise InputError(f"{location}: turns must be a list of at least one string")
            return Prompt(location, encoder, turns=tuple(value))
        case _:
            check_messages(value, location)
            return Prompt(location, encoder, messages=tuple(value))


def check_messages(value: Any, location: str) -> None:
    """Raises an InputError unless the value is a list of objects with a string `role` and a string `content`."""
    if not isinstance(value, list) or not value:
        raise InputError(f"{location}: messages must be a list of at least one object")
    for index, message in enumerate(value):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise InputError(f"{location}: messages[{index}] must be an object with strings role and content")
