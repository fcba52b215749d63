"""Int8 weights: how exact they are, the kernel against plain products, and what becomes of it without a compiler."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.layers import quantized
from dspark_jax.layers.kernels import build, int8_products
from dspark_jax.layers.linear import Embedding, Linear, embed, linear, linears, matmul
from dspark_jax.layers.quantized import GROUP, dequantize, quantize

# (out, in): one weight, less than a block and a group, a little more, whole ones, and enough work for two threads.
SHAPES = [(1, 1), (31, 30), (33, 65), (64, 96), (100, 1000), (520, 576)]
PATHS = {
    "portable": int8_products.PORTABLE,
    "AVX2": int8_products.AVX2,
    "AVX-512": int8_products.AVX512,
    "AMX": int8_products.AMX,
}


@pytest.fixture(scope="module", autouse=True)
def kernel():
    if int8_products.best_path() is None:
        pytest.skip("no C++ compiler")


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def group_largest(rows):
    """The largest magnitude of each element's group."""
    padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % GROUP)))
    largest = np.abs(padded).reshape(len(rows), -1, GROUP).max(axis=-1)
    return largest.repeat(GROUP, axis=-1)[:, : rows.shape[1]]


def run(x, weights, path=int8_products.BEST):
    pairs = [(weight.values, weight.scales) for weight in weights]
    return [np.asarray(y) for y in int8_products.int8_products(x, pairs, [w.out for w in weights], path)]


