"""How much to verify, as a choice of the caller's, and which choices keep the target's law with which verifier."""

import dataclasses
import enum

from dspark_jax.verification.verifier import Verifier


class PolicyKind(enum.Enum):
    """The policies of `prefix_scheduler`, by what decides the verified length.

    EARLY_STOP: the paper's Algorithm 1. GLOBAL_BEST: the schedule of the largest throughput. STALE_CAPACITY: its number
    of tokens from confidences two rounds old, filled by the current ones. FIXED: one length. THRESHOLD: a least prefix
    survival.
    """

    EARLY_STOP = "early-stop"
    GLOBAL_BEST = "global-best"
    STALE_CAPACITY = "stale-capacity"
    FIXED = "fixed"
    THRESHOLD = "threshold"

    @property
    def anticipating(self) -> bool:
        """Whether a slot's verification may depend on its own token, through the confidences of later slots."""
        return self is PolicyKind.GLOBAL_BEST


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """`length`: drafts a request, or a tree's depth, for FIXED. `threshold`: for THRESHOLD, in [0, 1]."""

    kind: PolicyKind = PolicyKind.STALE_CAPACITY
    length: int | None = None
    threshold: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", PolicyKind(self.kind))
        for field, kind in (("length", PolicyKind.FIXED), ("threshold", PolicyKind.THRESHOLD)):
            given = getattr(self, field) is not None
            if given and self.kind is not kind:
                raise ValueError(f"policy {field}: {self.kind.value} has none; leave it out")
            if not given and self.kind is kind:
                raise ValueError(f"policy {field}: {self.kind.value} needs one")
        if self.length is not None and self.length < 0:
            raise ValueError(f"policy length {self.length} must be at least 0")
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise ValueError(f"policy threshold {self.threshold} must be in [0, 1]")


def check_lossless(policy: Policy, verifier: Verifier, tree: bool) -> None:
    """Raises ValueError for a policy and a verifier that together would change the target's law.

    COUPLED emits a function of the target and its noise, TARGET_WALK draws the target's tokens after the drafts:
    neither minds what is verified. REJECTION and BLOCK need chains drawn from q and a non-anticipating policy.
    """
    if not verifier.chains_only:
        return
    lossless = f"{Verifier.COUPLED.value} or {Verifier.TARGET_WALK.value}"
    if tree:
        raise ValueError(
            f"verifier {verifier.value} on a tree would change the target's law: its candidates are not drawn from q; "
            f"take verifier {lossless}"
        )
    if policy.kind.anticipating:
        raise ValueError(
            f"policy {policy.kind.value} with verifier {verifier.value} would change the target's law: whether it "
            f"verifies a token depends on the token; take policy {PolicyKind.STALE_CAPACITY.value} or "
            f"{PolicyKind.EARLY_STOP.value}, or verifier {lossless}"
        )
