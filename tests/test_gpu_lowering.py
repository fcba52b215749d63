"""The programs of training and decoding lowered for CUDA, without a GPU."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax
from dspark_jax import DecodeConfig, TreeSpec, request_keys, sampling_params
from dspark_jax.layers import cudnn_attention
from dspark_jax.layers.attention import attention
from dspark_jax.targets.decoder import forward_documents
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


@pytest.fixture
def cudnn(monkeypatch):
    """As if a GPU with cuDNN 9.10 were here; JAX asks for the version when it traces the call."""
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn_attention, "_has_cudnn", lambda: True)


FORWARD, BACKWARD = "__cudnn$fmhaScaleBiasSoftmax(", "__cudnn$fmhaScaleBiasSoftmaxBackward("


def attend(q, k, v, mask):
    return attention(q, k, v, mask)


def attention_shapes(length=320, dtype=jnp.bfloat16, width=8) -> list[jax.ShapeDtypeStruct]:
    shapes = ((2, length, 4, width), (2, 2, width, 330), (2, 2, 330, width))
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes] + [jax.ShapeDtypeStruct((2, length, 330), bool)]


def test_long_attention_is_cudnns(cudnn):
    program = lowered(jax.jit(attend), *attention_shapes())
    assert program.count(FORWARD) == 1 and "stablehlo.while" not in program
    assert "tensor<2x1x320x330xbf16>" in program, "the mask is a bias that all heads share"


def test_its_gradient_too(cudnn):
    gradient = jax.grad(lambda q, k, v, mask: jnp.sum(attend(q, k, v, mask), dtype=jnp.float32), argnums=(0, 1, 2))
    assert BACKWARD in lowered(jax.jit(gradient), *attention_shapes())


@pytest.mark.parametrize(
    "shape",
    [{"length": 256}, {"length": 321}, {"dtype": jnp.float32}, {"width": 136}, {"width": 12}],
    ids=["short", "odd", "float32", "wide heads", "heads of 12"],
)
def test_other_attention_is_not(cudnn, shape):
    assert "cudnn" not in lowered(jax.jit(attend), *attention_shapes(**shape))


def test_other_platforms_programs_do_not_change(cudnn):
    for platform in ("cpu", "tpu"):
        program = jax.jit(attend).trace(*attention_shapes()).lower(lowering_platforms=(platform,)).as_text()
        assert "cudnn" not in program and "stablehlo.while" in program


@pytest.mark.parametrize(
    ("platform", "capability", "has"),
    [("gpu", "9.0", True), ("gpu", "8.0", True), ("gpu", "7.5", False), ("gpu", "gfx942", False), ("cpu", None, False)],
)
def test_which_devices_have_it(monkeypatch, platform, capability, has):
    device = types.SimpleNamespace(platform=platform)
    if capability is not None:
        device.compute_capability = capability
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert cudnn_attention._has_cudnn() == has


def test_documents_and_prefill_go_there(cudnn):
    target = target_config(64)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_target(target))
    tokens = jnp.zeros((1, 320), jnp.int32)

    def documents(params, tokens):
        return forward_documents(params, target, tokens, tokens, tokens).hidden

    assert lowered(jax.jit(documents), params, tokens).count(FORWARD) == target.num_hidden_layers
    config = DecodeConfig(target=target, max_new_tokens=5)
    program = lowered(
        dspark_jax.generate, params, None, tokens, jnp.full(1, 320, jnp.int32), request_keys(0, 1), config
    )
    assert program.count(FORWARD) == target.num_hidden_layers
