"""Chips as their makers publish them, and the topologies that TPUs are sold in."""

import dataclasses
import math
import re

_GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peaks:
    """Published peaks of one chip.

    `flops`: bfloat16 operations a second, without sparsity. `memory_bandwidth`: bytes a second. `device_kinds`: what
    JAX calls it.
    """

    name: str
    flops: float
    memory_bandwidth: float
    source: str
    device_kinds: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip(Peaks):
    """A TPU chip.

    `memory`: bytes of HBM. `link_bandwidth`: bytes a second that leave the chip over all its ICI links together (as
    many arrive at the same time). `dimensions`: of the torus. `chip_config`: libtpu's name for "both cores are one
    device", where that is not its default.
    """

    memory: int
    link_bandwidth: float
    dimensions: int
    chip_config: str | None = None


# Google states ICI bandwidth in both directions together; half of it leaves a chip.
CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            name="v4",
            flops=275e12,
            memory=32 * _GIB,
            memory_bandwidth=1228e9,
            link_bandwidth=300e9,
            dimensions=3,
            source="https://cloud.google.com/tpu/docs/v4 (ICI: 2400 Gbps)",
            device_kinds=("TPU v4",),
            chip_config="megacore",
        ),
        Chip(
            name="v5e",
            flops=197e12,
            memory=16 * _GIB,
            memory_bandwidth=819e9,
            link_bandwidth=200e9,
            dimensions=2,
            source="https://cloud.google.com/tpu/docs/v5e (ICI: 400 GBps in both directions)",
            device_kinds=("TPU v5 lite", "TPU v5e"),
        ),
        Chip(
            name="v5p",
            flops=459e12,
            memory=95 * _GIB,
            memory_bandwidth=2765e9,
            link_bandwidth=600e9,
            dimensions=3,
            source="https://cloud.google.com/tpu/docs/v5p (ICI: 1200 GBps in both directions)",
            device_kinds=("TPU v5", "TPU v5p"),
        ),
        Chip(
            name="v6e",
            flops=918e12,
            memory=32 * _GIB,
            memory_bandwidth=1638e9,
            link_bandwidth=400e9,
            dimensions=2,
            source="https://cloud.google.com/tpu/docs/v6e (ICI: 800 GBps in both directions)",
            device_kinds=("TPU v6 lite", "TPU v6e"),
        ),
    )
}

_GPUS = (
    Peaks(
        name="A100 40GB",
        flops=312e12,
        memory_bandwidth=1555e9,
        source="https://www.nvidia.com/en-us/data-center/a100/",
        device_kinds=("NVIDIA A100-SXM4-40GB",),
    ),
    Peaks(
        name="A100 80GB",
        flops=312e12,
        memory_bandwidth=2039e9,
        source="https://www.nvidia.com/en-us/data-center/a100/",
        device_kinds=("NVIDIA A100-SXM4-80GB",),
    ),
    Peaks(
        name="L4",
        flops=121e12,
        memory_bandwidth=300e9,
        source="https://www.nvidia.com/en-us/data-center/l4/",
        device_kinds=("NVIDIA L4",),
    ),
    Peaks(
        name="H100 SXM",
        flops=989e12,
        memory_bandwidth=3350e9,
        source="https://www.nvidia.com/en-us/data-center/h100/",
        device_kinds=("NVIDIA H100 80GB HBM3",),
    ),
    Peaks(
        name="H200 SXM",
        flops=989e12,
        memory_bandwidth=4800e9,
        source="https://www.nvidia.com/en-us/data-center/h200/",
        device_kinds=("NVIDIA H200",),
    ),
)


def peaks_of(device_kind: str) -> Peaks | None:
    """Of a device by JAX's name for it (`jax.Device.device_kind`); None for one that is not listed."""
    return next((chip for chip in (*CHIPS.values(), *_GPUS) if device_kind in chip.device_kinds), None)


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice of `shape` chips, such as 4x4x4."""

    chip: Chip
    shape: tuple[int, ...]

    @property
    def chips(self) -> int:
        return math.prod(self.shape)

    @property
    def name(self) -> str:
        """As libtpu reads it."""
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"


def parse_topology(text: str) -> Topology:
    """The topology of a text such as "v5p:4x4x4".

    Raises:
      ValueError: another form, an unknown chip, or more dimensions than its torus has.
    """
    match = re.fullmatch(r"([a-z0-9]+):(\d+(?:x\d+)*)", text)
    if match is None:
        raise ValueError(f"{text!r} is no topology; write a chip and a shape, such as v5p:4x4x4 or v5e:8x8")
    chip = CHIPS.get(match[1])
    if chip is None:
        raise ValueError(f"{text}: unknown chip {match[1]}; known: {', '.join(CHIPS)}")
    shape = tuple(map(int, match[2].split("x")))
    if 0 in shape:
        raise ValueError(f"{text}: a dimension of 0")
    if not 2 <= len(shape) <= chip.dimensions:
        wanted = " or ".join(str(n) for n in range(2, chip.dimensions + 1))
        raise ValueError(f"{text}: {chip.name} has topologies of {wanted} dimensions, not {len(shape)}")
    return Topology(chip, shape)
