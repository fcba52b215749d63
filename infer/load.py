"""`python -m infer load`: the engine's throughput at several concurrencies, scheduled against every fixed length."""

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from dspark_jax import Verifier, request_keys
from dspark_jax.io import Drafter, InputError, Prompt, Target, write_json
from dspark_jax.io.calibration import CalibrationLaw
from dspark_jax.io.outputs import check_input, check_report
from dspark_jax.io.report import environment
from dspark_jax.scheduling.policy import Policy, PolicyKind
from dspark_jax.scheduling.survival import SurvivalMap
from dspark_jax.scheduling.throughput import StepTable
from dspark_jax.serving import Engine, EngineConfig, Request, Result, Statistics, measure_schedule
from dspark_jax.sharding import mesh_of
from infer.batch import chosen_survival
from infer.batching import read_prompt_file
from infer.decoding import decode_config
from infer.load_report import (
    PLAIN,
    SCHEDULED,
    Load,
    PolicyRuns,
    load_fields,
    load_table,
    plot_loads,
    sweep_fields,
)
from infer.models import describe, load_described, load_named, print_cache_size
from infer.options import MOST_SLOTS, SamplingOptions, under_mesh
from infer.step_table import measure

# At least so many requests a run: a few requests' luck with their drafts would decide.
_FEWEST_REQUESTS = 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadOptions(SamplingOptions):
    """Decode the same requests with a scheduled engine, plainly, and with each fixed length, at each concurrency.

    Every policy has an engine of its own, which first runs the requests once to compile and to learn; then they take
    turns. A ratio is of medians over the turns. Plain decoding runs without a drafter. A request's output is the same
    under every policy at temperature 0 and under the coupled verifier, which is counted: rounding at near ties differs
    between widths.
    """

    prompts: Path
    """JSON Lines file, one prompt a line: the first turn of each is used."""
    output: Path = Path("load.json")
    """JSON file to write; the plot goes beside it as .png."""
    concurrency: tuple[int, ...] = (1, 4, 16, 64)
    """Requests decoded together."""
    length: tuple[int, ...] = (1, 3, 7)
    """Fixed lengths to compare with, beside 0, plain decoding; for trees, depths."""
    requests_per_slot: int = 2
    """Requests of a run for each slot; at least twelve run in all."""
    repeats: int = 5
    """Turns."""
    calibration: Path | None = None
    """Calibration of `python -m train calibrate`; without it confidences are taken as they are."""
    verifier: Verifier = Verifier.COUPLED
    """How drafts are accepted at a temperature above 0."""

    def check(self) -> None:
        super().check()
        if self.drafter is None:
            raise InputError("--drafter is missing: without one there is nothing to schedule; name one")
        self.check_tree()
        for name in ("requests_per_slot", "repeats"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name.replace('_', '-')} {getattr(self, name)} must be at least 1")
        if self.max_new_tokens < 2:
            raise InputError(
                f"--max-new-tokens {self.max_new_tokens} must be at least 2: prefill gives the first token"
            )
        for name, values, most in (("concurrency", self.concurrency, MOST_SLOTS), ("length", self.length, 2**10)):
            if not values:
                raise InputError(f"--{name} is missing: name one value or more")
            for value in values:
                if not 1 <= value <= most:
                    raise InputError(f"--{name} {value} must be in 1..{most}")
        for path in (self.prompts, self.calibration):
            if path is not None:
                check_input(path)
        check_report(self.output, [self.prompts, self.target, self.drafter, self.calibration])


