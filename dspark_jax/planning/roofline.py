"""The time of a program, modelled: a roofline.

The parts of a program follow each other. In each, arithmetic at the chip's peak and traffic at its memory's bandwidth
overlap perfectly, so a part takes the longer of the two. Collectives come on top, as if nothing overlapped with them;
see `collectives.seconds`. Nothing else takes time: no start of a program or a kernel, no host, no input pipeline. It is
a bound that shows what limits a step, not a measurement.
"""

import dataclasses
from collections.abc import Mapping

from dspark_jax.planning.chips import Peaks
from dspark_jax.planning.products import Cost


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds of a program on each chip, and what they are made of.

    `compute`, `memory`: of all its arithmetic and of all its traffic, if either were alone. `collectives`: on top.
    `useful`: floating-point operations that the mathematics needs, on one chip.
    """

    seconds: float
    compute: float
    memory: float
    collectives: float
    useful: float

    def model_flops_utilization(self, chip: Peaks) -> float:
        """MFU: useful arithmetic as a share of what the chip could do in the time."""
        return self.useful / (chip.flops * self.seconds)


def part_seconds(cost: Cost, chip: Peaks) -> float:
    return max(cost.executed / chip.flops, cost.bytes / chip.memory_bandwidth)


def estimate(costs: Mapping[str, Cost], chip: Peaks, collectives: float = 0.0) -> Estimate:
    """Of a program's parts, with seconds of collectives."""
    total = sum(costs.values(), Cost())
    return Estimate(
        seconds=sum(part_seconds(cost, chip) for cost in costs.values()) + collectives,
        compute=total.executed / chip.flops,
        memory=total.bytes / chip.memory_bandwidth,
        collectives=collectives,
        useful=total.useful,
    )
