"""The table of step rates."""

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.scheduling.throughput import (
    StepTable,
    bucket_capacity,
    drafting_pays,
    is_flat,
    steps_per_second_at,
    validate_table,
)


def table(capacities, rates) -> StepTable:
    return StepTable(jnp.asarray(capacities, jnp.int32), jnp.asarray(rates, jnp.float32))


def test_the_rate_of_a_size_is_that_of_its_bucket():
    steps = table([1, 4, 8], [50, 40, 10])
    sizes = jnp.asarray([0, 1, 2, 4, 5, 8, 9])
    assert steps_per_second_at(steps, sizes).tolist() == [50, 50, 40, 40, 10, 10, 0]
    assert bucket_capacity(steps, sizes).tolist() == [1, 1, 4, 4, 8, 8, 8]
    assert steps_per_second_at(steps, jnp.asarray(3)).dtype == jnp.float32


@pytest.mark.parametrize(
    ("capacities", "rates", "said"),
    [
        ([1, 4], [5, np.nan], "bucket 4 is nan"),
        ([1, 4], [np.inf, 5], "bucket 1 is inf"),
        ([1, 4], [5, 0], "bucket 4 is 0.0"),
        ([1, 4], [-5, 1], "bucket 1 is -5.0"),
        ([4, 4], [5, 4], r"\[4, 4\] must be positive and ascending"),
        ([4, 1], [5, 4], "ascending"),
        ([0, 4], [5, 4], "positive"),
        ([1, 4], [5], r"\[2\] and steps_per_second \[1\]"),
        ([], [], "a bucket at least"),
    ],
)
def test_a_table_that_cannot_be(capacities, rates, said):
    with pytest.raises(ValueError, match=said) as error:
        validate_table(table(capacities, rates))
    assert "\n" not in str(error.value)


def test_a_good_table():
    validate_table(table([1], [3]))
    validate_table(table([1, 4, 8], [50, 40, 45]))


def test_flat():
    assert is_flat(table([1, 8], [100, 98.5]))
    assert is_flat(table([1], [100]))
    assert not is_flat(table([1, 8], [100, 95]))


def test_drafting_pays_where_its_tokens_are_worth_the_slower_step():
    """One request: two drafts of survival 0.8 and 0.4 against steps that take 1 plain, and 1.5 or 3 with drafts."""
    survival = np.array([0.8, 0.4])

    def against(plain):
        steps = table([1, 2, 8], [1, 1 / 1.5, 1 / 3])
        return steps.replace(plain_steps_per_second=jnp.full(3, plain, jnp.float32))

    # One draft: 1.8 tokens in 1.5.
    assert drafting_pays(against(1.19), survival, 1)
    assert not drafting_pays(against(1.21), survival, 1)
    # Of three requests' drafts one each fits in the bucket of 8: 1.8 tokens each in 3.
    assert drafting_pays(against(0.59), survival, 3)
    assert not drafting_pays(against(0.61), survival, 3)
    assert drafting_pays(table([1], [1]), survival, 1), "plain steps were not measured"
