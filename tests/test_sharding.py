"""One device and eight give the same tokens, under each way a caller may hand over a mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import dspark_jax
from dspark_jax import DecodeConfig, TreeSpec, request_keys, sampling_params
from dspark_jax.drafters.dspark import declare_drafter
from dspark_jax.sharding import make_mesh, partition_spec, shardings
from dspark_jax.targets.decoder import declare_target
from tests.models import drafter_config, pad, random_drafter, random_target, target_config

PROMPTS = [[1, 4, 0, 2], [3], [2, 2, 5, 6, 1, 0, 3], [0, 1]]


def setup(tree=None):
    config = target_config(64)
    target = random_target(config)
    draft_config = drafter_config(config, "rnn")
    decode = DecodeConfig(target=config, drafter=draft_config, tree=tree, max_new_tokens=10)
    tokens, lengths = (jnp.asarray(x) for x in pad(PROMPTS))
    arguments = (tokens, lengths, request_keys(0, 4), decode)
    return target, random_drafter(draft_config, target), arguments


@pytest.mark.parametrize("tree", [None, TreeSpec(k=2, budget=5)], ids=["chain", "tree"])
def test_sharded_verification_gives_the_same_tokens(tree):
    """Weights over "model", requests over "data"; the vocabulary's argmax runs on shards of it."""
    target, drafter, (tokens, lengths, keys, decode) = setup(tree)
    sampling = sampling_params(4, 1.0)
    expected = dspark_jax.generate(target, drafter, tokens, lengths, keys, decode, sampling=sampling)
    mesh = make_mesh(4, 2)
    target = jax.device_put(target, shardings(declare_target(decode.target), mesh, decode.target.head_dim))
    drafter = jax.device_put(drafter, shardings(declare_drafter(decode.drafter), mesh, decode.drafter.head_dim))
    assert target.embed_tokens.weight.addressable_shards[0].data.shape == (32, 16)
    data = NamedSharding(mesh, PartitionSpec("data"))
    tokens, lengths, keys, sampling = jax.device_put((tokens, lengths, keys, sampling), data)
    with jax.set_mesh(mesh):
        sharded = dspark_jax.generate(target, drafter, tokens, lengths, keys, decode, sampling=sampling)
        program = dspark_jax.generate.lower(target, drafter, tokens, lengths, keys, decode, sampling=sampling).compile()
    np.testing.assert_array_equal(sharded.tokens, expected.tokens)
    np.testing.assert_array_equal(sharded.counts.accepted_lengths, expected.counts.accepted_lengths)
    # No device ever holds all the logits of its requests: one request, all nodes, half of the vocabulary.
    assert f"f32[1,{decode.width},32]" in program.as_text()
    assert f"f32[1,{decode.width},64]" not in program.as_text()


def test_an_explicit_mesh_is_bridged():
    target, drafter, (tokens, lengths, keys, decode) = setup()
    expected = dspark_jax.generate(target, drafter, tokens, lengths, keys, decode)
    mesh = jax.make_mesh((2, 2), ("data", "model"), (AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        tokens = jax.device_put(tokens, PartitionSpec("data"))
        out = dspark_jax.generate(target, drafter, tokens, lengths, keys, decode)
        inside = jax.jit(lambda *arguments: dspark_jax.generate(*arguments, decode).tokens + 0)(
            target, drafter, tokens, lengths, keys
        )
    np.testing.assert_array_equal(out.tokens, expected.tokens)
    np.testing.assert_array_equal(inside, expected.tokens)


@pytest.mark.parametrize(
    ("kind", "tree"),
    [
        (AxisType.Explicit, None),
        pytest.param(AxisType.Explicit, TreeSpec(k=2, budget=5), marks=pytest.mark.slow),
        pytest.param(AxisType.Auto, TreeSpec(k=2, budget=5), marks=pytest.mark.slow),
    ],
    ids=["explicit, chain", "explicit, tree", "auto, tree"],
)
def test_chunks_under_a_mesh(kind, tree):
    """Chunk by chunk the same tokens as without a mesh, with weights over "model", where a request is stopped too."""
    target, drafter, (tokens, lengths, keys, decode) = setup(tree)
    chunks = functools.partial(dspark_jax.generate_chunks, config=decode, rounds_per_chunk=2)

    def stop(request, new):
        return 4 if request == 1 and len(new) >= 4 else None

    expected = list(chunks(target, drafter, tokens, lengths, keys, sampling=sampling_params(4, 1.0), stop=stop))
    assert len(expected) > 1 and expected[-1].lengths.tolist() == [10, 4, 10, 10]
    mesh = jax.make_mesh((2, 2), ("data", "model"), (kind,) * 2, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        target = jax.device_put(target, shardings(declare_target(decode.target), mesh, decode.target.head_dim))
        drafter = jax.device_put(drafter, shardings(declare_drafter(decode.drafter), mesh, decode.drafter.head_dim))
        tokens = jax.device_put(tokens, PartitionSpec("data"))
        found = list(chunks(target, drafter, tokens, lengths, keys, sampling=sampling_params(4, 1.0), stop=stop))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.done, other.done)


@pytest.mark.parametrize(
    ("shape", "axes", "expected"),
    [
        ((64, 16), ("vocab", "embed"), PartitionSpec("model", None)),
        ((63, 16), ("vocab", "embed"), PartitionSpec(None, None)),
        ((4, 9, 2, 8), ("batch", None, "kv_heads", None), PartitionSpec("data", None, "model", None)),
    ],
)
def test_a_dimension_that_does_not_divide_stays_whole(shape, axes, expected):
    assert partition_spec(shape, axes, {"data": 4, "model": 2}) == expected
