"""Trains the byte-level language model that the demonstration decodes, on the sources of Python's standard library."""

import contextlib
import dataclasses
import json
import math
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

from dspark_jax import parameters
from dspark_jax.config import TargetConfig
from dspark_jax.io import command_line
from dspark_jax.io.errors import InputError
from dspark_jax.io.files import atomic_folder, reported, write_text
from dspark_jax.io.target import load_target, save_target
from dspark_jax.io.tokenizer import byte_tokenizer
from dspark_jax.sharding import make_mesh
from dspark_jax.targets.decoder import TargetParams, declare_target
from dspark_jax.training.anchors import Batch
from dspark_jax.training.language_model import (
    LanguageModelConfig,
    LanguageModelState,
    init_state,
    language_model_loss,
    language_model_step,
)
from dspark_jax.training.optimizer import OptimizerConfig
from train.stdlib_corpus import EOS, Split, TokenStream, corpus, token_stream, windows

# Small enough that a decoding step on two cores is mostly fixed cost, deep enough for taps.
MODEL = TargetConfig(
    model_type="qwen3",
    vocab_size=260,
    hidden_size=160,
    intermediate_size=448,
    num_hidden_layers=6,
    num_attention_heads=5,
    num_key_value_heads=1,
    head_dim=32,
    max_position_embeddings=2048,
    qk_norm=True,
    tie_word_embeddings=True,
)

# A step's windows all have one of these lengths. Short ones are cheap; long ones teach far positions.
WINDOWS = (256, 512, 1024)
_WINDOW_WEIGHTS = (0.8, 0.15, 0.05)
# So many of the long windows begin at a file's first byte, as a prompt does.
_FROM_START = 1 / 8
_HELD_OUT_WINDOW = 512
_HELD_OUT_ROWS = 16


@dataclasses.dataclass(frozen=True)
class ByteModelConfig:
    """Train a small byte-level language model on the Python standard library's sources.

    A run that was interrupted goes on from its last checkpoint when it is started again, exactly unless the number
    of steps is changed, which changes what is left of the learning rate's schedule. On a CPU,
    XLA_FLAGS=--xla_force_host_platform_device_count=N with N cores makes short windows about 1.3 times as fast.
    """

    output: Path = Path("runs/byte_model")
    """Hugging Face folder to write; replaced at every checkpoint."""
    checkpoints: Path = Path("runs/byte_model_checkpoints")
    """Folder of the run's checkpoints."""
    sources: Path | None = None
    """Folder of *.py files to train on; by default the running Python's standard library."""
    steps: int = 3800
    """Updates to make."""
    tokens_per_step: int = 2048
    """Bytes in a step, a multiple of 1024."""
    learning_rate: float = 2e-3
    """Peak of the learning rate, after warm-up."""
    weight_decay: float = 0.1
    """AdamW's decoupled weight decay of matrices."""
    save_every: int = 400
    """Steps between checkpoints."""
    seed: int = 0
    """Of the initial values and of the order of the data."""


def block_begins(length: int, config: ByteModelConfig, step: int) -> np.ndarray:
    """Where a step's blocks of the longest window begin in a stream of so many tokens.

    Each epoch cuts the stream at a new phase and visits all its blocks in a new order.
    """
    longest, rows = WINDOWS[-1], config.tokens_per_step // WINDOWS[-1]
    blocks = max(1, (length - longest) // longest)
    visits = np.arange(step * rows, (step + 1) * rows)
    begins = np.empty(rows, np.int64)
    for epoch in np.unique(visits // blocks):
        rng = np.random.default_rng((config.seed, 0, int(epoch)))
        phase, order = rng.integers(longest), rng.permutation(blocks)
        ours = visits // blocks == epoch
        begins[ours] = phase + order[visits[ours] % blocks] * longest
    return begins


def step_batch(stream: TokenStream, config: ByteModelConfig, step: int) -> Batch:
    """The batch of one step, a pure function of the seed and the step: its blocks, cut in windows of one length."""
    rng = np.random.default_rng((config.seed, 1, step))
    begins = block_begins(len(stream), config, step)
    from_start = rng.random(len(begins)) < _FROM_START
    begins = np.where(from_start, rng.choice(stream.starts, len(begins)), begins)
    length = int(rng.choice(WINDOWS, p=_WINDOW_WEIGHTS))
    offsets = np.arange(0, WINDOWS[-1], length)
    return windows(stream, (begins[:, None] + offsets[None]).reshape(-1), length)


def _put(batch: Batch, mesh: Mesh) -> Batch:
    return jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))


