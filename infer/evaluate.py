"""`python -m infer evaluate`: what a drafter is worth, over prompt files."""

import dataclasses
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

import tyro
from tqdm import tqdm

from dspark_jax import TreeKind, Verifier, request_keys
from dspark_jax.io import InputError, Prompt, padded_length, write_json
from dspark_jax.io.outputs import check_input, check_output, check_report
from dspark_jax.io.report import environment
from dspark_jax.sharding import mesh_of
from dspark_jax.verification.statistics import AcceptanceCounts
from infer.batching import Request, converse, make_batch, read_prompt_file
from infer.comparison import collect, in_turns
from infer.decoding import Decoder, decode_config, make_decoder
from infer.draw import draw_tree
from infer.methods import Method, MethodName, chosen_methods
from infer.models import describe, load_described, load_named, print_cache_size
from infer.options import DecodingOptions, under_mesh
from infer.results import (
    Result,
    label,
    plot_budgets,
    plot_results,
    pool,
    result_fields,
    results_table,
)
from infer.round_parts import part_milliseconds

_SAMPLE_CHARACTERS = 300
# Rounds whose parts are timed.
_TIMED_ROUNDS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateOptions(DecodingOptions):
    """Measure a drafter: accepted lengths, acceptance by position, and speed against plain decoding.

    Plain and speculative decoding of each batch alternate in one run, after compilation; times include the prefill.
    """

    drafter: str = dataclasses.field()
    """Folder or hub id of the drafter (DeepSpec layout)."""
    prompts: tuple[Path, ...]
    """JSON Lines files of prompts, as for generate."""
    output: Path = Path("evaluation.json")
    """JSON file to write; the plot goes beside it as .png."""
    limit: int | None = None
    """Prompts of each file, from its beginning."""
    compare: tuple[MethodName, ...] = ()
    """Methods to put side by side; the chain, or what --tree names, by default. A chain beside pctree adds controls:
    pctree with the chain's number of nodes, and the chain with each slot's second choice."""
    sweep_budget: tuple[int, ...] = ()
    """Also measure pctree with these budgets, and plot τ and speed against them."""
    verifier: tuple[Verifier, ...] = (Verifier.COUPLED,)
    """One or more; they differ at a temperature above 0. Trees are left out of those for chains (rejection, block)."""
    draw_tree: Path | None = None
    """PNG file to draw one real tree of the first tree method to."""
    repeats: int = 3
    """How often each batch is timed; the median counts."""
    sample: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print one completion of each file, if there is a tokenizer."""

    def check(self) -> None:
        super().check()
        for name in ("limit", "repeats"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise InputError(f"--{name} {getattr(self, name)} must be at least 1")
        for name in ("prompts", "verifier"):
            if not getattr(self, name):
                raise InputError(f"--{name}: name at least one")
        for path in self.prompts:
            check_input(path)
        if self.tree is not None and self.compare:
            raise InputError(f"--tree {self.tree.value}: is one of --compare's methods; leave one of the two out")
        kinds = {TreeKind(name) for name in self.methods if name != "chain"}
        self.check_trees([*kinds, *([TreeKind.PCTREE] if self.sweep_budget else [])])
        for budget in self.sweep_budget:
            try:
                dataclasses.replace(self.tree_spec(TreeKind.PCTREE), budget=budget)
            except ValueError as error:
                raise InputError(f"--sweep-budget {budget}: {error}") from error
        inputs = [*self.prompts, self.target, self.drafter]
        check_report(self.output, inputs)
        if self.sweep_budget:
            check_output(self.budget_plot, inputs)
        if self.draw_tree is not None:
            if not (self.sweep_budget or any(name != "chain" for name in self.methods)):
                raise InputError(f"--draw-tree {self.draw_tree}: no tree is measured; add --tree or --compare")
            check_output(self.draw_tree, inputs)
            if self.draw_tree.absolute() in {
                path.absolute() for path in (self.output, self.output.with_suffix(".png"), self.budget_plot)
            }:
                raise InputError(f"--draw-tree {self.draw_tree}: the report or a plot goes to this file; name another")

    @property
    def methods(self) -> tuple[MethodName, ...]:
        if self.tree is not None:
            return (self.tree.value,)
        return self.compare or ("chain",)

    @property
    def budget_plot(self) -> Path:
        return self.output.with_name(f"{self.output.stem}_budgets.png")


@under_mesh
def evaluate(options: EvaluateOptions) -> None:
    options.check()
    description = describe(options, options.drafter)
    files = {path: read_prompt_file(path, description, options)[: options.limit] for path in options.prompts}
    longest = max(len(prompt.turn_ids()) for prompts in files.values() for prompt in prompts)
    rows = min(options.batch_size, max(map(len, files.values())))
    drafts = decode_config(
        description.target.config, description.drafter_config, options.max_new_tokens, max_drafts=options.max_drafts
    ).depth
    methods = chosen_methods(options, options.methods, options.sweep_budget, options.verifier, drafts)
    configs = [
        decode_config(
            description.target.config, description.drafter_config, options.max_new_tokens, method.verifier, method.tree
        )
        for method in methods
    ]
    capacity = padded_length(longest) + max(config.max_new_tokens + config.width for config in configs)
    print_cache_size(description, rows, capacity, options.dtype)
    target = load_described(options, description)
    drafter = load_named(options, options.drafter, target)
    plain = make_decoder(target, None, options)
    speculative = {method: make_decoder(target, drafter, options, method.verifier, method.tree) for method in methods}
    results = []
    for path, prompts in files.items():
        run = _Run(options, rows, path, prompts, plain, speculative)
        with run.bar:
            converse(prompts, rows, run.answer)
        results += run.results
        if options.sample and run.sample:
            print(f"--- {path.name}, completed by speculative decoding:\n{run.sample}\n")
    pooled = pool(results) if len(files) > 1 else []
    print(results_table([*results, *pooled]))
    for result in results:
        if result.counts.collapsed:
            _warn_of_collapse(result)
    law = {
        "target": target.name,
        "target_fingerprint": target.fingerprint,
        "drafter": drafter.name,
        "block_size": drafter.config.block_size,
        **{
            name: getattr(options, name)
            for name in ("temperature", "top_p", "top_k", "min_p", "confidence_threshold", "dtype", "seed")
        },
        "max_new_tokens": options.max_new_tokens,
        "batch_size": options.batch_size,
        "mesh": mesh_of(target.params.norm.weight),
        **environment(),
    }
    report = {
        "law": law,
        "timing": f"plain and speculative decoding alternate batch by batch, median of {options.repeats}, "
        "compilation excluded, prefill included",
        "round_parts": "medians of the first rounds of each file's first batch, each part a program of its own",
        "results": [result_fields(result) for result in results],
        "pooled": [result_fields(result) for result in pooled],
    }
    write_json(options.output, report)
    plot = options.output.with_suffix(".png")
    title = f"{drafter.name} for {target.name}, T = {options.temperature:g}, {law['device']}"
    plot_results(plot, results, title)
    written = [options.output, plot]
    if options.sweep_budget:
        plot_budgets(options.budget_plot, results, {*options.sweep_budget, options.tree_budget}, title)
        written.append(options.budget_plot)
    if options.draw_tree is not None:
        decoder = next(decoder for method, decoder in speculative.items() if method.tree is not None)
        prompts = next(iter(files.values()))
        requests = [Request(0, 0, prompts[0], prompts[0].turn_ids())]
        keys = request_keys(options.seed, len(prompts))
        context = target.config.max_position_embeddings
        draw_tree(options.draw_tree, decoder, make_batch(requests, 1, context, options.max_new_tokens, keys))
        written.append(options.draw_tree)
    print(f"wrote {', '.join(map(str, written))}", file=sys.stderr)


def _warn_of_collapse(result: Result) -> None:
    first, second = result.counts.conditional_acceptance[:2]
    print(
        f"warning: {label(result)}: acceptance falls from {first:.2f} at position 0 to "
        f"{second:.2f} at position 1; likely the drafter's layout (slot k must predict the token at anchor+k+1) or the "
        "alignment of its context features is wrong",
        file=sys.stderr,
    )


class _Run:
    """One prompt file: answers batches, and collects a result for each method."""

    def __init__(
        self,
        options: EvaluateOptions,
        rows: int,
        path: Path,
        prompts: Sequence[Prompt],
        plain: Decoder,
        speculative: dict[Method, Decoder],
    ) -> None:
        self._rows, self._keys = rows, request_keys(options.seed, len(prompts))
        self._options, self._plain, self._speculative = options, plain, speculative
        self._compiled: set[tuple[int, ...]] = set()
        self.results = [
            Result(
                path.name,
                method,
                options.temperature,
                AcceptanceCounts.zero(decoder.config.depth),
                decoder.config.width,
            )
            for method, decoder in speculative.items()
        ]
        self.bar = tqdm(total=sum(prompt.num_turns for prompt in prompts), desc=path.stem, unit="request")
        self.sample = ""

    def answer(self, requests: list[Request]) -> list[str]:
        context = self._plain.config.target.max_position_embeddings
        batch = make_batch(requests, self._rows, context, self._options.max_new_tokens, self._keys)
        decoders = [self._plain, *self._speculative.values()]
        if batch.shape not in self._compiled:
            self._compiled.add(batch.shape)
            for decoder in decoders:
                decoder.compile(batch)
        if self._options.compare and not self.results[0].part_ms:
            for result, decoder in zip(self.results, self._speculative.values(), strict=True):
                if result.method.named:
                    result.part_ms = part_milliseconds(decoder, batch, _TIMED_ROUNDS)
        runs = [functools.partial(decoder.run, batch) for decoder in decoders]
        generations, medians = in_turns(runs, self._options.repeats)
        plain = generations[0]
        for result, generation, taken in zip(self.results, generations[1:], medians[1:], strict=True):
            collect(result, self._plain, requests, batch, plain, generation, medians[0], taken)
        self.bar.update(len(requests))
        tokenizer = self._plain.target.tokenizer
        if tokenizer is None:
            return [""] * len(requests)
        replies = [tokenizer.decode(plain.tokens[row, : plain.lengths[row]]) for row in range(len(requests))]
        if not self.sample:
            shown = generations[1]
            prompt = tokenizer.decode(requests[0].ids)[-_SAMPLE_CHARACTERS:]
            self.sample = f"{prompt} ▶ {tokenizer.decode(shown.tokens[0, : shown.lengths[0]])}"
        return replies
