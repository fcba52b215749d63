"""Timers of loops on the device."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import dspark_jax
from dspark_jax import DecodeConfig, request_keys
from dspark_jax.io import Drafter, Target, padded_length

Timer = Callable[[], float]


def seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - begin


def decoding_timer(target: Target, drafter: Drafter | None, context: int, steps: int, width: int = 1) -> Timer:
    """Seconds a round of greedy `generate` after `context` tokens: of `steps` plain passes over `width` tokens, or of
    speculative decoding of `steps` tokens.
    """
    config = DecodeConfig(
        target=target.config,
        drafter=None if drafter is None else drafter.config,
        max_new_tokens=steps + 1,
        plain_width=width,
    )
    tokens = jnp.arange(padded_length(context), dtype=jnp.int32)[None] % target.config.num_valid_tokens
    lengths, keys = jnp.asarray([context], jnp.int32), request_keys(0, 1)
    parameters = None if drafter is None else drafter.params

    def run(max_tokens: int) -> tuple[float, int]:
        most = jnp.asarray([max_tokens], jnp.int32)
        begin = time.perf_counter()
        result = dspark_jax.generate(target.params, parameters, tokens, lengths, keys, config, max_tokens=most)
        jax.block_until_ready(result)
        return time.perf_counter() - begin, int(result.counts.rounds[0])

    def timer() -> float:
        prefill, _ = run(1)
        whole, rounds = run(steps + 1)
        # Another program may have slowed the prefill alone; that turn says nothing.
        return (whole - prefill) / rounds if whole > prefill else float("nan")

    return timer
