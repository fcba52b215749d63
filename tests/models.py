"""Small models for tests: random ones of any shape, and the golden ones."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.config import (
    DecoderConfig,
    DrafterConfig,
    DraftModelConfig,
    Eagle3Config,
    MarkovHeadType,
    MTPConfig,
    TargetConfig,
)
from dspark_jax.drafters.kinds import DrafterParams, declare_drafter
from dspark_jax.io import Drafter, Target, load_drafter, load_target
from dspark_jax.layers.linear import Linear
from dspark_jax.parameters import initialize
from dspark_jax.targets.decoder import TargetParams, declare_target, head_weight

GOLDENS = Path(__file__).parent / "goldens"
GOLDEN_DRAFTERS = ("dspark_vanilla", "dspark_gated", "dspark_rnn", "dflash")
HEADS = ("dflash", *(kind.value for kind in MarkovHeadType))
PAIR_KINDS = ("eagle3", "mtp")


def target_config(vocab_size: int = 8, **changes) -> TargetConfig:
    """A target of three narrow layers whose logits are far from flat."""
    shape = {
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "qk_norm": True,
        "tie_word_embeddings": True,
        "initializer_range": 0.5,
    }
    return TargetConfig(**(shape | changes))


def drafter_config(target: TargetConfig, head: str = "vanilla", **changes) -> DrafterConfig:
    """A drafter of one layer; `head` is a Markov head's type, or "dflash"."""
    shape = {
        field: getattr(target, field)
        for field in (
            "model_type",
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "qk_norm",
            "initializer_range",
        )
    }
    shape |= {
        "num_hidden_layers": 1,
        "block_size": 3,
        "mask_token_id": target.vocab_size - 1,
        "target_layer_ids": (-1, 1),
        "num_target_layers": target.num_hidden_layers,
        "markov_rank": 0 if head == "dflash" else 4,
        "markov_head_type": MarkovHeadType("vanilla" if head == "dflash" else head),
        "enable_confidence_head": head != "dflash",
    }
    return DrafterConfig(**(shape | changes))


def pair_config(target: TargetConfig, kind: str = "eagle3", **changes) -> Eagle3Config | MTPConfig:
    """An Eagle3 drafter of three drafts, or with "mtp" a multi-token-prediction module."""
    like_target = {field.name: getattr(target, field.name) for field in dataclasses.fields(DecoderConfig)}
    shape = like_target | {
        "model_type": target.model_type,
        "num_hidden_layers": 1,
        "sliding_windows": (),
        "num_target_layers": target.num_hidden_layers,
    }
    if kind == "mtp":
        return MTPConfig(**(shape | changes))
    shape |= {"model_type": "llama", "qk_norm": False, "block_size": 3, "target_layer_ids": (-1, 1)}
    return Eagle3Config(**(shape | changes))


def random_target(config: TargetConfig, seed: int = 0, dtype=jnp.float32) -> TargetParams:
    return initialize(declare_target(config), jax.random.key(seed), dtype)


def random_drafter(config: DraftModelConfig, target: TargetParams, seed: int = 1) -> DrafterParams:
    """Random trainable parameters around the target's own embedding and head, or with an Eagle3 head of its own."""
    head = head_weight(target)
    params = initialize(declare_drafter(config), jax.random.key(seed), head.dtype)
    if config.reduced_vocabulary:
        ids = np.random.default_rng(seed).permutation(config.vocab_size)[: config.draft_vocab_size]
        params = params.replace(draft_token_ids=jnp.asarray(np.sort(ids), jnp.int32))
        head = head[params.draft_token_ids]
    params = params.replace(embed_tokens=target.embed_tokens)
    return params.replace(lm_head=Linear(weight=head)) if "lm_head" in params.FROZEN else params


@functools.cache
def golden_target() -> Target:
    return load_target(GOLDENS / "target")


@functools.cache
def golden_drafter(name: str) -> Drafter:
    return load_drafter(GOLDENS / name, target=golden_target())


def golden_prompts(name: str) -> tuple[list[dict], np.ndarray, np.ndarray]:
    """Entries of a greedy golden, and their prompts right-padded, with lengths."""
    entries = json.loads((GOLDENS / f"{name}_greedy.json").read_text())
    return entries, *pad([entry["prompt"] for entry in entries])


def pad(rows: list[list[int]], width: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens = np.zeros((len(rows), width or lengths.max()), np.int32)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)] = ids
    return tokens, lengths
