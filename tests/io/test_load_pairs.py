"""EAGLE-3 and multi-token-prediction folders: exact names, round trips, other tools' files, and what is refused."""

import functools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark_jax.config import RopeScaling
from dspark_jax.io import InputError, Target, load_drafter, load_target, save_drafter, save_target
from dspark_jax.io.drafter_config import drafter_config_from_fields
from dspark_jax.parameters import named_leaves
from tests.models import pair_config, random_drafter, random_target, target_config

VOCABULARY = 12
LAYER = ("input_layernorm", "post_attention_layernorm", *(f"self_attn.{x}_proj" for x in "qkvo"),
         *(f"mlp.{x}_proj" for x in ("gate", "up", "down")))  # fmt: skip


@functools.cache
def settings():
    return target_config(VOCABULARY, num_hidden_layers=7)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Target:
    folder = tmp_path_factory.mktemp("target") / "target"
    save_target(folder, settings(), random_target(settings()))
    return load_target(folder)


def saved(folder: Path, target: Target, kind: str, **changes) -> tuple:
    config = pair_config(target.config, kind, **changes)
    params = random_drafter(config, target.params)
    save_drafter(folder, config, params, target.config)
    return config, params


@pytest.mark.parametrize("draft_vocab_size", [VOCABULARY, 5])
@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_round_trip(tmp_path, target, kind, draft_vocab_size):
    changes = {} if kind == "mtp" else {"block_size": 5, "rope_scaling": RopeScaling(8.0, 1.0, 4.0, 64)}
    config, params = saved(tmp_path / "a", target, kind, draft_vocab_size=draft_vocab_size, num_anchors=9, **changes)
    drafter = load_drafter(tmp_path / "a", target=target)
    assert drafter.config == config
    loaded = named_leaves(drafter.params)
    for name, array in named_leaves(params).items():
        np.testing.assert_array_equal(np.asarray(loaded[name]), np.asarray(array), err_msg=name)
    save_drafter(tmp_path / "b", drafter.config, drafter.params, target.config, deepspec=True)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "b" / file).read_bytes() == (tmp_path / "a" / file).read_bytes()
    with pytest.raises(InputError, match=r"embed_tokens.weight is missing and no target"):
        load_drafter(tmp_path / "a")


