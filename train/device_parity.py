"""What must hold on every device, asked of a small model: speculation changes no token, bfloat16 changes little."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dspark_jax
from dspark_jax.config import DrafterConfig, TargetConfig, TreeSpec
from dspark_jax.decode_state import DecodeConfig
from dspark_jax.sampling import request_keys
from dspark_jax.targets.decoder import TargetParams, forward_documents, target_logits
from train.device_shapes import random_drafter, random_target

# Few tokens, so that a random drafter is right now and then; logits that are far from flat.
_TARGET = TargetConfig(
    model_type="qwen3",
    vocab_size=8,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    qk_norm=True,
    tie_word_embeddings=True,
    initializer_range=0.1,
)
_LIKE_TARGET = (
    "model_type vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim qk_norm "
    "initializer_range"
)
_DRAFTER = DrafterConfig(
    **{field: getattr(_TARGET, field) for field in _LIKE_TARGET.split()},
    num_hidden_layers=1,
    block_size=3,
    mask_token_id=7,
    target_layer_ids=(0, 1),
    num_target_layers=3,
    markov_rank=32,
)
_TREE = TreeSpec(k=2, budget=8)
_REQUESTS, _PROMPT = 4, 8
# Long enough for attention to leave the path of short passes.
_LENGTH = 384
# Of the logits' standard deviation; bfloat16 has 8 bits.
_BOUND = 0.25


def measure_parity(new_tokens: int = 48) -> dict[str, Any]:
    """`passed`: drafts as chains and as trees gave plain decoding's tokens in float32, passes being of one width, and
    the logits of bfloat16 lie within the bound.
    """
    target = random_target(_TARGET, "float32")
    drafter = random_drafter(_DRAFTER, target, "float32")
    tokens = np.random.default_rng(0).integers(0, _TARGET.vocab_size, (_REQUESTS, _PROMPT))
    inputs = (jnp.asarray(tokens, jnp.int32), jnp.full(_REQUESTS, _PROMPT, jnp.int32), request_keys(0, _REQUESTS))

    def decode(config: DecodeConfig, params) -> Any:
        return jax.tree.map(np.asarray, dspark_jax.generate(target, params, *inputs, config))

    found: dict[str, Any] = {"requests": _REQUESTS, "new_tokens": new_tokens, "bound": _BOUND}
    for name, tree in (("chain", None), ("tree", _TREE)):
        config = DecodeConfig(target=_TARGET, drafter=_DRAFTER, tree=tree, max_new_tokens=new_tokens)
        out = decode(config, drafter)
        plain = decode(dataclasses.replace(config, drafter=None, tree=None, plain_width=config.width), None)
        found[name] = {
            "equal_requests": int(np.sum(np.all(out.tokens == plain.tokens, axis=1))),
            "tau": float((new_tokens - 1) * _REQUESTS / out.counts.rounds.sum()),
        }
    found["bfloat16_error"] = _bfloat16_error(target)
    equal = all(found[name]["equal_requests"] == _REQUESTS for name in ("chain", "tree"))
    found["passed"] = equal and found["bfloat16_error"] < _BOUND
    return found


def _bfloat16_error(target: TargetParams) -> float:
    """Largest difference of a logit, in standard deviations of the logits."""
    tokens = np.random.default_rng(1).integers(0, _TARGET.vocab_size, (2, _LENGTH))
    positions = jnp.broadcast_to(jnp.arange(_LENGTH, dtype=jnp.int32)[None], tokens.shape)

    @jax.jit
    def logits(params: TargetParams):
        out = forward_documents(params, _TARGET, jnp.asarray(tokens, jnp.int32), positions, jnp.zeros_like(positions))
        return target_logits(params, _TARGET, out.hidden)

    exact = np.asarray(logits(target))
    rounded = np.asarray(logits(jax.tree.map(lambda x: x.astype(jnp.bfloat16), target)))
    return float(np.max(np.abs(rounded - exact)) / np.std(exact))


def parity_line(found: dict[str, Any]) -> str:
    decoded = ", ".join(
        f"{name} {found[name]['equal_requests']} of {found['requests']} (tau {found[name]['tau']:.2f})"
        for name in ("chain", "tree")
    )
    return (
        f"{'passed' if found['passed'] else 'FAILED'}: requests equal to plain decoding: {decoded}; bfloat16's largest "
        f"error is {found['bfloat16_error']:.3f} standard deviations of the logits (bound {found['bound']})"
    )
