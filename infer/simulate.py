"""`python -m infer simulate`: what each policy is worth under load, on a device's throughput table."""

import dataclasses
import sys
from typing import Any

import numpy as np
from tqdm import tqdm

from dspark_jax import TreeSpec, Verifier
from dspark_jax.io import InputError, write_json
from dspark_jax.io.calibration import CalibrationLaw, load_calibration
from dspark_jax.io.report import environment
from dspark_jax.scheduling.policy import Policy, PolicyKind
from dspark_jax.scheduling.simulation import Simulation, simulate
from dspark_jax.scheduling.survival import uncalibrated
from infer.batching import read_prompt_file
from infer.decoding import decode_config, make_decoder
from infer.models import Description, describe, load_described, load_named
from infer.recorded_run import RecordedRun, record_run
from infer.simulation_inputs import read_table, read_trace
from infer.simulation_options import SimulateOptions
from infer.simulation_plan import Drafts, Load, chosen_slots, loads_of, policies_of
from infer.simulation_report import Outcome, drafts_fields, outcome_fields, outcome_tables, plot_figures

# Thresholds of the sweep.
_SWEEP = tuple(np.linspace(0, 1, 21).round(2).tolist())


def run_simulation(options: SimulateOptions) -> None:
    options.check()
    trace = None if options.trace is None else read_trace(options.trace)
    recorded = description = None
    if options.recording is not None:
        recorded = RecordedRun.load(options.recording)
        gamma, tree = recorded.gamma, recorded.tree
    else:
        description = _describe(options)
        gamma, tree = description.drafter_config.num_drafts, options.decoding().chosen_tree
    drafts = _drafts(options, gamma, tree)
    concurrencies, slots = chosen_slots(options, drafts)
    survival = uncalibrated(gamma)
    if options.calibration is not None:
        law = None if recorded is None else _calibration_law(recorded, options)
        survival = load_calibration(options.calibration, gamma, law, tree).survival
    if recorded is None:
        recorded = _record(options, description)
    replays = {"chain": recorded.replay(survival), "tree": recorded.tree_replay(survival)}
    loads = list(loads_of(options, len(recorded.lengths), concurrencies, slots, trace))
    policies = {each: policies_of(each, gamma, options.threshold) for each in drafts}
    total = len(loads) * sum(map(len, policies.values())) + len(drafts) * len(_SWEEP)
    with tqdm(total=total, desc="simulate", unit="run") as bar:

        def run(each: Drafts, policy: Policy, load: Load) -> Simulation:
            bar.update(1)
            return simulate(replays[each.kind], each.table, policy, load.requests, load.arrivals, load.slots)

        outcomes = [
            Outcome(each.kind, name, load, run(each, policy, load))
            for load in loads
            for each in drafts
            for name, policy in policies[each].items()
        ]
        busiest = loads[len(concurrencies) - 1]
        sweeps = {
            each.kind: [(x, run(each, Policy(kind=PolicyKind.THRESHOLD, threshold=x), busiest)) for x in _SWEEP]
            for each in drafts
        }
    for name in dict.fromkeys(each.table_name for each in drafts if each.modelled):
        print(f"step times: {name}\n")
    print(outcome_tables(outcomes))
    report = {
        "law": recorded.law,
        "drafts": {each.kind: drafts_fields(each, sweeps[each.kind]) for each in drafts},
        "survival": {name: np.asarray(value, np.float64).tolist() for name, value in vars(survival).items()},
        "recorded_requests": len(recorded.lengths),
        "seed": options.seed,
        "loads": [outcome_fields(load, [x for x in outcomes if x.load is load]) for load in loads],
    }
    write_json(options.output, report)
    title = " for ".join(str(recorded.law[name]) for name in ("drafter", "target") if name in recorded.law)
    tables = " and ".join(dict.fromkeys(each.table_name for each in drafts))
    plot_figures(options.figures, outcomes, sweeps, f"{title}, replayed on {tables}")
    print(f"wrote {', '.join(map(str, (options.output, *options.figures.values())))}", file=sys.stderr)


def _drafts(options: SimulateOptions, gamma: int, tree: TreeSpec | None) -> list[Drafts]:
    """Chains, and the trees that the run has, with their tables."""
    drafts = [Drafts("chain", gamma + 1, options.table, *read_table(options.table, None))]
    if tree is None and options.tree_table is not None:
        raise InputError(f"--tree-table: {options.recording} has no trees; record them with --tree, or leave it out")
    if tree is not None:
        path, table = options.table, (drafts[0].table, drafts[0].modelled)
        if options.tree_table is not None:
            path, table = options.tree_table, read_table(options.tree_table, tree)
        drafts.append(Drafts("tree", tree.budget, path, *table))
    return drafts


def _calibration_law(recorded: RecordedRun, options: SimulateOptions) -> CalibrationLaw:
    names = [field.name for field in dataclasses.fields(CalibrationLaw)]
    for name in names:
        if name not in recorded.law:
            raise InputError(f"{options.recording}: law.{name} is missing, which --calibration needs; record it again")
    return CalibrationLaw(**{name: recorded.law[name] for name in names})


def _describe(options: SimulateOptions) -> Description:
    decoding = options.decoding()
    description = describe(decoding, options.drafter)
    if not description.drafter_config.enable_confidence_head:
        raise InputError(f"--drafter {options.drafter}: has no confidence head; there is nothing to schedule by")
    models = (description.target.config, description.drafter_config)
    decode_config(*models, options.max_new_tokens, tree=decoding.chosen_tree)
    return description


def _record(options: SimulateOptions, description: Description) -> RecordedRun:
    decoding = options.decoding()
    prompts = [prompt for path in options.prompts for prompt in read_prompt_file(path, description, decoding)]
    target = load_described(decoding, description)
    drafter = load_named(decoding, options.drafter, target)
    calibration_law = CalibrationLaw.of(target, drafter, Verifier.COUPLED, **decoding.sampling_law)
    tree = decoding.chosen_tree
    if options.calibration is not None:
        load_calibration(options.calibration, drafter.config.num_drafts, calibration_law, tree)
    law: dict[str, Any] = dataclasses.asdict(calibration_law) | {
        "target": target.name,
        "drafter": drafter.name,
        "prompts": [path.name for path in options.prompts],
        **{name: getattr(options, name) for name in ("dtype", "seed", "max_new_tokens")},
        **environment(),
    }
    rows = min(options.batch_size, len(prompts))
    decoder = make_decoder(target, drafter, decoding, tree=tree)
    with tqdm(total=sum(prompt.num_turns for prompt in prompts), desc="record", unit="request") as bar:
        recorded = record_run(decoder, prompts, rows, law, bar.update)
    if options.record is not None:
        recorded.save(options.record)
        print(f"wrote {options.record}", file=sys.stderr)
    return recorded
