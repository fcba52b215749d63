"""The `config.json` of an EAGLE-3 drafter as SpecForge writes it, both ways. Errors are ValueErrors that name the key.

Tapped layers are `eagle_config.eagle_aux_hidden_state_layer_ids`, i for the output of decoder layer i (SpecForge,
SGLang), or the top-level `eagle_aux_hidden_state_layer_ids`, there i + 1 (vLLM, which asks the top level first); both
are written. A file with neither taps SpecForge's layers. `block_size`, `num_target_layers` and `num_anchors` are this
project's; other tools leave them unread.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dspark_jax import targets
from dspark_jax.config import DecoderConfig, Eagle3Config, TargetConfig
from dspark_jax.io.layer_ids import from_engine_layer_ids, to_engine_layer_ids
from dspark_jax.targets import hf_fields

ARCHITECTURE = "LlamaForCausalLMEagle3"

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_OWN_KEYS = ("block_size", "draft_vocab_size", "eagle_config", _LAYER_IDS, "num_anchors", "num_target_layers")
# Keys that have one supported value.
_ONLY = {"norm_before_residual": False, "norm_before_fc": False}


def config_from_fields(
    fields: Mapping[str, Any], allow_keys: Collection[str] = (), target: TargetConfig | None = None
) -> Eagle3Config:
    """The drafter that a `config.json` describes; a `target` says what other tools' files leave out.

    Raises:
      ValueError: a missing, unknown or unsupported key or value.
    """
    for key, only in _ONLY.items():
        if fields.get(key, only) not in (None, only):
            raise ValueError(f"{key} {fields[key]!r} is not supported; only {only!r} is")
    known = {*_OWN_KEYS, *_ONLY, "target_hidden_size"}
    base = targets.config_from_hf({k: v for k, v in fields.items() if k not in known}, allow_keys)
    if base.model_type != "llama":
        raise ValueError(f"model_type {base.model_type!r}: the layer of {ARCHITECTURE} is llama's")
    if fields.get("target_hidden_size") not in (None, base.hidden_size):
        raise ValueError(
            f"target_hidden_size is {fields['target_hidden_size']!r}, hidden_size {base.hidden_size}; "
            "only a drafter as wide as its target is supported"
        )
    layers = hf_fields.integer(fields, "num_target_layers", 0 if target is None else target.num_hidden_layers)
    if not layers:
        raise ValueError("num_target_layers is missing; load the drafter with its target, or set it")
    shared = {field.name: getattr(base, field.name) for field in dataclasses.fields(DecoderConfig)}
    return Eagle3Config(
        **shared,
        model_type=base.model_type,
        block_size=hf_fields.integer(fields, "block_size", 7),
        num_target_layers=layers,
        target_layer_ids=_layer_ids(fields, layers),
        draft_vocab_size=hf_fields.integer(fields, "draft_vocab_size", base.vocab_size),
        num_anchors=hf_fields.integer(fields, "num_anchors", 512),
    )


def _layer_ids(fields: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    nested = fields.get("eagle_config") or {}
    if not isinstance(nested, Mapping):
        raise ValueError(f"eagle_config must be an object, not {nested!r}")
    unknown = sorted(set(nested) - {_LAYER_IDS, "use_aux_hidden_state"})
    if unknown:
        raise ValueError(f"eagle_config has the unknown key {unknown[0]}")
    if not hf_fields.boolean(nested, "use_aux_hidden_state", True):
        raise ValueError("eagle_config has use_aux_hidden_state false; a drafter of tapped layers is needed")
    own, engine = _integers(nested), _integers(fields)
    if own is not None and engine is not None and own != from_engine_layer_ids(engine):
        raise ValueError(
            f"{_LAYER_IDS} is {list(engine)}, which are outputs of the layers {list(from_engine_layer_ids(engine))}, "
            f"but eagle_config says {list(own)}"
        )
    if own is not None:
        return own
    return (1, layers // 2 - 1, layers - 4) if engine is None else from_engine_layer_ids(engine)


def _integers(fields: Mapping[str, Any]) -> tuple[int, ...] | None:
    ids = fields.get(_LAYER_IDS)
    if ids is None:
        return None
    if not isinstance(ids, Sequence) or isinstance(ids, str) or any(type(layer) is not int for layer in ids):
        raise ValueError(f"{_LAYER_IDS} must be a list of integers, not {ids!r}")
    return tuple(ids)


def fields_from_config(config: Eagle3Config) -> dict[str, Any]:
    """The keys that engines read, and this project's own."""
    return {
        **hf_fields.fields_from_config(config),
        "architectures": [ARCHITECTURE],
        "model_type": config.model_type,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": False,
        "draft_vocab_size": config.draft_vocab_size,
        "eagle_config": {_LAYER_IDS: list(config.target_layer_ids), "use_aux_hidden_state": True},
        _LAYER_IDS: list(to_engine_layer_ids(config.target_layer_ids)),
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "num_anchors": config.num_anchors,
    }
