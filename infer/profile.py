"""`python -m infer profile`: how far decoding is from what the memory allows."""

import dataclasses
import functools
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from matplotlib.figure import Figure
from tqdm import tqdm

from dspark_jax import DrafterConfig, DraftModelConfig, Verifier
from dspark_jax.drafters import dspark, kinds
from dspark_jax.drafters.dspark import DrafterParams
from dspark_jax.drafting.autoregressive import propose_autoregressive
from dspark_jax.drafting.chain import sequential_stage
from dspark_jax.io import Drafter, InputError, Target, padded_length, write_json
from dspark_jax.io.outputs import check_report
from dspark_jax.io.report import environment, save_figure, shown, table
from dspark_jax.io.step_table import StepTableLaw, save_step_table
from dspark_jax.serving import EngineConfig
from dspark_jax.sharding import mesh_of
from dspark_jax.targets.decoder import TargetParams, head_weight
from infer.decoding import decode_config
from infer.models import Description, describe, load_described, load_named
from infer.options import MOST_SLOTS, TreeOptions, under_mesh
from infer.step_table import measure, plot_steps, rates_table, warn_if_flat
from infer.timers import Timer, decoding_timer, seconds

_WIDTHS = (1, 2, 4, 8)
# Beyond these a run would not fit a machine, or end.
_MOST = {"context": 2**31 - 1, "steps": 2**31 - 1, "repeats": 10**6, "slots": MOST_SLOTS}
# More than the caches of most processors hold.
_BANDWIDTH_BYTES = 512 * 2**20
_BANDWIDTH_TRIES = 3
_BOUND, _STEP = "bound: weights read once", "step: one token"
_BACKBONE, _SEQUENTIAL = "draft: backbone", "draft: head and sequential stage"
_AUTOREGRESSIVE = "draft: one token after the other"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileOptions(TreeOptions):
    """Time decoding steps, verification and drafting, and compare a step with reading the weights once.

    With --slots also the rounds of a serving engine, for each bucket of tokens that it verifies in a step: the table
    that `batch` schedules by. The rest is about one request and chains. Memory bandwidth and everything else
    are measured in turn, again and again; medians are reported, and ratios are medians of the ratios within each turn;
    the best turns are what a busy machine disturbed least. Times are of loops on the device, the prefill taken off.
    """

    output: Path = Path("profile.json")
    """JSON file to write; the plot goes beside it as .png."""
    context: int = 128
    """Tokens of the prompt."""
    steps: int = 32
    """Steps of each timed loop."""
    repeats: int = 7
    """Turns."""
    slots: int | None = None
    """Also measure the step table of an engine of so many slots, drafting included; --tree is about it."""
    table: Path | None = None
    """JSON file to write it to, the plot beside it as .png; OUTPUT with _steps at its end by default."""

    def check(self) -> None:
        for name, most in _MOST.items():
            if getattr(self, name) is not None and not 1 <= getattr(self, name) <= most:
                raise InputError(f"--{name} {getattr(self, name)} must be in 1..{most}")
        self.check_tree()
        inputs = [self.target, self.drafter]
        check_report(self.output, inputs)
        if self.slots is None:
            for name in ("table", "tree"):
                if getattr(self, name) is not None:
                    raise InputError(f"--{name}: is about the step table; add --slots, or leave it out")
            return
        if self.drafter is None:
            raise InputError("--slots: the step table is about rounds with drafting; add --drafter")
        check_report(self.table_path, inputs)
        if self.table_path.with_suffix("") == self.output.with_suffix(""):
            raise InputError(f"--table {self.table_path}: its files would be those of --output; name another")

    @property
    def table_path(self) -> Path:
        return self.table or self.output.with_name(f"{self.output.stem}_steps.json")


@under_mesh
def profile(options: ProfileOptions) -> None:
    options.check()
    description = describe(options, options.drafter)
    longest = description.target.config.max_position_embeddings
    if options.context + options.steps >= longest:
        raise InputError(
            f"--context {options.context} and --steps {options.steps} are more than the target's {longest} positions; "
            "lower one of them"
        )
    engine = None if options.slots is None else _engine_config(options, description, options.slots)
    target = load_described(options, description)
    drafter = None if options.drafter is None else load_named(options, options.drafter, target)
    timers: dict[str, Timer] = {"read": _bandwidth_timer(options.chosen_mesh)}
    for width in _WIDTHS:
        timers[f"verify {width}"] = decoding_timer(target, None, options.context, options.steps, width)
    if drafter is not None:
        timers |= _drafting_timers(options, target, drafter)
        timers["round"] = decoding_timer(target, drafter, options.context, options.steps)
    for timer in tqdm(timers.values(), desc="compile", unit="program"):
        timer()
    turns = {name: np.zeros(options.repeats) for name in timers}
    for turn in tqdm(range(options.repeats), desc="measure", unit="turn"):
        for name, timer in timers.items():
            turns[name][turn] = timer()
    report = _report(options, target, drafter, turns)
    print(_table(report))
    write_json(options.output, report)
    plot = options.output.with_suffix(".png")
    _plot(plot, report)
    print(f"wrote {options.output} and {plot}", file=sys.stderr)
    if engine is not None:
        _profile_engine(options, target, drafter, engine)


