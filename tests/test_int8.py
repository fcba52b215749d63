"""Models with int8 weights: loading them, and decoding that is the same with and without a drafter."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import dspark_jax
from dspark_jax import request_keys, sampling_params
from dspark_jax.io import load_drafter, load_target, save_target
from dspark_jax.io.calibration import CalibrationLaw
from dspark_jax.io.step_table import StepTableLaw
from dspark_jax.layers.kernels import int8_products
from dspark_jax.layers.quantized import QuantizedWeight, dequantize
from dspark_jax.sharding import make_mesh
from dspark_jax.targets.decoder import forward_documents, target_logits
from tests.models import GOLDENS, golden_drafter, golden_prompts, golden_target


@pytest.fixture(scope="module")
def target():
    if int8_products.best_path() is None:
        pytest.skip("no C++ compiler")
    return load_target(GOLDENS / "target", dtype="int8")


@pytest.fixture(scope="module")
def drafter(target):
    return load_drafter(GOLDENS / "dspark_vanilla", target=target, dtype="int8")


def logits(target, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    out = forward_documents(target.params, target.config, tokens, positions, jnp.zeros_like(tokens))
    return np.asarray(target_logits(target.params, target.config, out.hidden))


def test_weights_of_products_are_int8_and_the_rest_float32(target, drafter):
    layer = target.params.layers[0]
    assert isinstance(layer.mlp.up_proj.weight, QuantizedWeight) and isinstance(
        target.params.embed_tokens.weight, QuantizedWeight
    )
    assert layer.input_layernorm.weight.dtype == jnp.float32 and target.params.embed_tokens.weight.dtype == jnp.float32
    assert isinstance(drafter.params.markov_head.markov_w2.weight, QuantizedWeight)
    tokens = jnp.asarray(golden_prompts("dspark_vanilla")[1])
    own, exact = logits(target, tokens), logits(golden_target(), tokens)
    assert np.abs(own - exact)[..., : target.config.num_valid_tokens].max() < 0.1 * exact.std()
    assert (own.argmax(-1) == exact.argmax(-1)).mean() > 0.97


def test_stacked_layers_hold_the_same_weights(target):
    stacked = load_target(GOLDENS / "target", dtype="int8", stacked_layers=True)
    weight = stacked.params.layers.mlp.up_proj.weight
    for index, layer in enumerate(target.params.layers):
        one = jax.tree.map(lambda x, index=index: x[index], weight)
        np.testing.assert_array_equal(dequantize(one), dequantize(layer.mlp.up_proj.weight))
    tokens = jnp.asarray(golden_prompts("dspark_vanilla")[1][:1])
    np.testing.assert_allclose(logits(stacked, tokens), logits(target, tokens), atol=1e-4)


def test_laws_name_the_weights(target, drafter):
    exact = golden_target()
    assert (
        target.fingerprint != exact.fingerprint and drafter.fingerprint != golden_drafter("dspark_vanilla").fingerprint
    )
    laws = [StepTableLaw.of(model, drafter, None, 2, (8,)) for model in (target, exact)]
    assert [law.dtype for law in laws] == ["int8", "float32"] and laws[0] != laws[1]
    coupled = dspark_jax.Verifier.COUPLED
    assert CalibrationLaw.of(target, drafter, coupled) != CalibrationLaw.of(exact, drafter, coupled)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_decoding_with_a_drafter_is_plain_decoding(target, drafter, temperature):
    _, tokens, lengths = golden_prompts("dspark_vanilla")
    outputs = []
    for model in (None, drafter):
        config = dspark_jax.DecodeConfig(
            target=target.config, drafter=None if model is None else model.config, max_new_tokens=64
        )
        outputs.append(
            dspark_jax.generate(
                target.params,
                None if model is None else model.params,
                jnp.asarray(tokens),
                jnp.asarray(lengths),
                request_keys(0, len(tokens)),
                config,
                sampling_params(len(tokens), temperature=temperature),
            )
        )
    plain, speculative = outputs
    np.testing.assert_array_equal(plain.tokens, speculative.tokens)
    assert int(speculative.counts.rounds.sum()) < 0.7 * int(plain.counts.rounds.sum())


def test_what_a_drafter_lacks_is_the_target_s(target, tmp_path):
    folder = shutil.copytree(GOLDENS / "dspark_vanilla", tmp_path / "drafter")
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {k: v for k, v in tensors.items() if k.split(".")[0] not in ("embed_tokens", "lm_head")},
        folder / "model.safetensors",
    )
    own = load_drafter(folder, target=target, dtype="int8").params
    assert own.embed_tokens.weight is target.params.embed_tokens.weight
    quantised = load_drafter(folder, target=golden_target(), dtype="int8").params
    np.testing.assert_array_equal(quantised.embed_tokens.weight.values, own.embed_tokens.weight.values)
    exact = load_drafter(folder, target=target).params
    np.testing.assert_array_equal(exact.embed_tokens.weight, dequantize(own.embed_tokens.weight))


def test_what_int8_weights_cannot(target, tmp_path):
    with pytest.raises(ValueError, match="cannot be sharded"):
        load_target(GOLDENS / "target", dtype="int8", mesh=make_mesh(1, 2, jax.devices()[:2]))
    with pytest.raises(ValueError, match="cannot be saved"):
        save_target(tmp_path / "saved", target.config, target.params)
