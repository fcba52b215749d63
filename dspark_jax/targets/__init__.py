"""Target language models: one module a family, found by `model_type`."""

from collections.abc import Collection, Mapping
from types import ModuleType
from typing import Any

from dspark_jax.config import TargetConfig
from dspark_jax.targets import llama, qwen3

FAMILIES: dict[str, ModuleType] = {"llama": llama, "qwen3": qwen3}


def config_from_hf(fields: Mapping[str, Any], allow_keys: Collection[str] = ()) -> TargetConfig:
    """The config that a Hugging Face `config.json` describes.

    Raises:
      ValueError: an unknown family, or a missing, unknown or unsupported key or value, named.
    """
    name = fields.get("model_type")
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise ValueError(f"model_type {name!r} is not supported; known: {', '.join(FAMILIES)}")
    return family.config_from_hf(fields, allow_keys)
