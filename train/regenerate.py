"""`python -m train regenerate`: the target's own answers to prompts, the data that drafters are trained on."""

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from tqdm import tqdm

from dspark_jax import DecodeConfig, generate, request_keys, sampling_params
from dspark_jax.io import (
    Drafter,
    InputError,
    JsonlWriter,
    Prompt,
    Target,
    TargetDescription,
    describe_drafter,
    describe_target,
    load_drafter,
    read_json,
    read_prompts,
    write_json,
    write_jsonl,
)
from train.conversations import converse, make_batch
from train.data import file_digest


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegenerateConfig:
    """Sample the target's responses to prompts.

    A prompt line has input_ids, or prompt (raw), or messages, or turns. An output line has input_ids, output_ids,
    temperature and finish_reason (stop or length), the prompt's index and turn, and messages, the reply included,
    where the prompt goes through the chat template; there is a line for each turn. The same command again goes on
    with a file that an interrupted run left, and ends with the same file.
    """

    target: str
    """Hugging Face folder or hub id, or a .gguf file."""
    prompts: Path
    """JSON Lines file of prompts."""
    output: Path
    """JSON Lines file to write."""
    drafter: str | None = None
    """Drafter folder or hub id: the same output, faster."""
    temperature: tuple[float, ...] = (1.0,)
    """Temperatures, assigned to the prompts in turn; 0 is greedy."""
    max_new_tokens: int = 1024
    """Tokens of a response, at most; fewer where the context ends."""
    batch_size: int = 16
    """Prompts answered at a time; an interruption loses at most so many."""
    enable_thinking: bool | None = None
    """Passed to the chat template; by default the template decides."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and activations."""
    seed: int = 0
    """Of the samples: a prompt's depend on this and on its place in the file only."""
    allow_config_key: tuple[str, ...] = ()
    """Unknown keys of the models' config.json that may be ignored."""

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1")
        if not 0 <= self.seed < 2**32:
            raise InputError(f"--seed {self.seed}: must be in 0..{2**32 - 1}")
        if not self.temperature:
            raise InputError("--temperature: name at least one")
        for value in self.temperature:
            if not (math.isfinite(value) and value >= 0):
                raise InputError(f"--temperature {value}: must be finite and at least 0")


def main(config: RegenerateConfig) -> None:
    """Runs the command."""
    keys = config.allow_config_key
    description = describe_target(config.target, allow_config_keys=keys)
    if config.drafter is not None:
        describe_drafter(config.drafter, target=description.config, allow_config_keys=keys)
    prompts = read_prompts(config.prompts, description.prompt_encoder(config.enable_thinking))
    kept = _resume(config, _settings(config, description), prompts)
    target, drafter = description.load(dtype=config.dtype), None
    if config.drafter is not None:
        drafter = load_drafter(config.drafter, target=target, dtype=config.dtype, allow_config_keys=keys)
    batches = range(kept, len(prompts), config.batch_size)
    sampler = _Sampler(config, target, drafter, len(prompts))
    with (
        JsonlWriter(config.output) as writer,
        tqdm(total=len(prompts), initial=kept, unit=" prompts", disable=None, dynamic_ncols=True) as bar,
    ):
        for begin in batches:
            group = prompts[begin : begin + config.batch_size]
            for row in _lines(sampler, group, begin):
                writer.write(row)
            bar.set_postfix_str(f"{sampler.rate:.0f} tokens/s", refresh=False)
            bar.update(len(group))
    print(f"{config.output}: responses to {len(prompts)} prompts ({sampler.tokens:,} new tokens, {kept} prompts kept)")


def _settings(config: RegenerateConfig, target: TargetDescription) -> dict[str, Any]:
    """All that the output depends on. A drafter changes it at near-ties only, but then it does."""
    return {
        "target": target.fingerprint,
        "prompts": file_digest([config.prompts]),
        "drafter": config.drafter,
        "temperature": list(config.temperature),
        "max_new_tokens": config.max_new_tokens,
        "batch_size": config.batch_size,
        "enable_thinking": config.enable_thinking,
        "dtype": config.dtype,
        "seed": config.seed,
    }


