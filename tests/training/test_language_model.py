"""The next-token loss against a slow numpy reference, and one step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import parameters
from dspark_jax.config import TargetConfig
from dspark_jax.targets.decoder import declare_target, forward_documents
from dspark_jax.training.anchors import Batch
from dspark_jax.training.language_model import (
    LanguageModelConfig,
    init_state,
    language_model_loss,
    language_model_step,
    next_token_loss,
)
from dspark_jax.training.optimizer import OptimizerConfig, make_optimizer

CONFIG = TargetConfig(
    model_type="qwen3",
    vocab_size=20,
    num_valid_tokens=18,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    qk_norm=True,
    tie_word_embeddings=True,
    initializer_range=0.3,
)


@pytest.fixture(scope="module")
def params():
    return parameters.initialize(declare_target(CONFIG), jax.random.key(0))


@pytest.fixture(scope="module")
def batch():
    """Two rows of 13: documents of 5 and 8 tokens; one of 9, the second token untrained, then padding."""
    rng = np.random.default_rng(0)
    mask = np.ones((2, 13), bool)
    mask[1, 1] = False
    mask[1, 9:] = False
    documents = np.array([[0] * 5 + [1] * 8, [2] * 9 + [-1] * 4], np.int32)
    positions = np.array([[*range(5), *range(8)], [*range(9), *range(4)]], np.int32)
    arrays = (rng.integers(0, 18, (2, 13)).astype(np.int32), mask, documents, positions)
    return Batch(*map(jnp.asarray, arrays))


def reference(params, batch) -> tuple[float, int]:
    """One softmax a predicted token, in float64."""
    out = forward_documents(params, CONFIG, batch.tokens, batch.positions, batch.document_ids)
    hidden, head = np.asarray(out.hidden, np.float64), np.asarray(params.embed_tokens.weight, np.float64)
    tokens, mask, documents = (np.asarray(x) for x in (batch.tokens, batch.loss_mask, batch.document_ids))
    nats, count = 0.0, 0
    for row in range(tokens.shape[0]):
        for t in range(1, tokens.shape[1]):
            if mask[row, t] and documents[row, t] == documents[row, t - 1]:
                odds = np.exp((head @ hidden[row, t - 1])[:18])
                nats -= np.log(odds[tokens[row, t]] / odds.sum())
                count += 1
    return nats, count


@pytest.mark.parametrize("chunk", [1, 5, 12, 100])
def test_loss_equals_the_reference_for_any_chunk(params, batch, chunk):
    nats, count = language_model_loss(params, batch, CONFIG, chunk)
    expected_nats, expected_count = reference(params, batch)
    assert expected_count == 4 + 7 + 7
    assert count == expected_count
    np.testing.assert_allclose(nats, expected_nats, rtol=1e-5)


def test_gradient_does_not_depend_on_the_chunk(params, batch):
    gradients = [
        jax.jit(jax.grad(lambda p, c=chunk: next_token_loss(p, CONFIG, batch, c)[0]))(params) for chunk in (3, 12)
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), *gradients)


def test_documents_do_not_see_each_other(params, batch):
    first = np.asarray(batch.tokens).copy()
    first[0, :5] = (first[0, :5] + 1) % 18
    second = batch.replace(tokens=jnp.asarray(first), loss_mask=batch.loss_mask.at[0, :5].set(False).at[1].set(False))
    before = language_model_loss(params, second.replace(tokens=batch.tokens), CONFIG)
    after = language_model_loss(params, second, CONFIG)
    assert before[1] == after[1] == 7
    np.testing.assert_allclose(before[0], after[0], rtol=1e-6)


def test_steps_learn_a_batch_and_compile_once(params, batch, compilations):
    config = LanguageModelConfig(target=CONFIG, total_steps=30)
    state = init_state(config, jax.tree.map(jnp.copy, params))
    state, first = language_model_step(state, batch, config)
    compilations.reset()
    for _ in range(29):
        state, last = language_model_step(state, batch, config)
    assert compilations.count == 0
    assert int(state.step) == 30
    assert float(last) < float(first)


def test_only_matrices_decay(params):
    settings = OptimizerConfig(weight_decay=0.5, learning_rate=1.0, warmup_fraction=0.1)
    optimizer = make_optimizer(settings, 10)
    zeros = jax.tree.map(jnp.zeros_like, params)
    with jax.numpy_dtype_promotion("standard"):
        state, update = optimizer.init(params), jax.jit(optimizer.update)
        _, state = update(zeros, state, params)  # the warm-up's first rate is 0
        updates, _ = update(zeros, state, params)
    assert not np.any(updates.norm.weight)
    np.testing.assert_allclose(updates.embed_tokens.weight, -0.5 * params.embed_tokens.weight, rtol=1e-6)
