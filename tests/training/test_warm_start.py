"""Drafters that begin as layers of their target."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.drafters.backbone import context_features, context_keys_values
from dspark_jax.layers.attention import project, project_keys_values
from dspark_jax.layers.norm import rms_norm
from dspark_jax.layers.rope import rope_tables
from dspark_jax.training.step import init_params
from dspark_jax.training.warm_start import start_from_target
from tests.models import drafter_config, random_target, target_config

TARGET = target_config(11)


def test_the_context_after_the_last_tap_is_the_target_s_own():
    """Where the first chosen layer follows the last tap, up to what the other taps add."""
    target = random_target(TARGET)
    config = drafter_config(TARGET, target_layer_ids=(0,), num_hidden_layers=2, sliding_windows=(None, None))
    params = init_params(config, jax.random.key(0))
    count, layer = config.num_hidden_layers, target.layers[1]
    started = start_from_target(params.replace(fc=jax.tree.map(jnp.zeros_like, params.fc)), target, (1,) * count)
    states, positions = (
        jax.random.normal(jax.random.key(1), (2, 5, 16)),
        jnp.tile(jnp.arange(5, dtype=jnp.int32), (2, 1)),
    )
    context = context_features(started.fc, started.hidden_norm, config, states)
    expected = project_keys_values(
        layer.self_attn,
        TARGET,
        rms_norm(layer.input_layernorm, states, TARGET.rms_norm_eps),
        rope_tables(TARGET, positions),
    )
    for found in context_keys_values(started.layers, config, context, positions):
        for mine, theirs in zip((found.keys, found.values), expected, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-5)


def test_each_layer_keeps_its_function():
    """With the first one's input norm in the place of its own."""
    target = random_target(TARGET)
    layers = target.layers
    other = layers[1].replace(input_layernorm=jax.tree.map(lambda x: x * 1.5 + 0.1, layers[1].input_layernorm))
    target = target.replace(layers=(layers[0], other, *layers[2:]))
    config = drafter_config(TARGET, target_layer_ids=(0,), num_hidden_layers=2, sliding_windows=(None, None))
    chosen = tuple(range(config.num_hidden_layers))
    started = start_from_target(init_params(config, jax.random.key(0)), target, chosen)
    x, rope = jax.random.normal(jax.random.key(1), (3, 16)), rope_tables(TARGET, jnp.arange(3, dtype=jnp.int32))
    for mine, theirs in zip(started.layers, (target.layers[index] for index in chosen), strict=True):
        inputs = (rms_norm(layer.input_layernorm, x, TARGET.rms_norm_eps) for layer in (mine, theirs))
        found, expected = (
            project(layer.self_attn, TARGET, h, rope) for layer, h in zip((mine, theirs), inputs, strict=True)
        )
        for one, another in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, another, atol=1e-5)
        np.testing.assert_array_equal(mine.mlp.down_proj.weight, theirs.mlp.down_proj.weight)
    np.testing.assert_array_equal(started.norm.weight, target.norm.weight)


def test_another_number_of_layers_is_refused():
    config = drafter_config(TARGET)
    with pytest.raises(ValueError, match="draft layers"):
        start_from_target(init_params(config, jax.random.key(0)), random_target(TARGET), (0,) * 7)
