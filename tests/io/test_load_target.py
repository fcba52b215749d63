"""Target folders: reading, writing and everything that can be wrong with them."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark_jax import parameters
from dspark_jax.config import RopeScaling, TargetConfig
from dspark_jax.io import InputError, byte_tokenizer, describe_target, load_target, save_target
from dspark_jax.parameters import named_leaves
from dspark_jax.sharding import make_mesh
from dspark_jax.targets.decoder import declare_target

GOLDEN = Path(__file__).parent.parent / "goldens" / "target"


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(GOLDEN, tmp_path / "target"))


def edit_json(path, **changes):
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in fields.items() if value != "removed"}))


def edit_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def shard(folder):
    """Splits the checkpoint in two."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def assert_equal_trees(first, second):
    first, second = named_leaves(first), named_leaves(second)
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(np.asarray(first[name]), np.asarray(second[name]), err_msg=name)


def test_golden_target():
    target = load_target(GOLDEN)
    assert (target.config.model_type, target.config.rope_theta, target.config.head_dim) == ("qwen3", 1e6, 24)
    assert target.config.tie_word_embeddings and target.params.lm_head is None
    assert (target.eos_token_ids, target.tokenizer, target.name) == ((257,), None, "target")
    assert target.config.num_valid_tokens == 260
    stored = load_file(GOLDEN / "model.safetensors")
    assert len(named_leaves(target.params)) == len(stored)
    for path, array in named_leaves(target.params).items():
        np.testing.assert_array_equal(np.asarray(array), stored[f"model.{path}"])


def test_sharded_files_dtype_and_stacked_layers(folder):
    single = load_target(folder)
    shard(folder)
    sharded = load_target(folder, dtype="bfloat16", stacked_layers=True)
    assert sharded.fingerprint == single.fingerprint
    assert sharded.config.stacked_layers
    for layer, params in enumerate(single.params.layers):
        for path, array in named_leaves(params).items():
            stacked = named_leaves(sharded.params.layers)[path]
            assert stacked.dtype == jnp.bfloat16
            np.testing.assert_array_equal(np.asarray(stacked[layer]), np.asarray(array.astype(jnp.bfloat16)))


@pytest.mark.parametrize("stacked", [False, True])
def test_mesh(folder, stacked):
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices")
    mesh = make_mesh(4, 2)
    plain, placed = load_target(folder, stacked_layers=stacked), load_target(folder, mesh=mesh, stacked_layers=stacked)
    assert_equal_trees(plain.params, placed.params)
    embedding = placed.params.embed_tokens.weight
    assert embedding.addressable_shards[0].data.shape == (130, 96)
    layer = placed.params.layers if stacked else placed.params.layers[0]
    assert layer.self_attn.k_proj.weight.addressable_shards[0].data.shape[-2:] == (24, 96)


def test_end_of_text_ids_are_the_union(folder):
    edit_json(folder / "generation_config.json", eos_token_id=[9, 3])
    assert load_target(folder).eos_token_ids == (3, 9, 257)
    (folder / "generation_config.json").unlink()
    edit_json(folder / "config.json", eos_token_id=None)
    assert load_target(folder).eos_token_ids == ()
    edit_json(folder / "config.json", eos_token_id="x")
    with pytest.raises(InputError, match="eos_token_id must be an integer"):
        load_target(folder)


def test_ignorable_tensors(folder):
    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(12, np.float32)

    edit_tensors(folder, add)
    assert load_target(folder).params.lm_head is None


def test_padded_vocabulary_rows(folder):
    byte_tokenizer().save(folder)
    target = load_target(folder)
    assert (target.config.num_valid_tokens, target.config.vocab_size) == (259, 260)
    assert target.tokenizer.encode("hi") == [104, 105]


def test_a_description_is_what_is_loaded(folder):
    byte_tokenizer().save(folder)
    description, target = describe_target(folder), load_target(folder)
    assert description.config == target.config and description.config.num_valid_tokens == 259
    for name in ("eos_token_ids", "name", "fingerprint"):
        assert getattr(description, name) == getattr(target, name)
    assert_equal_trees(description.load().params, target.params)


