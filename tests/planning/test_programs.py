"""The abstract programs, compiled for CPU devices: whoever has the chips gets the same."""

import jax
import jax.numpy as jnp
import pytest

from dspark_jax.decode_state import DecodeConfig
from dspark_jax.planning.collectives import parse_collectives
from dspark_jax.planning.programs import (
    bytes_per_chip,
    lower_train_step,
    lower_verify_step,
    memory_of,
    train_arguments,
    verify_arguments,
)
from dspark_jax.serving.config import EngineConfig
from dspark_jax.sharding import make_mesh
from dspark_jax.training.step import TrainConfig
from tests.models import drafter_config, target_config

TARGET = target_config(64, hidden_size=32, stacked_layers=True)
DRAFTER = drafter_config(TARGET, num_anchors=4)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 2)])
def test_a_train_step(sizes):
    data, fsdp, model = sizes
    mesh = make_mesh(data, model, jax.devices()[: data * fsdp * model], fsdp=fsdp)
    config = TrainConfig(target=TARGET, drafter=DRAFTER, total_steps=10)
    state, target, batch = train_arguments(config, mesh, jnp.float32, parts=2, rows=4, length=16)
    with jax.set_mesh(mesh):
        compiled = lower_train_step(config, state, target, batch).compile()
    memory = memory_of(compiled, {"trained": state.params, "optimiser": state.optimizer, "target": target})
    # Two moments of each weight, and counters.
    assert 2 * memory.held["trained"] < memory.held["optimiser"] < 2 * memory.held["trained"] + 64
    assert memory.peak > sum(memory.held.values())
    kinds = {each.kind for each in parse_collectives(compiled.as_text(), mesh.size)}
    assert ("all-reduce" in kinds) == (mesh.size > 1)
    if mesh.size > 1:
        alone = make_mesh(1, 1, jax.devices()[:1], fsdp=1)
        whole = train_arguments(config, alone, jnp.float32, parts=2, rows=4, length=16)
        assert bytes_per_chip(batch) == bytes_per_chip(whole[2]) // 4
        assert bytes_per_chip(target) < bytes_per_chip(whole[1]) / 2


def test_a_verification():
    mesh = make_mesh(2, 2, jax.devices()[:4])
    config = EngineConfig(decode=DecodeConfig(target=TARGET, drafter=DRAFTER), slots=4, capacity=16)
    target, drafter, state, drafted = verify_arguments(config, mesh, jnp.float32)
    with jax.set_mesh(mesh):
        compiled = lower_verify_step(config, target, drafter, state, drafted).compile()
    memory = memory_of(compiled, {"target": target, "cache": state.cache})
    # Half of the slots, and of each half of the heads.
    shape = (TARGET.num_hidden_layers, 4 // 2, TARGET.num_key_value_heads // 2, TARGET.head_dim, 16)
    size = 1
    for dimension in shape:
        size *= dimension
    assert memory.held["cache"] == 2 * 4 * size
