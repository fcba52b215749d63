"""Prompt lines: four kinds, their ids and their errors."""

import dataclasses
import json

import pytest

from dspark_jax.io import InputError, PromptEncoder, byte_tokenizer, read_prompts

TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}a:{% if enable_thinking is defined and not enable_thinking %}!{% endif %}{% endif %}"
)
TOKENIZER = dataclasses.replace(byte_tokenizer(), chat_template=TEMPLATE)
ENCODER = PromptEncoder(TOKENIZER, vocab_size=260, max_length=40)


def _write(tmp_path, *rows):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _text(ids):
    return TOKENIZER.decode(ids, skip_special_tokens=False)


def test_the_four_kinds(tmp_path):
    path = _write(
        tmp_path,
        {"input_ids": [1, 2], "answer": "ignored"},
        {"prompt": "hé", "turns": None},
        {"turns": ["hi", "more"]},
        {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]},
    )
    ids, raw, turns, messages = read_prompts(path, ENCODER)
    assert ids.turn_ids() == [1, 2]
    assert raw.turn_ids() == list("hé".encode())
    assert [p.num_turns for p in (ids, raw, turns, messages)] == [1, 1, 2, 1]
    assert _text(turns.turn_ids()) == "u:hi<eos>a:"
    assert _text(turns.turn_ids(1, ["yes"])) == "u:hi<eos>a:yes<eos>u:more<eos>a:"
    assert _text(messages.turn_ids()) == "s:S<eos>u:U<eos>a:"


def test_enable_thinking_reaches_the_template_only_when_given(tmp_path):
    path = _write(tmp_path, {"turns": ["hi"]})
    for thinking, end in ((None, "a:"), (True, "a:"), (False, "a:!")):
        encoder = dataclasses.replace(ENCODER, enable_thinking=thinking)
        assert _text(read_prompts(path, encoder)[0].turn_ids()).endswith(end)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "exactly one of input_ids, prompt, turns, messages; found none"),
        ({"prompt": "a", "turns": ["b"]}, "exactly one of .* found prompt and turns"),
        ({"input_ids": "abc"}, "input_ids must be a list of integers"),
        ({"input_ids": [1, True]}, "input_ids must be a list of integers"),
        ({"input_ids": [1, 2.0]}, "input_ids must be a list of integers"),
        ({"input_ids": []}, "the prompt is empty"),
        ({"input_ids": [1, 260]}, "token id 260 is outside the vocabulary of 260"),
        ({"input_ids": [-1]}, "token id -1 is outside the vocabulary of 260"),
        ({"input_ids": [1] * 41}, "has 41 tokens, more than the 40"),
        ({"prompt": 3}, "prompt must be a string"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": "x" * 41}, "has 41 tokens"),
        ({"turns": []}, "turns must be a list"),
        ({"turns": "hi"}, "turns must be a list"),
        ({"turns": ["hi", 2]}, "turns must be a list"),
        ({"messages": {}}, "messages must be a list"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\] must be an object with strings role and content"),
    ],
)
def test_bad_lines(tmp_path, row, message):
    path = _write(tmp_path, {"input_ids": [1]}, row)
    with pytest.raises(InputError, match=f"^{path}, line 2: .*{message}") as error:
        read_prompts(path, ENCODER)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("row", [{"prompt": "a"}, {"turns": ["a"]}, {"messages": [{"role": "user", "content": "a"}]}])
def test_text_needs_a_tokenizer(tmp_path, row):
    encoder = dataclasses.replace(ENCODER, tokenizer=None)
    with pytest.raises(InputError, match=r"line 1: .* needs a tokenizer"):
        read_prompts(_write(tmp_path, row), encoder)


def test_chat_needs_a_template(tmp_path):
    encoder = dataclasses.replace(ENCODER, tokenizer=byte_tokenizer())
    with pytest.raises(InputError, match=r"line 1: .*has no chat template"):
        read_prompts(_write(tmp_path, {"turns": ["a"]}), encoder)


def test_a_later_turn_is_checked_too(tmp_path):
    (prompt,) = read_prompts(_write(tmp_path, {"turns": ["hi", "more"]}), ENCODER)
    with pytest.raises(InputError, match="line 1: the prompt has 55 tokens"):
        prompt.turn_ids(1, ["x" * 38])
