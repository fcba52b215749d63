"""The `config.json` of a DeepSpec drafter, both ways. Errors are ValueErrors that name the key."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dspark_jax import targets
from dspark_jax.config import DecoderConfig, DrafterConfig, MarkovHeadType, TargetConfig
from dspark_jax.targets import hf_fields

_ARCHITECTURES = {"llama": "LlamaDSparkModel", "qwen3": "Qwen3DSparkModel"}

_MIRRORED = ("num_target_layers", "block_size", "mask_token_id", "target_layer_ids", "num_anchors",
             "enable_confidence_head", "confidence_head_with_markov", "markov_rank", "markov_head_type",
             "sample_from_anchor")  # fmt: skip
_DRAFTER_KEYS = (*_MIRRORED, "dflash_config", "draft_vocab_size")


def to_engine_layer_ids(layer_ids: Sequence[int]) -> tuple[int, ...]:
    """Tapped layers as vLLM, GGUF and Speculators count them: indices into Hugging Face's `hidden_states`.

    Here i is the output of decoder layer i and -1 the embedding; there they are i + 1 and 0.
    """
    return tuple(layer + 1 for layer in layer_ids)


def from_engine_layer_ids(layer_ids: Sequence[int]) -> tuple[int, ...]:
    """The inverse of `to_engine_layer_ids`."""
    return tuple(layer - 1 for layer in layer_ids)


def drafter_config_from_fields(fields: Mapping[str, Any], allow_keys: Collection[str] = ()) -> DrafterConfig:
    """The drafter that a DeepSpec `config.json` describes.

    Raises:
      ValueError: a layout that is unknown or in-place, or a missing, unknown or unsupported key or value.
    """
    drafter = _drafter_fields(fields)
    architectures = fields.get("architectures") or []
    if not isinstance(architectures, list):
        raise ValueError(f"architectures must be a list of names, not {architectures!r}")
    _check_layout(architectures, drafter)
    decoder = {k: v for k, v in fields.items() if k not in _DRAFTER_KEYS and k not in hf_fields.WINDOW}
    base = targets.config_from_hf(decoder, allow_keys)
    shared = {field.name: getattr(base, field.name) for field in dataclasses.fields(DecoderConfig)}
    shared["sliding_windows"] = hf_fields.sliding_windows(fields)
    layer_ids = drafter.get("target_layer_ids")
    if not isinstance(layer_ids, list) or any(type(layer) is not int for layer in layer_ids):
        raise ValueError(f"target_layer_ids must be a list of integers, not {layer_ids!r}")
    if type(drafter.get("mask_token_id")) is not int:
        raise ValueError(f"mask_token_id must be an integer, not {drafter.get('mask_token_id')!r}")
    head = drafter.get("markov_head_type") or MarkovHeadType.VANILLA.value
    if head not in (names := [kind.value for kind in MarkovHeadType]):
        raise ValueError(f"markov_head_type {head!r} is not supported; known: {', '.join(names)}")
    return DrafterConfig(
        **shared,
        model_type=base.model_type,
        block_size=hf_fields.integer(drafter, "block_size"),
        mask_token_id=drafter["mask_token_id"],
        target_layer_ids=tuple(layer_ids),
        num_target_layers=hf_fields.integer(drafter, "num_target_layers"),
        markov_rank=hf_fields.integer(drafter, "markov_rank") if drafter.get("markov_rank") else 0,
        markov_head_type=MarkovHeadType(head),
        enable_confidence_head=hf_fields.boolean(drafter, "enable_confidence_head", False),
        confidence_head_with_markov=hf_fields.boolean(drafter, "confidence_head_with_markov", True),
        num_anchors=hf_fields.integer(drafter, "num_anchors", 512),
        draft_vocab_size=hf_fields.integer(drafter, "draft_vocab_size", base.vocab_size),
    )


def _drafter_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The drafter's own keys, from the top level and from `dflash_config`, which must agree."""
    mirror = fields.get("dflash_config") or {}
    if not isinstance(mirror, Mapping):
        raise ValueError(f"dflash_config must be an object, not {mirror!r}")
    unknown = sorted(set(mirror) - set(_MIRRORED))
    if unknown:
        raise ValueError(f"dflash_config has the unknown key {unknown[0]}")
    own = {key: fields[key] for key in _DRAFTER_KEYS if key in fields and key != "dflash_config"}
    for key in sorted(own.keys() & mirror.keys()):
        if own[key] != mirror[key]:
            raise ValueError(f"{key} is {own[key]!r}, but dflash_config says {mirror[key]!r}")
    return {**mirror, **own}


def _check_layout(architectures: Sequence[str], drafter: Mapping[str, Any]) -> None:
    anchor_first = drafter.get("sample_from_anchor")
    if anchor_first is None and not any(str(name).endswith("DSparkModel") for name in architectures):
        raise ValueError(
            f"block layout unknown: architectures {list(architectures)} is no DSpark model and sample_from_anchor is "
            "missing; set it to true if slot k predicts the token at position anchor+k+1"
        )
    if anchor_first is not None and anchor_first is not True:
        raise ValueError(
            f"sample_from_anchor is {anchor_first!r}: in-place checkpoints, where slot k predicts the token at "
            "position anchor+k, are not supported"
        )


def fields_from_drafter_config(config: DrafterConfig) -> dict[str, Any]:
    """The `config.json` keys that engines read, in both of their forms.

    Raises:
      ValueError: what the format cannot say (layers with different windows).
    """
    own = {
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "num_anchors": config.num_anchors,
        "enable_confidence_head": config.enable_confidence_head,
        "confidence_head_with_markov": config.confidence_head_with_markov,
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head_type.value,
        "sample_from_anchor": True,
    }
    fields: dict[str, Any] = {
        **hf_fields.fields_from_config(config),
        **own,
        "architectures": [_ARCHITECTURES[config.model_type]],
        "model_type": config.model_type,
        "tie_word_embeddings": False,
        "dflash_config": own,
    }
    if config.model_type == "llama":
        fields["mlp_bias"] = config.mlp_bias
    if config.reduced_vocabulary:
        fields["draft_vocab_size"] = config.draft_vocab_size
    return fields


def check_against_target(config: DrafterConfig, target: TargetConfig) -> None:
    """Raises a ValueError that names the first field in which the drafter does not fit the target."""
    for field, own, other in (
        ("hidden_size", config.hidden_size, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("num_target_layers", config.num_target_layers, target.num_hidden_layers),
    ):
        if own != other:
            raise ValueError(f"{field} is {own}, but the target has {other}: a drafter of another target")
    if config.block_size >= target.max_position_embeddings:
        raise ValueError(
            f"block_size {config.block_size} must be under the target's {target.max_position_embeddings} positions"
        )
