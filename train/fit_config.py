"""The options of `python -m train fit`, and what a checkpoint must agree on to be continued."""

import dataclasses
import enum
import json
import math
from pathlib import Path
from typing import Any, Literal

from dspark_jax.config import MarkovHeadType
from dspark_jax.io import InputError, TargetDescription
from dspark_jax.layers.decoder import Remat
from dspark_jax.training.losses import LossConfig
from dspark_jax.training.optimizer import OptimizerConfig
from train.cache_files import MANIFEST
from train.data import file_digest

# Options that change no number of the run, and files, which are compared by their contents.
_FREE = {"output", "checkpoint_every", "log_every", "max_not_finite", "target", "data", "held_out_data", "features",
         "mesh", "distributed", "remat"}  # fmt: skip
_AT_LEAST_ONE = ("num_layers", "block_size", "sliding_window", "draft_vocab_size", "num_anchors", "steps", "epochs",
                 "batch_size", "accumulation", "checkpoint_every", "eval_every", "log_every",
                 "max_not_finite")  # fmt: skip


class DrafterKind(enum.Enum):
    """DFlash and JetSpec are options of DSpark; MTP is one multi-token-prediction module."""

    DSPARK = "dspark"
    EAGLE3 = "eagle3"
    MTP = "mtp"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitConfig:
    """Train a drafter for a frozen target.

    The same command again goes on exactly where the last checkpoint is. The best drafter is written to
    OUTPUT/drafter, beside checkpoints, metrics.jsonl, metrics.png and TensorBoard's files.
    """

    target: str
    """Hugging Face folder or hub id, or a .gguf file."""
    data: tuple[Path, ...]
    """JSON Lines files whose records have messages, or input_ids and output_ids, or text."""
    output: Path
    """Folder of the run."""
    init: str | None = None
    """Drafter folder or hub id to fine-tune, instead of a fresh drafter."""
    held_out_data: tuple[Path, ...] = ()
    """Files to choose the best checkpoint on; by default 2% of the data, held out of training."""

    features: Path | None = None
    """Folder that `cache` has made of the data: the target's features are read there instead of computed."""

    kind: DrafterKind | None = None
    """Kind of a fresh drafter, dspark by default. This and the next twelve options are fixed by --init; another kind
    has few of them."""
    num_layers: int | None = None
    """Layers, 5 by default."""
    init_layers: tuple[int, ...] | None = None
    """Layers of the target that a fresh drafter's layers begin as, one each, which learns in far fewer updates; the
    last ones follow the last tap. By default they begin random."""
    block_size: int | None = None
    """Slots of a block, 7 by default: each drafts a token, but the first if --no-sample-from-anchor. The drafts of a
    round of Eagle3."""
    sample_from_anchor: bool | None = None
    """Whether slot k predicts the token at anchor+k+1 (yes by default), not at anchor+k as in the first DFlash."""
    causal_block: bool | None = None
    """Whether a slot sees only its own and earlier slots of its block (JetSpec); no by default."""
    markov_rank: int | None = None
    """Rank of the sequential head, 256 by default; 0 for none."""
    markov_head_type: MarkovHeadType | None = None
    """Kind of the sequential head, vanilla by default."""
    confidence_head: bool | None = None
    """Whether to train a confidence head; yes by default."""
    target_layer_ids: tuple[int, ...] | None = None
    """Tapped target layers (i is the output of layer i); five evenly spaced ones by default."""
    mask_token_id: int | None = None
    """Id of the block's masks; by default the tokenizer's, or an id that the data never uses."""
    draft_vocab_size: int | None = None
    """Rows of the drafter's head, the most frequent ids of the data; the whole vocabulary by default."""
    sliding_window: int | None = None
    """Positions that a drafter's layer looks back; all by default."""
    num_anchors: int = 512
    """Blocks trained in each document at a time, at most."""

    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    steps: int | None = None
    """Updates; by default as many as the epochs need."""
    epochs: int = 10
    """Passes over the data, if steps are not given."""
    batch_size: int = 16
    """Documents of one update, which are packed into rows as long as the longest document of the data."""
    accumulation: int = 1
    """Parts that a batch's rows are computed in, one after the other, to save memory; fewer where that saves none."""
    remat: Remat = Remat.NONE
    """What of the drafter's layers is computed again in the backward pass, to save memory: none, all but the products
    of weights, or all (full)."""
    max_length: int = 4096
    """Tokens after which a document is cut; the target's context, if that is less."""
    enable_thinking: bool | None = None
    """Passed to the chat template; by default the template decides."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the target and of activations; the trained weights are kept in float32."""
    mesh: str | None = None
    """Devices to spread over, as data=2,fsdp=4,model=2: rows of a batch over data and fsdp, weights and their moments
    over fsdp and model. An axis that is not named is 1; the product is the number of devices. By default one device is
    used. A run may go on with another mesh."""
    distributed: bool = False
    """Run as one of several processes, one a host, that share the data's and the output's folders; all get the same
    command. They find each other by themselves on a TPU pod, Slurm and Kubernetes, elsewhere by the variables
    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID. Needs --mesh."""
    seed: int = 0
    """Of the initial values, the order of the data and the anchors."""

    checkpoint_every: int = 200
    """Updates between checkpoints."""
    eval_every: int = 200
    """Updates between evaluations on held-out data."""
    log_every: int = 10
    """Updates between lines of metrics."""
    max_not_finite: int = 10
    """Non-finite updates in a row after which the run stops; each is skipped and named."""
    allow_config_key: tuple[str, ...] = ()
    """Unknown keys of the models' config.json that may be ignored."""

    def __post_init__(self) -> None:
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{_option(name)} {value}: must be at least 1")
        if self.markov_rank is not None and self.markov_rank < 0:
            raise InputError(f"--markov-rank {self.markov_rank}: must be at least 0")
        if not 0 <= self.seed < 2**32:
            raise InputError(f"--seed {self.seed}: must be in 0..{2**32 - 1}")
        if self.max_length < 2:
            raise InputError(f"--max-length {self.max_length}: must be at least 2")
        if self.distributed and self.mesh is None:
            raise InputError("--distributed: name the axes of all processes' devices with --mesh")
        if self.batch_size % self.accumulation:
            raise InputError(
                f"--batch-size {self.batch_size}: must be a multiple of --accumulation {self.accumulation}"
            )
        for group in ("loss", "optimizer"):
            for name, value in dataclasses.asdict(getattr(self, group)).items():
                uniform = (group, name) == ("loss", "decay") and value == math.inf
                if value < 0 or not (math.isfinite(value) or uniform):
                    raise InputError(f"{_option(f'{group}.{name}')} {value}: must be finite and at least 0")
        for name in ("loss.decay", "loss.chunk", "optimizer.clip_norm"):
            group, field = name.split(".")
            if not getattr(getattr(self, group), field) > 0:
                raise InputError(f"{_option(name)}: must be positive")
        for name in ("warmup_fraction", "beta1", "beta2"):
            if getattr(self.optimizer, name) >= 1:
                raise InputError(f"{_option(f'optimizer.{name}')}: must be under 1")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def settings(config: FitConfig, target: TargetDescription) -> dict[str, Any]:
    """Everything that a resumed run must have in common with the run that it continues, as JSON values."""
    values: dict[str, Any] = {
        "target": target.fingerprint,
        "data": file_digest(config.data),
        "held_out_data": file_digest(config.held_out_data),
        "features": None if config.features is None else file_digest([config.features / MANIFEST]),
    }
    for name, value in dataclasses.asdict(config).items():
        if isinstance(value, dict):
            values |= {f"{name}.{key}": inner for key, inner in value.items()}
        elif name not in _FREE:
            values[name] = value.value if isinstance(value, enum.Enum) else value
    return json.loads(json.dumps(values))


def check_settings(saved: dict[str, Any], now: dict[str, Any], config: FitConfig) -> None:
    """Raises an InputError that names the first option in which the run in `config.output` differs."""
    for name in sorted(saved.keys() | now.keys()):
        if saved.get(name) != now.get(name):
            difference = f"with {_option(name)} {saved.get(name)}, not {now.get(name)}"
            if name in ("target", "data", "held_out_data", "features"):
                difference = f"with other contents of {_option(name)}"
            raise InputError(f"{config.output}: holds a run made {difference}; name another --output or remove it")
