"""SPS: how many verification steps a second the device takes, for each bucket of tokens a step may hold."""

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

# A largest bucket that is no slower than this share says that verification is free: timings differ by as much.
_FLAT_RATIO = 0.98


@struct.dataclass
class StepTable:
    """Measured rates of the verification step, one for each bucket.

    `capacities`: tokens that a bucket holds, roots included, ascending. `steps_per_second`: of the program of that
    bucket, drafting included, which costs the same however many of its tokens are padding. `plain_steps_per_second`: of
    steps that draft nothing, or None where they were not measured.
    """

    capacities: Int[Array, "b"]
    steps_per_second: Float[Array, "b"]
    plain_steps_per_second: Float[Array, "b"] | None = None


def validate_table(table: StepTable) -> None:
    """Raises ValueError, in one line, for a table that no measurement can give. On the host only."""
    capacities, rates = np.asarray(table.capacities), np.asarray(table.steps_per_second)
    if capacities.ndim != 1 or capacities.shape != rates.shape or not capacities.size:
        raise ValueError(
            f"step table: capacities {list(capacities.shape)} and steps_per_second {list(rates.shape)} must be two "
            "lists of one length, with a bucket at least"
        )
    if capacities[0] < 1 or (np.diff(capacities) <= 0).any():
        raise ValueError(f"step table: capacities {capacities.tolist()} must be positive and ascending")
    named = {"steps_per_second": rates}
    if table.plain_steps_per_second is not None:
        named["plain_steps_per_second"] = np.asarray(table.plain_steps_per_second)
    for name, values in named.items():
        if values.shape != capacities.shape:
            raise ValueError(f"step table: {name} {list(values.shape)} must have one rate a bucket")
        wrong = ~(np.isfinite(values) & (values > 0))
        if wrong.any():
            bucket = int(np.argmax(wrong))
            raise ValueError(
                f"step table: {name} of bucket {capacities[bucket]} is {values[bucket]}, which must be finite and "
                "positive; measure again"
            )


def is_flat(table: StepTable) -> bool:
    """Whether verifying the largest bucket costs no more than the smallest, within timing noise. On the host only.

    Then verification is free and everything may be verified without scheduling.
    """
    rates = np.asarray(table.steps_per_second)
    return bool(rates[-1] >= _FLAT_RATIO * rates[0])


def _bucket(table: StepTable, tokens: Int[Array, "..."]) -> Int[Array, "..."]:
    """Index of the smallest bucket that holds so many tokens; the number of buckets where none does."""
    return jnp.searchsorted(table.capacities, tokens.astype(table.capacities.dtype)).astype(jnp.int32)


def steps_per_second_at(table: StepTable, tokens: Int[Array, "..."]) -> Float[Array, "..."]:
    """SPS(B), a staircase: the rate of the smallest bucket that holds B tokens, and 0 where none does."""
    return table.steps_per_second.at[_bucket(table, tokens)].get(mode="fill", fill_value=0)


def drafting_pays(table: StepTable, survival: Float[np.ndarray, "n"], active: int) -> bool:
    """Whether a step that drafts brings more tokens a second than one that does not. On the host only.

    `survival`: of a request's drafts, descending, on average. The drafting step takes the best number of them, the same
    for each of the `active` requests. True where plain steps were not measured.
    """
    if table.plain_steps_per_second is None:
        return True
    capacities = np.asarray(table.capacities)
    drafts = np.arange(len(survival) + 1)
    expected = 1 + np.concatenate([[0.0], np.cumsum(survival)])
    column = np.searchsorted(capacities, active * (1 + drafts))
    rates = np.append(np.asarray(table.steps_per_second), 0.0)[column]
    plain = np.append(np.asarray(table.plain_steps_per_second), 0.0)[column[0]]
    return bool(np.max(expected * rates) >= plain)


def bucket_capacity(table: StepTable, tokens: Int[Array, "..."]) -> Int[Array, "..."]:
    """Tokens that the smallest bucket for B tokens holds, which cost no more than B; the largest's where none does."""
    return table.capacities.at[_bucket(table, tokens)].get(mode="clip")
