"""The ways to accept drafts."""

import enum


class Verifier(enum.Enum):
    """How drafts are accepted at T > 0; all keep the target's law, and at T = 0 all are greedy matching.

    COUPLED: noise keyed by absolute position and shared by drafter and target; the output equals plain sampling with
    the same key, token for token. TARGET_WALK: greedy drafts, followed as far as the target's own fresh draws go.
    REJECTION: the paper's min(1, p/q) with residual sampling. BLOCK: block verification (Sun et al., ICLR 2025), which
    never accepts less than REJECTION. The last two are for chains: a tree's candidates are not drawn from q, so
    min(1, p/q) would change the target's law.
    """

    COUPLED = "coupled"
    TARGET_WALK = "target-walk"
    REJECTION = "rejection"
    BLOCK = "block"

    @property
    def chains_only(self) -> bool:
        return self in (Verifier.REJECTION, Verifier.BLOCK)
