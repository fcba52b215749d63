"""The Llama family: Llama 2 and 3, SmolLM2."""

from collections.abc import Collection, Mapping
from typing import Any

from dspark_jax.config import TargetConfig
from dspark_jax.targets import hf_fields


def config_from_hf(fields: Mapping[str, Any], allow_keys: Collection[str] = ()) -> TargetConfig:
    """The config that a `config.json` of `model_type` llama describes.

    Raises:
      ValueError: a missing, unknown or unsupported key or value, named.
    """
    hf_fields.check_keys(fields, hf_fields.COMMON | hf_fields.WINDOW | {"mlp_bias", "rope_interleaved"}, allow_keys)
    if fields.get("rope_interleaved"):
        raise ValueError("rope_interleaved true is not supported")
    if any(window is not None for window in hf_fields.sliding_windows(fields)):
        raise ValueError("sliding_window is not part of the llama family")
    return TargetConfig(
        **hf_fields.decoder_fields(fields),
        model_type="llama",
        mlp_bias=hf_fields.boolean(fields, "mlp_bias", False),
        tie_word_embeddings=hf_fields.boolean(fields, "tie_word_embeddings", False),
    )
