"""`python -m train export`: a run's drafter as a DeepSpec folder."""

import dataclasses
from pathlib import Path
from typing import Literal

from jax.sharding import NamedSharding, PartitionSpec

from dspark_jax.config import DraftModelConfig
from dspark_jax.drafters.kinds import DrafterParams
from dspark_jax.io import InputError, Target, TargetDescription, describe_drafter, describe_target, save_drafter
from dspark_jax.io.drafter import check_deepspec
from dspark_jax.io.drafter_config import drafter_config_from_fields
from dspark_jax.parameters import abstract
from dspark_jax.training.step import declare_trainable, with_frozen
from train.checkpoints import Checkpoints
from train.processes import is_first, whole

CHECKPOINTS = "checkpoints"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Write the drafter of a training run as a folder that engines load."""

    run: Path
    """Output folder of `fit`."""
    output: Path
    """Folder to write."""
    which: Literal["best", "last"] = "best"
    """Best on held-out data, or newest."""
    dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """Of the written tensors. int8: of the weights of products, with scales, and without what is the target's; the
    smallest, for this project alone (--layout reduced)."""
    layout: Literal["deepspec", "reduced"] = "deepspec"
    """deepspec is what engines load, and refuses a reduced draft vocabulary and int8; reduced may hold both."""
    target: str | None = None
    """Where the target lies now, if it is not where it was in training."""
    allow_config_key: tuple[str, ...] = ()
    """Unknown keys of the target's config.json that may be ignored."""


def export(
    checkpoints: Checkpoints,
    step: int,
    config: DraftModelConfig,
    target: Target,
    output: Path,
    dtype: str,
    deepspec: bool,
) -> None:
    """Writes the drafter of one checkpoint, with the target's embedding and head, from the first process."""
    sharding = target.params.embed_tokens.weight.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec())
    params: DrafterParams = checkpoints.restore_params(step, abstract(declare_trainable(config)), sharding)
    complete = whole(with_frozen(params, target.params))
    if not is_first():
        return
    save_drafter(
        output,
        config,
        complete,
        target.config,
        dtype=dtype,
        eos_token_ids=target.eos_token_ids,
        deepspec=deepspec,
    )


def _check_output(folder: Path, drafter: DraftModelConfig, target: TargetDescription) -> None:
    """Raises an InputError where anything but this drafter, written before, would be lost."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is a file; name a folder to write")
    if not (folder / "config.json").exists():
        return
    try:
        same = describe_drafter(folder, target=target.config) == drafter
    except InputError:
        same = False
    if not same:
        raise InputError(f"{folder}: holds another model, which would be lost; name another --output")


def main(config: ExportConfig) -> None:
    """Runs the command."""
    if config.dtype == "int8" and config.layout == "deepspec":
        raise InputError("--dtype int8: engines of the layout deepspec cannot read it; add --layout reduced")
    checkpoints = Checkpoints(config.run / CHECKPOINTS, read_only=True)
    last = checkpoints.last()
    if last is None:
        raise InputError(f"{config.run / CHECKPOINTS}: no checkpoint yet; run `fit` until it has written one")
    notes = checkpoints.notes(last)
    step = notes["best"]["step"] if config.which == "best" and notes["best"] else last
    description = describe_target(config.target or notes["target"], allow_config_keys=config.allow_config_key)
    if description.fingerprint != notes["settings"].get("target"):
        raise InputError(
            f"--target {config.target or notes['target']}: not the target that the drafter was trained for"
        )
    try:
        drafter = drafter_config_from_fields(notes["drafter"])
    except ValueError as error:
        raise InputError(f"{checkpoints.folder}: checkpoint {last}: drafter: {error}; its notes are damaged") from error
    _check_output(config.output, drafter, description)
    if config.layout == "deepspec":
        check_deepspec(config.output, drafter, config.dtype)
    target = description.load(dtype=notes["dtype"])
    export(checkpoints, step, drafter, target, config.output, config.dtype, config.layout == "deepspec")
    print(f"{config.output}: the drafter after step {step}")
