"""The programs of training and decoding lowered for CUDA, without a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax
from dspark_jax import DecodeConfig, TreeSpec, request_keys, sampling_params
from dspark_jax.training.step import TrainConfig, init_params, init_train_state, train_step
from tests.models import drafter_config, random_drafter, random_target, target_config
from tests.training.test_losses import rows_batch


def lowered(function, *arguments, **keywords) -> str:
    return function.trace(*arguments, **keywords).lower(lowering_platforms=("cuda",)).as_text()


def test_the_train_step():
    target = target_config(128)
    config = TrainConfig(target=target, drafter=drafter_config(target, num_anchors=6), total_steps=4)
    state = init_train_state(config, jax.random.key(0), init_params(config.drafter, jax.random.key(1)))
    batch = jax.tree.map(lambda x: x[None], rows_batch(np.zeros((2, 16), np.int32)))
    dtype = jnp.bfloat16
    program = lowered(
        train_step, state, jax.tree.map(lambda x: x.astype(dtype), random_target(target)), batch, config=config
    )
    assert "bf16" in program and "tpu_custom_call" not in program


@pytest.mark.parametrize("tree", [None, TreeSpec(k=2, budget=5)], ids=["chain", "tree"])
def test_generation(tree):
    target = target_config(64)
    drafter = drafter_config(target, "rnn")
    params = random_target(target)
    config = DecodeConfig(target=target, drafter=drafter, tree=tree, max_new_tokens=4)
    tokens, lengths = jnp.ones((2, 4), jnp.int32), jnp.full(2, 4, jnp.int32)
    program = lowered(
        dspark_jax.generate, params, random_drafter(drafter, params), tokens, lengths, request_keys(0, 2), config,
        sampling=sampling_params(2, 1.0),
    )  # fmt: skip
    assert "stablehlo.while" in program and "tpu_custom_call" not in program
