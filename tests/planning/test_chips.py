import pytest

from dspark_jax.planning.chips import CHIPS, parse_topology
from dspark_jax.planning.products import Cost
from dspark_jax.planning.roofline import estimate


def test_topologies():
    topology = parse_topology("v5p:2x2x4")
    assert (topology.chip, topology.chips, topology.name) == (CHIPS["v5p"], 16, "v5p:2x2x4")
    assert parse_topology("v5e:8x8").shape == (8, 8)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("v5p", "write a chip and a shape"),
        ("v5p:", "write a chip and a shape"),
        ("v5p:2x2x", "write a chip and a shape"),
        ("v9:2x2", "unknown chip v9; known: v4, v5e, v5p, v6e"),
        ("v5e:4x4x4", "v5e has topologies of 2 dimensions, not 3"),
        ("v5p:8", "2 or 3 dimensions, not 1"),
        ("v5e:0x4", "dimension of 0"),
    ],
)
def test_other_topologies(text, names):
    with pytest.raises(ValueError, match=names):
        parse_topology(text)


def test_a_part_takes_the_longer_of_arithmetic_and_traffic():
    chip = CHIPS["v5e"]
    arithmetic = Cost(useful=chip.flops, executed=2 * chip.flops, bytes=chip.memory_bandwidth)
    traffic = Cost(useful=0, executed=chip.flops, bytes=3 * chip.memory_bandwidth)
    found = estimate({"a": arithmetic, "b": traffic}, chip, collectives=5.0)
    assert (found.seconds, found.compute, found.memory) == (2 + 3 + 5, 3, 4)
    assert found.model_flops_utilization(chip) == 1 / 10
