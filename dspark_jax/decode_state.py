"""What decoding is configured by, and the state of R slots between rounds."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from dspark_jax.config import DrafterConfig, DraftModelConfig, TargetConfig, TreeSpec
from dspark_jax.drafters.kinds import DrafterState
from dspark_jax.sampling import SamplingParams
from dspark_jax.verification.counting import Counts
from dspark_jax.verification.verifier import Verifier


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """Everything static about decoding; one compiled program for each value.

    `drafter` None is plain autoregressive decoding. `tree`: drafts form a tree instead of a chain. `max_drafts`: of a
    chain, by default all of a block (engines call it num_speculative_tokens). `plain_width`: tokens in each pass of
    plain decoding, of which only the first counts; the nodes of a speculative pass make it bit-comparable with that (a
    matrix product's rows differ in the last bit between widths). `log_probabilities`: also return the target's
    log-probability of each token.
    """

    target: TargetConfig
    drafter: DraftModelConfig | None = None
    tree: TreeSpec | None = None
    max_drafts: int | None = None
    max_new_tokens: int = 128
    eos_token_ids: tuple[int, ...] = ()
    verifier: Verifier = Verifier.COUPLED
    plain_width: int = 1
    log_probabilities: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens {self.max_new_tokens} must be at least 1")
        if self.max_drafts is not None and self.max_drafts < 1:
            raise ValueError(f"max_drafts {self.max_drafts} must be at least 1")
        if self.max_drafts is not None and self.tree is not None:
            raise ValueError("max_drafts: is for chains, the budget for trees; leave one out")
        drafter, target = self.drafter, self.target
        if drafter is None:
            if self.tree is not None:
                raise ValueError("tree: plain decoding has no drafter to grow a tree with")
            return
        for field in ("vocab_size", "hidden_size"):
            if getattr(drafter, field) != getattr(target, field):
                raise ValueError(
                    f"{field}: the drafter was made for {getattr(drafter, field)}, the target has "
                    f"{getattr(target, field)}"
                )
        if drafter.num_target_layers != target.num_hidden_layers:
            raise ValueError(
                f"num_target_layers: the drafter was made for {drafter.num_target_layers}, the target has "
                f"{target.num_hidden_layers}"
            )
        if self.tree is None:
            return
        if not isinstance(drafter, DrafterConfig):
            raise ValueError("tree: Eagle3 and multi-token prediction draft chains only; leave it out")
        if self.verifier.chains_only:
            raise ValueError(
                f"verifier {self.verifier.value} is for chains: on a tree it would change the target's law; "
                f"take {Verifier.COUPLED.value} or {Verifier.TARGET_WALK.value}"
            )
        if self.tree.k is not None and self.tree.k > drafter.draft_vocab_size:
            raise ValueError(f"tree k {self.tree.k}: the draft vocabulary has only {drafter.draft_vocab_size} tokens")

    @property
    def depth(self) -> int:
        """Drafts on the longest path of a round."""
        if self.drafter is None:
            return self.plain_width - 1
        return self.drafter.num_drafts if self.max_drafts is None else min(self.max_drafts, self.drafter.num_drafts)

    @property
    def width(self) -> int:
        """Nodes of one verification pass, the anchor included."""
        return self.depth + 1 if self.tree is None else self.tree.budget

    @property
    def taps(self) -> tuple[int, ...]:
        return () if self.drafter is None else self.drafter.target_layer_ids


@struct.dataclass
class Requests:
    """What each request asks for.

    `confidence_threshold`: drafts from the first less confident slot on are cut, in a tree those under a less
    confident parent.
    """

    keys: Key[Array, "R"]
    sampling: SamplingParams
    max_tokens: Int[Array, "R"]
    confidence_threshold: Float[Array, "R"]


@struct.dataclass
class DecodeState:
    """R slots. `lengths` counts committed tokens, prompt included; the last of them, the anchor, is in no cache yet.

    `stopped`: ended by an EOS token.
    """

    requests: Requests
    tokens: Int[Array, "R capacity"]
    prompt_lengths: Int[Array, "R"]
    lengths: Int[Array, "R"]
    done: Bool[Array, "R"]
    stopped: Bool[Array, "R"]
    cache: Any
    drafter: DrafterState | None
    counts: Counts
    log_probabilities: Float[Array, "R capacity"] | None

    @property
    def anchors(self) -> tuple[Int[Array, "R"], Int[Array, "R"]]:
        """Each request's last committed token and its position."""
        positions = self.lengths - 1
        return self.tokens[jnp.arange(positions.shape[0], dtype=jnp.int32), positions], positions
