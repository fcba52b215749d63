"""One target distribution from logits, and the noise that turns it into tokens.

A choice is argmax(ℓ + T·g), where ℓ are the raw logits with the removed tokens at -inf, T is the temperature and g
Gumbel noise: its law is softmax(ℓ/T), and T = 0 is greedy decoding without a special case.
"""

import enum

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

# Bisection over the 2^32 ordered float32 bit patterns: exact thresholds without sorting the vocabulary.
_BISECTION_STEPS = 32


class Purpose(enum.IntEnum):
    """What a random number of rejection sampling is for."""

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2


@struct.dataclass
class SamplingParams:
    """Per-request settings; changing them compiles nothing.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 switch a filter off. Filters apply in the order
    temperature, top-k, top-p, min-p; ties at a threshold are all kept.
    """

    temperature: Float[Array, "R"]
    top_k: Int[Array, "R"]
    top_p: Float[Array, "R"]
    min_p: Float[Array, "R"]


def sampling_params(
    requests: int, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> SamplingParams:
    """The same settings for R requests. Raises ValueError for a value outside its range."""
    # Times the noise it is finite in float32.
    if not 0 <= temperature <= 1e30:
        raise ValueError(f"temperature {temperature} must be in [0, 1e30]")
    if top_k < 0:
        raise ValueError(f"top_k {top_k} must be at least 0 (0 switches it off)")
    if top_k >= 2**31:
        raise ValueError(f"top_k {top_k} must be under {2**31} (0 switches it off)")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p {top_p} must be in (0, 1]")
    if not 0 <= min_p <= 1:
        raise ValueError(f"min_p {min_p} must be in [0, 1]")
    return SamplingParams(
        jnp.full(requests, temperature, jnp.float32),
        jnp.full(requests, top_k, jnp.int32),
        jnp.full(requests, top_p, jnp.float32),
        jnp.full(requests, min_p, jnp.float32),
    )


def request_keys(seed: int, requests: int) -> Key[Array, "R"]:
    """One key a request: the seed's key folded with the request's index."""
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.arange(requests, dtype=jnp.int32))


def position_noise(
    keys: Key[Array, "R"], positions: Int[Array, "R N"], vocab_size: int, sampling: SamplingParams
) -> Float[Array, "R N V"]:
    """Coupled noise g_t = Gumbel(fold_in(request key, t)), t the absolute index of the token to be chosen.

    Zeros, not drawn at all, while every request is greedy.
    """

    def draw(key, position):
        return jax.random.gumbel(jax.random.fold_in(key, position), (vocab_size,), jnp.float32)

    shape = (*positions.shape, vocab_size)
    return jax.lax.cond(
        jnp.any(sampling.temperature > 0),
        lambda: jax.vmap(jax.vmap(draw, (None, 0)))(keys, positions),
        lambda: jnp.zeros(shape, jnp.float32),
    )


def purpose_keys(
    keys: Key[Array, "R"], rounds: Int[Array, "R"], positions: Int[Array, "R N"], purpose: Purpose
) -> Key[Array, "R N"]:
    """Keys of rejection sampling, fresh in every round: (round, position, purpose) folded into the request's key."""

    def fold(key, round_index, position):
        return jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, round_index), position), purpose)

    return jax.vmap(jax.vmap(fold, (None, None, 0)))(keys, rounds, positions)


def gumbel(keys: Key[Array, "R N"], vocab_size: int) -> Float[Array, "R N V"]:
    return jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, (vocab_size,), jnp.float32)))(keys)


