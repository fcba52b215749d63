"""`python -m train device-check`: does everything work on this machine's device, and how fast?"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from dspark_jax.config import TreeSpec
from dspark_jax.io import InputError, write_json
from dspark_jax.io.outputs import check_output
from dspark_jax.io.report import environment
from train.device_decoding import decoding_line, measure_decoding
from train.device_parity import measure_parity, parity_line
from train.device_shapes import Shape, read_shape
from train.device_training import measure_training, training_line

_PROGRAM = "train device-check"
_TREE = TreeSpec(k=4, budget=32)
_MOST = {"context": 2**20, "rounds": 2**16, "repeats": 10**6}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceCheckConfig:
    """Check and time decoding and training on this machine's device, with random weights: nothing is downloaded.

    First a small model must decode equally with and without drafts. Then for each shape: a train step over one
    document; and for each number of requests a plain step, a pass as wide as a chain's verification, a round with a
    chain and one with a PCTree of 32 nodes, in turns. The file is written after each part. A part for which the device
    has not enough memory is reported as that. Ends with 1 if the small model fails.
    """

    output: Path = Path("device_check.json")
    """JSON file to write."""
    shapes: tuple[str, ...] = ("qwen3_0.6b", "qwen3_4b")
    """Configs of `fit`, shipped ones by name: the models' shapes, their dtype, a document's tokens and anchors."""
    requests: tuple[int, ...] = (1, 8)
    """Requests decoded together."""
    context: int = 1024
    """Tokens of each request before the first timed round."""
    rounds: int = 32
    """Rounds of each timed loop."""
    repeats: int = 5
    """Turns."""

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            if not 1 <= getattr(self, name) <= most:
                raise InputError(f"--{name} {getattr(self, name)}: must be in 1..{most}")
        for requests in self.requests:
            if not 1 <= requests <= 2**16:
                raise InputError(f"--requests {requests}: must be in 1..{2**16}")


@dataclasses.dataclass(frozen=True)
class _Part:
    """One thing to measure. `line`: what is said of it."""

    name: str
    measure: Callable[[], dict[str, Any]]
    line: Callable[[dict[str, Any]], str]


def main(config: DeviceCheckConfig) -> None:
    """Runs the command.

    Raises:
      SystemExit: 1 where drafts changed a token, or bfloat16 is off.
    """
    check_output(config.output)
    shapes = [read_shape(name, _PROGRAM) for name in config.shapes]
    parts = list(_parts(config, shapes))
    report: dict[str, Any] = environment() | {"repeats": config.repeats, "parts": {}}
    with tqdm(parts, desc="device check", unit="part") as bar:
        for part in bar:
            bar.set_postfix_str(part.name)
            report["parts"][part.name] = found = _measured(part)
            write_json(config.output, report)
            line = f"{part.name}: {found.get('out_of_memory') or part.line(found)}"
            tqdm.write(line, file=sys.stdout)
    print(f"wrote {config.output}", file=sys.stderr)
    if not report["parts"]["parity"].get("passed"):
        raise SystemExit(1)


def _parts(config: DeviceCheckConfig, shapes: list[Shape]) -> Iterator[_Part]:
    """In the order of what they tell, for a time limit may cut the last ones off."""
    yield _Part("parity", measure_parity, parity_line)
    for shape in shapes:
        yield _Part(
            f"{shape.name}, training", functools.partial(measure_training, shape, config.repeats), training_line
        )
    for requests in config.requests:
        for shape in shapes:
            run = functools.partial(
                measure_decoding, shape, _TREE, requests, config.context, config.rounds, config.repeats
            )
            yield _Part(f"{shape.name}, decoding {requests}", run, decoding_line)


def _measured(part: _Part) -> dict[str, Any]:
    """What a part found, or that the device's memory is too small for it, and the allocator's account after it."""
    try:
        found = part.measure()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        found = {"out_of_memory": f"out of memory ({str(error).splitlines()[0]})"}
    stats = jax.devices()[0].memory_stats() or {}
    # The allocator never forgets a peak: it is that of all parts so far.
    names = ("bytes_in_use", "peak_bytes_in_use", "bytes_limit")
    return found | {"allocator": {name: stats[name] for name in names if name in stats}}
