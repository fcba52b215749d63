"""What the engine is asked for, and what it answers."""

import dataclasses
from collections.abc import Callable, Hashable, Sequence

import jax


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """One prompt. `id` must be unique among the engine's unfinished requests.

    `key`: a typed key of its own (`sampling.request_keys`), so that its samples do not depend on its company. `stop`
    is asked about the new tokens so far, and ends the request after as many of them as it returns.
    """

    id: Hashable
    input_ids: Sequence[int]
    key: jax.Array
    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: Callable[[Sequence[int]], int | None] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """A finished request. `finish_reason`: stop, length, cancelled, or error, with `error` saying why in one line.

    `accepted_lengths`, `verified_nodes`: of each round, bonus and root included, as in `Generation`.
    """

    id: Hashable
    tokens: tuple[int, ...]
    finish_reason: str
    accepted_lengths: tuple[int, ...] = ()
    verified_nodes: tuple[int, ...] = ()
    error: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Update:
    """New tokens of a request; `result` with the last of them."""

    id: Hashable
    tokens: tuple[int, ...]
    result: Result | None = None
