"""The `config.json` of every kind of drafter, both ways. Errors are ValueErrors that name the key.

DeepSpec, DFlash and JetSpec are read and written here, the others in modules of their own.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dspark_jax import targets
from dspark_jax.config import (
    DecoderConfig,
    DrafterConfig,
    DraftModelConfig,
    Eagle3Config,
    MarkovHeadType,
    MTPConfig,
    TargetConfig,
)
from dspark_jax.io import eagle3_config, mtp_config
from dspark_jax.targets import hf_fields

_ARCHITECTURES = {"llama": "LlamaDSparkModel", "qwen3": "Qwen3DSparkModel"}
# The original DFlash and JetSpec: in place and without heads, where sample_from_anchor does not say otherwise.
_IN_PLACE = "DFlashDraftModel"
# A causal block, as vLLM, JetSpec and z-lab's own code name it; the last of them at the top level.
_CAUSAL = ("causal", "causal_head", "is_causal")

_MIRRORED = ("num_target_layers", "block_size", "mask_token_id", "target_layer_ids", "num_anchors",
             "enable_confidence_head", "confidence_head_with_markov", "markov_rank", "markov_head_type",
             "sample_from_anchor")  # fmt: skip
_DRAFTER_KEYS = (*_MIRRORED, *_CAUSAL, "dflash_config", "draft_vocab_size", "auto_map")
# Keys of `dflash_config` that have one supported value.
_ONLY = {"input_embedding_scale": 1, "projector_type": "dflash", "shift_label": False, "use_swa": False}
# And those that say how the drafter was trained.
_TRAINING = ("loss_decay_gamma",)


def drafter_config_from_fields(
    fields: Mapping[str, Any], allow_keys: Collection[str] = (), target: TargetConfig | None = None
) -> DraftModelConfig:
    """The drafter that a `config.json` of DeepSpec, DFlash, JetSpec, EAGLE-3 or multi-token prediction describes.

    `target`: says what an EAGLE-3 file of other tools leaves out, where it is known.

    Raises:
      ValueError: a layout that is unknown, or a missing, unknown or unsupported key or value.
    """
    architectures = fields.get("architectures") or []
    if not isinstance(architectures, list):
        raise ValueError(f"architectures must be a list of names, not {architectures!r}")
    if eagle3_config.ARCHITECTURE in architectures:
        return eagle3_config.config_from_fields(fields, allow_keys, target)
    if mtp_config.ARCHITECTURES.intersection(architectures):
        return mtp_config.config_from_fields(fields, allow_keys)
    return _block_drafter(fields, architectures, allow_keys)


def _block_drafter(
    fields: Mapping[str, Any], architectures: Sequence[str], allow_keys: Collection[str]
) -> DrafterConfig:
    drafter = _drafter_fields(fields)
    sample_from_anchor = _anchor_first(architectures, drafter)
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
        sample_from_anchor=sample_from_anchor,
        causal_block=_causal_block(drafter, sample_from_anchor, shared["sliding_windows"]),
    )


def _drafter_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The drafter's own keys, from the top level and from `dflash_config`, which must agree."""
    mirror = fields.get("dflash_config") or {}
    if not isinstance(mirror, Mapping):
        raise ValueError(f"dflash_config must be an object, not {mirror!r}")
    unknown = sorted(set(mirror) - {*_MIRRORED, *_CAUSAL, *_ONLY, *_TRAINING})
    if unknown:
        raise ValueError(f"dflash_config has the unknown key {unknown[0]}")
    for key in sorted(_ONLY.keys() & mirror.keys()):
        if mirror[key] is not None and mirror[key] != _ONLY[key]:
            raise ValueError(f"dflash_config has {key} {mirror[key]!r}, which is not supported; only {_ONLY[key]!r} is")
    own = {key: fields[key] for key in _DRAFTER_KEYS if key in fields and key != "dflash_config"}
    for key in sorted(own.keys() & mirror.keys()):
        if own[key] != mirror[key]:
            raise ValueError(f"{key} is {own[key]!r}, but dflash_config says {mirror[key]!r}")
    return {**mirror, **own}


def _anchor_first(architectures: Sequence[str], drafter: Mapping[str, Any]) -> bool:
    """Whether slot k predicts the token at position anchor+k+1, and not that at anchor+k."""
    if drafter.get("sample_from_anchor") is not None:
        return hf_fields.boolean(drafter, "sample_from_anchor", True)
    if any(str(name).endswith("DSparkModel") for name in architectures):
        return True
    heads = drafter.get("markov_rank") or drafter.get("enable_confidence_head")
    if not heads and (_IN_PLACE in architectures or any(drafter.get(key) for key in _CAUSAL)):
        return False
    raise ValueError(
        f"block layout unknown: architectures {list(architectures)} is no DSpark model or headless {_IN_PLACE}, and "
        "sample_from_anchor is missing; set it to true if slot k predicts the token at position anchor+k+1, to "
        "false if that at anchor+k"
    )


def _causal_block(drafter: Mapping[str, Any], anchor_first: bool, windows: Sequence[int | None]) -> bool:
    """What the keys say, which must agree. Without them an in-place drafter's sliding layers are causal."""
    said = {key: hf_fields.boolean(drafter, key, False) for key in _CAUSAL if drafter.get(key) is not None}
    if len(set(said.values())) > 1:
        raise ValueError(", but ".join(f"{key} is {value}" for key, value in said.items()))
    if said:
        return next(iter(said.values()))
    sliding = [window is not None for window in windows]
    if anchor_first or not any(sliding):
        return False
    if not all(sliding):
        raise ValueError(
            "layer_types mixes sliding and full attention: the sliding layers alone would be causal in the block, "
            "which is not supported; set dflash_config.causal if all layers are alike"
        )
    return True


def fields_from_drafter_config(config: DraftModelConfig) -> dict[str, Any]:
    """The `config.json` keys that engines read, in both of their forms.

    Raises:
      ValueError: what the format cannot say (layers with different windows).
    """
    if isinstance(config, Eagle3Config):
        return eagle3_config.fields_from_config(config)
    if isinstance(config, MTPConfig):
        return mtp_config.fields_from_config(config)
    return _block_fields(config)


def _block_fields(config: DrafterConfig) -> dict[str, Any]:
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
        "sample_from_anchor": config.sample_from_anchor,
    }
    causal = {}
    if config.causal_block or not config.sample_from_anchor:
        causal = dict.fromkeys(_CAUSAL, config.causal_block)
    heads = config.markov_rank or config.enable_confidence_head
    in_place = not config.sample_from_anchor and not heads
    fields: dict[str, Any] = {
        **hf_fields.fields_from_config(config),
        **own,
        **causal,
        "architectures": [_IN_PLACE if in_place else _ARCHITECTURES[config.model_type]],
        "model_type": config.model_type,
        "tie_word_embeddings": False,
        "dflash_config": own | causal,
    }
    if config.model_type == "llama":
        fields["mlp_bias"] = config.mlp_bias
    if config.reduced_vocabulary:
        fields["draft_vocab_size"] = config.draft_vocab_size
    return fields


def check_against_target(config: DraftModelConfig, target: TargetConfig) -> None:
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