def _engine_config(options: ProfileOptions, description: Description, slots: int) -> EngineConfig:
    """An engine whose slots hold the context, the timed steps' tokens and one verification."""
    decode = decode_config(
        description.target.config, description.drafter_config, options.steps, Verifier.COUPLED, options.chosen_tree
    )
    return EngineConfig(decode=decode, slots=slots, capacity=options.context + options.steps + decode.width)


def _profile_engine(options: ProfileOptions, target: Target, drafter: Drafter | None, config: EngineConfig) -> None:
    steps = measure(target, drafter, config, options.context, options.repeats)
    warn_if_flat(steps)
    law = StepTableLaw.of(target, drafter, options.chosen_tree, config.slots, config.buckets)
    print(f"\nrounds of an engine of {config.slots} slots at {options.context} tokens\n\n{rates_table(steps)}\n")
    names = {"target": target.name, "drafter": None if drafter is None else drafter.name}
    save_step_table(options.table_path, steps, law, **names, context=options.context, repeats=options.repeats)
    plot = options.table_path.with_suffix(".png")
    drafts = "chains" if law.tree is None else f"{law.tree.kind.value} of {law.tree.budget} nodes"
    circumstances = f"{config.slots} slots, {drafts}, {law.dtype}, {law.device}"
    plot_steps(plot, steps, f"{names['drafter']} for {target.name}, {circumstances}")
    print(f"wrote {options.table_path} and {plot}", file=sys.stderr)