def test_eagle3_is_written_as_specforge_does(tmp_path, target):
    _, params = saved(tmp_path / "a", target, "eagle3", draft_vocab_size=5, target_layer_ids=(-1, 2, 3))
    fields = json.loads((tmp_path / "a" / "config.json").read_text())
    assert fields["architectures"] == ["LlamaForCausalLMEagle3"] and fields["model_type"] == "llama"
    assert (fields["draft_vocab_size"], fields["vocab_size"], fields["num_hidden_layers"]) == (5, VOCABULARY, 1)
    # One convention a reader: outputs of these layers, and vLLM's numbers, which are one higher.
    assert fields["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [-1, 2, 3]
    assert fields["eagle_aux_hidden_state_layer_ids"] == [0, 3, 4]
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    expected = {f"midlayer.{name}.weight" for name in (*LAYER, "hidden_norm")}
    assert set(tensors) == expected | {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (32, 2 * 16)
    assert tensors["fc.weight"].shape == (16, 3 * 16) and tensors["lm_head.weight"].shape == (5, 16)
    ids = np.asarray(params.draft_token_ids)
    assert tensors["d2t"].dtype == np.int64 and tensors["t2d"].dtype == bool
    np.testing.assert_array_equal(tensors["d2t"] + np.arange(5), ids)
    np.testing.assert_array_equal(np.flatnonzero(tensors["t2d"]), ids)


def test_mtp_has_deepseeks_names(tmp_path, target):
    saved(tmp_path / "a", target, "mtp")
    fields = json.loads((tmp_path / "a" / "config.json").read_text())
    assert fields["architectures"] == ["Qwen3MTPModel"] and fields["num_nextn_predict_layers"] == 1
    names = (*LAYER, "self_attn.q_norm", "self_attn.k_norm", "enorm", "hnorm", "eh_proj", "shared_head.norm")
    path = tmp_path / "a" / "model.safetensors"
    tensors = load_file(path)
    assert set(tensors) == {f"model.layers.7.{name}.weight" for name in names}
    # The target's embedding and head may be there.
    embedding = np.asarray(target.params.embed_tokens.weight)
    shared = ("embed_tokens", "shared_head.head")
    save_file(tensors | {f"model.layers.7.{name}.weight": embedding for name in shared}, path)
    load_drafter(tmp_path / "a")
    save_file(tensors | {"model.layers.7.embed_tokens.weight": embedding[::-1].copy()}, path)
    with pytest.raises(InputError, match=r"model.layers.7.embed_tokens.weight differs from that of the target"):
        load_drafter(tmp_path / "a", target=target)


# What SpecForge's config.json of a Qwen3 target holds, the sizes apart.
SPECFORGE = {
    "architectures": ["LlamaForCausalLMEagle3"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 2, "head_dim": 8, "hidden_act": "silu", "hidden_size": 16, "initializer_range": 0.02,
    "intermediate_size": 24, "max_position_embeddings": 4096, "max_window_layers": 36, "model_type": "llama",
    "num_attention_heads": 4, "num_hidden_layers": 1, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
    "vocab_size": VOCABULARY, "draft_vocab_size": 5,
}  # fmt: skip
IDS = "eagle_aux_hidden_state_layer_ids"


def test_specforges_own_config():
    """It names neither the target's layers nor, always, the tapped ones."""

    def read(**changes):
        return drafter_config_from_fields(SPECFORGE | changes, target=settings())

    config = read()
    assert (config.target_layer_ids, config.num_target_layers, config.block_size) == ((1, 2, 3), 7, 7)
    assert config.draft_vocab_size == 5 and config.model_type == "llama" and not config.qk_norm
    assert read(eagle_config={IDS: [0, 3, 5]}).target_layer_ids == (0, 3, 5)
    assert read(**{IDS: [1, 4, 6]}).target_layer_ids == (0, 3, 5)
    assert read(**{IDS: [1, 4, 6]}, eagle_config={IDS: [0, 3, 5]}).target_layer_ids == (0, 3, 5)
    assert read(norm_before_residual=False, target_hidden_size=16).hidden_size == 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mystery": 1}, "unknown key mystery"),
        ({"eagle_config": {"mystery": 1}}, "eagle_config has the unknown key mystery"),
        ({"eagle_config": 3}, "eagle_config must be an object, not 3"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state false"),
        ({"eagle_config": {IDS: [0, 1.0]}}, "must be a list of integers"),
        ({"eagle_config": {IDS: [1, 3, 6]}}, r"\[1, 3, 6\] must lie in -1..5"),
        ({IDS: [2, 3, 4], "eagle_config": {IDS: [2, 3, 4]}}, r"outputs of the layers \[1, 2, 3\], but .* \[2, 3, 4\]"),
        ({"norm_before_residual": True}, "norm_before_residual True is not supported"),
        ({"target_hidden_size": 32}, "target_hidden_size is 32, hidden_size 16"),
        ({"model_type": "qwen3"}, "model_type 'qwen3': the layer"),
        ({"num_hidden_layers": 2}, "num_hidden_layers 2"),
        ({"draft_vocab_size": 13}, r"draft_vocab_size 13 is outside 1\.\.12"),
        ({"block_size": 0}, "block_size must be a positive integer, not 0"),
        ({"architectures": "LlamaForCausalLMEagle3"}, "architectures must be a list"),
    ],
)
def test_bad_eagle3_configs(changes, message):
    with pytest.raises(ValueError, match=message):
        drafter_config_from_fields(SPECFORGE | changes, target=settings())


def test_an_eagle3_config_without_its_targets_layers():
    with pytest.raises(ValueError, match="num_target_layers is missing; load the drafter with its target"):
        drafter_config_from_fields(SPECFORGE)


def _without(name: str):
    return lambda tensors: tensors.pop(name)


BAD_TENSORS = {
    "no d2t": ("eagle3", _without("d2t"), "tensor d2t is missing; draft_vocab_size is 5"),
    "other d2t": ("eagle3", lambda t: t.update(d2t=-np.arange(5)), "tensor d2t must give ascending target ids"),
    "fractions": (
        "eagle3",
        lambda t: t.update(d2t=t["d2t"].astype(np.float16)),
        "tensor d2t is stored as float16; it must be of integers",
    ),
    "d2t around the integers": (
        "eagle3",
        lambda t: t.update(d2t=np.asarray([0, 2**62, -(2**63), -(2**62), 10]) - np.arange(5)),
        "tensor d2t must give ascending target ids under 12",
    ),
    "other t2d": ("eagle3", lambda t: t.update(t2d=~t["t2d"]), "tensor t2d must mark, of 12 ids"),
    "short t2d": ("eagle3", lambda t: t.update(t2d=t["t2d"][:-1]), "tensor t2d must mark, of 12 ids"),
    "no head": ("eagle3", _without("lm_head.weight"), r"tensor lm_head.weight \[5, 16\] is missing"),
    "no hidden norm": ("eagle3", _without("midlayer.hidden_norm.weight"), "midlayer.hidden_norm.weight .* is missing"),
    "extra": ("eagle3", lambda t: t.update(mystery=np.zeros(1, np.float32)), "tensor mystery is not part of"),
    "other taps": (
        "eagle3",
        lambda t: t.update({"fc.weight": np.zeros((16, 48), np.float32)}),
        r"tensor fc.weight has shape \[16, 48\], but its config asks for \[16, 32\]",
    ),
    "no enorm": ("mtp", _without("model.layers.7.enorm.weight"), "model.layers.7.enorm.weight .* is missing"),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_bad_tensors(tmp_path, target, case):
    kind, spoil, message = BAD_TENSORS[case]
    saved(tmp_path / "a", target, kind, draft_vocab_size=5)
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    spoil(tensors)
    save_file(tensors, tmp_path / "a" / "model.safetensors")
    with pytest.raises(InputError, match=message) as error:
        load_drafter(tmp_path / "a", target=target)
    assert str(error.value).startswith(str(tmp_path / "a")) and "\n" not in str(error.value)


def test_a_whole_vocabulary_needs_no_map(tmp_path, target):
    """Other tools write one all the same, or none; one that maps is another vocabulary's."""
    saved(tmp_path / "a", target, "eagle3")
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    assert not tensors["d2t"].any() and tensors["t2d"].all()
    few = Path(shutil.copytree(tmp_path / "a", tmp_path / "few")) / "model.safetensors"
    save_file({name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}, few)
    assert load_drafter(few.parent, target=target).params.draft_token_ids is None
    save_file(load_file(few) | {"t2d": np.ones((), bool)}, few)
    assert load_drafter(few.parent, target=target).params.draft_token_ids is None
    save_file(tensors | {"d2t": tensors["d2t"] + 1}, few)
    with pytest.raises(InputError, match="tensor d2t must give ascending target ids under 12"):
        load_drafter(few.parent, target=target)


def test_mtp_configs(tmp_path, target):
    saved(tmp_path / "a", target, "mtp")
    fields = json.loads((tmp_path / "a" / "config.json").read_text())
    for changes, message in (
        ({"mystery": 1}, "unknown key mystery"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers 2 is not supported"),
        ({"num_target_layers": None}, "num_target_layers is missing"),
        ({"block_size": 3}, "block_size 3: .* drafts one token"),
    ):
        with pytest.raises(ValueError, match=message):
            drafter_config_from_fields(fields | changes)
    (tmp_path / "a" / "config.json").write_text(json.dumps(fields | {"num_target_layers": 6}))
    with pytest.raises(InputError, match="num_target_layers is 6, but the target has 7"):
        load_drafter(tmp_path / "a", target=target)
