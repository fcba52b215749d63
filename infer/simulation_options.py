"""The options of `python -m infer simulate`, checked before anything is read."""

import dataclasses
from pathlib import Path
from typing import Literal

from dspark_jax import TreeKind
from dspark_jax.io import InputError
from dspark_jax.io.outputs import check_input, check_output
from infer.options import DEFAULT_BUDGET, DecodingOptions

# A run of more would not end.
_MOST_REQUESTS = 10**6
_FIGURES = ("thresholds", "users", "concurrency")
_MODELS = ("target", "drafter", "prompts", "record")
_RECORDING = (
    *("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "batch_size"),
    *("tree", "tree_k", "tree_width", "tree_budget", "tree_spine"),
    *("dtype", "enable_thinking", "allow_config_key"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """Replay recorded decoding under load, in simulated time, with each policy of verifying.

    Give models and prompts to record a run, or a run that was recorded. A recorded run holds what the drafter proposes
    from every position of the texts that the target decodes, greedily or coupled, so that it replays every policy
    exactly: chains and, with --tree, trees beside them. A step takes what the throughput table says of its bucket;
    reading prompts takes no time. As in an engine, a stale capacity drafts nothing while the table's plain steps are
    faster, and a tree of a fixed depth takes the bucket of the whole tree.
    The JSON file holds every number; three figures go beside it: OUTPUT_thresholds.png, accepted and rejected drafts
    against a static threshold; OUTPUT_users.png, throughput against each user's speed; OUTPUT_concurrency.png,
    throughput and mean verification length against concurrency.
    """

    table: Path
    """JSON file of `profile --slots`, of this or another device: `capacities` of buckets in tokens, `steps_per_second`
    of each, and perhaps `plain_steps_per_second`, of steps that draft nothing."""
    tree_table: Path | None = None
    """The same of `profile --slots` with --tree, for trees; by default --table, as if a tree were drafted as fast."""
    recording: Path | None = None
    """A run that was recorded, .npz."""
    output: Path = Path("simulation.json")
    """JSON file to write."""
    calibration: Path | None = None
    """JSON file of train calibrate, with a map for the run's trees; by default confidences are taken as they are."""
    concurrency: tuple[int, ...] = ()
    """Fixed numbers of requests at once; powers of two as far as the table goes by default."""
    rate: tuple[float, ...] = ()
    """Also let requests arrive at random, so many a second (Poisson)."""
    trace: Path | None = None
    """Also let requests arrive at the times of this JSON Lines file, one `arrival_seconds` a line, ascending."""
    slots: int | None = None
    """Requests decoded together where they arrive by rate or trace; the largest concurrency by default."""
    requests: int = 256
    """Requests of each run but the trace's, drawn from the recording."""
    threshold: tuple[float, ...] = (0.5,)
    """Static policies beside the others: drafts whose prefix survival is at least this."""
    seed: int = 0
    """Of the samples while recording, of the arrivals, and of the order of requests."""
    target: str | None = None
    """To record: folder of a Hugging Face checkpoint, a hub id, or a .gguf file."""
    drafter: str | None = None
    """To record: folder or hub id of a drafter with a confidence head."""
    prompts: tuple[Path, ...] = ()
    """To record: JSON Lines files of prompts, as for generate."""
    record: Path | None = None
    """Keep the recorded run in this .npz file."""
    max_new_tokens: int = 128
    """To record: new tokens a request, at most; fewer where the context ends."""
    temperature: float = 0.0
    """To record: 0 is greedy; above it samples are coupled."""
    top_p: float = 1.0
    """To record: keep the likeliest tokens that together have this probability; 1 keeps all."""
    top_k: int = 0
    """To record: keep the k likeliest tokens; 0 keeps all."""
    min_p: float = 0.0
    """To record: keep tokens at least this likely relative to the likeliest; 0 keeps all."""
    batch_size: int = 8
    """To record: requests decoded together."""
    tree: TreeKind | None = None
    """To record: trees of this kind beside the chains."""
    tree_k: int | None = None
    """To record: children of an expanded node: 4 for pctree, 7 for jetspec; ddtree has no such limit."""
    tree_width: int | None = None
    """To record: nodes that pctree expands at each depth; tree-k by default."""
    tree_budget: int = DEFAULT_BUDGET
    """To record: nodes of a tree, the root included."""
    tree_spine: bool | None = None
    """To record: whether pctree keeps the greedy chain in the tree where the budget has room; yes by default."""
    dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """To record: type of weights and caches."""
    enable_thinking: bool | None = None
    """To record: passed to the chat template as true or false; else its default."""
    allow_config_key: tuple[str, ...] = ()
    """To record: unknown keys of the models' config.json that may be ignored."""

    def check(self) -> None:
        for name, values in (("requests", [self.requests]), ("slots", [self.slots]), ("concurrency", self.concurrency)):
            for value in values:
                if value is not None and value < 1:
                    raise InputError(f"--{name} {value} must be at least 1")
        if self.requests > _MOST_REQUESTS:
            raise InputError(f"--requests {self.requests} must be at most {_MOST_REQUESTS}")
        for rate in self.rate:
            if not 0 < rate < 1e9:
                raise InputError(f"--rate {rate} must be positive, and under 1e9")
        for threshold in self.threshold:
            if not 0 <= threshold <= 1:
                raise InputError(f"--threshold {threshold} must be in [0, 1]")
        if not 0 <= self.seed < 2**32:
            raise InputError(f"--seed {self.seed} must be in 0..{2**32 - 1}")
        if not self.rate and self.trace is None and self.slots is not None:
            raise InputError("--slots: is for requests that arrive; add --rate or --trace, or leave it out")
        self._check_source()
        inputs = [self.table, self.tree_table, self.recording, self.calibration, self.trace]
        inputs += [*self.prompts, self.target, self.drafter]
        if self.output.suffix == ".png":
            raise InputError(f"{self.output}: names a figure; name a .json file")
        for path in (self.output, *self.figures.values()):
            check_output(path, inputs)
        if self.record is not None:
            if self.record.suffix != ".npz":
                raise InputError(f"--record {self.record}: a recorded run is an .npz file; name one")
            check_output(self.record, inputs)
            if self.record.absolute() == self.output.absolute():
                raise InputError(f"--record {self.record}: is the --output too; name another file")

    @property
    def figures(self) -> dict[str, Path]:
        """The file of each figure."""
        return {name: self.output.with_name(f"{self.output.stem}_{name}.png") for name in _FIGURES}

    def _check_source(self) -> None:
        """One source of a run: a file, or models and prompts."""
        if self.recording is not None:
            default = {field.name: field.default for field in dataclasses.fields(self)}
            for name in (*_MODELS, *_RECORDING):
                if getattr(self, name) != default[name]:
                    option = name.replace("_", "-")
                    raise InputError(f"--{option}: is for recording a run; leave it out, or --recording")
            return
        for name in ("target", "drafter", "prompts"):
            if not getattr(self, name):
                raise InputError(f"--{name} is missing: name models and prompts to record a run, or a --recording")
        if self.tree is None and self.tree_table is not None:
            raise InputError("--tree-table: is for trees; record them with --tree, or leave it out")
        decoding = self.decoding()
        decoding.check_tree()
        decoding.check()
        for path in self.prompts:
            check_input(path)

    def decoding(self) -> DecodingOptions:
        """How the run is recorded."""
        shared = {name: getattr(self, name) for name in ("target", "drafter", "seed", *_RECORDING)}
        return DecodingOptions(**shared)
