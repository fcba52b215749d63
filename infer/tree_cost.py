"""`python -m infer tree-cost`: what growing a PCTree takes at a vocabulary's size, against reading W2 once a depth."""

import dataclasses
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from tqdm import tqdm

from dspark_jax import DrafterConfig, TreeSpec
from dspark_jax.drafters.dspark import DrafterParams
from dspark_jax.drafters.markov import MarkovHead
from dspark_jax.drafting.pctree import pctree_of_logits
from dspark_jax.io import InputError, write_json
from dspark_jax.io.outputs import check_output
from dspark_jax.io.report import environment, table
from dspark_jax.layers.linear import Embedding, Linear

# Beyond these a run would not fit a machine, or end.
_MOST = {"vocab_size": 10**7, "markov_rank": 2**16, "block_size": 256, "requests": 4096, "repeats": 10**6}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeCostOptions:
    """Time the tree stage of a vanilla Markov head with random weights, greedy; no model is needed.

    The bound is reading W2 once for each depth at the bandwidth that a plain pass over it reaches (by row sums or by a
    product with a vector, whichever is faster). Bound and tree are measured in turn; ratios are of medians.
    """

    output: Path = Path("tree_cost.json")
    """JSON file to write."""
    vocab_size: int = 151_936
    """Rows of W1 and W2 (Qwen3's by default)."""
    markov_rank: int = 256
    """Columns of W1 and W2."""
    block_size: int = 7
    """Depth of the tree."""
    requests: int = 1
    """Trees grown together."""
    tree_k: int = 4
    """Children of a parent, and parents expanded at each depth."""
    tree_budget: int = 32
    """Nodes of the tree, the root included."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of W1 and W2."""
    repeats: int = 15
    """Turns."""

    def check(self) -> None:
        for name, most in _MOST.items():
            if not 1 <= getattr(self, name) <= most:
                raise InputError(f"--{name.replace('_', '-')} {getattr(self, name)} must be in 1..{most}")
        self.tree()
        if self.vocab_size <= self.tree_k:
            raise InputError(f"--vocab-size {self.vocab_size} must be more than --tree-k {self.tree_k}")
        check_output(self.output)

    def tree(self) -> TreeSpec:
        try:
            return TreeSpec(k=self.tree_k, budget=self.tree_budget)
        except ValueError as error:
            raise InputError(f"--{str(error).replace(' ', '-', 1)}") from error


def tree_cost(options: TreeCostOptions) -> None:
    options.check()
    head, logits, config, spec = _inputs(options)
    params = DrafterParams(None, head.markov_w2, None, (), None, None, head)
    anchors = jnp.zeros(options.requests, jnp.int32)

    @jax.jit
    def grow(params: DrafterParams, logits: Float[Array, "R gamma V"]):
        hidden = jnp.zeros((*logits.shape[:2], 1), logits.dtype)
        none = jnp.zeros(options.requests, jnp.float32)
        noise = jnp.zeros((*logits.shape[:2], 1), logits.dtype)
        return pctree_of_logits(params, config, spec, hidden, logits, anchors, noise, lambda x, _: x, none)

    weight = head.markov_w2.weight
    vector = jnp.ones((weight.shape[1], 1), weight.dtype)
    calls: dict[str, Callable[[], Any]] = {
        "tree": functools.partial(grow, params, logits),
        "sums": functools.partial(jax.jit(lambda x: jnp.sum(x, axis=1)), weight),
        "product": functools.partial(jax.jit(jnp.matmul), weight, vector),
    }
    for call in tqdm(calls.values(), desc="compile", unit="program"):
        jax.block_until_ready(call())
    seconds = {name: np.zeros(options.repeats) for name in calls}
    for turn in tqdm(range(options.repeats), desc="measure", unit="turn"):
        for name, call in calls.items():
            begin = time.perf_counter()
            jax.block_until_ready(call())
            seconds[name][turn] = time.perf_counter() - begin
    medians = {name: float(np.median(values)) for name, values in seconds.items()}
    read = min(medians["sums"], medians["product"])
    report = {
        **{name: value for name, value in dataclasses.asdict(options).items() if name != "output"},
        **environment(),
        "tree_ms": 1e3 * medians["tree"],
        "bound_ms": 1e3 * read * options.block_size,
        "tree_over_bound": medians["tree"] / (read * options.block_size),
        "read_gb_per_second": weight.nbytes / read / 1e9,
    }
    rows = [
        ["", "ms"],
        ["bound: W2 read once a depth", f"{report['bound_ms']:.2f}"],
        ["tree", f"{report['tree_ms']:.2f}"],
    ]
    print(table(rows))
    print(f"tree / bound = {report['tree_over_bound']:.2f} at {report['read_gb_per_second']:.1f} GB/s")
    write_json(options.output, report)
    print(f"wrote {options.output}", file=sys.stderr)


def _inputs(options: TreeCostOptions) -> tuple[MarkovHead, Array, DrafterConfig, TreeSpec]:
    config = DrafterConfig(
        vocab_size=options.vocab_size,
        hidden_size=1,
        intermediate_size=1,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=1,
        model_type="qwen3",
        block_size=options.block_size,
        mask_token_id=0,
        target_layer_ids=(0,),
        num_target_layers=2,
        markov_rank=options.markov_rank,
        enable_confidence_head=False,
    )
    keys = jax.random.split(jax.random.key(0), 3)
    shape = (options.vocab_size, options.markov_rank)
    w1, w2 = (0.1 * jax.random.normal(key, shape, options.dtype) for key in keys[:2])
    logits = jax.random.normal(keys[2], (options.requests, options.block_size, options.vocab_size))
    head = MarkovHead(Embedding(weight=w1), Linear(weight=w2))
    return head, logits, config, options.tree()