@pytest.mark.parametrize("shape", SHAPES)
def test_quantization_is_off_by_half_a_step_at_most(shape):
    weight = normal(*shape)
    weight[0, : GROUP // 2] = 0
    stored = quantize(weight)
    assert stored.shape == shape and stored.dtype == jnp.float32
    assert (np.abs(np.asarray(dequantize(stored)) - weight) <= group_largest(weight) / 254 * (1 + 1e-5)).all()
    # What was quantised once stays as it is.
    np.testing.assert_array_equal(quantize(np.asarray(dequantize(stored))).values, stored.values)


def test_tiny_and_zero_groups_are_zeros():
    assert not np.asarray(dequantize(quantize(np.full((3, 40), 1e-42, np.float32)))).any()
    assert not np.asarray(dequantize(quantize(np.zeros((3, 40), np.float32)))).any()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_is_the_product_of_the_dequantised_weight(path, shape):
    if PATHS[path] > int8_products.best_path():
        pytest.skip(f"this processor lacks {path}")
    out, width = shape
    weight, other = quantize(normal(out, width)), quantize(normal(7, width, seed=1))
    x = normal(11, width, seed=2)
    for y, stored in zip(run(jnp.asarray(x), [weight, other], PATHS[path]), [weight, other], strict=True):
        exact = np.asarray(dequantize(stored)).astype(np.float64)
        # Float32 sums of `width` terms, each off by its rounding.
        bound = 4e-7 * np.sqrt(width) * (np.abs(x).astype(np.float64) @ np.abs(exact).T)
        assert (np.abs(y - x.astype(np.float64) @ exact.T) <= bound + 1e-30).all()


@pytest.mark.parametrize("path", PATHS)
def test_a_row_has_the_same_bits_among_any_number_of_rows(path):
    if PATHS[path] > int8_products.best_path():
        pytest.skip(f"this processor lacks {path}")
    weight, x = quantize(normal(200, 330)), jnp.asarray(normal(67, 330, seed=1))
    (whole,) = run(x, [weight], PATHS[path])
    for rows in (1, 2, 3, 5, 7, 8, 9, 15, 64):
        for begin in (0, 67 - rows):
            np.testing.assert_array_equal(run(x[begin : begin + rows], [weight], PATHS[path])[0], whole[begin:][:rows])


@pytest.mark.parametrize("path", PATHS)
def test_what_is_no_number_is_none_afterwards(path):
    """In its own row; and numbers at the ends of float32's range are numbers."""
    if PATHS[path] > int8_products.best_path():
        pytest.skip(f"this processor lacks {path}")
    weight, x = quantize(normal(40, 96)), np.ones((4, 96), np.float32)
    x[1, 50], x[2], x[3] = np.nan, 1e-38, 1e34
    (y,) = run(jnp.asarray(x), [weight], PATHS[path])
    assert np.isnan(y[1]).all() and np.isfinite(y[[0, 2, 3]]).all()
    np.testing.assert_allclose(y[3], y[0] * 1e34, rtol=1e-4)
    assert np.abs(y[2]).max() < 1e-30


def test_a_path_that_the_processor_lacks_is_refused():
    with pytest.raises(jax.errors.JaxRuntimeError, match="lacks the path"):
        run(jnp.ones((1, 32)), [quantize(normal(1, 32))], 4)


def test_layers_take_quantised_weights():
    weights = [normal(40, 48), normal(24, 48, seed=1)]
    bias = jnp.asarray(normal(24, seed=2))
    stored = [Linear(quantize(weights[0])), Linear(quantize(weights[1]), bias)]
    plain = [Linear(dequantize(layer.weight), layer.bias) for layer in stored]
    x = jnp.asarray(normal(2, 3, 48, seed=3))

    @jax.jit
    def apply(layers, x):
        return [*linears(layers, x), *(linear(layer, x) for layer in layers), matmul(x, layers[0].weight)]

    for y, expected in zip(apply(stored, x), apply(plain, x), strict=True):
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-4)
    assert linear(stored[0], x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_embedding_rows():
    weight = quantize(normal(40, 48))
    ids = jnp.asarray([[0, 31, 32], [39, 40, -1]])
    rows = np.asarray(embed(Embedding(weight), ids))
    np.testing.assert_array_equal(rows.reshape(6, 48)[:4], np.asarray(dequantize(weight))[[0, 31, 32, 39]])
    assert np.isnan(rows[1, 1:]).all()


def test_scan_over_stacked_weights():
    weights, x = normal(3, 48, 48), jnp.asarray(normal(2, 48, seed=1))
    looped = x
    for weight in weights:
        looped = matmul(looped, quantize(weight))
    scanned, _ = jax.jit(lambda x, stacked: jax.lax.scan(lambda x, w: (matmul(x, w), None), x, stacked))(
        x, quantize(weights)
    )
    np.testing.assert_array_equal(scanned, looped)


def test_without_a_compiler_products_are_plain_after_one_warning(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.warns(RuntimeWarning, match=r"int8 weights will be slow: there is no C\+\+ compiler") as caught:
        assert int8_products.best_path.__wrapped__() is None
    assert len(caught) == 1
    monkeypatch.setattr(int8_products, "best_path", lambda: None)
    weight, x = quantize(normal(40, 48)), jnp.asarray(normal(3, 48, seed=1))
    text = jax.jit(lambda x: quantized.products(x, [weight])).lower(x).as_text()
    assert "custom_call" not in text
    np.testing.assert_allclose(quantized.products(x, [weight])[0], x @ dequantize(weight).T, rtol=1e-5, atol=1e-5)


def test_a_build_that_fails_says_why(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "broken.cc"
    source.write_text("int f() { return nothing; }\n")
    with pytest.raises(build.BuildError, match=r"cannot build broken\.cc .*nothing") as caught:
        build.load(source)
    assert "\n" not in str(caught.value)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.BuildError, match="CXX names no-such-compiler"):
        build.load(source)


def test_processes_may_build_at_the_same_time(tmp_path):
    source = tmp_path / "answer.cc"
    source.write_text('extern "C" int answer() { return 42; }\n')
    code = (
        "from pathlib import Path; from dspark_jax.layers.kernels import build; "
        f"print(build.load(Path({str(source)!r})).answer())"
    )
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=environment,
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    assert [process.communicate(timeout=120)[0].strip() for process in processes] == ["42", "42"]
    (built,) = (tmp_path / "cache" / "dspark_jax").iterdir()
    assert built.suffix == ".so"


def test_nothing_is_built_at_import(tmp_path):
    code = "import dspark_jax.io, infer.__main__"
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=environment, cwd=Path(__file__).parents[2], check=True)
    assert not (tmp_path / "dspark_jax").exists()
