"""Tokenizers and chat templates, alone and against transformers."""

import dataclasses
import json

import pytest

from dspark_jax.io import InputError, byte_tokenizer, load_tokenizer

CHATML = (
    "{%- for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{%- endif %}"
)
# Like Qwen3's: past replies lose their thinking, and the generation prompt may hold an empty thinking block.
THINKING = """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' and '</think>' in m.content and loop.index0 < ns.last %}
        {{- '<|assistant|>\n' + m.content.split('</think>')[-1].lstrip('\n') + '<eos>\n' }}
    {%- else %}
        {{- '<|' + m.role + '|>\n' + m.content + '<eos>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "héllo <b>"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\n<i>ça va 日本"},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "\nFine.", "tool_calls": None},
]


def _with(template):
    return dataclasses.replace(byte_tokenizer(), chat_template=template)


def test_byte_tokenizer(tmp_path):
    tokenizer = byte_tokenizer()
    text = "".join(map(chr, range(300))) + "日本 🎉\r\n\t"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.encode("a<eos>") == [97, 257]
    assert tokenizer.decode([97, 257, 259]) == "a"
    assert tokenizer.decode([97, 257], skip_special_tokens=False) == "a<eos>"
    assert (tokenizer.num_ids, tokenizer.eos_token_id, tokenizer.token_id("<mask>")) == (259, 257, 258)
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.special_tokens == tokenizer.special_tokens
    assert loaded.chat_template is None


@pytest.mark.parametrize("form", ["string", "named", "file"])
def test_chat_template_forms(tmp_path, form):
    _with(None).save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["eos_token"] = {"content": "<eos>", "lstrip": False}
    if form == "file":
        (tmp_path / "chat_template.jinja").write_text(CHATML)
    elif form == "named":
        config["chat_template"] = [{"name": "tools", "template": "x"}, {"name": "default", "template": CHATML}]
    else:
        config["chat_template"] = CHATML
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    text = tokenizer.decode(tokenizer.encode_chat(CHAT[1:2]), skip_special_tokens=False)
    assert text == "<|user|>\nhéllo <b><eos>\n<|assistant|>\n"


def _replies(tokenizer, chat, thinking=None):
    ids, mask = tokenizer.encode_chat_with_offsets(chat, enable_thinking=thinking)
    assert ids == tokenizer.encode_chat(chat, add_generation_prompt=False, enable_thinking=thinking)
    runs, previous = [], 0
    for token, inside in zip(ids, mask, strict=True):
        if inside and not previous:
            runs.append([])
        if inside:
            runs[-1].append(token)
        previous = inside
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs]


def test_loss_mask_is_what_the_assistant_says():
    assert _replies(_with(CHATML), CHAT) == [CHAT[2]["content"] + "<eos>", "\nFine.<eos>"]


@pytest.mark.parametrize("thinking", [None, True, False])
def test_loss_mask_where_the_template_rewrites_replies(thinking):
    assert _replies(_with(THINKING), CHAT, thinking) == ["<i>ça va 日本<eos>", "\nFine.<eos>"]


def test_loss_mask_leaves_out_what_the_generation_prompt_gives():
    chat = [CHAT[1], {"role": "assistant", "content": "<think>\n\n</think>\n\nok"}]
    assert _replies(_with(THINKING), chat, False) == ["ok<eos>"]
    assert _replies(_with(THINKING), chat, None) == ["<think>\n\n</think>\n\nok<eos>"]


def test_loss_mask_where_every_generation_prompt_opens_thinking():
    template = THINKING.replace("{%- if enable_thinking is defined", "{{- '<pad>' }}{%- if enable_thinking is defined")
    assert _replies(_with(template), CHAT) == ["<i>ça va 日本<eos>", "\nFine.<eos>"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template"),
        ("{% for %}", "chat template: "),
        ("{{ raise_exception('no system role') }}", "chat template: no system role"),
        ("{{ messages[9].content.x }}", "chat template: "),
        ("{{ ''.__class__.__mro__ }}", "chat template: "),
        ("{{ 1 / 0 }}", "chat template: division by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "chat template: "),
        ("{{ '\\ud800' }}", "chat template: .*surrogates"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "no special token"),
        ("{{ messages | length }}{{ messages[0].content }}", "changes earlier messages"),
    ],
)
def test_bad_templates(template, message):
    with pytest.raises(InputError, match=message):
        _with(template).encode_chat_with_offsets(CHAT)


def test_malformed_tokenizer_files(tmp_path):
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"tokenizer.json: malformed tokenizer"):
        load_tokenizer(tmp_path)
    byte_tokenizer().save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(InputError, match=r"tokenizer_config.json, line 1: malformed JSON"):
        load_tokenizer(tmp_path)
    for fields, message in (
        ({"eos_token": 5}, "eos_token must be a string"),
        ({"eos_token": {"x": 1}}, "eos_token must be a string"),
        ({"chat_template": 5}, "chat_template must be a string"),
        ({"chat_template": [{}, 5]}, "chat_template has no entry named default"),
        ({"chat_template": [{"name": "default", "template": 7}]}, "chat_template must be a string"),
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
        with pytest.raises(InputError, match=f"tokenizer_config.json: {message}"):
            load_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"chat_template.jinja: not UTF-8"):
        load_tokenizer(tmp_path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "template",
    [
        CHATML,
        THINKING,
        "{{ strftime_now('%Y') }}{{ messages | tojson(indent=1) }}",
        "{% for m in messages %}\n  {% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}",
    ],
)
@pytest.mark.parametrize("thinking", [None, False])
def test_parity_with_transformers(tmp_path, template, thinking):
    transformers = pytest.importorskip("transformers")
    _with(template).save(tmp_path)
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    options = {} if thinking is None else {"enable_thinking": thinking}
    for messages, prompt in ((CHAT, False), (CHAT[:4], True)):
        expected = reference.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False, **options)
        assert tokenizer.render_chat(messages, prompt, thinking) == expected
        ids = reference.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=True, **options)
        assert tokenizer.encode_chat(messages, prompt, thinking) == list(ids["input_ids"])
    assert tokenizer.encode("a é <eos>") == reference("a é <eos>")["input_ids"]
