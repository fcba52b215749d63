"""The split of the standard library's sources, and prompts from it."""

import json

import numpy as np
import pytest

from dspark_jax.io.errors import InputError
from train.stdlib_corpus import EOS, Split, corpus, is_held_out, token_stream, windows
from train.stdlib_prompts import StdlibPromptsConfig, main, prompts


def test_split_is_deterministic_disjoint_and_about_5_percent():
    train, held_out = corpus(Split.TRAIN), corpus(Split.HELD_OUT)
    assert list(train) == sorted(train)
    assert train == corpus(Split.TRAIN)
    assert not train.keys() & held_out.keys()
    assert not {train[name] for name in train} & {held_out[name] for name in held_out}
    assert 0.02 < len(held_out) / (len(train) + len(held_out)) < 0.09
    assert not any("/tests/" in name or name.startswith(("test/", "encodings/")) for name in train | held_out)


def test_split_depends_on_the_name_alone():
    names = [f"package/module_{i}.py" for i in range(4000)]
    assert 0.04 < np.mean([is_held_out(name) for name in names]) < 0.06
    # A change of the hash would let a shipped model be judged on what it has seen.
    assert [i for i in range(60) if is_held_out(names[i])] == [40, 46]


def test_no_sources_is_a_clear_error(tmp_path):
    with pytest.raises(InputError, match=r"holds no Python source"):
        corpus(Split.TRAIN, tmp_path)


def test_windows_restart_positions_at_files_and_pad_the_end():
    stream = token_stream([b"abc", b"defgh"])
    assert stream.tokens.tolist() == [97, 98, 99, EOS, 100, 101, 102, 103, 104, EOS]
    assert stream.starts.tolist() == [0, 4]
    batch = windows(stream, np.array([1, 6]), 6)
    assert batch.tokens[0].tolist() == [98, 99, EOS, 100, 101, 102]
    assert batch.document_ids.tolist() == [[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, -1, -1]]
    assert batch.positions[0].tolist() == [0, 1, 2, 0, 1, 2]
    assert batch.positions[1, :4].tolist() == [0, 1, 2, 3]
    assert batch.loss_mask.tolist() == [[True] * 6, [True] * 4 + [False] * 2]


@pytest.mark.parametrize("split", list(Split))
def test_prompts_are_beginnings_of_the_split(tmp_path, split):
    path = tmp_path / "prompts.jsonl"
    config = StdlibPromptsConfig(output=path, count=40, split=split, seed=3)
    main(config)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(set(line) == {"prompt"} for line in lines)
    written = [line["prompt"] for line in lines]
    assert written == prompts(config)
    assert len(set(written)) == 40
    text = [data.decode() for data in corpus(split).values()]
    for prompt in written:
        assert 61 <= len(prompt.encode()) <= 160
        assert prompt.lstrip().startswith(("def ", "async def ")) or any(file.startswith(prompt) for file in text)
        assert any(prompt in file for file in text)


def test_other_seeds_give_other_prompts(tmp_path):
    first, second = (prompts(StdlibPromptsConfig(output=tmp_path, count=20, seed=seed)) for seed in (0, 1))
    assert first != second


@pytest.mark.parametrize(("count", "message"), [(0, "must be positive"), (10**6, "has only")])
def test_impossible_counts(tmp_path, count, message):
    with pytest.raises(InputError, match=message):
        prompts(StdlibPromptsConfig(output=tmp_path, count=count))


def test_a_negative_seed(tmp_path):
    with pytest.raises(InputError, match="seed -1: must be at least 0"):
        prompts(StdlibPromptsConfig(output=tmp_path, seed=-1))
