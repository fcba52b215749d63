"""What the families' `config.json` have in common, both ways. Errors are ValueErrors that name the key."""

from collections.abc import Collection, Mapping
from typing import Any

from dspark_jax.config import DecoderConfig, RopeScaling

# Keys that do not change the forward pass, or that other modules read (token ids).
IRRELEVANT = frozenset({
    "_attn_implementation_autoset", "_name_or_path", "architectures", "attention_dropout", "bos_token_id", "dtype",
    "eos_token_id", "is_llama_config", "output_attentions", "output_hidden_states", "pad_token_id", "pretraining_tp",
    "return_dict", "torch_dtype", "transformers.js_config", "transformers_version", "use_cache",
})  # fmt: skip

COMMON = frozenset({
    "attention_bias", "head_dim", "hidden_act", "hidden_size", "initializer_range", "intermediate_size",
    "max_position_embeddings", "model_type", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
    "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "tie_word_embeddings", "vocab_size",
})  # fmt: skip

WINDOW = frozenset({"layer_types", "max_window_layers", "sliding_window", "use_sliding_window"})

# More than any model has.
_MOST_LAYERS = 10_000

_ROPE_KEYS = {"rope_theta", "rope_type", "type", "factor", "low_freq_factor", "high_freq_factor",
              "original_max_position_embeddings"}  # fmt: skip


def check_keys(fields: Mapping[str, Any], known: Collection[str], allow_keys: Collection[str]) -> None:
    """Refuses a key whose meaning is unknown: ignoring it could silently change the model."""
    unknown = sorted(set(fields) - set(known) - IRRELEVANT - set(allow_keys))
    if unknown:
        raise ValueError(f"unknown key {unknown[0]}; if it changes nothing, allow it with --allow-config-key")


def integer(fields: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A positive integer; a missing or null key has the default, if there is one."""
    value = fields.get(key)
    if value is None and default is not None:
        return default
    if value is None:
        raise ValueError(f"{key} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key} must be a positive integer, not {value!r}")
    return value


def _layers(fields: Mapping[str, Any]) -> int:
    """Layers, of which lists are made before any file could say that they are too many."""
    layers = integer(fields, "num_hidden_layers")
    if layers > _MOST_LAYERS:
        raise ValueError(f"num_hidden_layers {layers} must be at most {_MOST_LAYERS}")
    return layers


def number(fields: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A positive number; a missing or null key has the default, if there is one."""
    value = fields.get(key)
    if value is None and default is not None:
        return default
    if value is None:
        raise ValueError(f"{key} is missing")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e300:
        raise ValueError(f"{key} must be a positive number, not {value!r}")
    return float(value)


def boolean(fields: Mapping[str, Any], key: str, default: bool) -> bool:
    """true or false; a missing or null key has the default."""
    value = fields.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"{key} must be true or false, not {value!r}")
    return value


def rope(fields: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling of the rotary embeddings, from `rope_parameters` or from `rope_theta` and `rope_scaling`."""
    merged: dict[str, Any] = {}
    for key in ("rope_parameters", "rope_scaling"):
        value = fields.get(key) or {}
        if not isinstance(value, Mapping):
            raise ValueError(f"{key} must be an object, not {value!r}")
        unknown = sorted(set(value) - _ROPE_KEYS)
        if unknown:
            raise ValueError(f"{key} has the unsupported key {unknown[0]}")
        merged = _merge(merged, value, key)
    if fields.get("rope_theta") is not None:
        merged = _merge(merged, {"rope_theta": fields["rope_theta"]}, "rope_theta")
    theta = number(merged, "rope_theta", 10_000.0)
    kind = merged.get("rope_type", merged.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(f"rope_type {kind!r} is not supported; only default and llama3 are")
    low, high = number(merged, "low_freq_factor"), number(merged, "high_freq_factor")
    if low >= high:
        raise ValueError(f"low_freq_factor {low} must be smaller than high_freq_factor {high}")
    return theta, RopeScaling(
        factor=number(merged, "factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=integer(merged, "original_max_position_embeddings"),
    )


def _merge(first: dict[str, Any], second: Mapping[str, Any], origin: str) -> dict[str, Any]:
    for key in first.keys() & second.keys():
        if first[key] != second[key]:
            raise ValueError(f"{origin} says {key} {second[key]!r}, but rope_parameters says {first[key]!r}")
    return {**first, **second}


def sliding_windows(fields: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Each layer's window, from `layer_types`, or from `max_window_layers` (the first ones are full) without it."""
    layers = _layers(fields)
    window = None
    if boolean(fields, "use_sliding_window", False):
        window = integer(fields, "sliding_window")
    types = fields.get("layer_types")
    if types is None:
        full = 0 if fields.get("max_window_layers") == 0 else integer(fields, "max_window_layers", 28)
        return tuple(None if layer < full else window for layer in range(layers))
    if not isinstance(types, list) or len(types) != layers or not all(isinstance(kind, str) for kind in types):
        raise ValueError(f"layer_types must be a list of num_hidden_layers {layers} names, not {types!r}")
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ValueError(f"layer_types has the unsupported kind {unknown[0]!r}")
    if "sliding_attention" in types and window is None:
        raise ValueError("layer_types has sliding_attention, but sliding_window is null or use_sliding_window false")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def decoder_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that every `DecoderConfig` takes from the common keys, windows apart."""
    if (activation := fields.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"hidden_act {activation!r} is not supported; only silu is")
    heads, width = integer(fields, "num_attention_heads"), integer(fields, "hidden_size")
    if fields.get("head_dim") is None and width % heads:
        raise ValueError(f"hidden_size {width} is not a multiple of num_attention_heads {heads}, and no head_dim")
    theta, scaling = rope(fields)
    head_dim = integer(fields, "head_dim", width // heads)
    if head_dim % 2:
        raise ValueError(f"head_dim {head_dim} must be even for rotary embeddings")
    return {
        "vocab_size": integer(fields, "vocab_size"),
        "hidden_size": width,
        "intermediate_size": integer(fields, "intermediate_size"),
        "num_hidden_layers": _layers(fields),
        "num_attention_heads": heads,
        "num_key_value_heads": integer(fields, "num_key_value_heads", heads),
        "head_dim": head_dim,
        "rms_norm_eps": number(fields, "rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_position_embeddings": integer(fields, "max_position_embeddings"),
        "attention_bias": boolean(fields, "attention_bias", False),
        "initializer_range": number(fields, "initializer_range", 0.02),
    }


def fields_from_config(config: DecoderConfig) -> dict[str, Any]:
    """The `config.json` keys of a decoder of the Llama or Qwen3 family, rope in both forms.

    Raises:
      ValueError: layers with different sliding windows, which the format cannot say.
    """
    windows = {window for window in config.sliding_windows if window is not None}
    if len(windows) > 1:
        raise ValueError(f"sliding windows {sorted(windows)} differ between layers; config.json holds one")
    rope_parameters: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_type": "default"}
    if (scaling := config.rope_scaling) is not None:
        rope_parameters |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        }
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "hidden_act": "silu",
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": rope_parameters,
        "rope_scaling": None if scaling is None else {k: v for k, v in rope_parameters.items() if k != "rope_theta"},
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "initializer_range": config.initializer_range,
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in config.sliding_windows],
        "sliding_window": next(iter(windows), None),
        "use_sliding_window": bool(windows),
        "max_window_layers": config.num_hidden_layers,
        "use_cache": True,
    }
