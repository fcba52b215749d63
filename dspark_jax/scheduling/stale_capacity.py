"""A stale capacity's side on the host: whether the next round drafts, and how much it verifies. On the host only.

An engine and a simulation of one share it, so that both decide alike from the same reports.
"""

import numpy as np
from jaxtyping import Float

from dspark_jax.scheduling.throughput import StepTable, drafting_pays, is_flat

# Where decoding plainly is faster, so many rounds pass until a drafted one asks again: each time twice as many.
_FEWEST_PLAIN_ROUNDS, _MOST_PLAIN_ROUNDS = 16, 256
# Requests' rounds that the mean survival remembers: one round of one request says little.
_MEMORY = 128


class StaleCapacity:
    """What drafted rounds, read one by one, say about rounds to come.

    For a law that rejection sampling keeps, a round must be read only after the next one was decided: see
    `prefix_scheduler.capacity`.
    """

    def __init__(self, table: StepTable) -> None:
        self._table, self._everything = table, is_flat(table)
        self._best_drafts: int | None = None
        self._survival: np.ndarray | None = None
        self._seen = 0
        self._plain_in_a_row, self._patience = 0, _FEWEST_PLAIN_ROUNDS

    def plainly(self, active: int) -> bool:
        """Whether the next round drafts nothing, because rounds that draft were found slower. Asked once a round."""
        if self._survival is None:
            return False
        if drafting_pays(self._table, self._survival, active):
            self._plain_in_a_row, self._patience = 0, _FEWEST_PLAIN_ROUNDS
            return False
        if self._plain_in_a_row == self._patience:
            self._plain_in_a_row, self._patience = 0, min(2 * self._patience, _MOST_PLAIN_ROUNDS)
            return False
        self._plain_in_a_row += 1
        return True

    def wanted(self, active: int, width: int) -> int:
        """Tokens that the next round verifies, roots included, if each of the active requests has up to `width`."""
        most = active * width
        if self._everything or self._best_drafts is None:
            return most
        return min(active + self._best_drafts, most)

    def learn(self, best_drafts: int, survival: Float[np.ndarray, "drafts"], active: int) -> None:
        """Reads a drafted round of `active` requests: the drafts of its best schedule, and those of a request by
        descending survival, on average over its requests."""
        self._best_drafts = best_drafts
        self._seen = min(self._seen + active, max(_MEMORY, active))
        before = np.zeros_like(survival) if self._survival is None else self._survival
        self._survival = before + active / self._seen * (survival - before)
