"""On which devices bfloat16 is emulated, and that it is said and nothing is changed."""

import types
import warnings

import jax
import jax.numpy as jnp
import pytest

from dspark_jax.io import load_target
from dspark_jax.io.device_dtype import bfloat16_is_emulated, warn_if_emulated
from tests.models import GOLDENS

T4 = types.SimpleNamespace(platform="gpu", compute_capability="7.5", device_kind="Tesla T4")


@pytest.mark.parametrize(
    ("platform", "capability", "emulated"),
    [
        ("gpu", "7.5", True),
        ("gpu", "7.0", True),
        ("gpu", "8.0", False),
        ("gpu", "9.0", False),
        ("gpu", "10.0", False),
        ("gpu", "gfx942", False),
        ("gpu", None, False),
        ("tpu", None, False),
        ("cpu", None, False),
    ],
)
def test_by_platform_and_compute_capability(platform, capability, emulated):
    assert bfloat16_is_emulated(platform, capability) == emulated


def test_a_t4_is_warned_of():
    with pytest.warns(RuntimeWarning, match=r"Tesla T4 \(compute capability 7.5\).*float32"):
        warn_if_emulated("bfloat16", T4)


@pytest.mark.parametrize("dtype", ["float32", "int8", jnp.float32])
def test_other_types_are_not(dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_emulated(dtype, T4)


def test_loading_asks_the_first_device(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda *_: [T4])
    with pytest.warns(RuntimeWarning, match="Tesla T4"):
        target = load_target(GOLDENS / "target", dtype="bfloat16")
    assert target.params.norm.weight.dtype == jnp.bfloat16