def held_out_bits_per_byte(
    params: TargetParams, config: TargetConfig, stream: TokenStream, mesh: Mesh, limit: int | None = None
) -> float:
    """Mean over disjoint windows of 512 bytes, all of them or `limit` evenly spaced ones; each begins unconditioned."""
    begins = np.arange(0, len(stream), _HELD_OUT_WINDOW)
    if limit is not None and limit < len(begins):
        begins = begins[np.linspace(0, len(begins) - 1, limit).astype(int)]
    begins = np.pad(begins, (0, -len(begins) % _HELD_OUT_ROWS), constant_values=len(stream))
    sums = []
    with jax.set_mesh(mesh):
        for rows in begins.reshape(-1, _HELD_OUT_ROWS):
            batch = _put(windows(stream, rows, _HELD_OUT_WINDOW), mesh)
            sums.append(language_model_loss(params, batch, config))
    nats, count = np.asarray(jax.device_get(sums), np.float64).sum(axis=0)
    return float(nats / count / math.log(2))


def _check(config: ByteModelConfig) -> None:
    if config.tokens_per_step < WINDOWS[-1] or config.tokens_per_step % WINDOWS[-1]:
        raise InputError(f"tokens_per_step {config.tokens_per_step}: must be a positive multiple of {WINDOWS[-1]}")
    for field in ("steps", "save_every", "learning_rate"):
        if not 0 < getattr(config, field) < math.inf:
            raise InputError(f"{field} {getattr(config, field)}: must be positive and finite")
    if not 0 <= config.weight_decay < math.inf:
        raise InputError(f"weight_decay {config.weight_decay}: must be finite and at least 0")
    if not 0 <= config.seed < 2**32:
        raise InputError(f"seed {config.seed}: must be in 0..{2**32 - 1}")
    for field in ("output", "checkpoints"):
        path = getattr(config, field)
        if path.exists() and not path.is_dir():
            raise InputError(f"{field} {path}: is a file; name a folder")


def _settings(config: ByteModelConfig, model: TargetConfig, stream: TokenStream) -> dict[str, Any]:
    """What a checkpoint must agree on to be continued."""
    names = ("tokens_per_step", "learning_rate", "weight_decay", "seed")
    ours = {name: getattr(config, name) for name in names}
    return ours | {"model": repr(model), "bytes": len(stream)}


@contextlib.contextmanager
def _reported_restore(folder: Path, step: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # Orbax raises many kinds for one broken checkpoint
        reason = str(error).partition("\n")[0][:300]
        raise InputError(
            f"{folder}: checkpoint {step} could not be read ({reason}); remove the folder or name another"
        ) from error


def _restore(
    manager: ocp.CheckpointManager, state: LanguageModelState, settings: dict[str, Any], folder: Path
) -> LanguageModelState:
    step = manager.latest_step()
    if step is None:
        return state
    with _reported_restore(folder, step):
        saved = manager.restore(step, args=ocp.args.Composite(settings=ocp.args.JsonRestore()))["settings"]
    for name, value in settings.items():
        if saved.get(name) != value:
            raise InputError(
                f"{folder}: made with {name} {saved.get(name)}, not {value}; remove the folder or name another"
            )
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    with _reported_restore(folder, step):
        return manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract)))["state"]


_CARD = """\
# A small byte-level language model

{parameters:,} parameters, {layers} layers, in the layout of Qwen3; ids 0 to 255 are bytes, 257 ends a file.

* Data: {bytes:,} bytes of the standard library of Python {python} (`*.py` without tests and generated tables);
  5% of the files, by a hash of their names, are held out.
* Training: {step:,} of {steps:,} steps of {tokens:,} bytes; AdamW, peak learning rate {rate:g}; windows of 256 to
  1,024 bytes.
* Held-out bits per byte, in windows of 512 bytes without earlier context: {bits:.3f} (weights in bfloat16, over
  {scope}).

Made by `python -m train byte-model`. It completes Python-looking text and knows nothing else.
"""


