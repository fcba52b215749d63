"""From prompts to padded batches of few shapes."""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key
from tqdm import tqdm

from dspark_jax.io import InputError, Prompt, padded_length, read_prompts
from infer.models import Description
from infer.options import SamplingOptions


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """One turn of the prompt at place `index` of its file."""

    index: int
    turn: int
    prompt: Prompt
    ids: list[int]


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """R requests as `dspark_jax.generate` takes them; rows beyond the real requests ask for no token."""

    tokens: jax.Array
    lengths: jax.Array
    keys: jax.Array
    max_tokens: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tokens.shape


def read_prompt_file(
    path: Path, description: Description, options: SamplingOptions, limit: int | None = None
) -> list[Prompt]:
    """All prompts of a file, of at most `limit` tokens: by default what leaves room for a new one in the context."""
    return read_prompts(path, description.target.prompt_encoder(options.enable_thinking, limit))


def make_batch(
    requests: Sequence[Request],
    rows: int,
    context: int,
    max_new_tokens: int,
    keys: Key[Array, "prompts"],
    shortest: int = 0,
) -> Batch:
    """Pads to `rows` requests and to a bucket of prompt lengths, one of at least `shortest`.

    `keys`: one for each prompt of the file (`dspark_jax.request_keys`), so that samples do not depend on the batch.
    """
    longest = max(shortest, *(len(request.ids) for request in requests))
    tokens = np.zeros((rows, padded_length(longest)), np.int32)
    lengths, most = np.ones(rows, np.int32), np.zeros(rows, np.int32)
    indices = np.zeros(rows, np.int32)
    for row, request in enumerate(requests):
        tokens[row, : len(request.ids)] = request.ids
        lengths[row] = len(request.ids)
        most[row] = min(max_new_tokens, context - len(request.ids))
        indices[row] = request.index
    chosen, turn = keys[jnp.asarray(indices)], requests[0].turn
    if turn:
        # A template may shorten earlier turns, so a position alone could return.
        chosen = jax.vmap(jax.random.fold_in, (0, None))(chosen, turn)
    return Batch(jnp.asarray(tokens), jnp.asarray(lengths), chosen, jnp.asarray(most))


def converse(
    prompts: Sequence[Prompt],
    rows: int,
    answer: Callable[[list[Request]], list[str]],
    known: Mapping[tuple[int, int], str] | None = None,
    no_room: Callable[[int, int], None] | None = None,
) -> None:
    """Runs every turn of every prompt, at most `rows` together, all of one turn number.

    `answer` replies to the requests, in order. `known`: replies by (index, turn) that need no request. `no_room` is
    told of a later turn that the context has no room for, which gets no reply; a warning is printed.
    """
    known = known or {}
    pending = [i for i, p in enumerate(prompts) if any((i, turn) not in known for turn in range(p.num_turns))]
    for group in _groups(pending, rows):
        replies: dict[int, list[str]] = {index: [] for index in group}
        for turn in range(max(prompts[index].num_turns for index in group)):
            requests = []
            for index in group:
                prompt = prompts[index]
                if turn >= prompt.num_turns:
                    continue
                if (index, turn) in known:
                    replies[index].append(known[index, turn])
                    continue
                try:
                    requests.append(Request(index, turn, prompt, prompt.turn_ids(turn, replies[index])))
                except InputError as error:
                    if turn == 0:
                        raise
                    tqdm.write(f"warning: turn {turn} of {error}", file=sys.stderr)
                    replies[index].append("")
                    if no_room is not None:
                        no_room(index, turn)
            if requests:
                for request, reply in zip(requests, answer(requests), strict=True):
                    replies[request.index].append(reply)


def _groups(items: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for begin in range(0, len(items), size):
        yield items[begin : begin + size]