def _bandwidth_timer(mesh: Mesh | None) -> Timer:
    """Seconds to read `_BANDWIDTH_BYTES`, by row sums or by products with a vector, whichever is faster.

    With a mesh they lie on it as weights do, divided over "model".
    The mean of a few tries, as a decoding loop's time is one: the best try would see less of a busy machine's noise.
    """
    shape = (4096, _BANDWIDTH_BYTES // 4 // 4096)
    matrix, vector = jnp.ones(shape, jnp.float32), jnp.ones((shape[1], 1), jnp.float32)
    if mesh is not None:
        matrix = jax.device_put(matrix, NamedSharding(mesh, PartitionSpec("model")))
    sums = jax.jit(lambda x: jnp.sum(x, axis=1))
    products = jax.jit(jnp.matmul)

    def timer() -> float:
        calls = (lambda: sums(matrix), lambda: products(matrix, vector))
        return min(float(np.mean([seconds(call) for _ in range(_BANDWIDTH_TRIES)])) for call in calls)

    return timer


def _drafting_timers(options: ProfileOptions, target: Target, drafter: Drafter) -> dict[str, Timer]:
    capacity = padded_length(options.context) + options.steps
    state = kinds.init_state(drafter.config, 1, capacity, target.params.embed_tokens.weight.dtype)
    if isinstance(drafter.config, DrafterConfig):
        loops = {_BACKBONE: _backbone_loop, _SEQUENTIAL: _sequential_loop}
    else:
        loops = {_AUTOREGRESSIVE: _autoregressive_loop}

    def make(loop) -> Timer:
        return lambda: (
            seconds(lambda: loop(drafter.params, state, drafter.config, options.context, options.steps)) / options.steps
        )

    return {name: make(loop) for name, loop in loops.items()}


@functools.partial(jax.jit, static_argnames=("config", "steps"))
def _backbone_loop(params: DrafterParams, state, config: DrafterConfig, context: int, steps: int):
    """The parallel stage, `steps` times, of another anchor each time."""

    def body(step, _):
        anchor = jnp.full((1,), step % config.vocab_size, jnp.int32)
        return dspark.block_hidden(params, config, state, anchor, jnp.full((1,), context + step, jnp.int32))

    hidden = jnp.zeros((1, config.num_drafts, config.hidden_size), params.fc.weight.dtype)
    return jax.lax.fori_loop(0, steps, body, hidden)


@functools.partial(jax.jit, static_argnames=("config", "steps"))
def _sequential_loop(params: DrafterParams, state, config: DrafterConfig, context: int, steps: int):
    """The draft head and the sequential stage, `steps` times, each from the last token of the one before."""
    del state, context
    noise = jnp.zeros((1, config.num_drafts), jnp.int32)

    def body(_, carry):
        hidden, anchor = carry
        rows, _, _ = sequential_stage(
            params, config, hidden, anchor, noise, lambda logits, _: jnp.argmax(logits, axis=-1).astype(jnp.int32)
        )
        # Other hidden states each time, so that the head's product cannot leave the loop.
        return hidden.at[:, :, 0].set(rows.astype(hidden.dtype)), dspark.target_token_ids(params, rows[:, -1])

    hidden = jnp.ones((1, config.num_drafts, config.hidden_size), params.fc.weight.dtype)
    return jax.lax.fori_loop(0, steps, body, (hidden, jnp.zeros(1, jnp.int32)))


@functools.partial(jax.jit, static_argnames=("config", "steps"))
def _autoregressive_loop(params: kinds.DrafterParams, state, config: DraftModelConfig, context: int, steps: int):
    """A whole chain, `steps` times, each from the last token of the one before."""
    noise, threshold = jnp.zeros((1, config.num_drafts), jnp.int32), jnp.zeros(1, jnp.float32)

    def body(step, anchor):
        position = jnp.full((1,), context + step, jnp.int32)
        proposal = propose_autoregressive(
            params,
            config,
            state,
            anchor,
            position,
            noise,
            lambda logits, _: jnp.argmax(logits, axis=-1).astype(jnp.int32),
            threshold,
        )
        return proposal.tokens[:, -1]

    return jax.lax.fori_loop(0, steps, body, jnp.zeros(1, jnp.int32))


def _weight_bytes(params: TargetParams) -> int:
    """Bytes of the weights that every token's pass reads: all but an embedding table that is not the head too."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves((params.layers, params.norm, head_weight(params))))


def _median(values: np.ndarray) -> float | None:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else None


def _best(values: np.ndarray) -> float | None:
    known = values[np.isfinite(values)]
    return float(np.min(known)) if len(known) else None


def _ratio(times: dict[str, dict[str, Any]], name: str, other: str) -> float | None:
    first, second = times[name]["best_ms"], times[other]["best_ms"]
    return None if first is None or second is None else first / second


def _report(
    options: ProfileOptions, target: Target, drafter: Drafter | None, turns: dict[str, np.ndarray]
) -> dict[str, Any]:
    weights = _weight_bytes(target.params)
    bound = turns["read"] * (weights / _BANDWIDTH_BYTES)
    step = turns["verify 1"]

    def entry(seconds: np.ndarray) -> dict[str, Any]:
        return {
            "ms": _median(1e3 * seconds),
            "best_ms": _best(1e3 * seconds),
            "over_bound": _median(seconds / bound),
            "over_step": _median(seconds / step),
        }

    times = {_BOUND: entry(bound), _STEP: entry(step)}
    times |= {f"verify {width} tokens": entry(turns[f"verify {width}"]) for width in _WIDTHS[1:]}
    if drafter is not None:
        times |= {name: entry(turns[name]) for name in (_BACKBONE, _SEQUENTIAL, _AUTOREGRESSIVE) if name in turns}
        times["speculative round"] = entry(turns["round"])
    eight = f"verify {_WIDTHS[-1]} tokens"
    return {
        "target": target.name,
        "target_fingerprint": target.fingerprint,
        "drafter": None if drafter is None else drafter.name,
        "dtype": options.dtype,
        "context": options.context,
        "repeats": options.repeats,
        "mesh": mesh_of(target.params.norm.weight),
        **environment(),
        "bandwidth_gb_per_second": _median(_BANDWIDTH_BYTES / turns["read"] / 1e9),
        "weight_bytes_per_token": weights,
        "step_over_bound": times[_STEP]["over_bound"],
        "verify_8_over_step": times[eight]["over_step"],
        "step_over_bound_of_best": _ratio(times, _STEP, _BOUND),
        "verify_8_over_step_of_best": _ratio(times, eight, _STEP),
        "times": times,
    }


def _table(report: dict[str, Any]) -> str:
    rows = [["", "median ms", "best ms", "/ bound", "/ step"]]
    for name, entry in report["times"].items():
        rows.append([name, *(shown(entry[key]) for key in ("ms", "best_ms", "over_bound", "over_step"))])
    weights, bandwidth = report["weight_bytes_per_token"] / 1e6, shown(report["bandwidth_gb_per_second"], 1)
    ratios = "\n".join(
        f"{name}: step / bound = {shown(report[f'step_over_bound{of}'])}, "
        f"verify(8) / step = {shown(report[f'verify_8_over_step{of}'])}"
        for name, of in (("medians", ""), ("best turns", "_of_best"))
    )
    return (
        f"{report['target']}, {report['dtype']}, {report['device']}\n"
        f"weights read for a token: {weights:,.1f} MB; memory bandwidth: {bandwidth} GB/s\n{ratios}\n\n{table(rows)}\n"
    )


def _plot(path: Path, report: dict[str, Any]) -> None:
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    names, times = list(report["times"]), [entry["ms"] or 0.0 for entry in report["times"].values()]
    axes.bar_label(axes.barh(names, times), fmt="%.2f", padding=3)
    axes.axvline(times[0], color="black", linewidth=1, linestyle="--")
    axes.invert_yaxis()
    axes.set(
        title=f"{report['target']}, {report['dtype']}, {report['device']}", xlabel="ms", xlim=(0, max(times) * 1.15)
    )
    save_figure(path, figure)