@under_mesh
def load(options: LoadOptions) -> None:
    options.check()
    description = describe(options, options.drafter)
    prompts = read_prompt_file(options.prompts, description, options)
    longest = max(len(prompt.turn_ids()) for prompt in prompts) + options.max_new_tokens
    decode = decode_config(
        description.target.config,
        description.drafter_config,
        options.max_new_tokens,
        options.verifier,
        options.chosen_tree,
    )
    capacity = min(longest, description.target.config.max_position_embeddings) + decode.width
    print_cache_size(description, max(options.concurrency), capacity, options.dtype)
    target = load_described(options, description)
    drafter = load_named(options, options.drafter, target)
    decode = dataclasses.replace(decode, eos_token_ids=target.eos_token_ids)
    survival = chosen_survival(options.calibration, target, drafter, decode, options.sampling_law)
    loads = []
    for slots in sorted(set(options.concurrency)):
        config = EngineConfig(decode=decode, slots=slots, capacity=capacity)
        steps = measure(target, drafter, config, context=longest // 2)
        scheduling = measure_schedule(target.params, drafter.params, config, steps)
        engines = _engines(options, target, drafter, config, steps, survival)
        loads.append(Load(slots, steps, scheduling, _take_turns(options, engines, prompts, slots)))
    law = CalibrationLaw.of(target, drafter, options.verifier, **options.sampling_law)
    report = {
        "law": dataclasses.asdict(law)
        | {"target": target.name, "drafter": drafter.name, "prompts": options.prompts.name, "dtype": options.dtype}
        | {"calibration": None if options.calibration is None else options.calibration.name}
        | {"mesh": mesh_of(target.params.norm.weight)}
        | environment(),
        "max_new_tokens": options.max_new_tokens,
        "repeats": options.repeats,
        "loads": [load_fields(one) for one in loads],
        "sweep": sweep_fields(loads),
    }
    print(load_table(loads))
    write_json(options.output, report)
    plot = options.output.with_suffix(".png")
    plot_loads(plot, loads, f"{drafter.name} for {target.name}, {environment()['device']}")
    print(f"wrote {options.output} and {plot}", file=sys.stderr)


def _engines(
    options: LoadOptions,
    target: Target,
    drafter: Drafter,
    config: EngineConfig,
    table: StepTable,
    survival: SurvivalMap | None,
) -> dict[str, Engine]:
    """An engine for each policy, by its name in the report."""
    plainly = dataclasses.replace(config.decode, drafter=None, tree=None)
    plain = EngineConfig(
        decode=plainly, slots=config.slots, capacity=config.capacity, policy=Policy(kind=PolicyKind.FIXED, length=0)
    )
    blank = StepTable(np.asarray(plain.buckets, np.int32), np.ones(len(plain.buckets), np.float32))
    engines = {
        SCHEDULED: Engine(target.params, drafter.params, config, table, survival),
        PLAIN: Engine(target.params, None, plain, blank),
    }
    for length in sorted(set(options.length)):
        policy = Policy(kind=PolicyKind.FIXED, length=length)
        fixed = dataclasses.replace(config, policy=policy)
        engines[f"fixed {length}"] = Engine(target.params, drafter.params, fixed, table, survival)
    return engines


def _take_turns(
    options: LoadOptions, engines: dict[str, Engine], prompts: Sequence[Prompt], slots: int
) -> dict[str, PolicyRuns]:
    count = max(options.requests_per_slot * slots, _FEWEST_REQUESTS)
    keys = request_keys(options.seed, count)
    requests = [
        Request(id=index, input_ids=prompts[index % len(prompts)].turn_ids(), key=keys[index], **options.sampling_law)
        for index in range(count)
    ]
    rates: dict[str, list[float]] = {name: [] for name in engines}
    results: dict[str, dict[int, Result]] = {}
    with tqdm(total=(options.repeats + 1) * len(engines), desc=f"{slots} at once", unit="run") as bar:
        for turn in range(options.repeats + 1):
            for name, engine in engines.items():
                begin = time.perf_counter()
                results[name] = {result.id: result for result in engine.generate(requests)}
                seconds = time.perf_counter() - begin
                if turn:
                    rates[name].append(sum(len(result.tokens) for result in results[name].values()) / seconds)
                else:
                    engine.statistics = Statistics()
                bar.update(1)
    return {name: PolicyRuns(rates[name], results[name], engine.statistics) for name, engine in engines.items()}
