"""The dense Qwen3 family: normed queries and keys, optional sliding windows."""

from collections.abc import Collection, Mapping
from typing import Any

from dspark_jax.config import TargetConfig
from dspark_jax.targets import hf_fields


def config_from_hf(fields: Mapping[str, Any], allow_keys: Collection[str] = ()) -> TargetConfig:
    """The config that a `config.json` of `model_type` qwen3 describes.

    Raises:
      ValueError: a missing, unknown or unsupported key or value, named.
    """
    hf_fields.check_keys(fields, hf_fields.COMMON | hf_fields.WINDOW, allow_keys)
    return TargetConfig(
        **hf_fields.decoder_fields({"head_dim": 128, **fields}),
        model_type="qwen3",
        qk_norm=True,
        sliding_windows=hf_fields.sliding_windows(fields),
        tie_word_embeddings=hf_fields.boolean(fields, "tie_word_embeddings", False),
    )
