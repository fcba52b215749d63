"""A reduced draft vocabulary: the target ids that the drafter's head has rows for."""

import numpy as np
from jaxtyping import Int


def most_frequent_ids(counts: Int[np.ndarray, "V"], size: int) -> Int[np.ndarray, "V_d"]:
    """The `size` ids with the largest counts, ascending; of equal counts the lower ids.

    Raises:
      ValueError: `size` is not in 1..V.
    """
    if not 0 < size <= len(counts):
        raise ValueError(f"draft_vocab_size {size} is outside 1..{len(counts)}")
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)
