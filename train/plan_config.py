"""The options of `python -m train plan`: those of `fit`, and the chips to plan for."""

import dataclasses
import math
from pathlib import Path

from dspark_jax import targets
from dspark_jax.config import DrafterConfig, TargetConfig
from dspark_jax.decode_state import DecodeConfig
from dspark_jax.io import InputError, read_json
from dspark_jax.io.drafter_config import check_against_target
from dspark_jax.io.mesh_option import mesh_sizes
from dspark_jax.planning.chips import Topology, parse_topology
from dspark_jax.serving.config import EngineConfig
from dspark_jax.sharding import MESH_AXES, TRAIN_MESH_AXES
from dspark_jax.training.step import TrainConfig
from train.fit_config import DrafterKind, FitConfig
from train.new_drafter import fresh_config

CONFIGS = Path(__file__).parent / "configs"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig(FitConfig):
    """Plan a run of `fit` on TPUs that you need not have: does it fit, and how long would it take?

    Compiles the train step of a config of `fit` for a topology, from shapes alone: no weights, no data. Ends with 0 if
    it fits the chips' memory, with 1 if not. Also models a round of decoding with the drafter. Times are modelled from
    the chip's published peaks, not measured.
    """

    topology: str
    """Chip and shape of a slice, such as v5p:4x4x4; chips are v4, v5e, v5p and v6e."""
    mesh: str | None = None
    """Axes of training, such as data=2,fsdp=16,model=2, whose product is the number of chips; by default all are fsdp:
    documents and weights are spread over all chips."""
    target: str
    """Folder with the target's config.json, that file, or the hub id of one whose shape is shipped."""
    data: tuple[Path, ...] = ()
    """Not read."""
    output: Path | None = None
    """JSON file for the report."""
    samples: int = 1_300_000
    """Documents of the data; 1.3 million in the paper."""

    slots: int = 64
    """Requests decoded together."""
    cache_length: int = 4096
    """Positions of each request's cache."""
    decode_mesh: str | None = None
    """Axes of decoding, such as data=8,model=2; by default model is as many chips as share the target's heads of keys
    evenly."""
    step_table: Path | None = None
    """JSON file for the modelled rounds a second by bucket, which `infer simulate --table` reads."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("samples", "slots", "cache_length"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1")
        for name in ("output", "step_table"):
            path = getattr(self, name)
            if path is not None and path.suffix != ".json":
                raise InputError(f"--{name.replace('_', '-')} {path}: is JSON; name a file that ends in .json")
        if self.kind not in (None, DrafterKind.DSPARK):
            raise InputError(f"--kind {self.kind.value}: only drafters of the kind dspark are planned")
        if self.init is not None or self.features is not None:
            raise InputError("--init and --features: plan knows shapes alone; leave them out")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is planned. `rows`: documents of one of the `parts` of a batch, on all chips."""

    topology: Topology
    mesh: dict[str, int]
    train: TrainConfig
    parts: int
    rows: int
    length: int
    decode_mesh: dict[str, int]
    engine: EngineConfig

    @property
    def batch_ways(self) -> int:
        """Chips that the documents of a part are spread over."""
        return self.mesh["data"] * self.mesh["fsdp"]


def make_plan(config: PlanConfig) -> Plan:
    """Checks all that can be known without compiling.

    Raises:
      InputError: an option that is wrong by itself or for this topology, named.
    """
    try:
        topology = parse_topology(config.topology)
    except ValueError as error:
        raise InputError(f"--topology {error}") from error
    target = dataclasses.replace(target_shape(config), stacked_layers=True)
    drafter = drafter_shape(config, target)
    mesh = _mesh("--mesh", config.mesh, TRAIN_MESH_AXES, topology, {"fsdp": topology.chips})
    rows, ways = config.batch_size // config.accumulation, mesh["data"] * mesh["fsdp"]
    if rows % ways:
        raise InputError(
            f"--accumulation {config.accumulation}: parts of {rows} documents cannot be spread evenly over "
            f"{ways} chips (data x fsdp){_remedy(config.batch_size, ways)}"
        )
    steps = config.steps or max(1, round(config.epochs * config.samples / config.batch_size))
    shared = next(n for n in range(target.num_key_value_heads, 0, -1) if not topology.chips % n)
    default = {"data": topology.chips // shared, "model": shared}
    decode_mesh = _mesh("--decode-mesh", config.decode_mesh, MESH_AXES, topology, default)
    if config.slots % decode_mesh["data"]:
        raise InputError(
            f"--slots {config.slots}: must be a multiple of the decoding mesh's data, {decode_mesh['data']}"
        )
    try:
        decode = DecodeConfig(target=target, drafter=drafter, max_new_tokens=config.cache_length)
        engine = EngineConfig(decode=decode, slots=config.slots, capacity=config.cache_length)
    except ValueError as error:
        raise InputError(f"--cache-length: {error}") from error
    return Plan(
        topology=topology,
        mesh=mesh,
        train=TrainConfig(
            target=target,
            drafter=drafter,
            total_steps=steps,
            loss=config.loss,
            optimizer=config.optimizer,
            remat=config.remat,
        ),
        parts=config.accumulation,
        rows=rows,
        length=min(config.max_length, target.max_position_embeddings),
        decode_mesh=decode_mesh,
        engine=engine,
    )


def target_shape(config: FitConfig) -> TargetConfig:
    """The target's config, of which no weights are needed: "Qwen/Qwen3-8B" is shipped as qwen3/8b.json.

    Raises:
      InputError: there is none, or it is malformed.
    """
    path, name = Path(config.target), config.target.split("/")[-1]
    if path.is_dir():
        path = path / "config.json"
    elif not path.is_file():
        path = CONFIGS / f"{name.lower().replace('-', '/', 1)}.json"
        if not path.is_file():
            raise InputError(
                f"--target {config.target}: its shape is not shipped; name a folder with its config.json, or the file"
            )
    try:
        return targets.config_from_hf(read_json(path), config.allow_config_key)
    except ValueError as error:
        raise InputError(f"{path}: {error}") from error


def drafter_shape(config: FitConfig, target: TargetConfig) -> DrafterConfig:
    """The config of a fresh drafter for a target of which no weights are needed.

    Raises:
      InputError: the options make none.
    """
    # Which id masks a block changes no shape.
    mask = target.vocab_size - 1 if config.mask_token_id is None else config.mask_token_id
    try:
        drafter = fresh_config(config, target, mask)
        check_against_target(drafter, target)
    except ValueError as error:
        raise InputError(f"drafter options: {error}") from error
    return drafter


def _mesh(
    option: str, text: str | None, axes: tuple[str, ...], topology: Topology, default: dict[str, int]
) -> dict[str, int]:
    """Sizes of all axes, of which those that are not named are 1."""
    if text is None:
        return dict.fromkeys(axes, 1) | default
    sizes = mesh_sizes(option, text, axes)
    if (product := math.prod(sizes.values())) != topology.chips:
        raise InputError(f"{option} {text}: is for {product} chips, but {topology.name} has {topology.chips}")
    return sizes


def _remedy(batch_size: int, ways: int) -> str:
    if batch_size % ways:
        return f", nor can a --batch-size of {batch_size}; choose one that can, or another --mesh"
    parts = batch_size // ways
    return f"; {parts} gives each of them one" if parts > 1 else "; 1 does"
