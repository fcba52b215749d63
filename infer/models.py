"""The target and drafter of a command: described before, and apart from, the loading of their weights."""

import dataclasses
from pathlib import Path

from dspark_jax import DrafterConfig, TargetConfig, targets
from dspark_jax.io import Drafter, InputError, Target, Tokenizer, load_drafter, load_target, load_tokenizer, read_json
from dspark_jax.io.drafter_config import check_against_target, drafter_config_from_fields
from dspark_jax.io.target import resolve_folder
from dspark_jax.io.tensors import INT8
from dspark_jax.layers.kv_cache import cache_bytes
from infer.options import ModelOptions


@dataclasses.dataclass(frozen=True, eq=False)
class Description:
    """What can be known of the models without their weights. `target`: where it is loaded already, else None."""

    config: TargetConfig
    tokenizer: Tokenizer | None
    drafter_config: DrafterConfig | None
    target: Target | None = None


def describe(options: ModelOptions, drafter: str | None) -> Description:
    """Reads and checks the configs and the tokenizer.

    A GGUF file is loaded at once: most of the time goes into its header, which cannot be read apart.

    Raises:
      InputError: a missing file, an unknown key, or a drafter of another target.
    """
    if options.target.endswith(".gguf"):
        target = load_target(options.target, dtype=options.dtype, allow_config_keys=options.allow_config_key)
        config, tokenizer = target.config, target.tokenizer
    else:
        folder, target = resolve_folder(options.target), None
        path = folder / "config.json"
        try:
            config = targets.config_from_hf(read_json(path), options.allow_config_key)
        except ValueError as error:
            raise InputError(f"{path}: {error}") from error
        tokenizer = load_tokenizer(folder)
    drafter_config = None
    if drafter is not None:
        path = resolve_folder(drafter) / "config.json"
        try:
            drafter_config = drafter_config_from_fields(read_json(path), options.allow_config_key)
            check_against_target(drafter_config, config)
        except ValueError as error:
            raise InputError(f"{path}: {error}") from error
    return Description(config, tokenizer, drafter_config, target)


def load_described(options: ModelOptions, description: Description) -> Target:
    """Loads the target that was described."""
    if description.target is not None:
        return description.target
    return load_target(options.target, dtype=options.dtype, allow_config_keys=options.allow_config_key)


def load_named(options: ModelOptions, drafter: str, target: Target) -> Drafter:
    """Loads a drafter as the target's."""
    return load_drafter(drafter, target=target, dtype=options.dtype, allow_config_keys=options.allow_config_key)


def print_cache_size(description: Description, requests: int, capacity: int, dtype: str) -> None:
    """Says what the KV caches will take. `capacity`: positions of each request, prompt, new tokens and drafts."""
    dtype = "float32" if dtype == INT8 else dtype
    parts = {"target": cache_bytes(description.config, requests, capacity, dtype)}
    if description.drafter_config is not None:
        parts["drafter"] = cache_bytes(description.drafter_config, requests, capacity, dtype)
    sizes = " + ".join(f"{size / 2**20:,.1f} MiB ({name})" for name, size in parts.items())
    print(f"KV caches of {requests} requests of {capacity:,} positions: {sizes}")


def stamp(source: str) -> dict[str, list[int]]:
    """Size and time of each file of a local checkpoint: changes when the checkpoint does. Empty for a hub id."""
    path = Path(source)
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors")) + sorted(path.glob("*.json"))
    return {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}
