"""Drafters whose weights a file holds in int8: exact both ways, small, and refused in one line where damaged."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark_jax.io import InputError, Target, describe_drafter, load_drafter, save_drafter
from dspark_jax.layers.quantized import QuantizedWeight, dequantize, quantize, unpack
from dspark_jax.parameters import named_leaves
from dspark_jax.sharding import make_mesh
from tests.models import drafter_config, pair_config, random_drafter, random_target, target_config


def is_quantized(node):
    return isinstance(node, QuantizedWeight)


def make(kind):
    """A target of 50 tokens whose widths are no multiples of 32, and a drafter of it with 40 draft tokens."""
    config = target_config(50, hidden_size=40, intermediate_size=72)
    params = random_target(config)
    target = Target(config, params, None, (), "target", "0")
    if kind in ("eagle3", "mtp"):
        own = pair_config(config, kind, draft_vocab_size=40)
    else:
        own = drafter_config(config, kind, draft_vocab_size=0 if kind == "gated" else 40)
    return target, own, random_drafter(own, params)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders by kind, with what they were made of."""
    found = {}
    for kind in ("vanilla", "gated", "rnn", "dflash", "eagle3", "mtp"):
        target, config, params = make(kind)
        folder = tmp_path_factory.mktemp("int8") / kind
        save_drafter(folder, config, params, target.config, dtype="int8")
        found[kind] = folder, target, config, params
    return found


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn", "dflash", "eagle3", "mtp"])
def test_what_is_loaded_is_what_was_rounded_bit_for_bit(saved, kind, tmp_path):
    folder, target, config, params = saved[kind]
    floats = load_drafter(folder, target=target)
    int8 = load_drafter(folder, target=target, dtype="int8")
    half = load_drafter(folder, target=target, dtype="bfloat16")
    assert floats.config == int8.config == describe_drafter(folder, target=target.config) == config
    exact, found = named_leaves(params), named_leaves(int8.params, is_quantized)
    dequantized, rounded = named_leaves(floats.params), named_leaves(half.params)
    assert exact.keys() == found.keys() == dequantized.keys()
    for path, leaf in found.items():
        frozen = path.split(".")[0] in params.FROZEN
        if isinstance(leaf, QuantizedWeight):
            jax.tree.map(np.testing.assert_array_equal, leaf, quantize(np.asarray(exact[path])))
        expected = dequantize(leaf) if isinstance(leaf, QuantizedWeight) and not frozen else exact[path]
        np.testing.assert_array_equal(dequantized[path], expected)
        np.testing.assert_array_equal(
            rounded[path], expected if expected.dtype == jnp.int32 else expected.astype("bfloat16")
        )
        assert is_quantized(leaf) == (exact[path].ndim == 2)
    # Written again, from int8 or from float32 values that int8 holds, the same weights.
    save_drafter(tmp_path / "again", config, int8.params, target.config, dtype="int8")
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / file).read_bytes() == (folder / file).read_bytes()


def test_the_file_holds_no_copy_of_the_target_and_all_else_as_it_is(saved):
    folder, _, _, params = saved["vanilla"]
    tensors = load_file(folder / "model.safetensors")
    assert not any(name.startswith(("embed_tokens", "lm_head")) for name in tensors)
    assert tensors["fc.weight"].dtype == np.int8 and tensors["fc.weight"].shape == (40, 80)
    assert tensors["fc.weight_scale"].dtype == np.float32 and tensors["fc.weight_scale"].shape == (40, 3)
    np.testing.assert_array_equal(tensors["norm.weight"], params.norm.weight)
    np.testing.assert_array_equal(tensors["confidence_head.proj.bias"], params.confidence_head.proj.bias)
    np.testing.assert_array_equal(tensors["d2t"] + np.arange(40), params.draft_token_ids)
    fields = json.loads((folder / "config.json").read_text())
    assert (fields["weight_storage"], fields["dtype"], fields["draft_vocab_size"]) == ("int8", "float32", 40)


def test_a_quantised_target_lends_its_own_rows(saved):
    folder, target, *_ = saved["vanilla"]
    params = jax.tree.map(lambda x: quantize(np.asarray(x)) if x.ndim == 2 else x, target.params)
    own = Target(target.config, params, None, (), "target", "0")
    drafter = load_drafter(folder, target=own, dtype="int8").params
    assert drafter.embed_tokens.weight is params.embed_tokens.weight
    ids = np.asarray(drafter.draft_token_ids)
    for found, whole in zip(unpack(drafter.lm_head.weight), unpack(params.embed_tokens.weight), strict=True):
        np.testing.assert_array_equal(found, whole[ids])


