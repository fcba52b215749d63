"""The target and drafter of a command: described before, and apart from, the loading of their weights."""

import dataclasses
from pathlib import Path

from dspark_jax import DraftModelConfig
from dspark_jax.io import (
    Drafter,
    InputError,
    Target,
    TargetDescription,
    describe_drafter,
    describe_target,
    load_drafter,
)
from dspark_jax.io.named_models import locate
from dspark_jax.io.tensors import INT8
from dspark_jax.layers.kv_cache import cache_bytes
from infer.options import DraftingOptions, ModelOptions


@dataclasses.dataclass(frozen=True, eq=False)
class Description:
    """What can be known of the models without their weights."""

    target: TargetDescription
    drafter_config: DraftModelConfig | None


def describe(options: ModelOptions, drafter: str | None) -> Description:
    """Reads and checks everything but the weights.

    Raises:
      InputError: a missing file, an unknown key, a drafter of another target, or a threshold without confidences.
    """
    keys = options.allow_config_key
    target = describe_target(options.target, allow_config_keys=keys)
    config = None if drafter is None else describe_drafter(drafter, target=target.config, allow_config_keys=keys)
    threshold = options.confidence_threshold if isinstance(options, DraftingOptions) else 0
    if threshold and config is not None and not config.enable_confidence_head:
        raise InputError(f"--confidence-threshold {threshold}: {drafter} has no confidence head; leave it out")
    return Description(target, config)


def load_described(options: ModelOptions, description: Description) -> Target:
    """Loads the target that was described, sharded over the mesh if there is one, else with fused projections."""
    mesh = options.chosen_mesh
    return description.target.load(dtype=options.dtype, mesh=mesh, fused_projections=mesh is None)


def load_named(options: ModelOptions, drafter: str, target: Target) -> Drafter:
    """Loads a drafter as the target's, sharded as the target is."""
    return load_drafter(
        drafter,
        target=target,
        dtype=options.dtype,
        mesh=options.chosen_mesh,
        allow_config_keys=options.allow_config_key,
    )


def print_cache_size(description: Description, requests: int, capacity: int, dtype: str) -> None:
    """Says what the KV caches will take. `capacity`: positions of each request, prompt, new tokens and drafts."""
    dtype = "float32" if dtype == INT8 else dtype
    parts = {"target": cache_bytes(description.target.config, requests, capacity, dtype)}
    if description.drafter_config is not None:
        parts["drafter"] = cache_bytes(description.drafter_config, requests, capacity, dtype)
    sizes = " + ".join(f"{size / 2**20:,.1f} MiB ({name})" for name, size in parts.items())
    print(f"KV caches of {requests} requests of {capacity:,} positions: {sizes}")


def stamp(source: str) -> dict[str, list[int]]:
    """Size and time of each file of a local checkpoint: changes when the checkpoint does. Empty for a hub id."""
    path = Path(locate(source))
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors")) + sorted(path.glob("*.json"))
    return {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}
