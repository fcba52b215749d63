"""`python -m train recipe-speed`: an update of a drafter here and as eager PyTorch recipes compute it."""

import concurrent.futures
import dataclasses
import functools
import gc
import multiprocessing
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from dspark_jax.config import TargetConfig
from dspark_jax.io import InputError, describe_target, write_json
from dspark_jax.io.outputs import check_output
from dspark_jax.io.report import environment, number
from dspark_jax.io.transformers_model import load_transformers_model, transformers_versions
from dspark_jax.training.anchors import Batch, Blocks, make_blocks, sample_anchors
from dspark_jax.training.step import TrainConfig, init_params, init_train_state, train_step
from train.device_shapes import random_document
from train.fit_config import FitConfig
from train.new_drafter import fresh_config
from train.torch_recipe import make_step

# Resident memory of a process: now, and the most since it was last reset.
_NOW, _PEAK = "VmRSS", "VmHWM"
_RESET = Path("/proc/self/clear_refs")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecipeSpeedConfig:
    """Time an update of a DSpark drafter here and in eager PyTorch, in turns in one process, on CPU in float32.

    Both run the frozen target online over the same random document, and train the same drafter on the same anchors. The
    recipe's side is written as public ones are: transformers' forward with all hidden states, attention under a dense
    mask, logits of the whole vocabulary at all slots. The losses must agree before the first update. The ratio is the
    median of the ratios within each turn, of seconds and of processor seconds, which other programs disturb less.
    Memory is what an update adds at its peak, each side in a process of its own (Linux). Needs
    `pip install -e '.[parity]'`.
    """

    target: str = "smollm2"
    """Folder of a Hugging Face checkpoint, a hub id, a .gguf file, or smollm2."""
    output: Path = Path("recipe_speed.json")
    """JSON file to write."""
    length: int = 256
    """Tokens of the document."""
    num_anchors: int = 64
    """Blocks trained in it."""
    num_layers: int = 5
    """Layers of the drafter."""
    repeats: int = 3
    """Turns."""
    allow_config_key: tuple[str, ...] = ()
    """Unknown keys of the target's config.json that may be ignored."""

    def __post_init__(self) -> None:
        for name, least in (("length", 2), ("num_anchors", 1), ("num_layers", 1), ("repeats", 1)):
            if getattr(self, name) < least:
                raise InputError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least {least}")


# Updates the drafter once and returns the loss before. Which update it is decides anchors and learning rate.
Update = Callable[[int], float]


def main(config: RecipeSpeedConfig) -> None:
    """Runs the command.

    Raises:
      SystemExit: 1 where the losses of the two sides differ before the first update.
    """
    check_output(config.output, [config.target])
    if jax.default_backend() != "cpu":
        raise InputError("recipe-speed compares on CPU; set JAX_PLATFORMS=cpu")
    description = describe_target(config.target, allow_config_keys=config.allow_config_key)
    if config.length > (longest := description.config.max_position_embeddings):
        raise InputError(f"--length {config.length}: the target has {longest} positions")
    # Theirs first, for it may say what is missing.
    sides = {"theirs": their_update, "ours": our_update}
    updates = {name: side(config) for name, side in sides.items()}
    seconds, processor, losses = _turns([updates.pop("ours"), updates.pop("theirs")], config.repeats + 1)
    memory = {
        name: _added_bytes(sides[name], config) for name in tqdm(("ours", "theirs"), desc="memory", unit="process")
    }
    report = _report(config, seconds[:, 1:], processor[:, 1:], losses, memory)
    report |= {"target": description.name, "transformers": transformers_versions(), **environment()}
    print(_line(report))
    write_json(config.output, report)
    print(f"wrote {config.output}", file=sys.stderr)
    if not report["losses_agree"]:
        raise SystemExit(1)


