"""What acceptance counts say about a drafter: τ, and two different numbers for each draft position."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, Key

from dspark_jax.config import TargetConfig
from dspark_jax.layers.kv_cache import init_cache
from dspark_jax.sampling import SamplingParams, filter_logits, position_noise
from dspark_jax.targets.decoder import TargetParams, forward_cached, target_logits
from dspark_jax.verification.counting import Counts

# With fewer rounds than this, a low acceptance at position 1 may be chance.
_COLLAPSE_ROUNDS = 50
_COLLAPSE_RATIO = 0.3


@dataclasses.dataclass(frozen=True, eq=False)
class AcceptanceCounts:
    """Sums over rounds, of one request or pooled over many: counts of disjoint rounds add.

    `tokens`: accepted lengths, bonus included, each request's last round uncut. `tokens_to_end`: the same, cut at the
    end of each request that ended with an EOS. For the others see `verification.counting.Counts`.
    """

    rounds: int
    tokens: int
    tokens_to_end: int
    verified_nodes: int
    reached: Int[np.ndarray, "depth"]
    accepted: Int[np.ndarray, "depth"]
    missed_first: int
    took_second: int

    @classmethod
    def zero(cls, depth: int) -> "AcceptanceCounts":
        """The counts of no round, for drafts of such a depth."""
        return cls(0, 0, 0, 0, np.zeros(depth, np.int64), np.zeros(depth, np.int64), 0, 0)

    def __add__(self, other: "AcceptanceCounts") -> "AcceptanceCounts":
        return AcceptanceCounts(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self)}
        )

    @property
    def verified(self) -> int:
        """Drafts verified: nodes without the roots."""
        return self.verified_nodes - self.rounds

    @property
    def committed_share(self) -> float:
        """Of the nodes verified, those on accepted paths: each of them, the root too, gives one token."""
        return float(_ratio(self.tokens, self.verified_nodes))

    @property
    def second_choice_mass(self) -> float:
        """How often the target's token is the draft's second choice where it is not the first. NaN for a chain."""
        return float(_ratio(self.took_second, self.missed_first))

    @property
    def tau(self) -> float:
        """Committed tokens a round, bonus included, pooled: τ = tokens / rounds. NaN without a round."""
        return float(_ratio(self.tokens, self.rounds))

    @property
    def tau_to_end(self) -> float:
        """τ without what was accepted after an EOS."""
        return float(_ratio(self.tokens_to_end, self.rounds))

    @property
    def conditional_acceptance(self) -> Float[np.ndarray, "depth"]:
        """accepted[k] / reached[k]: of the rounds that verified slot k with all earlier drafts accepted."""
        return _ratio(self.accepted, self.reached)

    @property
    def prefix_survival(self) -> Float[np.ndarray, "depth"]:
        """accepted[k] / rounds: of all rounds, those in which slots 0 to k were all accepted."""
        return _ratio(self.accepted, self.rounds)

    @property
    def collapsed(self) -> bool:
        """Position 1 is far worse than position 0, which a mistake in layout or alignment causes, not training."""
        if len(self.reached) < 2 or self.reached[1] < _COLLAPSE_ROUNDS:
            return False
        first, second = self.conditional_acceptance[:2]
        return bool(second < _COLLAPSE_RATIO * first)


def _ratio(numerator, denominator) -> np.ndarray:
    numerator, denominator = np.asarray(numerator, float), np.asarray(denominator, float)
    return np.divide(numerator, denominator, out=np.full(numerator.shape, np.nan), where=denominator > 0)


def count_acceptance(counts: Counts, lengths: Int[ArrayLike, "R"], stopped: Bool[ArrayLike, "R"]) -> AcceptanceCounts:
    """Counts of R requests pooled, from a `Generation`. The first token, prefill's, is in no round."""
    counts, lengths = jax.tree.map(np.asarray, counts), np.asarray(lengths)
    ran = np.arange(counts.accepted_lengths.shape[1])[None] < counts.rounds[:, None]
    tokens = np.where(ran, counts.accepted_lengths, 0).sum(axis=1)
    to_end = np.where(np.asarray(stopped), np.maximum(lengths - 1, 0), tokens)
    return AcceptanceCounts(
        rounds=int(counts.rounds.sum()),
        tokens=int(tokens.sum()),
        tokens_to_end=int(to_end.sum()),
        verified_nodes=int(np.where(ran, counts.verified_nodes, 0).sum()),
        reached=counts.reached.sum(axis=0, dtype=np.int64),
        accepted=counts.accepted.sum(axis=0, dtype=np.int64),
        missed_first=int(counts.missed_first.sum()),
        took_second=int(counts.took_second.sum()),
    )


def rounds_until(accepted_lengths: Int[ArrayLike, "rounds"], length: int) -> int:
    """Rounds after which `length` new tokens were there; a request that is cut from outside may have run more."""
    accepted_lengths = np.asarray(accepted_lengths)
    committed = 1 + np.concatenate([[0], np.cumsum(accepted_lengths)])
    return int(min(np.searchsorted(committed, length), len(accepted_lengths)))


def first_difference(first: Int[ArrayLike, "N"], second: Int[ArrayLike, "M"]) -> int | None:
    """The first index at which two sequences differ, a missing token included; None if they are equal."""
    first, second = np.asarray(first), np.asarray(second)
    shared = min(len(first), len(second))
    different = np.flatnonzero(first[:shared] != second[:shared])
    if len(different):
        return int(different[0])
    return None if len(first) == len(second) else shared


@functools.partial(jax.jit, static_argnames="config")
def score_gap(
    target: TargetParams,
    config: TargetConfig,
    tokens: Int[Array, "R P"],
    lengths: Int[Array, "R"],
    first: Int[Array, "R"],
    second: Int[Array, "R"],
    keys: Key[Array, "R"],
    sampling: SamplingParams,
) -> Float[Array, "R"]:
    """|score(first) − score(second)| as the next token after `tokens[:, :lengths]`.

    The score is what coupled sampling maximises, ℓ + T·g_t, so a gap near 0 is a tie that rounding decides.
    """
    cache = init_cache(
        config, tokens.shape[0], tokens.shape[1], target.embed_tokens.weight.dtype, config.stacked_layers
    )
    hidden = forward_cached(target, config, tokens, jnp.zeros_like(lengths), cache).hidden
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)
    logits = filter_logits(target_logits(target, config, last), sampling)
    noise = position_noise(keys, lengths[:, None], config.vocab_size, sampling).astype(logits.dtype)
    scores = (logits + sampling.temperature.astype(logits.dtype)[:, None, None] * noise)[:, 0]
    pair = jnp.take_along_axis(scores, jnp.stack([first, second], axis=1), axis=1)
    return jnp.abs(pair[:, 0] - pair[:, 1])
