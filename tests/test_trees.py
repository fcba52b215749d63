"""Trees in the decoding loop."""

import numpy as np
import pytest

from dspark_jax import TreeSpec, sampling_params
from tests.models import HEADS
from tests.test_generation import Small

SPECS = {
    "pctree": TreeSpec(kind="pctree", k=2, width=3, budget=9),
    "jetspec": TreeSpec(kind="jetspec", k=3, budget=8),
    "ddtree": TreeSpec(kind="ddtree", budget=7),
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("kind", "head"), [*(("pctree", head) for head in HEADS), ("jetspec", "dflash"), ("ddtree", "rnn")]
)
def test_tree_output_is_plain_output(kind, head, temperature):
    small = Small(head)
    sampling = sampling_params(4, temperature, top_p=0.9)
    out = small.run(small.config(tree=SPECS[kind]), sampling=sampling)
    plain = small.run(small.config(drafter=None, plain_width=SPECS[kind].budget), sampling=sampling)
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    assert out.counts.rounds.sum() < plain.counts.rounds.sum()
