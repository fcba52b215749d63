"""The collectives of a compiled program, read from its text, and the time that they take.

The model of the time: a ring. Of n chips, each sends (n-1)/n of the whole array for an all-gather, a reduce-scatter or
an all-to-all, twice that for an all-reduce, and all of it once for a permutation. A group of chips lies on the fewest
dimensions of the topology that hold so many, and uses their share of the chip's links in both directions; a permutation
uses one dimension's. Latency and missing wrap-around links cost nothing.
"""

import dataclasses
import math
import re
from collections.abc import Sequence

from dspark_jax.planning.chips import Topology

_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
          "collective-broadcast")  # fmt: skip
_BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128}

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][a-z0-9-]*)\((.*)$")
_SHAPE = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|condition|body|branch_computations|true_computation|false_computation)="
                     r"(\{[^}]*\}|%?[\w.-]+)")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Collective:
    """Collectives of one kind and size that a program runs `count` times.

    `bytes`: of the whole array, as gathered or before it is scattered. `group`: chips that take part together.
    `counted_once`: in a loop whose number of turns is unknown, of which one is counted.
    """

    kind: str
    bytes: int
    group: int
    count: int
    counted_once: bool = False


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    shape: str
    operation: str
    rest: str

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.-]+)", self.rest.split(")")[0])

    @property
    def called(self) -> list[str]:
        names = " ".join(match[1] for match in _CALLED.finditer(self.rest))
        return [name.strip("%{},") for name in names.replace(",", " ").split()]

    def attribute(self, name: str) -> str | None:
        match = re.search(rf"\b{name}=%?([\w.-]+)", self.rest)
        return None if match is None else match[1]


def parse_collectives(program: str, devices: int) -> list[Collective]:
    """All collectives in the text of a compiled program (`Compiled.as_text()`) for so many devices; the largest total
    first.

    One in a loop is counted as often as the loop turns, if that can be told, see `_turns`. Pieces of an asynchronous
    collective share a channel and are one, also where some of them stand in a loop that runs meanwhile.
    """
    entry, computations = _computations(program)
    found: dict[str, Collective] = {}

    def visit(name: str, turns: int, known: bool) -> None:
        for index, instruction in enumerate(computations.get(name, ())):
            kind = instruction.operation.removesuffix("-start")
            if instruction.operation == "while":
                inner = _turns(instruction, computations)
                visit(instruction.attribute("body") or "", turns * (inner or 1), known and inner is not None)
            elif kind in _KINDS:
                # TPU writes a reduce-scatter as a fusion of this name, around an all-reduce and a slice.
                if kind == "all-reduce" and "reduce-scatter" in name:
                    kind = "reduce-scatter"
                group = _group(instruction.rest, devices)
                new = Collective(kind, _whole(kind, instruction, group), group, turns, not known)
                channel = instruction.attribute("channel_id") or f"{name} {index}"
                found[channel] = min(new, found.get(channel, new), key=lambda each: each.count)
            else:
                for called in instruction.called:
                    visit(called, turns, known)

    visit(entry, 1, True)
    total: dict[Collective, int] = {}
    for each in found.values():
        alike = dataclasses.replace(each, count=1)
        total[alike] = total.get(alike, 0) + each.count
    collectives = [dataclasses.replace(each, count=count) for each, count in total.items() if each.group > 1]
    return sorted(collectives, key=lambda each: -each.bytes * each.count)


def _computations(program: str) -> tuple[str, dict[str, list[_Instruction]]]:
    """The entry's name, and the instructions of every computation."""
    entry, computations, current = "", {}, None
    for line in program.splitlines():
        if (header := _COMPUTATION.match(line)) is not None:
            current = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif current is not None and (match := _INSTRUCTION.match(line)) is not None:
            current.append(_Instruction(match[1], match[2], match[3], match[4]))
    return entry, computations


def _turns(loop: _Instruction, computations: dict[str, list[_Instruction]]) -> int | None:
    """Turns of a while loop, if they are known: XLA says so, or a condition `index < constant` over an index to which
    the body adds a constant. Such an index is taken to begin at 0, as in all loops of JAX's scans and XLA's own.
    """
    if (match := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest)) is not None:
        return int(match[1])
    condition, body = (
        {each.name: each for each in computations.get(loop.attribute(part) or "", ())} for part in ("condition", "body")
    )
    compared = [each for each in condition.values() if each.operation == "compare" and "direction=LT" in each.rest]
    if len(compared) != 1 or len(compared[0].operands) != 2:
        return None
    index, limit = (condition.get(name) for name in compared[0].operands)
    place = None if index is None else index.attribute("index")
    end, results = _constant(limit), list(body.values())[-1].operands if body else []
    if place is None or end is None or int(place) >= len(results):
        return None
    added = body.get(results[int(place)])
    if added is None or added.operation != "add":
        return None
    steps = [step for name in added.operands if (step := _constant(body.get(name))) is not None]
    return -(-end // steps[0]) if steps and steps[0] > 0 else None


def _constant(instruction: _Instruction | None) -> int | None:
    if instruction is None or instruction.operation != "constant":
        return None
    match = re.match(r"-?\d+\)", instruction.rest)
    return None if match is None else int(match[0][:-1])


def _group(text: str, devices: int) -> int:
    """Chips in each group of a collective."""
    if (match := re.search(r"replica_groups=\[\d+,(\d+)\]<=", text)) is not None:
        return int(match[1])
    if (match := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", text)) is not None:
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", match[1])}
        return math.prod(sizes.get(name, 1) for name in re.findall(r"'([^']+)'", match[2]))
    if (match := re.search(r"replica_groups=\{\{([\d,]+)\}", text)) is not None:
        return len(match[1].split(","))
    if "source_target_pairs={}" in text:
        return 1
    return devices


def _whole(kind: str, instruction: _Instruction, group: int) -> int:
    """Bytes of the whole array."""
    sizes = [_bytes(*shape) for shape in _SHAPE.findall(instruction.shape)]
    if instruction.operation in ("all-gather-start", "collective-permute-start"):
        # Operands, results and maybe two contexts.
        sizes = [size for size in sizes if size > 4] or sizes
        sizes = sizes[len(sizes) // 2 :]
    total = sum(sizes)
    return total * group if instruction.operation == "reduce-scatter" else total


def _bytes(kind: str, dimensions: str) -> int:
    digits = re.search(r"\d+", kind)
    bits = _BITS.get(kind) or (int(digits[0]) if digits else 0)
    return -(-math.prod(int(size) for size in dimensions.split(",") if size) * bits // 8)


def dimensions_used(topology: Topology, group: int) -> int:
    """The fewest dimensions of a topology that hold a group of chips."""
    held = 1
    for used, size in enumerate(sorted(topology.shape, reverse=True), start=1):
        held *= size
        if held >= group:
            return used
    return len(topology.shape)


def seconds(collective: Collective, topology: Topology) -> float:
    """Of all runs of a collective; see the module."""
    n, chip = collective.group, topology.chip
    sent = {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1.0, "collective-broadcast": 1.0}
    used = 1 if collective.kind == "collective-permute" else dimensions_used(topology, n)
    share = used / chip.dimensions
    moved = collective.bytes * sent.get(collective.kind, (n - 1) / n)
    return collective.count * moved / (chip.link_bandwidth * share)


def total_seconds(collectives: Sequence[Collective], topology: Topology) -> float:
    return sum(seconds(collective, topology) for collective in collectives)
