"""Step tables: what is read back, and what is refused."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import TreeSpec
from dspark_jax.io import InputError
from dspark_jax.io.step_table import StepTableLaw, is_modelled, load_step_table, save_step_table
from dspark_jax.scheduling.throughput import StepTable

LAW = StepTableLaw(
    device="1 x cpu",
    mesh="data=1,model=1",
    dtype="float32",
    target_fingerprint="t",
    drafter_fingerprint="d",
    tree=TreeSpec(k=3, budget=8),
    slots=2,
    buckets=(4, 8, 16),
)
TABLE = StepTable(jnp.asarray(LAW.buckets, jnp.int32), jnp.asarray([30.5, 20, 9], jnp.float32))


@pytest.fixture
def written(tmp_path):
    def write(**changes):
        path = tmp_path / "table.json"
        save_step_table(path, TABLE, LAW, context=32)
        # json writes NaN and Infinity as other programs do.
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        return path

    return write


def refused(path, *words, law=LAW):
    with pytest.raises(InputError) as raised:
        load_step_table(path, law)
    for word in (str(path), "measure again", *words):
        assert word in str(raised.value)
    assert "\n" not in str(raised.value)


def test_what_is_read_back(written):
    table = load_step_table(written(), LAW)
    np.testing.assert_array_equal(table.capacities, TABLE.capacities)
    np.testing.assert_array_equal(table.steps_per_second, TABLE.steps_per_second)
    assert (table.capacities.dtype, table.steps_per_second.dtype) == (jnp.int32, jnp.float32)


def test_modelled_rates_are_marked_and_refused_by_who_needs_measured_ones(written, tmp_path):
    path, modelled = tmp_path / "modelled.json", dataclasses.replace(LAW, modelled=True)
    save_step_table(path, TABLE, modelled)
    assert is_modelled(json.loads(path.read_text())["law"])
    np.testing.assert_array_equal(load_step_table(path, modelled).capacities, TABLE.capacities)
    refused(path, "law.modelled", "modelled, not measured")
    # Tables from before there were modelled ones do not say.
    law = json.loads(written().read_text())["law"]
    del law["modelled"]
    load_step_table(written(law=law), LAW)
    assert not is_modelled(law)


def test_plain_rates_are_kept_and_checked(written, tmp_path):
    path = tmp_path / "plain.json"
    plain = TABLE.replace(plain_steps_per_second=jnp.asarray([50, 40, 30], jnp.float32))
    save_step_table(path, plain, LAW)
    np.testing.assert_array_equal(load_step_table(path, LAW).plain_steps_per_second, [50, 40, 30])
    assert load_step_table(written(), LAW).plain_steps_per_second is None
    refused(written(plain_steps_per_second=[1, 2, 0]), "plain_steps_per_second[2]")
    refused(written(plain_steps_per_second=[1, 2]), "plain_steps_per_second")


def test_the_file_says_what_it_is_about(written):
    law = json.loads(written().read_text())["law"]
    assert law["slots"] == 2 and law["tree"]["budget"] == 8 and law["context"] == 32
    assert law["date"] and law["versions"]["jax"]


def test_a_table_without_a_law_is_taken_only_unchecked(written):
    assert load_step_table(written(law=None)).capacities.tolist() == [4, 8, 16]
    refused(written(law=None), "law is missing")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("device", "8 x TPU v5"),
        ("dtype", "bfloat16"),
        ("target_fingerprint", "x"),
        ("drafter_fingerprint", None),
        ("tree", None),
        ("tree", TreeSpec(k=3, budget=9)),
        ("slots", 3),
        ("buckets", (4, 8)),
    ],
)
def test_another_law(written, name, value):
    law = dataclasses.replace(LAW, **{name: value})
    field = "capacities" if name == "buckets" else f"law.{name}"
    values = ("budget 8", "budget 9" if value else "None") if name == "tree" else (str(value), str(getattr(LAW, name)))
    if name == "buckets":
        values = ("[4, 8]", "[4, 8, 16]")
    refused(written(), field, *values, law=law)


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), 0, -1, "1", True, 1e300])
def test_rates_that_no_measurement_gives(written, value):
    path = written(steps_per_second=[30, value, 9])
    refused(path, *([] if isinstance(value, float) and value != 1e300 else ["steps_per_second[1]", str(value)]))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"capacities": [8, 4, 16]}, "ascending"),
        ({"capacities": [0, 4, 16]}, "capacities[0]"),
        ({"capacities": None}, "capacities"),
        ({"steps_per_second": []}, "steps_per_second"),
        ({"steps_per_second": [1.0, 2.0]}, "one length"),
    ],
)
def test_malformed_tables(written, changes, word):
    path = written(**changes)
    with pytest.raises(InputError, match=r"table\.json") as raised:
        load_step_table(path)
    assert word in str(raised.value) and "measure again" in str(raised.value)


def test_a_missing_file(tmp_path):
    refused(tmp_path / "none.json", "No such file")


def test_only_good_tables_are_written(tmp_path):
    path = tmp_path / "table.json"
    with pytest.raises(ValueError, match="must be finite"):
        save_step_table(path, TABLE.replace(steps_per_second=jnp.full(3, jnp.nan)), LAW)
    with pytest.raises(ValueError, match="its law is about"):
        save_step_table(path, TABLE, dataclasses.replace(LAW, buckets=(4, 8)))
    assert not path.exists()
