"""The train step over meshes: the same losses and updates as on one device, and each device keeps its part."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dspark_jax.sharding import make_mesh, shardings
from dspark_jax.targets.decoder import declare_target
from dspark_jax.training.step import TrainConfig, abstract_train_state, init_params, init_train_state, train_step
from tests.models import drafter_config, random_target, target_config
from tests.training.test_losses import rows_batch

MESHES = [(2, 2, 2), (1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (4, 1, 2), (1, 4, 2), (8, 1, 1), (1, 8, 1)]


def setup(draft_vocab_size: int):
    target = target_config(64)
    drafter = drafter_config(target, "gated", num_anchors=6, draft_vocab_size=draft_vocab_size)
    config = TrainConfig(target=target, drafter=drafter, total_steps=40)
    ids = None if draft_vocab_size == 64 else jnp.arange(0, 64, 2, dtype=jnp.int32)
    params = init_params(drafter, jax.random.key(1), ids)
    tokens = np.random.default_rng(0).integers(0, 64, (16, 16))
    mask = np.ones((16, 16), bool)
    mask[0, :9] = mask[5, 4:] = False
    batch = jax.tree.map(lambda x: x.reshape(2, 8, *x.shape[1:]), rows_batch(tokens, mask))
    return config, random_target(target), init_train_state(config, jax.random.key(2), params), batch


def two_steps(config, target, state, batch):
    losses = []
    for _ in range(2):
        state, metrics = train_step(state, target, batch, config)
        losses.append([float(metrics["loss"]), float(metrics["gradient_norm"])])
    return state, losses


def placed(mesh, config, target, state, batch):
    state_shardings = jax.tree.map(lambda x: x.sharding, abstract_train_state(config, mesh))
    rows = NamedSharding(mesh, PartitionSpec(None, ("data", "fsdp")))
    return (
        jax.device_put(target, shardings(declare_target(config.target), mesh, config.target.head_dim)),
        jax.device_put(state, state_shardings),
        jax.device_put(batch, rows),
        state_shardings,
    )


@pytest.mark.parametrize(
    ("sizes", "draft_vocab_size"),
    [
        (MESHES[0], 64),
        pytest.param(MESHES[0], 32, marks=pytest.mark.slow),
        *(pytest.param(sizes, size, marks=pytest.mark.slow) for sizes in MESHES[1:] for size in (64, 32)),
    ],
    ids=str,
)
def test_every_mesh_trains_alike(sizes, draft_vocab_size):
    config, target, state, batch = setup(draft_vocab_size)
    copy = jax.tree.map(lambda x: x.copy(), state)
    expected, losses = two_steps(config, target, copy, batch)
    data, fsdp, model = sizes
    mesh = make_mesh(data, model, jax.devices()[: data * fsdp * model], fsdp=fsdp)
    target, state, batch, state_shardings = placed(mesh, config, target, state, batch)
    with jax.set_mesh(mesh):
        found, sharded_losses = two_steps(config, target, state, batch)
    np.testing.assert_allclose(sharded_losses, losses, rtol=1e-5)
    for one, other in zip(jax.tree.leaves(found.params), jax.tree.leaves(expected.params), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    for x, sharding in zip(jax.tree.leaves(found), jax.tree.leaves(state_shardings), strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)


def test_masters_and_moments_are_spread_over_the_mesh():
    config, *_ = setup(64)
    state = abstract_train_state(config, make_mesh(1, 2, fsdp=4))
    moments = [x for x in jax.tree.leaves(state.optimizer) if x.ndim > 1 and x.shape[0] > 1]
    masters = [x for x in jax.tree.leaves(state.params) if x.ndim > 1 and x.shape[0] > 1]
    assert len(moments) == 2 * len(masters) > 0
    for x in (*masters, *moments):
        assert np.prod(x.sharding.shard_shape(x.shape)) * 4 <= np.prod(x.shape)
    layer = state.params.layers[0].mlp
    assert layer.up_proj.weight.sharding.spec == PartitionSpec("model", "fsdp")
    assert layer.down_proj.weight.sharding.spec == PartitionSpec("fsdp", "model")
