"""Rounds of decoding timed on the device: what a speculative round costs beside a plain step."""

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.config import TreeSpec
from dspark_jax.decode_state import DecodeConfig, DecodeState, Requests
from dspark_jax.io.report import number
from dspark_jax.planning.programs import memory_of
from dspark_jax.rounds import decode_round, init_state
from dspark_jax.sampling import request_keys, sampling_params
from dspark_jax.targets.decoder import head_weight
from train.device_shapes import Shape, random_drafter, random_target

PLAIN = "plain"


@functools.partial(jax.jit, static_argnames=("config", "context", "rounds"), donate_argnames="state")
def _rounds(target, drafter, state: DecodeState, config: DecodeConfig, context: int, rounds: int) -> DecodeState:
    """So many rounds after `context` tokens, whatever the state's requests have come to before."""
    lengths = jnp.full_like(state.lengths, context)
    state = state.replace(
        lengths=lengths,
        prompt_lengths=lengths,
        done=jnp.zeros_like(state.done),
        counts=jax.tree.map(jnp.zeros_like, state.counts),
    )
    return jax.lax.fori_loop(0, rounds, lambda _, state: decode_round(target, drafter, config, state), state)


def _empty(config: DecodeConfig, requests: int, capacity: int, dtype: str) -> DecodeState:
    asked = Requests(
        keys=request_keys(0, requests),
        sampling=sampling_params(requests),
        max_tokens=jnp.full(requests, config.max_new_tokens, jnp.int32),
        confidence_threshold=jnp.zeros(requests, jnp.float32),
    )
    return init_state(config, asked, capacity, jnp.dtype(dtype))


def decoding_configs(shape: Shape, tree: TreeSpec, rounds: int) -> dict[str, DecodeConfig]:
    """A plain step, a plain pass as wide as a chain's verification, a round with a chain, and one with a tree."""
    width = shape.drafter.num_drafts + 1
    shared = {"target": shape.target, "max_new_tokens": rounds * width + 1}
    return {
        PLAIN: DecodeConfig(**shared),
        f"pass of {width}": DecodeConfig(**shared, plain_width=width),
        "chain": DecodeConfig(**shared, drafter=shape.drafter),
        f"{tree.kind.value} {tree.budget}": DecodeConfig(**shared, drafter=shape.drafter, tree=tree),
    }


def measure_decoding(
    shape: Shape, tree: TreeSpec, requests: int, context: int, rounds: int, repeats: int
) -> dict[str, Any]:
    """Greedy rounds of each kind in turns, after a context of zeros, with random weights.

    `over_plain` is the median of the ratios within each turn: the τ at which a kind of round breaks even.
    """
    target = random_target(shape.target, shape.dtype, fused=True)
    drafter = random_drafter(shape.drafter, target, shape.dtype)
    configs = decoding_configs(shape, tree, rounds)
    # The same for all: attention reads the whole of it.
    capacity = context + configs[PLAIN].max_new_tokens + max(config.width for config in configs.values())
    programs, states, found = {}, {}, {}
    for name, config in configs.items():
        used = None if config.drafter is None else drafter
        state = _empty(config, requests, capacity, shape.dtype)
        begin = time.perf_counter()
        compiled = _rounds.lower(target, used, state, config=config, context=context, rounds=rounds).compile()
        found[name] = {"compile_seconds": time.perf_counter() - begin}
        programs[name] = functools.partial(compiled, target, used)
        states[name] = jax.block_until_ready(programs[name](state))
        held = {"target's weights": target, "drafter's weights": used, "state": states[name]}
        found[name]["peak_bytes"] = memory_of(compiled, held).peak
    seconds = {name: np.zeros(repeats) for name in programs}
    for turn in range(repeats):
        for name, run in programs.items():
            begin = time.perf_counter()
            states[name] = jax.block_until_ready(run(states[name]))
            seconds[name][turn] = (time.perf_counter() - begin) / rounds
    for name, taken in seconds.items():
        state = states[name]
        found[name] |= {
            "milliseconds": number(1e3 * np.median(taken)),
            "best_milliseconds": number(1e3 * np.min(taken)),
            "rounds_per_second": number(1 / np.median(taken)),
            "over_plain": number(np.median(taken / seconds[PLAIN])),
            "tau": float(np.mean(np.asarray(state.lengths - state.prompt_lengths))) / rounds,
        }
    read = sum(leaf.nbytes for leaf in jax.tree.leaves((target.layers, target.norm, head_weight(target))))
    return {
        "requests": requests,
        "context": context,
        "capacity": capacity,
        "rounds": found,
        "weight_bytes_per_step": read,
        "weights_gb_per_second": number(read / np.median(seconds[PLAIN]) / 1e9),
    }


def decoding_line(found: dict[str, Any]) -> str:
    rounds = dict(found["rounds"])
    plain = rounds.pop(PLAIN)
    costs = ", ".join(f"{name} {entry['over_plain']:.2f}" for name, entry in rounds.items())
    return (
        f"plain step {plain['milliseconds']:.2f} ms ({found['weights_gb_per_second']:,.0f} GB/s of weights); "
        f"in plain steps, which is the tau to break even: {costs}"
    )
