"""Packed nodes: where they go, and that the target's pass over them is the pass over all nodes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.layers.kv_cache import init_cache
from dspark_jax.layers.packing import pack
from dspark_jax.proposals import ancestors
from dspark_jax.targets.decoder import forward_cached, forward_packed, forward_tree, target_logits
from tests.models import pad, random_target, target_config
from tests.test_generation import PROMPTS
from tests.test_trees import wide_tree


@pytest.mark.parametrize("capacity", [1, 5, 12, 40])
def test_packing_is_in_order_and_drops_what_does_not_fit(capacity):
    nodes = np.random.default_rng(0).random((4, 6)) < 0.5
    packing = jax.device_get(pack(jnp.asarray(nodes), capacity))
    chosen = np.argwhere(nodes)[:capacity]
    real = len(chosen)
    assert packing.request[:real].tolist() == chosen[:, 0].tolist()
    assert packing.node[:real].tolist() == chosen[:, 1].tolist()
    assert (packing.request[real:] == 4).all() and (packing.node[real:] == 0).all()
    expected = np.full((4, 6), capacity)
    expected[tuple(chosen.T)] = np.arange(real)
    np.testing.assert_array_equal(packing.place, expected)

    values = jnp.asarray(np.random.default_rng(1).random((4, 6, 2)))
    packed = pack(jnp.asarray(nodes), capacity)
    back = np.asarray(packed.scatter(packed.gather(values), fill=-1.0))
    kept = expected < capacity
    np.testing.assert_array_equal(back[kept], np.asarray(values)[kept])
    assert (back[~kept] == -1).all()


@functools.partial(jax.jit, static_argnames=("config", "capacity"))
def both(target, config, prompts, lengths, proposal, scheduled, capacity):
    """Logits, features and caches of the pass over all nodes, and of the packed pass over the scheduled ones."""
    dtype = target.norm.weight.dtype
    cache = init_cache(config, len(prompts), 24, dtype, config.stacked_layers)
    cache = forward_cached(target, config, prompts, jnp.zeros_like(lengths), cache).cache
    nodes = (proposal.tokens, proposal.depths, ancestors(proposal.parents, 4), lengths, cache)
    whole = forward_tree(target, config, *nodes, (-1, 1))
    packing = pack(scheduled, capacity)
    some = forward_packed(target, config, packing, *nodes, (-1, 1))
    logits = packing.scatter(target_logits(target, config, some.hidden))
    return (
        (target_logits(target, config, whole.hidden), whole),
        (logits, packing.scatter(some.features), some.cache),
        cache,
    )


@pytest.mark.parametrize(
    ("dtype", "changes", "tolerance"),
    [
        ("float32", {"sliding_windows": (3, None, 4)}, 1e-4),
        ("float64", {}, 1e-10),
        ("float64", {"stacked_layers": True}, 1e-10),
    ],
)
def test_a_packed_pass_is_the_pass_over_all_nodes(dtype, changes, tolerance):
    """For random schedules, requests without any node included; what is not scheduled leaves no trace."""
    rng = np.random.default_rng(2)
    with jax.enable_x64(True):
        config = target_config(12, **changes)
        target = random_target(config, dtype=jnp.dtype(dtype))
        prompts, lengths = (jnp.asarray(x) for x in pad(PROMPTS))
        proposal = wide_tree(rng, 4, 12)
        parents = np.asarray(proposal.parents[0])
        for _ in range(4):
            scheduled = rng.random((4, 8)) < 0.7
            scheduled[:, 0] = rng.random(4) < 0.8
            for node in range(1, 8):
                scheduled[:, node] &= scheduled[:, parents[node]]
            (expected, whole), (found, features, cache), before = both(
                target, config, prompts, lengths, proposal, jnp.asarray(scheduled), 26
            )
            np.testing.assert_allclose(found[scheduled], np.asarray(expected)[scheduled], atol=tolerance)
            np.testing.assert_allclose(features[scheduled], np.asarray(whole.features)[scheduled], atol=tolerance)
            last = [
                jax.tree.map(lambda leaf: leaf[-1], x) if config.stacked_layers else x[-1]
                for x in (cache, whole.cache, before)
            ]
            for packed, full, prompt in zip(*(map(np.asarray, x.rows) for x in last), strict=True):
                for row, length in enumerate(np.asarray(lengths)):
                    rows = slice(length, length + 8)
                    expected_rows = np.where(scheduled[row][:, None, None], full[row, rows], prompt[row, rows])
                    np.testing.assert_allclose(packed[row, rows], expected_rows, atol=tolerance)
