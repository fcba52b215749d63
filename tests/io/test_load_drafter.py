"""Drafter folders: DeepSpec, DFlash and JetSpec both ways, and everything that can be wrong with them."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import dspark_jax
from dspark_jax import parameters
from dspark_jax.config import DrafterConfig, MarkovHeadType, RopeScaling, TargetConfig
from dspark_jax.drafters.dspark import declare_drafter
from dspark_jax.io import (
    InputError,
    from_engine_layer_ids,
    load_drafter,
    load_target,
    save_drafter,
    to_engine_layer_ids,
)
from dspark_jax.io.drafter_config import drafter_config_from_fields, fields_from_drafter_config
from dspark_jax.parameters import named_leaves
from dspark_jax.sharding import make_mesh

GOLDENS = Path(__file__).parent.parent / "goldens"
DRAFTERS = ("dspark_vanilla", "dspark_gated", "dspark_rnn", "dflash")
# Keys that a published checkpoint holds and that say nothing about the drafter.
OTHER_KEYS = {"bos_token_id", "pad_token_id", "transformers_version", "max_window_layers"}


@pytest.fixture(scope="module")
def target():
    return load_target(GOLDENS / "target")


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(GOLDENS / "dspark_rnn", tmp_path / "drafter"))


def edit_json(folder, **changes):
    path = folder / "config.json"
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in fields.items() if value != "removed"}))


def edit_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("name", DRAFTERS)
def test_round_trip_is_bit_equal(tmp_path, target, name):
    drafter = load_drafter(GOLDENS / name, target=target)
    assert drafter.name == name
    save_drafter(
        tmp_path / name, drafter.config, drafter.params, target.config,
        eos_token_ids=target.eos_token_ids, deepspec=True,
    )  # fmt: skip
    before, after = load_file(GOLDENS / name / "model.safetensors"), load_file(tmp_path / name / "model.safetensors")
    assert before.keys() == after.keys()
    for tensor in before:
        assert before[tensor].dtype == after[tensor].dtype
        np.testing.assert_array_equal(before[tensor], after[tensor])
    assert load_drafter(tmp_path / name, target=target).config == drafter.config

    old = json.loads((GOLDENS / name / "config.json").read_text())
    new = json.loads((tmp_path / name / "config.json").read_text())
    assert {k: v for k, v in old.items() if k not in OTHER_KEYS}.items() <= new.items()
    assert new["sample_from_anchor"] is True
    assert not {"causal", "causal_head", "is_causal"} & (new.keys() | new["dflash_config"].keys())
    assert new["rope_theta"] == new["rope_parameters"]["rope_theta"] == 1e6
    assert all(new[key] == value for key, value in new["dflash_config"].items())
    assert "quantization_config" not in new


def test_bfloat16_round_trip(tmp_path, target):
    drafter = load_drafter(GOLDENS / "dspark_gated", target=target, dtype="bfloat16")
    save_drafter(tmp_path / "a", drafter.config, drafter.params, target.config, dtype="bfloat16")
    again = load_drafter(tmp_path / "a", target=target, dtype="bfloat16")
    for name, array in named_leaves(drafter.params).items():
        np.testing.assert_array_equal(np.asarray(array), np.asarray(named_leaves(again.params)[name]))


def test_mesh(target):
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices")
    plain = load_drafter(GOLDENS / "dspark_rnn", target=target)
    placed = load_drafter(GOLDENS / "dspark_rnn", target=target, mesh=make_mesh(4, 2))
    for name, array in named_leaves(placed.params).items():
        np.testing.assert_array_equal(np.asarray(array), np.asarray(named_leaves(plain.params)[name]))
    assert placed.params.markov_head.markov_w2.weight.addressable_shards[0].data.shape == (130, 16)


def test_embedding_and_head_of_the_target(folder, target):
    edit_tensors(folder, lambda t: (t.pop("embed_tokens.weight"), t.pop("lm_head.weight")))
    params = load_drafter(folder, target=target).params
    np.testing.assert_array_equal(np.asarray(params.embed_tokens.weight), np.asarray(target.params.embed_tokens.weight))
    np.testing.assert_array_equal(np.asarray(params.lm_head.weight), np.asarray(target.params.embed_tokens.weight))
    with pytest.raises(InputError, match=r"tensor embed_tokens.weight is missing and no target"):
        load_drafter(folder)


def _llama(reduced):
    shared = {
        "model_type": "llama", "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 4, "attention_bias": True, "mlp_bias": True,
        "rope_scaling": RopeScaling(8.0, 1.0, 4.0, 64), "rope_theta": 5e5,
    }  # fmt: skip
    target = TargetConfig(num_hidden_layers=4, **shared)
    drafter = DrafterConfig(
        num_hidden_layers=3, sliding_windows=(None, 8, 8), block_size=4, mask_token_id=39, target_layer_ids=(-1, 1),
        num_target_layers=4, markov_rank=5, markov_head_type=MarkovHeadType.GATED, confidence_head_with_markov=False,
        draft_vocab_size=10 if reduced else 0, **shared,
    )  # fmt: skip
    params = parameters.initialize(declare_drafter(drafter), jax.random.key(1))
    if reduced:
        params = params.replace(draft_token_ids=jnp.arange(10, dtype=jnp.int32) * 3 + 2)
    return target, drafter, params


@pytest.mark.slow
@pytest.mark.parametrize("reduced", [False, True])
def test_llama_drafter(tmp_path, reduced):
    target, config, params = _llama(reduced)
    save_drafter(tmp_path / "a", config, params, target)
    fields = json.loads((tmp_path / "a" / "config.json").read_text())
    assert fields["architectures"] == ["LlamaDSparkModel"]
    assert fields["layer_types"] == ["full_attention", "sliding_attention", "sliding_attention"]
    loaded = load_drafter(tmp_path / "a")
    assert loaded.config == config
    for name, array in named_leaves(params).items():
        np.testing.assert_array_equal(np.asarray(named_leaves(loaded.params)[name]), np.asarray(array))


def test_reduced_vocabulary(tmp_path):
    target, config, params = _llama(True)
    save_drafter(tmp_path / "a", config, params, target)
    stored = load_file(tmp_path / "a" / "model.safetensors")
    assert stored["d2t"].dtype == np.int64
    np.testing.assert_array_equal(stored["d2t"] + np.arange(10), np.arange(10) * 3 + 2)
    with pytest.raises(InputError, match="cannot be exported as DeepSpec"):
        save_drafter(tmp_path / "b", config, params, target, deepspec=True)
    assert not (tmp_path / "b").exists()
    for spoil, message in (
        (lambda t: t.pop("d2t"), "tensor d2t is missing"),
        (lambda t: t.update(d2t=np.zeros(9, np.int64)), r"tensor d2t is of shape \[9\]; draft_vocab_size is 10"),
        (lambda t: t.update(d2t=-np.arange(10)), "tensor d2t must give ascending target ids under 40"),
        (lambda t: t.update(d2t=np.full(10, 31)), "tensor d2t must give ascending target ids under 40"),
    ):
        folder = Path(shutil.copytree(tmp_path / "a", tmp_path / "spoiled", dirs_exist_ok=True))
        edit_tensors(folder, spoil)
        with pytest.raises(InputError, match=message):
            load_drafter(folder)


def test_export_refuses_a_drafter_of_another_target(tmp_path):
    target, config, params = _llama(False)
    with pytest.raises(ValueError, match="num_target_layers is 4, but the target has 5"):
        save_drafter(
            tmp_path / "a", config, params, dataclasses.replace(target, num_hidden_layers=5, sliding_windows=())
        )
    with pytest.raises(ValueError, match="params must hold embed_tokens"):
        save_drafter(tmp_path / "a", config, params.replace(embed_tokens=None), target)
    with pytest.raises(ValueError, match="differ between layers"):
        save_drafter(tmp_path / "a", dataclasses.replace(config, sliding_windows=(4, 8, 8)), params, target)
    assert not (tmp_path / "a").exists()


def test_layer_ids_of_engines():
    assert to_engine_layer_ids((-1, 0, 8)) == (0, 1, 9)
    assert from_engine_layer_ids(to_engine_layer_ids((-1, 0, 8))) == (-1, 0, 8)


def test_layouts(folder, target):
    edit_json(folder, architectures=["DFlashDraftModel"], sample_from_anchor=True)
    load_drafter(folder, target=target)
    fields = json.loads((folder / "config.json").read_text())
    edit_json(
        folder, mask_token_id="removed", target_layer_ids="removed",
        dflash_config={"mask_token_id": 258, "target_layer_ids": fields["target_layer_ids"]},
    )  # fmt: skip
    assert load_drafter(folder, target=target).config.target_layer_ids == (0, 2, 4)


# What the original DFlash's config.json holds, and JetSpec's, whose dflash_config has causal_head too.
DFLASH = {
    "architectures": ["DFlashDraftModel"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "block_size": 16, "bos_token_id": 256,
    "dflash_config": {"mask_token_id": 258, "target_layer_ids": [0, 2, 4]}, "dtype": "bfloat16", "eos_token_id": 257,
    "head_dim": 24, "hidden_act": "silu", "hidden_size": 96, "initializer_range": 0.02, "intermediate_size": 192,
    "layer_types": ["full_attention"] * 2, "max_position_embeddings": 1024, "max_window_layers": 5,
    "model_type": "qwen3", "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
    "num_target_layers": 6, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "tie_word_embeddings": True, "transformers_version": "4.57.3", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 260,
}  # fmt: skip


def _dflash(own=(), **changes):
    fields = DFLASH | changes
    return drafter_config_from_fields(fields | {"dflash_config": {**fields["dflash_config"], **dict(own)}})


def test_an_original_dflash_folder_decodes(tmp_path, target):
    """No embedding, no head, and the block in place: 15 drafts from 16 slots, and the target's own output."""
    folder = Path(shutil.copytree(GOLDENS / "dflash", tmp_path / "drafter"))
    (folder / "config.json").write_text(json.dumps(DFLASH))
    edit_tensors(folder, lambda t: (t.pop("embed_tokens.weight"), t.pop("lm_head.weight")))
    drafter = load_drafter(folder, target=target)
    assert not drafter.config.sample_from_anchor and not drafter.config.causal_block
    assert drafter.config.num_drafts == 15 and drafter.config.target_layer_ids == (0, 2, 4)

    prompt = jnp.asarray([list(b"Ann has 3 ducks")], jnp.int32)
    arguments = (prompt, jnp.asarray([15], jnp.int32), dspark_jax.request_keys(0, 1))
    config = dspark_jax.DecodeConfig(target=target.config, drafter=drafter.config, max_new_tokens=16)
    plain = dataclasses.replace(config, drafter=None, plain_width=16)
    fast = dspark_jax.generate(target.params, drafter.params, *arguments, config)
    slow = dspark_jax.generate(target.params, None, *arguments, plain)
    assert fast.tokens.tolist() == slow.tokens.tolist()
    assert fast.counts.accepted.shape == (1, 15)

    save_drafter(tmp_path / "again", drafter.config, drafter.params, target.config)
    assert load_drafter(tmp_path / "again").config == drafter.config
    fields = json.loads((tmp_path / "again" / "config.json").read_text())
    assert fields["architectures"] == ["DFlashDraftModel"]
    assert fields["sample_from_anchor"] is fields["dflash_config"]["causal"] is False


