"""Anchor attention compiled for a TPU v5e, without one: libtpu compiles ahead of time for a described topology."""

import math
import re

import jax
import jax.numpy as jnp
import pytest

from dspark_jax.layers.anchor_attention import anchor_attention, first_visible
from dspark_jax.parameters import abstract
from dspark_jax.targets.decoder import declare_target
from dspark_jax.training.anchors import Batch
from dspark_jax.training.step import TrainConfig, init_params, init_train_state, train_step
from tests.models import drafter_config, target_config

ANCHORS, BLOCK, LENGTH = 512, 7, 4096
# The shapes of Qwen3-4B's heads.
HEADS, KV_HEADS, WIDTH = 32, 8, 128
KERNEL = 'custom_call_target="tpu_custom_call"'


@pytest.fixture
def sharding(monkeypatch) -> jax.sharding.Sharding:
    """On one device of the described topology."""
    pytest.importorskip("libtpu")
    for name, value in (
        ("TPU_SKIP_MDS_QUERY", "1"),
        ("TPU_ACCELERATOR_TYPE", "v5litepod-8"),
        ("TPU_WORKER_HOSTNAMES", "localhost"),
        ("TPU_WORKER_ID", "0"),
    ):
        monkeypatch.setenv(name, value)
    from jax.experimental import topologies

    device = topologies.get_topology_desc(topology_name="v5e:2x4", platform="tpu").devices[0]
    return jax.sharding.SingleDeviceSharding(device)


@pytest.mark.slow
def test_kernels_compile_and_no_dense_mask_is_there(sharding):
    """One row of the paper's setting, forward and backward: three kernels, and nothing of queries times keys."""

    def shape(*sizes: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

    def step(q, k, v, keys, values, anchors, documents, cotangent):
        first = first_visible(anchors, BLOCK, documents, None)
        within = jnp.ones((BLOCK, BLOCK), bool)
        out, pull = jax.vjp(lambda *x: anchor_attention(*x, first, anchors, within), q, k, v, keys, values)
        return out, pull(cotangent)

    blocks = (1, ANCHORS, BLOCK)
    q, own, row = shape(*blocks, HEADS, WIDTH), shape(*blocks, KV_HEADS, WIDTH), shape(1, LENGTH, KV_HEADS, WIDTH)
    index = shape(1, ANCHORS, dtype=jnp.int32), shape(1, LENGTH, dtype=jnp.int32)
    compiled = jax.jit(step).lower(q, own, own, row, row, *index, q).compile()
    program = compiled.as_text()
    assert program.count(KERNEL) == 3
    arrays = [
        (kind, math.prod(map(int, sizes.split(",")))) for kind, sizes in re.findall(r"(\w+)\[([\d,]+)\]", program)
    ]
    slots = ANCHORS * BLOCK
    # Queries are the largest arrays: scores over the context would be HEADS * slots * LENGTH.
    assert max(size for _, size in arrays) <= 2 * slots * HEADS * WIDTH
    assert max((size for kind, size in arrays if kind == "pred"), default=0) < slots * LENGTH // 16
    assert compiled.memory_analysis().temp_size_in_bytes < 320 * 2**20


@pytest.mark.slow
def test_a_train_step_compiles_with_the_kernels(sharding):
    """One draft layer with a sliding window and Qwen3-4B's heads; all else is small."""
    target = target_config(
        256, hidden_size=256, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=WIDTH
    )
    drafter = drafter_config(target, sliding_windows=(1024,), block_size=BLOCK, num_anchors=ANCHORS)
    config = TrainConfig(target=target, drafter=drafter, total_steps=10)
    key = jax.random.key(0)
    state = jax.eval_shape(lambda: init_train_state(config, key, init_params(drafter, key)))
    tokens = jax.ShapeDtypeStruct((1, 1, LENGTH), jnp.int32)
    batch = Batch(tokens, jax.ShapeDtypeStruct((1, 1, LENGTH), bool), tokens, tokens)
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        (state, abstract(declare_target(target), jnp.bfloat16), batch),
    )
    compiled = train_step.lower(*arguments, config=config).compile()
    assert compiled.as_text().count(KERNEL) == 3
