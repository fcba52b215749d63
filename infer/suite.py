"""`python -m infer suite`: the accepted lengths of several drafters of one target, side by side."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import jax.numpy as jnp
import tyro
from tqdm import tqdm

from dspark_jax import DecodeConfig, DraftModelConfig
from dspark_jax.io import Drafter, InputError, Target, describe_drafter, padded_length, write_json
from dspark_jax.io.outputs import check_report
from dspark_jax.io.report import environment
from dspark_jax.io.tensors import INT8
from infer.batching import read_prompt_file
from infer.models import Description, describe, load_described, load_named, print_cache_size
from infer.options import DecodingOptions
from infer.suite_file import Suite, find_suite, read_suite
from infer.suite_report import Findings, finding_fields, markdown, plot_suite
from infer.suite_run import Recorder, Row, measure_file

_METHOD = (
    "the target's texts are written once, plainly; under greedy and coupled sampling every drafter's output is the same"
    " text, so that its rounds are replayed on it exactly. tau: tokens over rounds of all prompts of a file, bonus "
    "included; mean_tau: of the files. thresholds: a chain is cut before its first draft whose confidence is under it. "
    "reliability: of drafts whose earlier ones were all accepted, confidences as they are"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SuiteOptions:
    """Compare drafters of one target, as a YAML file lists them: tables of accepted lengths, as papers print them.

    The target decodes each prompt once, plainly; every drafter and method is replayed on what it wrote, at T = 0 and
    under coupled sampling exactly as if it had drafted. Printed is a Markdown table a temperature; the JSON file also
    holds acceptance by position, a sweep of confidence thresholds, and how reliable confidences are; a plot goes beside
    it as .png. Speed is measured by evaluate.
    """

    suite: tyro.conf.Positional[str] = ""
    """YAML file of the suite, or the name of a shipped one. Its paths are relative to it."""
    target: str | None = None
    """Instead of the suite's: folder of a Hugging Face checkpoint, a hub id, a .gguf file, or smollm2."""
    output: Path = Path("suite.json")
    """JSON file to write; the plot goes beside it as .png."""
    limit: int | None = None
    """Instead of the suite's: prompts of each file, from its beginning."""
    max_new_tokens: int | None = None
    """Instead of the suite's: new tokens a request, at most."""
    temperature: tuple[float, ...] = ()
    """Instead of the suite's; 0 is greedy."""
    batch_size: int = 32
    """Requests decoded and replayed together; their states are in memory at once."""
    seed: int = 0
    """Of the samples: a prompt's depend on this and on its place in the file only."""
    dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """Type of weights and caches; int8 is of the weights of products alone."""
    enable_thinking: bool | None = None
    """Passed to the chat template as true (--enable-thinking) or false (--no-enable-thinking); else its default."""
    allow_config_key: tuple[str, ...] = ()
    """Unknown keys of the models' config.json that may be ignored."""

    def chosen(self, path: Path) -> Suite:
        """The suite of this file, with the options that stand instead of its own."""
        suite = read_suite(path)
        instead = {
            name: value
            for name, value in (
                ("target", self.target),
                ("limit", self.limit),
                ("max_new_tokens", self.max_new_tokens),
                ("temperatures", tuple(dict.fromkeys(self.temperature)) or None),
            )
            if value is not None
        }
        suite = dataclasses.replace(suite, **instead)
        if suite.target is None:
            raise InputError(f"{path}: target is missing; add it, or give --target")
        if suite.limit is not None and suite.limit < 1:
            raise InputError(f"--limit {suite.limit} must be at least 1")
        for temperature in suite.temperatures:
            self.decoding(suite, temperature).check()
        check_report(self.output, [path, suite.target, *suite.prompts, *(each.path for each in suite.drafters)])
        return suite

    def decoding(self, suite: Suite, temperature: float = 0.0) -> DecodingOptions:
        shared = {name: getattr(self, name) for name in ("batch_size", "seed", "dtype", "enable_thinking")}
        return DecodingOptions(
            target=suite.target,
            max_new_tokens=suite.max_new_tokens,
            temperature=temperature,
            allow_config_key=self.allow_config_key,
            **shared,
        )


