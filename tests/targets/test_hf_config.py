"""`config.json` keys of the families."""

import pytest

from dspark_jax.config import RopeScaling
from dspark_jax.targets import config_from_hf
from dspark_jax.targets.hf_fields import fields_from_config

FIELDS = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip


def llama(**changes):
    return config_from_hf({"model_type": "llama", **FIELDS, **changes})


def qwen3(**changes):
    return config_from_hf({"model_type": "qwen3", **FIELDS, **changes})


def test_defaults():
    config = llama()
    assert (config.head_dim, config.num_key_value_heads, config.rope_theta) == (8, 4, 1e4)
    assert not (config.tie_word_embeddings or config.attention_bias or config.mlp_bias or config.qk_norm)
    assert config.sliding_windows == (None,) * 4
    assert qwen3().qk_norm
    assert qwen3().head_dim == 128
    assert llama(head_dim=None, num_key_value_heads=None) == config


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    ],
)
def test_rope_forms(changes):
    config = llama(**changes)
    assert config.rope_theta == 5e5
    assert config.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 64)
    assert config_from_hf({"model_type": "llama", **fields_from_config(config)}) == config


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 8}, (None,) * 4),
        ({"sliding_window": 8, "use_sliding_window": True}, (None,) * 4),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}, (None, None, 8, 8)),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}, (8,) * 4),
        (
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "max_window_layers": 0,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
            (None, 8, None, 8),
        ),
    ],
)
def test_sliding_windows(changes, windows):
    config = qwen3(**changes)
    assert config.sliding_windows == windows
    assert config_from_hf({"model_type": "qwen3", **fields_from_config(config)}) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_type 'linear' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor is missing"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters has the unsupported key full_attention"),
        ({"rope_theta": -1}, "rope_theta must be a positive number, not -1"),
        ({"rope_interleaved": True}, "rope_interleaved true is not supported"),
        ({"num_attention_heads": 5}, "hidden_size 32 is not a multiple of num_attention_heads 5"),
        ({"head_dim": 7}, "head_dim 7 must be even"),
        ({"rope_theta": float("inf")}, "rope_theta must be a positive number, not inf"),
        ({"rope_theta": 10**400}, "rope_theta must be a positive number"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}}, "low_freq_factor 4.0 must be"),
        ({"layer_types": [1, "full_attention", None, []]}, "layer_types"),
        ({"model_type": ["llama"]}, r"model_type \['llama'\] is not supported"),
        ({"vocab_size": True}, "vocab_size must be a positive integer, not True"),
        ({"num_experts": 4}, "unknown key num_experts"),
        (
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention"] * 4},
            "sliding_window is not part of the llama family",
        ),
    ],
)
def test_bad_values(changes, message):
    with pytest.raises(ValueError, match=message):
        llama(**changes)
