"""`python -m infer transformers-speed`: plain decoding against the transformers library, on the same weights."""

import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import dspark_jax
from dspark_jax import DecodeConfig, request_keys
from dspark_jax.io import InputError, Target, describe_target, write_json
from dspark_jax.io.outputs import check_output
from dspark_jax.io.report import environment, number
from dspark_jax.io.transformers_model import load_transformers_model, transformers_versions
from infer.timers import decoding_timer


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformersSpeedOptions:
    """Time a greedy step of one request here and in transformers (PyTorch), in turns in one process, in float32.

    Times are of whole loops, the prefill taken off; the ratio is the median of the ratios within each turn. Needs
    `pip install -e '.[parity]'`.
    """

    target: str
    """Folder of a Hugging Face checkpoint, a hub id, or a .gguf file."""
    output: Path = Path("transformers_speed.json")
    """JSON file to write."""
    context: int = 128
    """Tokens of the prompt."""
    steps: int = 32
    """Steps of each timed loop."""
    repeats: int = 7
    """Turns."""
    allow_config_key: tuple[str, ...] = ()
    """Unknown keys of the target's config.json that may be ignored."""

    def check(self) -> None:
        for name in ("context", "steps", "repeats"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name} {getattr(self, name)} must be at least 1")
        check_output(self.output, [self.target])


def transformers_speed(options: TransformersSpeedOptions) -> None:
    options.check()
    description = describe_target(options.target, allow_config_keys=options.allow_config_key)
    longest = description.config.max_position_embeddings
    if options.context + options.steps >= longest:
        raise InputError(f"--context and --steps are more than the target's {longest} positions; lower one of them")
    model = load_transformers_model(options.target)
    target = description.load(dtype="float32", fused_projections=True)
    prompt = np.arange(options.context)[None] % target.config.num_valid_tokens
    ours = decoding_timer(target, None, options.context, options.steps)
    agreeing = int(np.sum(_tokens(target, prompt, options.steps) == _their_tokens(model, prompt, options.steps)))
    ours()
    times = np.zeros((2, options.repeats))
    for turn in tqdm(range(options.repeats), desc="measure", unit="turn"):
        times[:, turn] = ours(), _their_seconds(model, prompt, options.steps)
    milliseconds = {name: 1e3 * float(np.nanmedian(row)) for name, row in zip(("ours", "theirs"), times, strict=True)}
    ratio = float(np.nanmedian(times[1] / times[0]))
    here, there = milliseconds["ours"], milliseconds["theirs"]
    print(
        f"{target.name}, float32: a step takes {here:.1f} ms here and {there:.1f} ms in transformers, "
        f"ratio {ratio:.2f}; {agreeing} of {options.steps} greedy tokens agree"
    )
    report = {
        "target": target.name,
        "context": options.context,
        "steps": options.steps,
        "ratio": number(ratio),
        "milliseconds": {name: number(value) for name, value in milliseconds.items()},
        "agreeing_tokens": agreeing,
        "transformers": transformers_versions(),
        **environment(),
    }
    write_json(options.output, report)
    print(f"wrote {options.output}", file=sys.stderr)


def _generated(model: Any, prompt: np.ndarray, tokens: int) -> Any:
    import torch

    ids = torch.tensor(prompt)
    with torch.inference_mode():
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            pad_token_id=0,
            eos_token_id=None,
        )


def _their_seconds(model: Any, prompt: np.ndarray, steps: int) -> float:
    """Seconds a step of transformers' generate."""
    taken = []
    for tokens in (1, steps + 1):
        begin = time.perf_counter()
        _generated(model, prompt, tokens)
        taken.append(time.perf_counter() - begin)
    return (taken[1] - taken[0]) / steps


def _their_tokens(model: Any, prompt: np.ndarray, steps: int) -> np.ndarray:
    return _generated(model, prompt, steps)[0, prompt.shape[1] :].numpy()


def _tokens(target: Target, prompt: np.ndarray, steps: int) -> np.ndarray:
    config = DecodeConfig(target=target.config, drafter=None, max_new_tokens=steps)
    lengths = jnp.asarray([prompt.shape[1]], jnp.int32)
    inputs = (jnp.asarray(prompt, jnp.int32), lengths, request_keys(0, 1))
    return np.asarray(dspark_jax.generate(target.params, None, *inputs, config).tokens[0])
