"""`python -m train calibrate`: temperatures that make a drafter's confidences mean what they say."""

import dataclasses
import sys
from pathlib import Path
from typing import Literal

import numpy as np
from tqdm import tqdm

from dspark_jax import DecodeConfig, TreeKind, TreeSpec, Verifier, sampling_params
from dspark_jax.io import (
    CalibrationLaw,
    Drafter,
    InputError,
    Target,
    TargetDescription,
    describe_drafter,
    describe_target,
    load_drafter,
    read_prompts,
    write_json,
)
from dspark_jax.io.outputs import check_report
from dspark_jax.io.report import environment
from train.calibration_figures import Figures
from train.recorded import Edges, Recorder, Rounds


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrateConfig:
    """Fit temperatures of a drafter's confidences on held-out prompts.

    Every draft is verified. Every other prompt of each file, from the first on, is for fitting; what is reported,
    before and after, is about the others. The JSON file holds the temperatures, the law that they are about, and the
    figures; reliability diagrams go beside it as .png.
    """

    target: str
    """Hugging Face folder or hub id, or a .gguf file."""
    drafter: str
    """Folder or hub id of a drafter with a confidence head."""
    prompts: tuple[Path, ...]
    """JSON Lines files of prompts that the drafter was not trained on, each of at least two."""
    output: Path
    """JSON file to write."""
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    """Keep the likeliest tokens that together have this probability; 1 keeps all."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this likely relative to the likeliest; 0 keeps all."""
    verifier: Verifier = Verifier.COUPLED
    """Acceptances depend on it at a temperature above 0; the confidence head is trained on those of rejection."""
    tree: TreeKind | None = None
    """Also decode with trees of this kind, and fit the map from an edge's log q to its survival."""
    tree_k: int | None = None
    """Children of an expanded node: 4 for pctree, 7 for jetspec; ddtree has no such limit."""
    tree_width: int | None = None
    """Nodes that pctree expands at each depth; tree-k by default."""
    tree_budget: int | None = None
    """Nodes of a tree, the root included; 32 by default."""
    max_new_tokens: int = 256
    """New tokens of a request, at most; fewer where the context ends."""
    batch_size: int = 8
    """Requests decoded together."""
    seed: int = 0
    """Of the samples: a prompt's depend on this and on its place in the file only."""
    enable_thinking: bool | None = None
    """Passed to the chat template; by default the template decides."""
    dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """Of weights and activations; int8 is of the weights of products alone."""
    allow_config_key: tuple[str, ...] = ()
    """Unknown keys of the models' config.json that may be ignored."""

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1")
        if not 0 <= self.seed < 2**32:
            raise InputError(f"--seed {self.seed}: must be in 0..{2**32 - 1}")
        if not self.prompts:
            raise InputError("--prompts: name at least one file")
        try:
            sampling_params(1, **self.sampling)
        except ValueError as error:
            raise InputError(f"--{str(error).replace('_', '-')}") from error
        for name in ("k", "width", "budget"):
            if self.tree is None and getattr(self, f"tree_{name}") is not None:
                raise InputError(f"--tree-{name}: a chain has none; add --tree, or leave it out")
        try:
            self.tree_spec()
        except ValueError as error:
            raise InputError(f"--{str(error).replace(' ', '-', 1)}") from error
        if self.tree is not None and self.verifier.chains_only:
            raise InputError(f"--verifier {self.verifier.value}: is for chains; leave --tree out, or take coupled")
        for path in self.prompts:
            if not path.is_file():
                raise InputError(f"{path}: no such file")
        if len({path.resolve() for path in self.prompts}) < len(self.prompts):
            raise InputError("--prompts: a file is named twice; its rounds would count twice")
        check_report(self.output, [*self.prompts, self.target, self.drafter])

    @property
    def sampling(self) -> dict[str, float]:
        """Keywords of `sampling_params`."""
        return {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "min_p")}

    def tree_spec(self) -> TreeSpec | None:
        """Raises ValueError for options that make no tree."""
        if self.tree is None:
            return None
        budget = {} if self.tree_budget is None else {"budget": self.tree_budget}
        return TreeSpec(kind=self.tree, k=self.tree_k, width=self.tree_width, **budget)


