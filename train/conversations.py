"""Prompts and their turns, answered in padded batches of few shapes."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key

from dspark_jax.io import InputError, Prompt, padded_length


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """R rows as `dspark_jax.generate` takes them; those without a request ask for no token.

    `indices`: each row's prompt in its file, 0 where there is no request.
    """

    tokens: Int[np.ndarray, "R P"]
    lengths: Int[np.ndarray, "R"]
    max_tokens: Int[np.ndarray, "R"]
    indices: Int[np.ndarray, "R"]
    keys: Key[Array, "R"]


def make_batch(
    contexts: Sequence[list[int] | None],
    begin: int,
    turn: int,
    rows: int,
    room: int,
    max_new_tokens: int,
    keys: Key[Array, "prompts"],
) -> Batch:
    """Pads the contexts of prompts `begin`, … to a bucket; those that are None rest.

    `room`: positions of the target's context. `keys`: one for each prompt of the file.
    """
    longest = max(len(ids) for ids in contexts if ids is not None)
    tokens = np.zeros((rows, padded_length(longest)), np.int32)
    lengths, most, indices = np.ones(rows, np.int32), np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    for row, ids in enumerate(contexts):
        if ids is not None:
            tokens[row, : len(ids)], lengths[row] = ids, len(ids)
            most[row], indices[row] = min(max_new_tokens, room - len(ids)), begin + row
    chosen = keys[jnp.asarray(indices)]
    if turn:
        # A template may shorten earlier turns, so that a position returns; its noise must not.
        chosen = jax.vmap(jax.random.fold_in, (0, None))(chosen, turn)
    return Batch(tokens, lengths, most, indices, chosen)


@dataclasses.dataclass(frozen=True, eq=False)
class Answer:
    """The answer to one turn of the prompt in row `row` of its group. `stopped`: an EOS ended it.

    `messages`: the conversation, this reply included, of a prompt that goes through the chat template, else None.
    """

    row: int
    turn: int
    input_ids: list[int]
    output_ids: list[int]
    stopped: bool
    messages: list[Any] | None


# answer(contexts of a turn, None for a prompt that rests; the turn) -> new tokens, and whether an EOS ended them
Answering = Callable[[Sequence[list[int] | None], int], Iterator[tuple[list[int], bool]]]


def converse(answer: Answering, prompts: Sequence[Prompt]) -> Iterator[Answer]:
    """Runs every turn of a group of prompts, together, turn by turn."""
    replies: list[list[str]] = [[] for _ in prompts]
    for turn in range(max(prompt.num_turns for prompt in prompts)):
        contexts = [_context(prompt, turn, said) for prompt, said in zip(prompts, replies, strict=True)]
        if all(ids is None for ids in contexts):
            return
        for row, (output, stopped) in enumerate(answer(contexts, turn)):
            prompt, ids, messages = prompts[row], contexts[row], None
            if ids is None:
                continue
            if prompt.turns is not None or prompt.messages is not None:
                before = prompt.messages or prompt.turn_messages(turn, replies[row])
                reply = prompt.encoder.tokenizer.decode(output)
                replies[row].append(reply)
                messages = [*before, {"role": "assistant", "content": reply}]
            yield Answer(row, turn, ids, output, stopped, messages)


def _context(prompt: Prompt, turn: int, replies: list[str]) -> list[int] | None:
    """Ids of a turn, or None where there is no such turn or, after the first, no more room for it."""
    if turn >= prompt.num_turns or len(replies) < turn:
        return None
    try:
        return prompt.turn_ids(turn, replies)
    except InputError:
        if turn == 0:
            raise
        return None
