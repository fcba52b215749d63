"""The pre-norm decoder layer of the Llama and Qwen3 families, and how a stack of them is run."""

import enum
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from dspark_jax import parameters
from dspark_jax.config import DecoderConfig
from dspark_jax.layers.attention import (
    Attention,
    declare_attention,
    project,
)
from dspark_jax.layers.linear import linear
from dspark_jax.layers.mlp import MLP, declare_mlp, mlp
from dspark_jax.layers.norm import Norm, declare_norm, rms_norm

# attend(q, k, v, cache, window) -> (attention output [*rows, heads, D], new cache)
Attend = Callable[[Array, Array, Array, Any, int | None], tuple[Array, Any]]


class Remat(enum.Enum):
    """What of a layer the backward pass computes again, to save memory: nothing; all but the products of weights; or
    the whole layer from its input.
    """

    NONE = "none"
    PRODUCTS = "products"
    FULL = "full"


@struct.dataclass
class DecoderLayer:
    input_layernorm: Norm
    self_attn: Attention
    post_attention_layernorm: Norm
    mlp: MLP


def fuse_layer(params: DecoderLayer) -> DecoderLayer:
    """The layer with one product for queries, keys and values, and one for the MLP's two inputs."""
    return params.replace(self_attn=params.self_attn.fused(), mlp=params.mlp.fused())


def declare_layer(config: DecoderConfig) -> DecoderLayer:
    return DecoderLayer(
        input_layernorm=declare_norm(config.hidden_size),
        self_attn=declare_attention(config),
        post_attention_layernorm=declare_norm(config.hidden_size),
        mlp=declare_mlp(config),
    )


def declare_layers(config: DecoderConfig, stacked: bool = False):
    """A tuple of layers, or one tree of stacked ones."""
    if stacked:
        return parameters.stack(declare_layer(config), config.num_hidden_layers)
    return tuple(declare_layer(config) for _ in range(config.num_hidden_layers))


def layer_at(layers: Any, index: int) -> DecoderLayer:
    """One layer of a tuple of them, or of a stacked tree."""
    return layers[index] if isinstance(layers, tuple) else jax.tree.map(lambda x: x[index], layers)


def decoder_layer(
    params: DecoderLayer,
    config: DecoderConfig,
    x: Float[Array, "*rows d"],
    rope: tuple[Array, Array],
    attend: Attend,
    cache: Any,
    window: int | None,
) -> tuple[Float[Array, "*rows d"], Any]:
    """One layer over rows of any leading shape; `attend` decides what each row sees and what is cached."""
    h = rms_norm(params.input_layernorm, x, config.rms_norm_eps)
    return after_input_norm(params, config, x, h, rope, attend, cache, window)


def after_input_norm(
    params: Any,
    config: DecoderConfig,
    x: Float[Array, "*rows d"],
    h: Float[Array, "*rows width"],
    rope: tuple[Array, Array],
    attend: Attend,
    cache: Any,
    window: int | None,
) -> tuple[Float[Array, "*rows d"], Any]:
    """The rest of a layer: attention over what is made from `h`, and the MLP, each added to `x`.

    `params` has the fields of a `DecoderLayer` but, maybe, other norms of its input.
    """
    q, k, v = project(params.self_attn, config, h, rope)
    out, cache = attend(q, k, v, cache, window)
    x = x + linear(params.self_attn.o_proj, out.reshape(*x.shape[:-1], -1))
    return x + mlp(params.mlp, rms_norm(params.post_attention_layernorm, x, config.rms_norm_eps)), cache


def _remat(remat: Remat) -> Callable[..., Any]:
    match remat:
        case Remat.NONE:
            return decoder_layer
        case Remat.PRODUCTS:
            policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        case Remat.FULL:
            policy = jax.checkpoint_policies.nothing_saveable
    # Config, attend and window are no arrays.
    return jax.checkpoint(decoder_layer, policy=policy, static_argnums=(1, 4, 6))


def apply_layers(
    layers: Any,
    config: DecoderConfig,
    x: Float[Array, "*rows d"],
    rope: tuple[Array, Array],
    attend: Attend,
    caches: Any,
    taps: tuple[int, ...] = (),
    remat: Remat = Remat.NONE,
) -> tuple[Float[Array, "*rows d"], tuple[Array, ...], Any]:
    """Runs a stack. Returns the last layer's output, the outputs of the tapped layers, and the new caches.

    `layers` is a tuple of layers (a Python loop; `caches` is a tuple too) or one stacked tree (`lax.scan`;
    the caches carry a leading layer axis). A tap of -1 is the input of the first layer.
    """
    layer = _remat(remat)
    if isinstance(layers, tuple):
        tapped, new_caches = [x] if -1 in taps else [], []
        for index, params in enumerate(layers):
            cache = None if caches is None else caches[index]
            x, cache = layer(params, config, x, rope, attend, cache, config.sliding_windows[index])
            new_caches.append(cache)
            if index in taps:
                tapped.append(x)
        return x, tuple(tapped), None if caches is None else tuple(new_caches)

    windows = set(config.sliding_windows)
    if len(windows) > 1:
        raise ValueError("stacked layers must share one sliding window; load this model with layers as a tuple")
    window = windows.pop()
    buffers = tuple(x if tap == -1 else jnp.zeros_like(x) for tap in taps)

    def body(carry, item):
        x, buffers = carry
        index, params, cache = item
        x, cache = layer(params, config, x, rope, attend, cache, window)
        buffers = tuple(jnp.where(index == tap, x, buffer) for tap, buffer in zip(taps, buffers, strict=True))
        return (x, buffers), cache

    indices = jnp.arange(config.num_hidden_layers, dtype=jnp.int32)
    (x, buffers), new_caches = jax.lax.scan(body, (x, buffers), (indices, layers, caches))
    return x, buffers, new_caches