def _turns(updates: list[Update], turns: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Seconds, processor seconds and loss of each update in each turn, [updates, turns]; the first one compiles."""
    seconds, processor, losses = (np.zeros((len(updates), turns)) for _ in range(3))
    for turn in tqdm(range(turns), desc="measure", unit="turn"):
        for side, update in enumerate(updates):
            begin = time.perf_counter(), time.process_time()
            losses[side, turn] = update(turn)
            seconds[side, turn] = time.perf_counter() - begin[0]
            processor[side, turn] = time.process_time() - begin[1]
    return seconds, processor, losses


def _train_config(config: RecipeSpeedConfig, target: TargetConfig) -> TrainConfig:
    shape = FitConfig(
        target=config.target,
        data=(),
        output=config.output,
        num_layers=config.num_layers,
        num_anchors=config.num_anchors,
    )
    drafter = fresh_config(shape, target, target.vocab_size - 1)
    # The learning rate rises by equal parts as long as this runs.
    steps = round((config.repeats + 2) / shape.optimizer.warmup_fraction)
    return TrainConfig(target=target, drafter=drafter, total_steps=steps)


def _rate(train: TrainConfig, update: int) -> float:
    return train.optimizer.learning_rate * update / round(train.optimizer.warmup_fraction * train.total_steps)


def our_update(config: RecipeSpeedConfig) -> Update:
    """The train step of `fit`."""
    target = describe_target(config.target, allow_config_keys=config.allow_config_key).load()
    train = _train_config(config, target.config)
    state = init_train_state(train, jax.random.key(1), init_params(train.drafter, jax.random.key(0)))
    batch = jax.tree.map(lambda x: x[None], random_document(target.config, config.length, config.num_anchors))

    def update(_: int) -> float:
        nonlocal state
        state, metrics = train_step(state, target.params, batch, train)
        return float(metrics["loss"])

    return update


def their_update(config: RecipeSpeedConfig) -> Update:
    """The recipe's, from the same initial weights."""
    model = load_transformers_model(config.target)
    target = describe_target(config.target, allow_config_keys=config.allow_config_key).config
    train = _train_config(config, target)
    step = make_step(model, train, init_params(train.drafter, jax.random.key(0)))
    batch = random_document(target, config.length, config.num_anchors)
    tokens = np.asarray(batch.tokens)
    blocks = jax.jit(functools.partial(_blocks, train, batch))
    return lambda update: step(tokens, blocks(update), _rate(train, update))


def _blocks(train: TrainConfig, batch: Batch, update: int) -> Blocks:
    """Those of `train_step`."""
    key = jax.random.fold_in(jax.random.key(1), update)
    anchors, kept = sample_anchors(key, batch, train.drafter.num_anchors)
    return make_blocks(batch, anchors, kept, train.drafter.num_drafts)


def _added_bytes(side: Callable[[RecipeSpeedConfig], Update], config: RecipeSpeedConfig) -> list[int] | None:
    """What the first and the second update add, at their peaks, to what a fresh process holds before each; None where
    it cannot be known. The first compiles here, and makes the optimiser's moments there.
    """
    if not _RESET.exists():
        return None
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_measure_memory, side, config).result()


def _measure_memory(side: Callable[[RecipeSpeedConfig], Update], config: RecipeSpeedConfig) -> list[int]:
    update = side(config)
    added = []
    for turn in range(2):
        gc.collect()
        _RESET.write_text("5")
        before = _resident(_NOW)
        update(turn)
        added.append(_resident(_PEAK) - before)
    return added


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def _report(
    config: RecipeSpeedConfig,
    seconds: np.ndarray,
    processor: np.ndarray,
    losses: np.ndarray,
    memory: dict[str, list[int] | None],
) -> dict[str, Any]:
    ours, theirs = memory.values()
    return {
        **{name: getattr(config, name) for name in ("length", "num_anchors", "num_layers", "repeats")},
        "seconds": dict(zip(memory, np.median(seconds, axis=1).tolist(), strict=True)),
        "ratio": number(np.median(seconds[1] / seconds[0])),
        "processor_seconds": dict(zip(memory, np.median(processor, axis=1).tolist(), strict=True)),
        "processor_ratio": number(np.median(processor[1] / processor[0])),
        "losses": dict(zip(memory, losses.tolist(), strict=True)),
        "losses_agree": bool(np.isclose(*losses[:, 0], rtol=1e-4)),
        "added_bytes": memory,
        "memory_ratio": None if ours is None or theirs is None else theirs[1] / ours[1],
    }


def _line(report: dict[str, Any]) -> str:
    ours, theirs = (report["seconds"][side] for side in ("ours", "theirs"))
    losses = [report["losses"][side] for side in ("ours", "theirs")]
    memory = ""
    if report["memory_ratio"] is not None:
        added = [report["added_bytes"][side][1] / 2**20 for side in ("ours", "theirs")]
        memory = f"it adds {added[0]:,.0f} and {added[1]:,.0f} MiB, ratio {report['memory_ratio']:.2f}; "
    return (
        f"{report['target']}, float32, {report['num_anchors']} anchors in {report['length']} tokens: an update takes "
        f"{ours:.2f} s here and {theirs:.2f} s in eager PyTorch, ratio {report['ratio']:.2f} "
        f"({report['processor_ratio']:.2f} of processor seconds); {memory}losses "
        f"{'agree' if report['losses_agree'] else 'DIFFER'}: {losses[0][0]:.5f} and {losses[1][0]:.5f} at first, "
        f"{losses[0][-1]:.5f} and {losses[1][-1]:.5f} at last"
    )
