"""The `config.json` and tensor names of one multi-token-prediction module, both ways.

The layout is this project's: a decoder layer of the target's family under DeepSeek-V3's tensor names, which number the
module as the layer behind the target's last: `model.layers.N.{enorm,hnorm,eh_proj}.weight`, the layer's own names,
`model.layers.N.shared_head.norm.weight`. `model.layers.N.embed_tokens.weight` and `…shared_head.head.weight` are the
target's; they are read where a file has them, and not written. Errors are ValueErrors that name the key.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from dspark_jax import targets
from dspark_jax.config import DecoderConfig, MTPConfig
from dspark_jax.targets import hf_fields

_ARCHITECTURES = {"llama": "LlamaMTPModel", "qwen3": "Qwen3MTPModel"}
ARCHITECTURES = frozenset(_ARCHITECTURES.values())

_OWN_KEYS = ("block_size", "draft_vocab_size", "num_anchors", "num_nextn_predict_layers", "num_target_layers")


def config_from_fields(fields: Mapping[str, Any], allow_keys: Collection[str] = ()) -> MTPConfig:
    """The module that a `config.json` describes.

    Raises:
      ValueError: a missing, unknown or unsupported key or value.
    """
    base = targets.config_from_hf({k: v for k, v in fields.items() if k not in _OWN_KEYS}, allow_keys)
    if (modules := hf_fields.integer(fields, "num_nextn_predict_layers")) != 1:
        raise ValueError(f"num_nextn_predict_layers {modules} is not supported; only 1 is")
    shared = {field.name: getattr(base, field.name) for field in dataclasses.fields(DecoderConfig)}
    return MTPConfig(
        **shared,
        model_type=base.model_type,
        block_size=hf_fields.integer(fields, "block_size", 1),
        num_target_layers=hf_fields.integer(fields, "num_target_layers"),
        draft_vocab_size=hf_fields.integer(fields, "draft_vocab_size", base.vocab_size),
        num_anchors=hf_fields.integer(fields, "num_anchors", 512),
    )


def fields_from_config(config: MTPConfig) -> dict[str, Any]:
    """The keys of `config_from_fields`."""
    fields = {
        **hf_fields.fields_from_config(config),
        "architectures": [_ARCHITECTURES[config.model_type]],
        "model_type": config.model_type,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 1,
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "num_anchors": config.num_anchors,
    }
    if config.model_type == "llama":
        fields["mlp_bias"] = config.mlp_bias
    if config.reduced_vocabulary:
        fields["draft_vocab_size"] = config.draft_vocab_size
    return fields


def stored_name(config: MTPConfig, path: str) -> str:
    """The tensor that holds the parameter at a dotted path of `MTPParams`."""
    module, _, rest = path.partition(".")
    inside = {"block": rest, "norm": f"shared_head.norm.{rest}", "lm_head": f"shared_head.head.{rest}"}.get(
        module, path
    )
    return f"model.layers.{config.num_target_layers}.{inside}"