def test_a_mesh_reads_parts(saved):
    folder, target, *_ = saved["gated"]
    mesh = make_mesh(1, 2, jax.devices()[:2])
    placed = named_leaves(load_drafter(folder, target=target, mesh=mesh).params)
    for path, leaf in named_leaves(load_drafter(folder, target=target).params).items():
        np.testing.assert_array_equal(placed[path], leaf)


def test_fingerprints_tell_storages_apart_and_not_dtypes(saved, tmp_path):
    folder, target, config, params = saved["vanilla"]
    save_drafter(tmp_path / "float32", config, params, target.config)
    prints = [load_drafter(path, target=target).fingerprint for path in (folder, tmp_path / "float32")]
    assert prints[0] != prints[1]
    assert load_drafter(folder, target=target, dtype="bfloat16").fingerprint == prints[0]


def test_an_engine_s_layout_refuses_int8(saved, tmp_path):
    _, target, config, params = saved["gated"]
    with pytest.raises(InputError, match="int8 weights cannot be exported as DeepSpec"):
        save_drafter(tmp_path / "d", config, params, target.config, dtype="int8", deepspec=True)
    assert not (tmp_path / "d").exists()


def edit(tensors, name, change):
    tensors[name] = change(tensors[name])


DAMAGED = {
    "no scale": (lambda t: t.pop("fc.weight_scale"), r"tensor fc.weight_scale \[40, 3\] is missing"),
    "fewer groups": (
        lambda t: edit(t, "fc.weight_scale", lambda x: x[:, :2].copy()),
        r"tensor fc.weight_scale has shape \[40, 2\] in F32, but fc.weight \[40, 80\] asks for \[40, 3\] in F32",
    ),
    "scale in another type": (
        lambda t: edit(t, "fc.weight_scale", lambda x: x.astype(np.float16)),
        r"tensor fc.weight_scale has shape \[40, 3\] in F16, but .* in F32",
    ),
    "not finite": (
        lambda t: edit(t, "layers.0.mlp.up_proj.weight_scale", lambda x: np.where(x == x.max(), np.nan, x)),
        "tensor layers.0.mlp.up_proj.weight_scale has values that are negative or not finite",
    ),
    "negative": (
        lambda t: edit(t, "fc.weight_scale", lambda x: -x),
        "tensor fc.weight_scale has values that are negative or not finite",
    ),
    "finite, and not times its values": (
        lambda t: edit(t, "fc.weight_scale", lambda x: np.where(x == x.max(), np.float32(3e38), x)),
        "tensor fc.weight_scale has values that are negative or not finite",
    ),
    "weight cut off": (
        lambda t: t.update({"fc.weight": t["fc.weight"][:8], "fc.weight_scale": t["fc.weight_scale"][:8]}),
        r"tensor fc.weight has shape \[8, 80\], but its config asks for \[40, 80\]",
    ),
    "no weight": (lambda t: t.pop("fc.weight"), r"tensor fc.weight \[40, 80\] is missing"),
    "a norm in int8": (
        lambda t: edit(t, "norm.weight", lambda x: x.astype(np.int8)),
        "tensor norm.weight is stored as int8; weights must be floating-point",
    ),
}


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_one_line(saved, tmp_path, case, dtype):
    spoil, message = DAMAGED[case]
    source, target, *_ = saved["vanilla"]
    folder = shutil.copytree(source, tmp_path / "drafter")
    tensors = load_file(folder / "model.safetensors")
    spoil(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InputError, match=message) as error:
        load_drafter(folder, target=target, dtype=dtype)
    assert str(error.value).startswith(str(folder))
    if "scale" in message:
        assert str(error.value).endswith("the checkpoint is damaged, get or make it again")


def test_int8_must_be_said(saved, tmp_path):
    source, target, *_ = saved["vanilla"]
    folder = shutil.copytree(source, tmp_path / "drafter")
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {"weight_storage": "int4"}))
    with pytest.raises(InputError, match="weight_storage 'int4' is not supported; only 'int8' is"):
        load_drafter(folder, target=target)
    fields.pop("weight_storage")
    path.write_text(json.dumps(fields))
    with pytest.raises(InputError, match="is stored as I8; quantised weights are not supported"):
        load_drafter(folder, target=target)
