"""What is simulated: chains and trees on their tables, policies, and loads that the tables have room for."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from dspark_jax.io import InputError
from dspark_jax.scheduling.policy import Policy, PolicyKind
from dspark_jax.scheduling.simulation import poisson_arrivals
from dspark_jax.scheduling.throughput import StepTable
from infer.simulation_options import SimulateOptions

Kind = Literal["chain", "tree"]
PLAIN = "plain"
# The policy that chains and trees are compared by.
REFERENCE = PolicyKind.STALE_CAPACITY.value


@dataclasses.dataclass(frozen=True, eq=False)
class Drafts:
    """Chains or trees: nodes of each, the root included, and the table that says what a step with them takes.

    `modelled`: nobody has measured the table.
    """

    kind: Kind
    nodes: int
    path: Path
    table: StepTable
    modelled: bool = False

    @property
    def table_name(self) -> str:
        """The table's file, as a report names it."""
        return f"{self.path.name} (modelled, not measured)" if self.modelled else self.path.name

    @property
    def largest(self) -> int:
        """Tokens of the largest step."""
        return int(self.table.capacities[-1])

    @property
    def room(self) -> int:
        """Requests whose nodes all fit in a step."""
        return self.largest // self.nodes


@dataclasses.dataclass(frozen=True, eq=False)
class Load:
    """Requests of a replay and when they arrive. `slots`: in a closed loop, the concurrency. `rate`: Poisson's."""

    kind: Literal["closed", "poisson", "trace"]
    rate: float | None
    slots: int
    requests: Int[np.ndarray, "n"]
    arrivals: Float[np.ndarray, "n"]

    @property
    def label(self) -> str:
        match self.kind:
            case "closed":
                return f"{self.slots} at once"
            case "poisson":
                return f"{self.rate:g} a second"
            case "trace":
                return "trace"


def chosen_slots(options: SimulateOptions, drafts: Sequence[Drafts]) -> tuple[list[int], int]:
    """The concurrencies, ascending, and the slots of open loops; each must have room in every table."""
    for each in drafts:
        if not each.room:
            needs, remedy = f"one request's {each.nodes} tokens", "measure more"
            if each.kind == "tree":
                needs = f"one tree's {each.nodes} nodes"
                remedy = "name a larger --tree-table, of `profile --slots` with --tree"
            raise InputError(f"{each.path}: capacities end at {each.largest}, less than {needs}; {remedy}")
    narrowest = min(drafts, key=lambda each: each.room)
    powers = [2**i for i in range(narrowest.room.bit_length()) if 2 * 2**i <= options.requests]
    chosen = sorted(set(options.concurrency)) or powers or [1]
    slots = chosen[-1] if options.slots is None else options.slots
    for name, value in (("concurrency", chosen[-1]), ("slots", slots)):
        if value > narrowest.room:
            raise InputError(
                f"--{name} {value}: needs {value * narrowest.nodes} tokens a step with a {narrowest.kind} each, but "
                f"{narrowest.path} ends at {narrowest.largest}; take at most {narrowest.room}, or measure more"
            )
    if options.requests < 2 * chosen[-1]:
        raise InputError(
            f"--requests {options.requests}: must be at least {2 * chosen[-1]}, twice the largest concurrency"
        )
    return chosen, slots


def policies_of(drafts: Drafts, gamma: int, thresholds: Sequence[float]) -> dict[str, Policy]:
    """Every policy by its name in the report; a fixed length of 1 is what one multi-token-prediction head does.

    Plain decoding, which is the same for both, is among the chains'.
    """
    plain = {PLAIN: Policy(kind=PolicyKind.FIXED, length=0)} if drafts.kind == "chain" else {}
    fixed = {f"fixed {length}": Policy(kind=PolicyKind.FIXED, length=length) for length in (1, gamma)}
    static = {f"threshold {value:g}": Policy(kind=PolicyKind.THRESHOLD, threshold=value) for value in thresholds}
    scheduled = (PolicyKind.EARLY_STOP, PolicyKind.GLOBAL_BEST, PolicyKind.STALE_CAPACITY)
    return plain | fixed | static | {kind.value: Policy(kind=kind) for kind in scheduled}


def loads_of(
    options: SimulateOptions, recorded: int, concurrencies: Sequence[int], slots: int, trace: np.ndarray | None
) -> Iterator[Load]:
    """The closed loops, then the open ones. The recorded requests come in the same order in all of them."""
    count = max(options.requests, 0 if trace is None else len(trace))
    rng = np.random.default_rng(options.seed)
    passes = -(-count // recorded)
    order = np.concatenate([rng.permutation(recorded) for _ in range(passes)])
    requests = order[: options.requests]
    for concurrency in concurrencies:
        yield Load("closed", None, concurrency, requests, np.zeros(len(requests)))
    for rate in options.rate:
        yield Load("poisson", rate, slots, requests, poisson_arrivals(rate, len(requests), rng))
    if trace is not None:
        yield Load("trace", None, slots, order[: len(trace)], trace)