def run_suite(options: SuiteOptions) -> None:
    path = find_suite(options.suite)
    suite = options.chosen(path)
    decoding = options.decoding(suite)
    description = describe(decoding, None)
    configs = _decode_configs(path, suite, description, decoding)
    files = {file.stem: read_prompt_file(file, description, decoding)[: suite.limit] for file in suite.prompts}
    taps = tuple(sorted({layer for config in configs.values() for layer in config.taps}))
    most = max(map(len, files.values()))
    rows_at_once = min(options.batch_size, most)
    new = next(iter(configs.values())).max_new_tokens
    beyond = max(config.depth for config in configs.values())
    longest = max(len(prompt.turn_ids()) for prompts in files.values() for prompt in prompts)
    capacity = padded_length(longest) + new + beyond + 1
    _print_sizes(description, rows_at_once, capacity, len(taps) + 1, options.dtype)
    target = load_described(decoding, description)
    rows = _load_rows(suite, configs, decoding, target)
    recorder = Recorder(target, rows_at_once, new, options.seed, taps, beyond, capacity)
    all_findings = []
    requests = sum(prompt.num_turns for prompts in files.values() for prompt in prompts)
    with tqdm(total=requests * len(suite.temperatures) * (1 + len(rows)), unit="request") as bar:
        for temperature in suite.temperatures:
            texts, measured = {}, {row.name: {} for row in rows}
            for name, prompts in files.items():
                bar.set_description(f"{name}, T = {temperature:g}")
                texts[name], found = measure_file(recorder, rows, prompts, temperature, bar.update)
                for row, values in found.items():
                    measured[row][name] = values
            all_findings.append(Findings(suite, rows, temperature, texts, measured))
    print("\n".join(map(markdown, all_findings)))
    _write_report(options, path, suite, target, all_findings)


def _decode_configs(
    path: Path, suite: Suite, description: Description, options: DecodingOptions
) -> dict[str, DecodeConfig]:
    """How each row that can be measured decodes, by its name."""
    target, configs = description.target, {}
    for index, spec in enumerate(suite.drafters):
        if not spec.path.is_dir():
            continue
        drafter: DraftModelConfig = describe_drafter(
            spec.path, target=target.config, allow_config_keys=options.allow_config_key
        )
        for method in spec.methods:
            try:
                configs[spec.row(method)] = DecodeConfig(
                    target=target.config,
                    drafter=drafter,
                    tree=suite.tree(method),
                    max_new_tokens=min(suite.max_new_tokens, target.config.max_position_embeddings),
                    eos_token_ids=target.eos_token_ids,
                )
            except ValueError as error:
                raise InputError(f"{path}: drafters[{index}].methods: {method} with {spec.path}: {error}") from error
    if not configs:
        raise InputError(f"{path}: drafters: none of their folders is there, so that there is nothing to measure")
    return configs


def _load_rows(suite: Suite, configs: dict[str, DecodeConfig], options: DecodingOptions, target: Target) -> list[Row]:
    loaded: dict[Path, Drafter] = {}
    rows = []
    for spec in suite.drafters:
        for method in spec.methods:
            config = configs.get(spec.row(method))
            if config is None:
                continue
            place = spec.path.resolve()
            if place not in loaded:
                loaded[place] = load_named(options, str(spec.path), target)
            rows.append(Row(spec, method, loaded[place], config))
    return rows


def _print_sizes(description: Description, rows: int, capacity: int, layers: int, dtype: str) -> None:
    """Says what is in memory beside the weights."""
    print_cache_size(description, rows, capacity, dtype)
    width = jnp.dtype("float32" if dtype == INT8 else dtype).itemsize
    size = rows * capacity * layers * description.target.config.hidden_size * width
    print(f"recorded states of {layers} layers, the last hidden one included: {size / 2**20:,.1f} MiB")


def _write_report(
    options: SuiteOptions, path: Path, suite: Suite, target: Target, all_findings: Sequence[Findings]
) -> None:
    law = {
        "suite": path.name,
        "target": target.name,
        "target_fingerprint": target.fingerprint,
        "verifier": "coupled",
        "dtype": options.dtype,
        "seed": options.seed,
        "max_new_tokens": suite.max_new_tokens,
        "limit": suite.limit,
        **environment(),
    }
    report = {
        "law": law,
        "method": _METHOD,
        "temperatures": [finding_fields(findings) for findings in all_findings],
    }
    write_json(options.output, report)
    plot = options.output.with_suffix(".png")
    plot_suite(plot, all_findings, f"{path.stem}: drafters for {target.name}, all prompt files pooled")
    print(f"wrote {options.output}, {plot}", file=sys.stderr)