def main(config: CalibrateConfig) -> None:
    """Runs the command."""
    description = describe_target(config.target, allow_config_keys=config.allow_config_key)
    _check_drafter(config, description)
    encoder = description.prompt_encoder(config.enable_thinking)
    files = {path: read_prompts(path, encoder) for path in config.prompts}
    for path, prompts in files.items():
        if len(prompts) < 2:
            raise InputError(f"{path}: has one prompt; give at least two, since half of them are for the report")
    target = description.load(dtype=config.dtype)
    drafter = load_drafter(config.drafter, target=target, dtype=config.dtype, allow_config_keys=config.allow_config_key)
    chains = _recorder(config, target, drafter, None)
    tree = config.tree_spec()
    trees = None if tree is None else _recorder(config, target, drafter, tree)
    rounds: dict[str, Rounds] = {}
    edges: dict[str, Edges] = {}
    total = sum(map(len, files.values())) * (1 if trees is None else 2)
    with tqdm(total=total, unit=" prompts", disable=None, dynamic_ncols=True) as bar:
        for path, prompts in files.items():
            rounds[str(path)] = chains.rounds(prompts, bar.update)
            if trees is not None:
                edges[str(path)] = trees.edges(prompts, bar.update)
    _check_rounds(config, rounds)
    figures = Figures(rounds, edges, tree)
    print(figures.tables())
    law = dataclasses.asdict(CalibrationLaw.of(target, drafter, config.verifier, **config.sampling)) | {
        "target": target.name,
        "drafter": drafter.name,
        "dtype": config.dtype,
        "seed": config.seed,
        "max_new_tokens": config.max_new_tokens,
        "batch_size": config.batch_size,
        **environment(),
    }
    write_json(config.output, figures.fields() | {"law": law})
    plot = config.output.with_suffix(".png")
    title = f"{drafter.name} for {target.name}, {config.verifier.value}, T = {config.temperature:g}, {law['device']}"
    figures.plot(plot, title)
    print(f"wrote {config.output}, {plot}", file=sys.stderr)


def _check_drafter(config: CalibrateConfig, target: TargetDescription) -> None:
    """Refuses one of another target, or without a confidence head, before any weights are loaded."""
    drafter = describe_drafter(config.drafter, target=target.config, allow_config_keys=config.allow_config_key)
    if not drafter.enable_confidence_head:
        raise InputError(
            f"--drafter {config.drafter}: the drafter has no confidence head; there is nothing to calibrate"
        )


def _recorder(config: CalibrateConfig, target: Target, drafter: Drafter, tree: TreeSpec | None) -> Recorder:
    try:
        decode = DecodeConfig(
            target=target.config,
            drafter=drafter.config,
            tree=tree,
            max_new_tokens=min(config.max_new_tokens, target.config.max_position_embeddings),
            eos_token_ids=target.eos_token_ids,
            verifier=config.verifier,
        )
    except ValueError as error:
        raise InputError(f"--{str(error).replace('tree ', 'tree-', 1)}") from error
    return Recorder(target, drafter, decode, config.sampling, config.seed, config.batch_size)


def _check_rounds(config: CalibrateConfig, rounds: dict[str, Rounds]) -> None:
    names, pooled = ", ".join(rounds), Rounds.concatenate(list(rounds.values()))
    if not np.isfinite(pooled.logits).all():
        raise InputError(f"{config.drafter}: gives confidences that are not finite on {names}")
    if not len(pooled.for_fitting) or not len(pooled.for_report):
        raise InputError(f"{names}: in one half of the prompts every answer is one token, without a round")
