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
    bucket, which costs the same however many of its tokens are padding.
    """

    capacities: Int[Array, "b"]
    steps_per_second: Float[Array, "b"]


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
    wrong = ~(np.isfinite(rates) & (rates > 0))
    if wrong.any():
        bucket = int(np.argmax(wrong))
        raise ValueError(
            f"step table: steps_per_second of bucket {capacities[bucket]} is {rates[bucket]}, which must be finite and "
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


def bucket_capacity(table: StepTable, tokens: Int[Array, "..."]) -> Int[Array, "..."]:
    """Tokens that the smallest bucket for B tokens holds, which cost no more than B; the largest's where none does."""
    return table.capacities.at[_bucket(table, tokens)].get(mode="clip")
