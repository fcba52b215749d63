"""The engine's fixed shapes and its policy."""

import dataclasses

from dspark_jax.decode_state import DecodeConfig
from dspark_jax.scheduling.policy import Policy, check_lossless

_BUCKETS = 6
_SHORTEST_PREFILL = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The engine's fixed shapes.

    `slots`: requests decoded together. `capacity`: positions of each slot's cache, prompt and new tokens and the nodes
    of one verification. `buckets`: capacities of a verification step, ascending, roots included; by default six from
    everything down by halves. `prefill_tokens`: the longest chunk in which prompts are read. `prefills_per_round`:
    chunks read between two rounds while requests are decoding.
    """

    decode: DecodeConfig
    slots: int
    capacity: int
    policy: Policy = dataclasses.field(default_factory=Policy)
    buckets: tuple[int, ...] = ()
    prefill_tokens: int = 256
    prefills_per_round: int = 2

    def __post_init__(self) -> None:
        for field in ("slots", "prefill_tokens", "prefills_per_round"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} {getattr(self, field)} must be at least 1")
        if self.capacity < self.decode.width + 2:
            raise ValueError(f"capacity {self.capacity} must be at least {self.decode.width + 2}")
        everything = self.slots * self.decode.width
        if not self.buckets:
            halves = {-(-everything // 2**i) for i in range(_BUCKETS)}
            object.__setattr__(self, "buckets", tuple(sorted(halves)))
        if list(self.buckets) != sorted(set(self.buckets)) or self.buckets[0] < 1:
            raise ValueError(f"buckets {list(self.buckets)} must be positive and ascending")
        if self.buckets[-1] < everything:
            raise ValueError(
                f"buckets: the largest is {self.buckets[-1]}, but {self.slots} slots have up to {everything} tokens"
            )
        check_lossless(self.policy, self.decode.verifier, self.decode.tree is not None)

    @property
    def prefill_buckets(self) -> tuple[int, ...]:
        """Lengths to which chunks of prompts are padded."""
        sizes = [min(_SHORTEST_PREFILL, self.prefill_tokens)]
        while sizes[-1] < self.prefill_tokens:
            sizes.append(min(2 * sizes[-1], self.prefill_tokens))
        return tuple(sizes)
