"""A tiny target with a chat tokenizer, and data for it, for the tests of the training programs."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from dspark_jax.io import Tokenizer, load_target, save_target
from dspark_jax.io.tokenizer import byte_alphabet
from train.__main__ import main

TARGET = Path(__file__).parents[1] / "goldens" / "target"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_NAMES, _THINGS = ("Ann", "Ben", "Carla", "Dev"), ("apples", "books", "coins", "ducks")


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Bytes, and ChatML's special tokens: 256 begins a turn, 257 ends it, 258 is the mask."""
    alphabet = {character: byte for byte, character in enumerate(byte_alphabet())}
    backend = tokenizers.Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", "<mask>"]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return Tokenizer(backend, TEMPLATE, {"eos_token": "<|im_end|>", "mask_token": "<mask>"})


@pytest.fixture(scope="session")
def chat_target(tmp_path_factory, tokenizer) -> Path:
    """The golden target with two layers, a tokenizer and an untied head."""
    target = load_target(TARGET)
    folder = tmp_path_factory.mktemp("chat") / "target"
    config = dataclasses.replace(target.config, num_hidden_layers=3, sliding_windows=(None,) * 3)
    params = target.params.replace(layers=target.params.layers[:3])
    save_target(folder, config, params, tokenizer=tokenizer, eos_token_ids=(257,))
    return folder


@pytest.fixture(scope="session")
def records() -> list[dict]:
    """Thirty small questions and answers, as ids."""
    rng, rows = np.random.default_rng(0), []
    for _ in range(30):
        name, thing, number = rng.choice(_NAMES), rng.choice(_THINGS), int(rng.integers(2, 9))
        question = f"{name} has {number} {thing} and buys one more."
        answer = f" Now {name} has {number + 1} {thing}."
        rows.append({"input_ids": list(question.encode()), "output_ids": [*answer.encode(), 257]})
    return rows


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def write_rows() -> Callable[[Path, list[dict]], Path]:
    """Writes JSON Lines and returns the path."""
    return write


@pytest.fixture(scope="session")
def data(tmp_path_factory, records) -> Path:
    return write(tmp_path_factory.mktemp("data") / "data.jsonl", records)


@pytest.fixture
def fit_arguments(chat_target, data) -> Callable[..., list[str]]:
    """Arguments of a small run in a folder; later options come last."""

    def arguments(output: Path, *more: object) -> list[str]:
        options = {
            "target": chat_target, "data": data, "output": output, "num-layers": 1, "block-size": 4,
            "markov-rank": 8, "num-anchors": 8, "batch-size": 4, "steps": 12, "checkpoint-every": 4,
            "eval-every": 6, "log-every": 1, "optimizer.learning-rate": 5e-3,
        }  # fmt: skip
        given = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
        return ["fit", *given, *map(str, more)]

    return arguments


@pytest.fixture
def no_weights(monkeypatch) -> None:
    """No model's weights can be loaded: what a test refuses is refused before."""
    monkeypatch.setattr("dspark_jax.io.target.load_parameters", None)
    monkeypatch.setattr("dspark_jax.io.drafter.load_parameters", None)


@pytest.fixture
def one_line(capsys) -> Callable[..., None]:
    """Runs a command that must fail with an exit code and exactly one line on standard error that holds the words."""

    def check(arguments: list, *words: object, code: int = 2) -> None:
        capsys.readouterr()
        assert main([str(argument) for argument in arguments]) == code
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1, lines
        for word in words:
            assert str(word) in lines[0], lines[0]

    return check