def test_causal_blocks():
    """Every name of a causal block, and what sliding layers of an in-place drafter say without one."""
    assert not _dflash().causal_block
    for own, changes in (
        ({"causal": True}, {}),
        ({"causal_head": True, "projector_type": "dflash", "loss_decay_gamma": 7.0}, {}),
        ({}, {"causal_head": True, "architectures": []}),
        ({}, {"is_causal": True}),
        ({}, {"sample_from_anchor": False, "architectures": ["Qwen3DSparkModel"], "causal": True}),
    ):
        config = _dflash(own, **changes)
        assert config.causal_block and not config.sample_from_anchor
    assert _dflash({"causal": True}, architectures=["Qwen3DSparkModel"]).sample_from_anchor
    sliding = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 32, "use_sliding_window": True}
    assert _dflash(**sliding).causal_block
    assert not _dflash({"causal": False}, **sliding).causal_block
    assert not _dflash(**sliding, architectures=["Qwen3DSparkModel"]).causal_block
    mixed = sliding | {"layer_types": ["sliding_attention", "full_attention"]}
    assert _dflash({"causal": True}, **mixed).sliding_windows == (32, None)


@pytest.mark.parametrize("causal_block", [False, True])
@pytest.mark.parametrize("sample_from_anchor", [False, True])
@pytest.mark.parametrize("markov_rank", [0, 4])
def test_layouts_round_trip(markov_rank, sample_from_anchor, causal_block):
    """Also sliding layers, whose causality is then said and not left to their default."""
    config = dataclasses.replace(
        _dflash(), markov_rank=markov_rank, sample_from_anchor=sample_from_anchor, causal_block=causal_block,
        sliding_windows=(None, 16),
    )  # fmt: skip
    fields = json.loads(json.dumps(fields_from_drafter_config(config)))
    assert drafter_config_from_fields(fields) == config
    in_place = markov_rank == 0 and not sample_from_anchor
    assert fields["architectures"] == ["DFlashDraftModel" if in_place else "Qwen3DSparkModel"]


