"""Calibration files: what is read back, and what is refused."""

import dataclasses
import json

import numpy as np
import pytest

from dspark_jax import TreeKind, TreeSpec
from dspark_jax.io import InputError
from dspark_jax.io.calibration import CalibrationLaw, EdgeMap, edge_map_fields, load_calibration

LAW = CalibrationLaw(
    target_fingerprint="t", drafter_fingerprint="d", verifier="coupled", temperature=0.7, top_k=0, top_p=0.95, min_p=0.0
)
TREE = TreeSpec(k=3, budget=16)
FIELDS = {
    "temperatures": [1.0, 0.5, 2],
    "platt": {"slopes": [1.5, 0, 2], "offsets": [-1.0, 0.5, 0]},
    "law": dataclasses.asdict(LAW) | {"device": "1 x cpu"},
    "edge_map": edge_map_fields(EdgeMap(0.8, -0.1, TREE)),
}


@pytest.fixture
def written(tmp_path):
    def write(**changes):
        path = tmp_path / "calibration.json"
        path.write_text(json.dumps(FIELDS | changes))
        return path

    return write


def test_what_is_read_back(written):
    calibration = load_calibration(written(), 3, LAW, TREE)
    np.testing.assert_array_equal(calibration.temperatures, np.array([1, 0.5, 2], np.float32))
    assert calibration.temperatures.dtype == np.float32
    assert calibration.edge_map == EdgeMap(0.8, -0.1, TREE)
    survival = calibration.survival
    np.testing.assert_array_equal(survival.slopes, [1.5, 0, 2])
    np.testing.assert_array_equal(survival.offsets, [-1, 0.5, 0])
    np.testing.assert_allclose((survival.alpha, survival.beta), (0.8, -0.1))


def test_temperatures_are_used_where_there_is_no_platt_scaling(written):
    survival = load_calibration(written(platt=None, edge_map=None), 3, LAW).survival
    np.testing.assert_array_equal(survival.slopes, [1, 2, 0.5])
    np.testing.assert_array_equal(survival.offsets, [0, 0, 0])
    assert (survival.alpha, survival.beta) == (1, 0)


def test_a_file_without_a_law_is_taken_only_unchecked(written):
    path = written(law=None, edge_map=None)
    assert load_calibration(path, 3).edge_map is None
    with pytest.raises(InputError, match="law is missing"):
        load_calibration(path, 3, LAW)


def refused(path, *words, law=LAW, tree=TREE, num_drafts=3):
    with pytest.raises(InputError) as raised:
        load_calibration(path, num_drafts, law, tree)
    for word in (str(path), *words):
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("target_fingerprint", "x"),
        ("drafter_fingerprint", "x"),
        ("verifier", "rejection"),
        ("temperature", 0.0),
        ("top_k", 5),
        ("top_p", 1.0),
        ("min_p", 0.1),
    ],
)
def test_another_law(written, name, value):
    refused(written(), f"law.{name}", str(getattr(LAW, name)), law=dataclasses.replace(LAW, **{name: value}))
    rest = {key: kept for key, kept in FIELDS["law"].items() if key != name}
    refused(written(law=rest), f"law.{name} is None")


@pytest.mark.parametrize("value", [0, -1, "1", None, True, [1], 1e300, 10**400, 1e-300])
def test_temperatures_that_are_no_positive_number(written, value):
    refused(written(temperatures=[1, value, 1]), "temperatures[1]")


@pytest.mark.parametrize(
    ("platt", "words"),
    [
        ([1, 2, 3], ["platt must be an object"]),
        ({"slopes": [1, 1, 1]}, ["platt.offsets must be a list"]),
        ({"slopes": [1, -1, 1], "offsets": [0, 0, 0]}, ["platt.slopes[1]", "at least 0", "-1"]),
        ({"slopes": [1, 1, 1], "offsets": [0, 0, "x"]}, ["platt.offsets[2]", "x"]),
        ({"slopes": [1, 1], "offsets": [0, 0, 0]}, ["platt.slopes of 2 positions", "drafts 3"]),
    ],
)
def test_platt_scaling_that_is_none(written, platt, words):
    refused(written(platt=platt), *words)


@pytest.mark.parametrize("value", [None, [], 1.0, {"0": 1}])
def test_temperatures_that_are_no_list(written, value):
    refused(written(temperatures=value), "temperatures must be a list")


def test_another_number_of_positions(written):
    refused(written(), "3 positions", "drafts 7", num_drafts=7)


def test_another_tree(written):
    for tree in (dataclasses.replace(TREE, budget=32), TreeSpec(kind=TreeKind.JETSPEC, k=3, budget=16)):
        refused(written(), "edge_map", "budget 16", tree=tree)
    refused(written(edge_map=None), "edge_map", "no trees")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"alpha": -1}, "edge_map.alpha"),
        ({"alpha": None}, "edge_map.alpha"),
        ({"beta": "x"}, "edge_map.beta"),
        ({"tree": None}, "edge_map.tree"),
        ({"tree": {"kind": "beam"}}, "edge_map.tree"),
        ({"tree": {"depth": 3}}, "edge_map.tree"),
    ],
)
def test_a_malformed_edge_map(written, changes, word):
    refused(written(edge_map=FIELDS["edge_map"] | changes), word)
    refused(written(edge_map=[1]), "edge_map must be an object")