def _export(
    config: ByteModelConfig, model: TargetConfig, state: LanguageModelState, held_out: TokenStream,
    trained_on: int, mesh: Mesh,
) -> float:  # fmt: skip
    """Writes the folder with the stored weights' own held-out figure, which is returned."""
    step, limit = int(state.step), None if int(state.step) >= config.steps else 8 * _HELD_OUT_ROWS
    with atomic_folder(config.output) as folder:
        save_target(
            folder,
            model,
            jax.device_get(state.params),
            tokenizer=byte_tokenizer(),
            eos_token_ids=(EOS,),
            dtype=jnp.bfloat16,
        )
        stored = jax.device_put(load_target(folder).params, NamedSharding(mesh, PartitionSpec()))
        bits = held_out_bits_per_byte(stored, model, held_out, mesh, limit)
        card = _CARD.format(
            parameters=parameters.count(declare_target(model)), layers=model.num_hidden_layers, bytes=trained_on,
            python=platform.python_version(), step=step, steps=config.steps, tokens=config.tokens_per_step,
            rate=config.learning_rate, bits=bits,
            scope="all held-out files" if limit is None else f"{limit * _HELD_OUT_WINDOW:,} bytes of them",
        )  # fmt: skip
        write_text(folder / "README.md", card)
    return bits


def train(config: ByteModelConfig, model: TargetConfig = MODEL) -> float:
    """Trains to the end, or on from the last checkpoint. Returns the final held-out bits per byte.

    Raises:
      InputError: bad settings, unreadable sources, an output that cannot be written, another run's checkpoints.
    """
    _check(config)
    stream = token_stream(list(corpus(Split.TRAIN, config.sources).values()))
    held_out = token_stream(list(corpus(Split.HELD_OUT, config.sources).values()))
    static = LanguageModelConfig(
        target=model,
        total_steps=config.steps,
        optimizer=OptimizerConfig(
            learning_rate=config.learning_rate, beta2=0.98, weight_decay=config.weight_decay, warmup_fraction=0.02
        ),
    )
    settings = _settings(config, model, stream)
    devices = math.gcd(len(jax.devices()), config.tokens_per_step // WINDOWS[-1], _HELD_OUT_ROWS)
    mesh = make_mesh(devices, 1, jax.devices()[:devices])
    state = init_state(static, parameters.initialize(declare_target(model), jax.random.key(config.seed)))
    state = jax.device_put(state, NamedSharding(mesh, PartitionSpec()))
    options = ocp.CheckpointManagerOptions(max_to_keep=1)
    with reported(config.checkpoints), ocp.CheckpointManager(config.checkpoints.absolute(), options=options) as manager:
        state = _restore(manager, state, settings, config.checkpoints)
        begin, bits, loss = int(state.step), math.nan, None
        if begin >= config.steps:
            return _export(config, model, state, held_out, len(stream), mesh)
        bar = tqdm(range(begin, config.steps), "byte model", config.steps, initial=begin, unit="step", mininterval=2.0)
        for step in bar:
            batch = _put(step_batch(stream, config, step), mesh)
            with jax.set_mesh(mesh):
                state, new_loss = language_model_step(state, batch, static)
            if loss is not None:  # the step before: reading it does not wait for this one
                _report(bar, loss, step - 1)
            loss = new_loss
            if (step + 1) % config.save_every == 0 or step + 1 == config.steps:
                _report(bar, loss, step)
                manager.save(step + 1, args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state), settings=ocp.args.JsonSave(settings)
                ))  # fmt: skip
                manager.wait_until_finished()
                bits = _export(config, model, state, held_out, len(stream), mesh)
                bar.write(json.dumps({"step": step + 1, "held_out_bits_per_byte": round(bits, 4)}))
    return bits


def _report(bar: tqdm, loss: jax.Array, step: int) -> None:
    bits = float(loss) / math.log(2)
    if not math.isfinite(bits):
        raise InputError(f"step {step}: the loss is not finite; lower the learning rate")
    bar.set_postfix_str(f"{bits:.3f} bits/byte", refresh=False)


def main(config: ByteModelConfig) -> None:
    """Runs the command and prints where the model lies."""
    bits = train(config)
    print(f"{config.output}: {bits:.3f} held-out bits per byte")


if __name__ == "__main__":
    commands = {"byte-model": command_line.Command(ByteModelConfig, main)}
    sys.exit(command_line.main("train", commands, ["byte-model", *sys.argv[1:]]))
