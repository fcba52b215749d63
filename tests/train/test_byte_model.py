"""The byte model's trainer on a tiny model, and the model that is shipped."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from dspark_jax.config import TargetConfig
from dspark_jax.io import InputError, load_target
from dspark_jax.io.safetensors import FILE
from dspark_jax.sharding import make_mesh
from train import byte_model
from train.byte_model import (
    WINDOWS,
    ByteModelConfig,
    block_begins,
    held_out_bits_per_byte,
    step_batch,
    train,
)
from train.stdlib_corpus import EOS, Split, corpus, is_held_out, token_stream

LONGEST = WINDOWS[-1]
SHIPPED = Path(byte_model.__file__).parent / "assets" / "byte_model"
# Of 16 windows spread over the held-out files of whichever Python runs this; all of those of Python 3.11 give 1.73.
SHIPPED_BITS_PER_BYTE = 2.1
TINY = TargetConfig(
    model_type="qwen3",
    vocab_size=260,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    qk_norm=True,
    tie_word_embeddings=True,
)


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """Some files of the standard library, one of them held out."""
    folder = tmp_path_factory.mktemp("sources")
    names = [f"m{i}.py" for i in range(60)]
    held_out = next(name for name in names if is_held_out(name))
    kept = [name for name in names if not is_held_out(name)][:4]
    for name, data in zip([held_out, *kept], corpus(Split.TRAIN).values(), strict=False):
        (folder / name).write_bytes(data[:4000])
    return folder


def config(sources: Path, folder: Path, **changes) -> ByteModelConfig:
    settings = {"steps": 6, "save_every": 3, "tokens_per_step": 1024} | changes
    return ByteModelConfig(output=folder / "model", checkpoints=folder / "checkpoints", sources=sources, **settings)


def test_an_interrupted_run_goes_on_exactly(sources, tmp_path, monkeypatch):
    monkeypatch.setattr(byte_model, "_WINDOW_WEIGHTS", (1.0, 0.0, 0.0))  # one compilation
    whole = train(config(sources, tmp_path / "whole"), TINY)
    assert np.isfinite(whole)

    step, calls = byte_model.language_model_step, []

    def interrupted(*arguments):
        calls.append(None)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return step(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(byte_model, "language_model_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(config(sources, tmp_path / "cut"), TINY)
    early = (tmp_path / "cut/model" / FILE).read_bytes()
    assert train(config(sources, tmp_path / "cut"), TINY) == whole
    assert (tmp_path / "cut/model" / FILE).read_bytes() == (tmp_path / "whole/model" / FILE).read_bytes() != early
    assert "6 of 6 steps" in (tmp_path / "cut/model/README.md").read_text()

    with pytest.raises(InputError, match="made with seed 0, not 1"):
        train(config(sources, tmp_path / "cut", seed=1), TINY)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens_per_step": 1000}, "tokens_per_step 1000: must be a positive multiple of 1024"),
        ({"steps": 0}, "steps 0: must be positive"),
        ({"learning_rate": -1.0}, "learning_rate -1.0: must be positive"),
    ],
)
def test_bad_settings(sources, tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        train(config(sources, tmp_path, **changes), TINY)


def test_an_epoch_visits_every_block_once():
    settings = ByteModelConfig(tokens_per_step=2 * LONGEST)
    length = 21 * LONGEST  # 20 blocks at any phase: epochs of 10 steps
    epochs = [np.concatenate([block_begins(length, settings, 10 * e + i) for i in range(10)]) for e in range(2)]
    for begins in epochs:
        assert len({begin % LONGEST for begin in begins.tolist()}) == 1
        assert sorted(begin // LONGEST for begin in begins.tolist()) == list(range(20))
    assert epochs[0].tolist() != epochs[1].tolist()


def test_batches_have_all_lengths_and_some_begin_at_files():
    stream = token_stream([bytes(range(256)) * 100, b"x" * 3000])
    settings = ByteModelConfig(tokens_per_step=2 * LONGEST)
    batches = [step_batch(stream, settings, step) for step in range(60)]
    assert all(batch.tokens.size == 2 * LONGEST for batch in batches)
    assert {batch.tokens.shape[1] for batch in batches} == set(WINDOWS)
    assert any((np.asarray(batch.tokens)[:, :4] == np.arange(4)).all(axis=1).any() for batch in batches)
    jax.tree.map(np.testing.assert_array_equal, batches[5], step_batch(stream, settings, 5))


@pytest.mark.parametrize(
    ("name", "value"),
    [("weight-decay", "nan"), ("learning-rate", "inf"), ("seed", -1), ("checkpoints", __file__), ("output", __file__)],
)
def test_bad_options_are_one_line(one_line, name, value):
    one_line(["byte-model", f"--{name}", value], name.replace("-", "_"), value)


def test_checkpoints_of_something_else(one_line, tmp_path):
    (tmp_path / "checkpoints" / "5").mkdir(parents=True)
    command = ["byte-model", "--checkpoints", tmp_path / "checkpoints", "--output", tmp_path / "model"]
    one_line(command, "checkpoints: checkpoint 5 could not be read")


def test_the_shipped_model():
    fields = json.loads((SHIPPED / "config.json").read_text())
    assert fields["architectures"] == ["Qwen3ForCausalLM"]
    assert (SHIPPED / FILE).stat().st_size < 8e6
    target = load_target(SHIPPED)
    assert target.eos_token_ids == (EOS,)
    assert target.tokenizer is not None
    assert target.tokenizer.encode("def é") == list("def é".encode())
    stream, mesh = token_stream(list(corpus(Split.HELD_OUT).values())), make_mesh(1, 1, jax.devices()[:1])
    bits = held_out_bits_per_byte(target.params, target.config, stream, mesh, limit=16)
    assert bits < SHIPPED_BITS_PER_BYTE
