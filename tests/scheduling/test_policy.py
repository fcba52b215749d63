"""Policies, and which keep the target's law with which verifier."""

import itertools

import pytest

import dspark_jax
from dspark_jax.scheduling.policy import Policy, PolicyKind, check_lossless
from dspark_jax.verification.verifier import Verifier

FIELDS = {PolicyKind.FIXED: {"length": 2}, PolicyKind.THRESHOLD: {"threshold": 0.5}}
POLICIES = [Policy(kind=kind, **FIELDS.get(kind, {})) for kind in PolicyKind]


def test_which_pairs_are_lossless():
    assert dspark_jax.Verifier is Verifier
    for policy, verifier, tree in itertools.product(POLICIES, Verifier, (False, True)):
        anticipating = policy.kind is PolicyKind.GLOBAL_BEST
        if verifier in (Verifier.REJECTION, Verifier.BLOCK) and (tree or anticipating):
            with pytest.raises(ValueError, match=f"{verifier.value}.*would change the target's law.*coupled") as error:
                check_lossless(policy, verifier, tree)
            assert "\n" not in str(error.value)
            if not tree:
                assert "policy global-best" in str(error.value) and "take policy stale-capacity" in str(error.value)
        else:
            check_lossless(policy, verifier, tree)


def test_the_default_and_the_names():
    assert Policy() == Policy(kind="stale-capacity")
    assert hash(Policy(kind="fixed", length=3)) == hash(Policy(kind=PolicyKind.FIXED, length=3))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kind": "fixed"}, "policy length: fixed needs one"),
        ({"kind": "early-stop", "length": 3}, "policy length: early-stop has none; leave it out"),
        ({"kind": "fixed", "length": 3, "threshold": 0.5}, "policy threshold: fixed has none"),
        ({"kind": "fixed", "length": -1}, "length -1 must be at least 0"),
        ({"kind": "threshold", "threshold": 1.5}, r"threshold 1.5 must be in \[0, 1\]"),
        ({"kind": "threshold", "threshold": float("nan")}, "threshold nan must be in"),
        ({"kind": "best"}, "'best' is not a valid PolicyKind"),
    ],
)
def test_a_policy_that_cannot_be(fields, said):
    with pytest.raises(ValueError, match=said):
        Policy(**fields)
