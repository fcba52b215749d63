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

# With fewer rounds than this, a low acceptance at position 1 may be chance.
_COLLAPSE_ROUNDS = 50
_COLLAPSE_RATIO = 0.3


@dataclasses.dataclass(frozen=True, eq=False)
class AcceptanceCounts:
    """Sums over rounds, of one request or pooled over many: counts of disjoint rounds add.

    `tokens`: accepted lengths, bonus included, each request's last round uncut. `tokens_to_end`: the same, cut at the
    end of each request that ended with an EOS. `verified`: drafts verified. `reached[k]`: rounds in which slot k was
    verified and every earlier draft accepted; `accepted[k]`: those in which slot k was accepted too.
    """

    rounds: int
    tokens: int
    tokens_to_end: int
    verified: int
    reached: Int[np.ndarray, "drafts"]
    accepted: Int[np.ndarray, "drafts"]

    @classmethod
    def zero(cls, drafts: int) -> "AcceptanceCounts":
        """The counts of no round, for blocks of so many drafts."""
        return cls(0, 0, 0, 0, np.zeros(drafts, np.int64), np.zeros(drafts, np.int64))

    def __add__(self, other: "AcceptanceCounts") -> "AcceptanceCounts":
        return AcceptanceCounts(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self)}
        )

    @property
    def proposed(self) -> int:
        """Drafts proposed: every slot of every round, those cut by a confidence threshold included."""
        return self.rounds * len(self.reached)

    @property
    def tau(self) -> float:
        """Committed tokens a round, bonus included, pooled: τ = tokens / rounds. NaN without a round."""
        return float(_ratio(self.tokens, self.rounds))

    @property
    def tau_to_end(self) -> float:
        """τ without what was accepted after an EOS."""
        return float(_ratio(self.tokens_to_end, self.rounds))

    @property
    def conditional_acceptance(self) -> Float[np.ndarray, "drafts"]:
        """accepted[k] / reached[k]: of the rounds that verified slot k with all earlier drafts accepted."""
        return _ratio(self.accepted, self.reached)

    @property
    def prefix_survival(self) -> Float[np.ndarray, "drafts"]:
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


def count_acceptance(
    accepted_lengths: Int[ArrayLike, "R rounds"],
    rounds: Int[ArrayLike, "R"],
    lengths: Int[ArrayLike, "R"],
    stopped: Bool[ArrayLike, "R"],
    verified: Int[ArrayLike, "R"],
    reached: Int[ArrayLike, "R drafts"],
    accepted: Int[ArrayLike, "R drafts"],
) -> AcceptanceCounts:
    """Counts of R requests pooled, from the fields of a `Generation`. The first token, prefill's, is in no round."""
    accepted_lengths, rounds, lengths = (np.asarray(x) for x in (accepted_lengths, rounds, lengths))
    ran = np.arange(accepted_lengths.shape[1])[None] < rounds[:, None]
    tokens = np.where(ran, accepted_lengths, 0).sum(axis=1)
    to_end = np.where(np.asarray(stopped), np.maximum(lengths - 1, 0), tokens)
    return AcceptanceCounts(
        rounds=int(rounds.sum()),
        tokens=int(tokens.sum()),
        tokens_to_end=int(to_end.sum()),
        verified=int(np.asarray(verified).sum()),
        reached=np.asarray(reached).sum(axis=0, dtype=np.int64),
        accepted=np.asarray(accepted).sum(axis=0, dtype=np.int64),
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
