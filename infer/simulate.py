"""`python -m infer simulate`: what each policy is worth under load, on a device's throughput table."""

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tqdm import tqdm

from dspark_jax import Verifier
from dspark_jax.io import InputError, write_json
from dspark_jax.io.calibration import CalibrationLaw, load_calibration
from dspark_jax.io.outputs import check_output
from dspark_jax.io.report import environment
from dspark_jax.io.step_table import load_step_table
from dspark_jax.scheduling.policy import Policy, PolicyKind
from dspark_jax.scheduling.simulation import Replay, Simulation, poisson_arrivals, simulate
from dspark_jax.scheduling.throughput import StepTable
from infer.batching import read_prompt_file
from infer.decoding import make_decoder
from infer.models import Description, describe, load_described, load_named
from infer.options import DecodingOptions
from infer.recorded_run import RecordedRun, record_run
from infer.simulation_inputs import read_trace
from infer.simulation_report import (
    FIGURES,
    Load,
    Outcome,
    figure_path,
    outcome_fields,
    outcome_tables,
    plot_figures,
    threshold_fields,
)

# Thresholds of the sweep.
_SWEEP = tuple(np.linspace(0, 1, 21).round(2).tolist())
_MODELS = ("target", "drafter", "prompts", "record")
_RECORDING = (
    *("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "batch_size"),
    *("dtype", "enable_thinking", "allow_config_key"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """Replay recorded decoding under load, in simulated time, with each policy of verifying.

    Give models and prompts to record a run, or a run that was recorded. A recorded run holds what the drafter proposes
    from every position of the texts that the target decodes, greedily or coupled, so that it replays every policy
    exactly. Chains only. A step takes what the throughput table says of its bucket; reading prompts takes no time.
    The JSON file holds every number; three figures go beside it: OUTPUT_thresholds.png, accepted and rejected drafts
    against a static threshold; OUTPUT_users.png, throughput against each user's speed; OUTPUT_concurrency.png,
    throughput and mean verification length against concurrency.
    """

    table: Path
    """JSON file of `profile --slots`, of this or another device: `capacities` of buckets in tokens, `steps_per_second`
    of each, and perhaps `plain_steps_per_second`, of steps that draft nothing."""
    recording: Path | None = None
    """A run that was recorded, .npz."""
    output: Path = Path("simulation.json")
    """JSON file to write."""
    calibration: Path | None = None
    """JSON file of train calibrate, for the confidences; by default they are taken as they are."""
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
    dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """To record: type of weights and caches; int8 is of the weights of products alone."""
    enable_thinking: bool | None = None
    """To record: passed to the chat template as true or false; else its default."""
    allow_config_key: tuple[str, ...] = ()
    """To record: unknown keys of the models' config.json that may be ignored."""

    def check(self) -> None:
        for name, values in (("requests", [self.requests]), ("slots", [self.slots]), ("concurrency", self.concurrency)):
            for value in values:
                if value is not None and value < 1:
                    raise InputError(f"--{name} {value} must be at least 1")
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
        inputs = [self.table, self.recording, self.calibration, self.trace, *self.prompts, self.target, self.drafter]
        if self.output.suffix == ".png":
            raise InputError(f"{self.output}: names a figure; name a .json file")
        for path in (self.output, *(figure_path(self.output, name) for name in FIGURES)):
            check_output(path, inputs)
        if self.record is not None:
            check_output(self.record, inputs)
            if self.record.absolute() == self.output.absolute():
                raise InputError(f"--record {self.record}: is the --output too; name another file")

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
        self.decoding().check()
        for path in self.prompts:
            if not path.is_file():
                raise InputError(f"{path}: no such file")

    def decoding(self) -> DecodingOptions:
        """How the run is recorded."""
        shared = {name: getattr(self, name) for name in ("target", "drafter", "seed", *_RECORDING)}
        return DecodingOptions(**shared)


def run_simulation(options: SimulateOptions) -> None:
    options.check()
    table = load_step_table(options.table)
    trace = None if options.trace is None else read_trace(options.trace)
    recorded = description = None
    if options.recording is not None:
        recorded = RecordedRun.load(options.recording)
        gamma = recorded.gamma
    else:
        description = _describe(options)
        gamma = description.drafter_config.num_drafts
    concurrencies, slots = _slots(options, table, gamma)
    temperatures = np.ones(gamma)
    if options.calibration is not None:
        temperatures = load_calibration(options.calibration, gamma).temperatures
    if recorded is None:
        recorded = _record(options, description)
    replay = recorded.replay(temperatures)
    loads = list(_loads(options, replay, concurrencies, slots, trace))
    policies = _policies(gamma, options.threshold)
    outcomes, sweep = [], []
    with tqdm(total=len(loads) * len(policies) + len(_SWEEP), desc="simulate", unit="run") as bar:
        for load in loads:
            for name, policy in policies.items():
                outcomes.append(Outcome(name, load, _simulate(replay, table, policy, load)))
                bar.update(1)
        for value in _SWEEP:
            policy = Policy(kind=PolicyKind.THRESHOLD, threshold=value)
            sweep.append((value, _simulate(replay, table, policy, loads[len(concurrencies) - 1])))
            bar.update(1)
    print(outcome_tables(outcomes))
    report = {
        "law": recorded.law,
        "table": {
            "file": str(options.table),
            "capacities": np.asarray(table.capacities).tolist(),
            "steps_per_second": np.asarray(table.steps_per_second, np.float64).tolist(),
        },
        "temperatures": np.asarray(temperatures, np.float64).tolist(),
        "num_drafts": gamma,
        "recorded_requests": len(replay.lengths),
        "seed": options.seed,
        "loads": [outcome_fields(load, [x for x in outcomes if x.load is load]) for load in loads],
        "thresholds": [threshold_fields(value, run) for value, run in sweep],
    }
    write_json(options.output, report)
    title = " for ".join(str(recorded.law[name]) for name in ("drafter", "target") if name in recorded.law)
    paths = plot_figures(options.output, outcomes, sweep, f"{title}, replayed on {options.table.name}")
    print(f"wrote {', '.join(map(str, (options.output, *paths)))}", file=sys.stderr)


def _describe(options: SimulateOptions) -> Description:
    description = describe(options.decoding(), options.drafter)
    if not description.drafter_config.enable_confidence_head:
        raise InputError(f"--drafter {options.drafter}: has no confidence head; there is nothing to schedule by")
    return description


def _slots(options: SimulateOptions, table: StepTable, gamma: int) -> tuple[list[int], int]:
    """The concurrencies, ascending, and the slots of open loops; each must have room in the table."""
    largest = int(table.capacities[-1])
    room = largest // (gamma + 1)
    if room < 1:
        raise InputError(
            f"{options.table}: capacities end at {largest}, less than one request's {gamma + 1} tokens; measure more"
        )
    powers = [2**i for i in range(room.bit_length()) if 2 * 2**i <= options.requests]
    chosen = sorted(set(options.concurrency)) or powers or [1]
    slots = chosen[-1] if options.slots is None else options.slots
    for name, value in (("concurrency", chosen[-1]), ("slots", slots)):
        if value > room:
            raise InputError(
                f"--{name} {value}: needs {value * (gamma + 1)} tokens a step, but {options.table} ends at {largest}; "
                f"take at most {room}, or measure larger buckets"
            )
    if options.requests < 2 * chosen[-1]:
        raise InputError(
            f"--requests {options.requests}: must be at least {2 * chosen[-1]}, twice the largest concurrency"
        )
    return chosen, slots


def _record(options: SimulateOptions, description: Description) -> RecordedRun:
    decoding = options.decoding()
    prompts = [prompt for path in options.prompts for prompt in read_prompt_file(path, description, decoding)]
    target = load_described(decoding, description)
    drafter = load_named(decoding, options.drafter, target)
    sampling = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    law: dict[str, Any] = dataclasses.asdict(CalibrationLaw.of(target, drafter, Verifier.COUPLED, **sampling)) | {
        "target": target.name,
        "drafter": drafter.name,
        "prompts": [path.name for path in options.prompts],
        **{name: getattr(options, name) for name in ("dtype", "seed", "max_new_tokens")},
        **environment(),
    }
    rows = min(options.batch_size, len(prompts))
    with tqdm(total=sum(prompt.num_turns for prompt in prompts), desc="record", unit="request") as bar:
        recorded = record_run(make_decoder(target, drafter, decoding), prompts, rows, law, bar.update)
    if options.record is not None:
        recorded.save(options.record)
        print(f"wrote {options.record}", file=sys.stderr)
    return recorded


def _policies(gamma: int, thresholds: tuple[float, ...]) -> dict[str, Policy]:
    """Every policy by its name in the report; a fixed length of 1 is what one multi-token-prediction head does."""
    fixed = {f"fixed {length}": Policy(kind=PolicyKind.FIXED, length=length) for length in (1, gamma)}
    static = {f"threshold {value:g}": Policy(kind=PolicyKind.THRESHOLD, threshold=value) for value in thresholds}
    scheduled = (PolicyKind.EARLY_STOP, PolicyKind.GLOBAL_BEST, PolicyKind.STALE_CAPACITY)
    return (
        {"plain": Policy(kind=PolicyKind.FIXED, length=0)}
        | fixed
        | static
        | {kind.value: Policy(kind=kind) for kind in scheduled}
    )


def _loads(
    options: SimulateOptions, replay: Replay, concurrencies: list[int], slots: int, trace: np.ndarray | None
) -> Iterator[Load]:
    """The closed loops, then the open ones. Requests come in the same order in all of them."""
    count = max(options.requests, 0 if trace is None else len(trace))
    rng = np.random.default_rng(options.seed)
    passes = -(-count // len(replay.lengths))
    order = np.concatenate([rng.permutation(len(replay.lengths)) for _ in range(passes)])
    requests = order[: options.requests]
    for concurrency in concurrencies:
        yield Load("closed", None, concurrency, requests, np.zeros(len(requests)))
    for rate in options.rate:
        yield Load("poisson", rate, slots, requests, poisson_arrivals(rate, len(requests), rng))
    if trace is not None:
        yield Load("trace", None, slots, order[: len(trace)], trace)


def _simulate(replay: Replay, table: StepTable, policy: Policy, load: Load) -> Simulation:
    return simulate(replay, table, policy, load.requests, load.arrivals, load.slots)
