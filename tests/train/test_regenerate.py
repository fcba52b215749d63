"""`python -m train regenerate`: mixed temperatures, turns, exact resume, bad input."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import DecodeConfig, generate, request_keys, sampling_params
from dspark_jax.io import load_target
from train.__main__ import main


def arguments(target: Path, prompts: Path, output: Path, *more: object) -> list[str]:
    given = ["--target", target, "--prompts", prompts, "--output", output, "--max-new-tokens", 12, "--batch-size", 3]
    return ["regenerate", *map(str, given), *map(str, more)]


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def prompts(tmp_path, write_rows) -> Path:
    lines = [
        {"prompt": "Ann has 3 ducks"},
        {"turns": ["How many?", "And now?"]},
        {"messages": [{"role": "user", "content": "Hi"}]},
        {"input_ids": list(b"Ben has 2")},
        {"turns": ["One", "Two", "Three"]},
        {"prompt": "x" * 70},
        {"turns": ["last", "turn"]},
    ]
    return write_rows(tmp_path / "prompts.jsonl", lines)


def test_lines(chat_target, prompts, tmp_path, tokenizer):
    output = tmp_path / "out.jsonl"
    assert main(arguments(chat_target, prompts, output, "--temperature", 0, 1)) == 0
    lines = rows(output)
    places = [(0, 0), (1, 0), (1, 1), (2, 0), (3, 0), (4, 0), (4, 1), (4, 2), (5, 0), (6, 0), (6, 1)]
    assert [(line["index"], line["turn"]) for line in lines] == places
    assert [line["temperature"] for line in lines] == [float(index % 2) for index, _ in places]
    for line in lines:
        stopped = line["output_ids"][-1] == 257
        assert line["finish_reason"] == ("stop" if stopped else "length")
        assert stopped or len(line["output_ids"]) == 12
        assert ("messages" in line) == (line["index"] in (1, 2, 4, 6))
    second = lines[2]
    assert [message["role"] for message in second["messages"]] == ["user", "assistant"] * 2
    assert second["messages"][:2] == lines[1]["messages"]
    assert second["messages"][3]["content"] == tokenizer.decode(second["output_ids"])
    assert second["input_ids"] == tokenizer.encode_chat(second["messages"][:3])


def test_samples_are_those_of_generate_with_the_prompt_s_key(chat_target, prompts, tmp_path):
    output = tmp_path / "out.jsonl"
    assert main(arguments(chat_target, prompts, output, "--temperature", 0.8, "--seed", 5)) == 0
    target = load_target(chat_target)
    line = rows(output)[4]
    result = generate(
        target.params,
        None,
        jnp.asarray([line["input_ids"]], jnp.int32),
        jnp.asarray([len(line["input_ids"])], jnp.int32),
        request_keys(5, 7)[3:4],
        DecodeConfig(target=target.config, max_new_tokens=12, eos_token_ids=(257,)),
        sampling_params(1, 0.8),
    )
    assert np.asarray(result.tokens)[0, : int(result.lengths[0])].tolist() == line["output_ids"]


@pytest.mark.parametrize("cut", [0.05, 0.5, 0.97])
def test_a_resumed_file_is_the_uninterrupted_one(chat_target, prompts, tmp_path, cut):
    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    assert main(arguments(chat_target, prompts, whole)) == 0
    data = whole.read_bytes()
    part.write_bytes(data[: int(cut * len(data))])
    Path(f"{part}.settings.json").write_bytes(Path(f"{whole}.settings.json").read_bytes())
    assert main(arguments(chat_target, prompts, part)) == 0
    assert part.read_bytes() == data


@pytest.mark.slow
def test_a_drafter_changes_nothing(data, fit_arguments, chat_target, prompts, tmp_path):
    assert main(fit_arguments(tmp_path / "run")) == 0
    plain, fast = tmp_path / "plain.jsonl", tmp_path / "fast.jsonl"
    assert main(arguments(chat_target, prompts, plain)) == 0
    assert main(arguments(chat_target, prompts, fast, "--drafter", tmp_path / "run" / "drafter")) == 0
    assert rows(plain) == rows(fast)


def test_a_conversation_ends_where_the_context_does(chat_target, tmp_path, write_rows):
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"turns": ["a" * 500, "b" * 600, "c"]}, {"prompt": "d" * 1020}])
    output = tmp_path / "out.jsonl"
    assert main(arguments(chat_target, prompts, output)) == 0
    lines = rows(output)
    assert [(line["index"], line["turn"]) for line in lines] == [(0, 0), (1, 0)]
    assert len(lines[1]["output_ids"]) == 4


def test_bad_input_is_one_line_before_weights_are_loaded(
    chat_target, prompts, tmp_path, write_rows, one_line, no_weights
):
    output = tmp_path / "out.jsonl"
    one_line(arguments(chat_target, tmp_path / "none.jsonl", output), "none.jsonl")
    one_line(arguments(tmp_path / "nowhere", prompts, output), "nowhere")
    one_line(arguments(chat_target, prompts, output, "--temperature", -1), "--temperature -1")
    one_line(arguments(chat_target, prompts, output, "--max-new-tokens", 0), "--max-new-tokens 0")
    one_line(arguments(chat_target, prompts, output, "--seed", 2**40), "--seed 1099511627776")
    for line, words in (
        ({"prompt": "x" * 2000}, "2000 tokens"),
        ({"input_ids": [300]}, "token id 300"),
        ({"nothing": 1}, "expected exactly one of"),
    ):
        bad = write_rows(tmp_path / "bad.jsonl", [{"prompt": "x"}, line])
        one_line(arguments(chat_target, bad, output), "bad.jsonl, line 2", words)
    assert not output.exists()


def test_an_output_of_something_else_is_refused(chat_target, prompts, tmp_path, write_rows, one_line):
    output = tmp_path / "out.jsonl"
    output.write_text('{"input_ids": [1]}\n')
    one_line(arguments(chat_target, prompts, output), "out.jsonl", "was not made by regenerate")
    output.unlink()
    assert main(arguments(chat_target, prompts, output)) == 0
    one_line(arguments(chat_target, prompts, output, "--seed", 1), "--seed 0, not 1")
    before = rows(output)
    for spoilt in (before[::-1], [*before, *before], [before[0] | {"turn": 9}]):
        one_line(arguments(chat_target, prompts, write_rows(output, spoilt)), "out.jsonl, line", "not made by")
        assert rows(output) == spoilt
    write_rows(output, before)
    changed = write_rows(tmp_path / "changed.jsonl", [{"prompt": "y"}])
    one_line(arguments(chat_target, changed, output), "other contents of --prompts")