def _config(**changes):
    return lambda folder: edit_json(folder, **changes)


def _tensors(change):
    return lambda folder: edit_tensors(folder, change)


BAD = {
    "DFlash with heads": (_config(architectures=["DFlashDraftModel"]), "block layout unknown: .* sample_from_anchor"),
    "other architecture": (_config(architectures=["DFlash2DraftModel"]), "block layout unknown: .*DFlash2DraftModel"),
    "architecture type": (_config(architectures=5), "architectures must be a list of names, not 5"),
    "block size": (_config(block_size=1024), "block_size 1024 must be under the target's 1024 positions"),
    "no architecture": (_config(architectures="removed"), "block layout unknown"),
    "layout type": (_config(sample_from_anchor=0), "sample_from_anchor must be true or false, not 0"),
    "no drafts": (_config(sample_from_anchor=False, block_size=1), "block_size 1 must be at least 2"),
    "causal type": (_config(causal_head="yes"), "causal_head must be true or false, not 'yes'"),
    "causal or not": (_config(causal_head=True, is_causal=False), "causal_head is True, but is_causal is False"),
    "other head": (_config(dflash_config={"projector_type": "domino"}), "projector_type 'domino', .* only 'dflash' is"),
    "shifted": (_config(dflash_config={"shift_label": True}), "shift_label True, .* only False is"),
    "mixed causality": (
        _config(
            sample_from_anchor=False,
            layer_types=["full_attention", "sliding_attention"],
            sliding_window=8,
            use_sliding_window=True,
        ),
        "layer_types mixes sliding and full attention: .* set dflash_config.causal",
    ),
    "unknown key": (_config(mystery=1), "config.json: unknown key mystery"),
    "unknown mirrored key": (_config(dflash_config={"mystery": 1}), "dflash_config has the unknown key mystery"),
    "mirror": (_config(dflash_config={"block_size": 8}), "block_size is 7, but dflash_config says 8"),
    "no block size": (_config(block_size="removed"), "block_size is missing"),
    "no taps": (_config(target_layer_ids="removed"), "target_layer_ids must be a list of integers, not None"),
    "tap type": (_config(target_layer_ids=[0, 2, 4.0]), "target_layer_ids must be a list of integers"),
    "tap order": (_config(target_layer_ids=[0, 4, 2]), r"target_layer_ids \[0, 4, 2\] must be ascending"),
    "last layer": (_config(target_layer_ids=[0, 2, 5]), r"target_layer_ids \[0, 2, 5\] must lie in -1..4"),
    "tap count": (_config(target_layer_ids=[0, 2]), r"tensor fc.weight has shape \[96, 288\], .* \[96, 192\]"),
    "mask id": (_config(mask_token_id=260), "mask_token_id 260 is outside the vocabulary of 260"),
    "mask type": (_config(mask_token_id=None), "mask_token_id must be an integer, not None"),
    "head": (_config(markov_head_type="lstm"), "markov_head_type 'lstm' is not supported; known: vanilla, gated, rnn"),
    "gated head": (_config(markov_head_type="gated"), "tensor markov_head.gate_proj.weight .* is missing"),
    "no head": (_config(markov_rank=0, confidence_head_with_markov=False), "tensor confidence_head.proj.weight has"),
    "head and confidence": (_config(markov_rank=0), "confidence_head_with_markov needs a Markov head"),
    "rank": (_config(markov_rank=8), "tensor .*markov.* has shape"),
    "hidden": (_config(hidden_size=80), "hidden_size is 80, but the target has 96: a drafter of another target"),
    "vocabulary": (_config(vocab_size=300), "vocab_size is 300, but the target has 260"),
    "target layers": (_config(num_target_layers=7), "num_target_layers is 7, but the target has 6"),
    "layers": (_config(num_hidden_layers=1, layer_types=["full_attention"]), "tensor layers.1.* is not part of"),
    "missing tensor": (_tensors(lambda t: t.pop("hidden_norm.weight")), r"tensor hidden_norm.weight \[96\] is missing"),
    "extra tensor": (_tensors(lambda t: t.update(d2t=np.zeros(260, np.int64))), "tensor d2t is not part of"),
    "wrong shape": (
        _tensors(lambda t: t.update({"confidence_head.proj.bias": np.zeros(2, np.float32)})),
        r"tensor confidence_head.proj.bias has shape \[2\], but its config asks for \[1\]",
    ),
    "integers": (
        _tensors(lambda t: t.update({"hidden_norm.weight": t["hidden_norm.weight"].astype(np.int64)})),
        "tensor hidden_norm.weight is stored as int64; weights must be floating-point",
    ),
    "other target": (
        _tensors(lambda t: t.update({"embed_tokens.weight": t["embed_tokens.weight"][::-1].copy()})),
        "embed_tokens.weight differs from that of the target target: a drafter of another target",
    ),
    "not a number": (
        _tensors(lambda t: t.update({"embed_tokens.weight": t["embed_tokens.weight"] * np.nan})),
        "embed_tokens.weight differs",
    ),
    "truncated": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:5000]),
        "truncated or corrupt safetensors file",
    ),
    "a target": (
        lambda f: shutil.copytree(GOLDENS / "target", f, dirs_exist_ok=True),
        "block layout unknown: architectures .*Qwen3ForCausalLM",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_folders(folder, target, case):
    spoil, message = BAD[case]
    spoil(folder)
    with pytest.raises(InputError, match=message) as error:
        load_drafter(folder, target=target)
    assert str(error.value).startswith(str(folder))
    assert "\n" not in str(error.value)


def test_an_unknown_key_can_be_allowed(folder, target):
    edit_json(folder, mystery=1)
    assert load_drafter(folder, target=target, allow_config_keys=("mystery",)).config.block_size == 7
