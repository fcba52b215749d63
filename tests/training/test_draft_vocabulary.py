import numpy as np
import pytest

from dspark_jax.training.draft_vocabulary import most_frequent_ids


def test_most_frequent_ids_ascend_and_ties_take_the_lower_id():
    counts = np.asarray([5, 0, 7, 5, 9, 0])
    assert most_frequent_ids(counts, 2).tolist() == [2, 4]
    assert most_frequent_ids(counts, 3).tolist() == [0, 2, 4]
    assert most_frequent_ids(counts, 5).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("size", [0, 7])
def test_a_size_outside_the_vocabulary_is_refused(size):
    with pytest.raises(ValueError, match="draft_vocab_size"):
        most_frequent_ids(np.zeros(6, int), size)
