"""Two requests that share the capacity of a step: their tables, and every policy in one form."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.scheduling.forest import Forest, chain_forest
from dspark_jax.scheduling.prefix_scheduler import capacity, early_stop, fill, fixed_length, global_best, threshold
from dspark_jax.scheduling.throughput import StepTable

VOCABULARY, GAMMA, REQUESTS, CASES = 3, 2, 2, 32


def normalized(mass: np.ndarray) -> np.ndarray:
    return mass / mass.sum()


def pair(case: int) -> tuple[int, int]:
    """Seeds of a case's two requests."""
    return 2 * case, 2 * case + 1


@functools.cache
def table() -> StepTable:
    """Gentle slopes for the even cases, staircases for the odd ones; [cases, buckets]."""
    rng = np.random.default_rng(0)
    capacities = np.tile(np.arange(2, 7), (CASES, 1))
    gentle, steep = rng.uniform(0.85, 0.98, capacities.shape), rng.choice([1, 0.7], capacities.shape)
    rates = np.cumprod(np.where(np.arange(CASES)[:, None] % 2, steep, gentle), axis=1)
    return StepTable(jnp.asarray(capacities, jnp.int32), jnp.asarray(rates, jnp.float32))


def early(forest: Forest, table, tokens):
    return early_stop(forest, table)


def best(forest: Forest, table, tokens):
    return global_best(forest, table)


def filled(forest: Forest, table, tokens):
    return fill(forest, tokens)


def fixed(forest: Forest, table, tokens):
    return fixed_length(forest, 1)


def confident(forest: Forest, table, tokens):
    return threshold(forest, jnp.asarray([0.3, 0.2], jnp.float32))


@functools.partial(jax.jit, static_argnames="policy")
def lengths_of(policy, survival, table, tokens):
    """Verified lengths [cases, pairs, R] and the capacities [cases, pairs] that these confidences would ask for."""

    def one(survival, table, tokens):
        forest = chain_forest(survival, jnp.ones(REQUESTS, bool))
        return policy(forest, table, tokens).lengths, capacity(forest, table)

    return jax.vmap(jax.vmap(one, (0, None, 0)))(survival, table, tokens)