def _ordered_bits(x: Float[Array, "..."]) -> Int[Array, "..."]:
    """float32 → int32 with the same order; both zeros are one number."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    return jnp.where(bits >= 0, bits, bits ^ jnp.int32(0x7FFFFFFF))


def _largest_threshold(enough, order: Int[Array, "R N V"]) -> Int[Array, "R N 1"]:
    """The largest threshold t for which `enough(order >= t)` holds; it must hold for the smallest int32."""

    def body(_, bounds):
        low, high = bounds
        # The overflow-free mean of two int32, rounded up.
        middle = (low | high) - ((low ^ high) >> 1)
        holds = enough(order >= middle)
        return jnp.where(holds, middle, low), jnp.where(holds, high, middle - 1)

    info = jnp.iinfo(jnp.int32)
    shape = (*order.shape[:-1], 1)
    bounds = (jnp.full(shape, info.min, jnp.int32), jnp.full(shape, info.max, jnp.int32))
    return jax.lax.fori_loop(0, _BISECTION_STEPS, body, bounds)[0]


def _kept(scaled: Float[Array, "R N V"], sampling: SamplingParams) -> Bool[Array, "R N V"]:
    """Tokens that survive top-k, then top-p, then min-p, of logits already divided by the temperature."""
    order = _ordered_bits(scaled.astype(jnp.float32))
    vocab_size = scaled.shape[-1]
    top_k = jnp.where(sampling.top_k > 0, jnp.minimum(sampling.top_k, vocab_size), vocab_size)[:, None, None]
    threshold = _largest_threshold(
        lambda above: jnp.sum(above, axis=-1, keepdims=True, dtype=jnp.int32) >= top_k, order
    )
    kept = order >= threshold
    probabilities = jax.nn.softmax(jnp.where(kept, scaled, -jnp.inf), axis=-1)
    top_p = sampling.top_p[:, None, None].astype(probabilities.dtype)

    def mass_reached(above):
        # With top_p at 1 the rounding of the sum must not cut the tail.
        mass = jnp.sum(jnp.where(above, probabilities, 0), axis=-1, keepdims=True)
        return (mass >= top_p) & (top_p < 1)

    kept &= order >= _largest_threshold(mass_reached, order)
    largest = jnp.max(probabilities, axis=-1, keepdims=True)
    return kept & (probabilities >= sampling.min_p[:, None, None].astype(largest.dtype) * largest)


def filter_logits(logits: Float[Array, "R N V"], sampling: SamplingParams) -> Float[Array, "R N V"]:
    """The raw logits, with tokens removed by top-k, top-p or min-p at -inf. No work while all filters are off."""
    active = (sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)

    def apply():
        temperature = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0).astype(logits.dtype)
        kept = _kept(logits / temperature[:, None, None], sampling)
        return jnp.where(kept | ~active[:, None, None], logits, -jnp.inf)

    return jax.lax.cond(jnp.any(active), apply, lambda: logits)


def perturb(
    filtered: Float[Array, "R N V"], noise: Float[Array, "R N V"], sampling: SamplingParams
) -> Float[Array, "R N V"]:
    """ℓ + T·g."""
    return filtered + sampling.temperature.astype(filtered.dtype)[:, None, None] * noise.astype(filtered.dtype)


def temper(filtered: Float[Array, "R N V"], sampling: SamplingParams) -> Float[Array, "R N V"]:
    """ℓ / T, or ℓ itself at T = 0."""
    temperature = sampling.temperature.astype(filtered.dtype)[:, None, None]
    return filtered / jnp.where(temperature > 0, temperature, 1)


def choose(
    filtered: Float[Array, "R N V"], noise: Float[Array, "R N V"], sampling: SamplingParams
) -> Int[Array, "R N"]:
    """argmax(ℓ + T·g); the lower id wins a tie."""
    return jnp.argmax(perturb(filtered, noise, sampling), axis=-1).astype(jnp.int32)


def log_law(filtered: Float[Array, "R N V"], sampling: SamplingParams) -> Float[Array, "R N V"]:
    """Log-probabilities of the law that `choose` samples: softmax(ℓ/T), or one-hot at T = 0."""
    ids = jnp.arange(filtered.shape[-1], dtype=jnp.int32).reshape((1,) * (filtered.ndim - 1) + (-1,))
    greedy = jnp.argmax(filtered, axis=-1, keepdims=True).astype(jnp.int32) == ids
    warm = jax.nn.log_softmax(temper(filtered, sampling), axis=-1)
    cold = jnp.where(greedy, 0.0, -jnp.inf).astype(filtered.dtype)
    return jnp.where((sampling.temperature > 0)[:, None, None], warm, cold)