def test_a_description_reads_no_weights(folder, monkeypatch):
    monkeypatch.setattr("dspark_jax.io.safetensors.SafetensorsSource.read", None)
    assert describe_target(folder).config.num_hidden_layers == 6
    edit_tensors(folder, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(InputError, match=r"tensor model.norm.weight \[96\] is missing"):
        describe_target(folder)


CONFIGS = {
    "qwen3": {"qk_norm": True, "sliding_windows": (None, 16)},
    "llama": {
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "rope_scaling": RopeScaling(8.0, 1.0, 4.0, 64),
    },
}


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_save_and_load(tmp_path, family, stacked, dtype):
    config = TargetConfig(
        model_type=family, vocab_size=260, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=6, stacked_layers=stacked, num_valid_tokens=259,
        **CONFIGS[family],
    )  # fmt: skip
    params = parameters.initialize(declare_target(config), jax.random.key(0), jnp.dtype(dtype))
    save_target(tmp_path / "a", config, params, tokenizer=byte_tokenizer(), eos_token_ids=(257, 3), dtype=dtype)
    loaded = load_target(tmp_path / "a", dtype=dtype, stacked_layers=stacked)
    assert loaded.config == config
    assert loaded.eos_token_ids == (3, 257)
    assert_equal_trees(loaded.params, params)


def _truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _broken_shard(folder, change):
    shard(folder)
    change(folder)


def _misplace(folder):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = "model-1.safetensors"
    path.write_text(json.dumps(index))


def _config(**changes):
    return lambda folder: edit_json(folder / "config.json", **changes)


def _tensors(change):
    return lambda folder: edit_tensors(folder, change)


BAD = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json: No such file"),
    "malformed config": (lambda f: (f / "config.json").write_text("{\n'"), "config.json, line 2: malformed JSON"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "config.json: expected a JSON object"),
    "family": (_config(model_type="gpt2"), "config.json: model_type 'gpt2' is not supported; known: llama, qwen3"),
    "no family": (_config(model_type="removed"), "model_type None is not supported"),
    "unknown key": (_config(mystery=1), "config.json: unknown key mystery; .*--allow-config-key"),
    "quantised": (_config(quantization_config={}), "unknown key quantization_config"),
    "activation": (_config(hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
    "missing key": (_config(hidden_size="removed"), "config.json: hidden_size is missing"),
    "wrong type": (_config(hidden_size="96"), "hidden_size must be a positive integer, not '96'"),
    "wrong flag": (_config(attention_bias=1), "attention_bias must be true or false, not 1"),
    "heads": (_config(num_key_value_heads=3), "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
    "rope kind": (_config(rope_parameters={"rope_type": "yarn"}), "rope_type 'yarn' is not supported"),
    "rope key": (_config(rope_parameters={"beta": 1}), "rope_parameters has the unsupported key beta"),
    "rope clash": (_config(rope_theta=5.0), "rope_theta says rope_theta 5.0, but rope_parameters says 1000000.0"),
    "layer types": (_config(layer_types=["full_attention"]), "layer_types must be a list of num_hidden_layers 6"),
    "layer kind": (_config(layer_types=["linear"] * 6), "layer_types has the unsupported kind 'linear'"),
    "window": (_config(layer_types=["sliding_attention"] * 6), "sliding_window is null"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has neither model.safetensors nor"),
    "truncated": (_truncate, "model.safetensors: truncated or corrupt safetensors file"),
    "empty": (lambda f: (f / "model.safetensors").write_bytes(b""), "truncated or corrupt safetensors file"),
    "garbage": (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 999), "truncated or corrupt"),
    "missing tensor": (
        _tensors(lambda t: t.pop("model.layers.3.mlp.up_proj.weight")),
        r"tensor model.layers.3.mlp.up_proj.weight \[192, 96\] is missing",
    ),
    "extra tensor": (
        _tensors(lambda t: t.update({"model.layers.6.x": np.ones(1, np.float32)})),
        "tensor model.layers.6.x is not part of the model",
    ),
    "wrong shape": (
        _tensors(lambda t: t.update({"model.norm.weight": np.ones(95, np.float32)})),
        r"tensor model.norm.weight has shape \[95\], but its config asks for \[96\]",
    ),
    "quantised tensor": (
        _tensors(lambda t: t.update({"model.norm.weight": np.ones(96, np.uint8)})),
        "tensor model.norm.weight is stored as U8",
    ),
    "untied head": (_config(tie_word_embeddings=False), r"tensor lm_head.weight \[260, 96\] is missing"),
    "missing shard": (
        lambda f: _broken_shard(f, lambda f: (f / "model-2.safetensors").unlink()),
        "model-2.safetensors: this shard of model.safetensors.index.json is missing",
    ),
    "misplaced tensor": (
        lambda f: _broken_shard(f, _misplace),
        "model-1.safetensors: tensor model.norm.weight, which model.safetensors.index.json places here, is missing",
    ),
    "no weight map": (
        lambda f: _broken_shard(f, lambda f: (f / "model.safetensors.index.json").write_text("{}")),
        "weight_map is missing",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_folders(folder, case):
    spoil, message = BAD[case]
    spoil(folder)
    with pytest.raises(InputError, match=message) as error:
        load_target(folder)
    assert str(error.value).startswith(str(folder))
    assert "\n" not in str(error.value)


def test_an_unknown_key_can_be_allowed(folder):
    edit_json(folder / "config.json", mystery=1)
    assert load_target(folder, allow_config_keys=("mystery",)).config == load_target(GOLDEN).config


@pytest.mark.parametrize("source", ["absent", "/absent/folder", "./a", "absent.gguf"])
def test_no_such_source(source):
    with pytest.raises(InputError, match=f"^{source}: no such f"):
        load_target(source)


def test_hub_failure(monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: (_ for _ in ()).throw(OSError("offline")))
    with pytest.raises(InputError, match=r"^org/name: .* hub does not give it \(OSError: offline\)"):
        load_target("org/name")


def test_hub_download(monkeypatch):
    asked = {}

    def download(repo, allow_patterns, ignore_patterns):
        asked.update(repo=repo, patterns=allow_patterns)
        return str(GOLDEN)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert load_target("org/name").name == "org/name"
    assert asked["repo"] == "org/name" and "*.safetensors" in asked["patterns"]