def _resume(config: RegenerateConfig, settings: dict[str, Any], prompts: Sequence[Prompt]) -> int:
    """Cuts the output to whole batches, so that the others are made in the same company, and counts its prompts.

    Raises:
      InputError: the output was made with other settings, or by something else.
    """
    path = Path(f"{config.output}.settings.json")
    if not config.output.exists():
        write_json(path, settings)
        return 0
    if not path.exists():
        raise InputError(f"{config.output}: exists and was not made by regenerate ({path.name} is missing)")
    saved = read_json(path)
    for name, value in settings.items():
        if saved.get(name) != value:
            difference = f"--{name.replace('_', '-')} {saved.get(name)}, not {value}"
            if name in ("target", "prompts"):
                difference = f"other contents of --{name}"
            raise InputError(f"{config.output}: was made with {difference}; name another --output or remove it")
    with JsonlWriter(config.output) as writer:
        rows = writer.rows
    kept, done, before = 0, 0, (-1, 0)
    for number, row in enumerate(rows, 1):
        index, turn = row.get("index"), row.get("turn")
        if (
            type(index) is not int
            or type(turn) is not int
            or not 0 <= index < len(prompts)
            or not 0 <= turn < prompts[index].num_turns
            or (index, turn) <= before
        ):
            raise InputError(f"{config.output}, line {number}: was not made by regenerate; name another --output")
        before = (index, turn)
        ends_batch = (index + 1) % config.batch_size == 0 or index + 1 == len(prompts)
        if ends_batch and turn + 1 == prompts[index].num_turns:
            kept, done = number, index + 1
    if kept < len(rows):
        write_jsonl(config.output, rows[:kept])
    return done


class _Sampler:
    """Turns prompts into responses, in batches of one size and of few lengths."""

    def __init__(self, config: RegenerateConfig, target: Target, drafter: Drafter | None, prompts: int) -> None:
        self._config, self._target, self._drafter = config, target, drafter
        self._decode = DecodeConfig(
            target=target.config,
            drafter=None if drafter is None else drafter.config,
            max_new_tokens=min(config.max_new_tokens, target.config.max_position_embeddings),
            eos_token_ids=target.eos_token_ids,
        )
        self._keys = request_keys(config.seed, prompts)
        self._begin = time.perf_counter()
        self.tokens = 0

    @property
    def rate(self) -> float:
        """New tokens a second since the start, compilations included."""
        return self.tokens / (time.perf_counter() - self._begin)

    def temperature(self, index: int) -> float:
        return self._config.temperature[index % len(self._config.temperature)]

    def __call__(self, contexts: Sequence[list[int] | None], begin: int, turn: int) -> Iterator[tuple[list[int], bool]]:
        """(new tokens, whether an EOS ended them) for prompts `begin`, … of which those without context rest."""
        rows, room = self._config.batch_size, self._target.config.max_position_embeddings
        batch = make_batch(contexts, begin, turn, rows, room, self._config.max_new_tokens, self._keys)
        temperatures = [self.temperature(index) for index in batch.indices]
        sampling = sampling_params(rows).replace(temperature=jnp.asarray(temperatures, jnp.float32))
        params = None if self._drafter is None else self._drafter.params
        result = generate(
            self._target.params,
            params,
            batch.tokens,
            batch.lengths,
            batch.keys,
            self._decode,
            sampling,
            jnp.asarray(batch.max_tokens),
        )
        tokens, lengths, stopped = jax.device_get((result.tokens, result.lengths, result.stopped))
        self.tokens += int(lengths.sum())
        for row in range(len(contexts)):
            yield tokens[row, : lengths[row]].tolist(), bool(stopped[row])


def _lines(sampler: _Sampler, prompts: Sequence[Prompt], begin: int) -> list[dict[str, Any]]:
    """The output lines of one batch, in the order of the prompts and their turns."""
    lines: list[list[dict[str, Any]]] = [[] for _ in prompts]
    for answer in converse(lambda contexts, turn: sampler(contexts, begin, turn), prompts):
        index = begin + answer.row
        line = {
            "index": index,
            "turn": answer.turn,
            "input_ids": answer.input_ids,
            "output_ids": answer.output_ids,
            "temperature": sampler.temperature(index),
            "finish_reason": "stop" if answer.stopped else "length",
        }
        if answer.messages is not None:
            line["messages"] = answer.messages
        lines[answer.row].append(line)
    return [line for conversation in lines for line in conversation]
