"""`python -m train calibrate` on the golden models: the file, what it is fitted on, and bad input."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import DecodeConfig, Generation, TreeSpec, Verifier
from dspark_jax.io import PromptEncoder, read_prompts
from dspark_jax.io.calibration import CalibrationLaw, load_calibration
from dspark_jax.recording import Recording
from dspark_jax.scheduling.calibration import expected_calibration_error, fit_platt, fit_temperatures, roc_auc
from dspark_jax.verification.counting import zero_counts
from tests.models import GOLDENS, golden_drafter, golden_prompts, golden_target
from train.__main__ import main
from train.recorded import Recorder, Rounds

NEW = 24
TREE = TreeSpec(budget=12)


def golden_entries() -> list[dict]:
    """Four prompts of 60 tokens, with what the reference accepted of them, greedy and without a threshold."""
    return [entry for entry in golden_prompts("dspark_vanilla")[0] if entry["confidence_threshold"] == 0]


@pytest.fixture
def prompts(tmp_path, write_rows) -> Path:
    return write_rows(tmp_path / "prompts.jsonl", [{"input_ids": entry["prompt"]} for entry in golden_entries()])


@pytest.fixture
def options(tmp_path, prompts) -> dict[str, object]:
    return {
        "target": GOLDENS / "target",
        "drafter": GOLDENS / "dspark_vanilla",
        "prompts": prompts,
        "output": tmp_path / "calibration.json",
        "max-new-tokens": NEW,
        "batch-size": 4,
    }


def arguments(options: dict[str, object]) -> list[str]:
    words = ["calibrate"]
    for name, value in options.items():
        words += [f"--{name}", *map(str, value if isinstance(value, tuple) else (value,))]
    return words


def decode_config() -> DecodeConfig:
    target, drafter = golden_target(), golden_drafter("dspark_vanilla")
    eos = target.eos_token_ids
    return DecodeConfig(target=target.config, drafter=drafter.config, max_new_tokens=NEW, eos_token_ids=eos)


@pytest.mark.slow
def test_the_file(options, tmp_path, write_rows, capsys):
    second = write_rows(
        tmp_path / "second.jsonl", [{"input_ids": entry["prompt"][:40]} for entry in golden_entries()[:2]]
    )
    names = (options["prompts"], second)
    options |= {"prompts": names, "tree": "pctree", "tree-budget": TREE.budget}
    assert main(arguments(options)) == 0
    output, out = options["output"], capsys.readouterr().out
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    fields = json.loads(output.read_text())
    assert fields["dataset"] == ", ".join(map(str, names))
    positions, edge_map = fields["positions"], fields["edge_map"]
    assert set(fields["files"]) == set(edge_map["files"]) == set(map(str, names))
    for group in (positions, *fields["files"].values()):
        assert all(len(group[name]) == 7 for name in ("ece_before", "ece_after", "ece_platt", "roc_auc"))
    for name in ("ece_before", "ece_after", "ece_platt"):
        assert fields[name] == pytest.approx(np.mean(positions[name]))
    assert {"device", "date", "versions", "dtype", "seed"} <= set(fields["law"])
    for words in (
        "ECE of the prefix survival",
        "ROC-AUC",
        "edges of trees",
        "every other prompt",
        "pooled, temperatures",
        "pooled, Platt scaling",
    ):
        assert words in out

    # The golden prompts' rounds are the reference's; the even prompts of both files make the temperatures.
    target, drafter = golden_target(), golden_drafter("dspark_vanilla")
    recorder = Recorder(target, drafter, decode_config(), {}, 0, 4)
    encoder = PromptEncoder(None, target.config.vocab_size, 1000)
    first, second = (recorder.rounds(read_prompts(path, encoder), lambda _: None) for path in names)
    for index, entry in enumerate(golden_entries()):
        accepted = first.accepted[first.prompts == index]
        assert (accepted + 1).tolist() == entry["acceptance_lengths"][: len(accepted)]
        assert accepted.sum() + len(accepted) >= NEW - 1
    fitting = Rounds.concatenate([first, second]).for_fitting
    assert set(fitting.prompts) == {0, 2} and fields["num_samples"] == len(fitting)
    assert fields["temperatures"] == fit_temperatures(fitting.logits, fitting.accepted).tolist()
    rest = Rounds.concatenate([first, second]).for_report
    assert set(rest.prompts) == {1, 3} and positions["num_rounds"] == len(rest)
    outcomes = rest.accepted > 0
    confidence = 1 / (1 + np.exp(-rest.logits[:, 0].astype(float)))
    assert positions["ece_before"][0] == pytest.approx(expected_calibration_error(confidence, outcomes))
    assert positions["roc_auc"][0] == pytest.approx(roc_auc(confidence, outcomes))

    law = CalibrationLaw.of(target, drafter, Verifier.COUPLED)
    calibration = load_calibration(output, 7, law, TREE)
    np.testing.assert_allclose(calibration.temperatures, fields["temperatures"], rtol=1e-6)
    assert calibration.edge_map.alpha == edge_map["alpha"] >= 0
    np.testing.assert_allclose(calibration.platt.slopes, fit_platt(fitting.logits, fitting.accepted)[0], rtol=1e-6)


BAD = {
    "missing prompts": ({"prompts": "none.jsonl"}, ["none.jsonl: no such file"]),
    "missing target": ({"target": "./none"}, ["./none: no such folder"]),
    "missing drafter": ({"drafter": "./none"}, ["./none: no such folder"]),
    "no confidence head": ({"drafter": GOLDENS / "dflash"}, ["--drafter", "dflash", "no confidence head"]),
    "missing output folder": ({"output": "none/out.json"}, ["none/out.json", "folder none"]),
    "output is the plot": ({"output": "out.png"}, ["out.png", ".json"]),
    "temperature": ({"temperature": -1}, ["--temperature -1"]),
    "top-p": ({"top-p": 0}, ["--top-p 0"]),
    "top-k too large": ({"top-k": 2**31}, ["--top-k"]),
    "max-new-tokens": ({"max-new-tokens": 0}, ["--max-new-tokens 0"]),
    "batch-size": ({"batch-size": 0}, ["--batch-size 0"]),
    "seed": ({"seed": -1}, ["--seed -1"]),
    "verifier": ({"verifier": "guess"}, ["--verifier", "guess"]),
    "tree option without a tree": ({"tree-k": 3}, ["--tree-k", "--tree"]),
    "tree option of another kind": ({"tree": "jetspec", "tree-width": 3}, ["--tree-width", "jetspec"]),
    "tree budget": ({"tree": "pctree", "tree-budget": 1}, ["--tree-budget 1"]),
    "tree k beyond the vocabulary": ({"tree": "pctree", "tree-k": 300}, ["--tree-k 300", "260"]),
    "tree under rejection": ({"tree": "pctree", "verifier": "rejection"}, ["--verifier rejection", "coupled"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_options(options, one_line, case, tmp_path):
    changed, words = BAD[case]
    one_line(arguments(options | changed), *words)
    assert not list(tmp_path.glob("calibration*"))


def test_bad_prompts(options, one_line, tmp_path, write_rows, no_weights):
    single = write_rows(tmp_path / "single.jsonl", [{"input_ids": [1]}])
    one_line(arguments(options | {"prompts": single}), single, "one prompt")
    one_line(arguments(options | {"prompts": (single, single)}), "--prompts", "twice")
    text = write_rows(tmp_path / "text.jsonl", [{"prompt": "x"}] * 2)
    one_line(arguments(options | {"prompts": text}), f"{text}, line 1", "tokenizer")
    before = options["prompts"].read_bytes()
    one_line(arguments(options | {"output": options["prompts"]}), "is read by this command")
    assert options["prompts"].read_bytes() == before


@pytest.mark.parametrize(
    ("prompts_of_rounds", "logit", "word"),
    [([0, 0, 2], 0.0, "without a round"), ([1], 0.0, "without a round"), ([0, 1], np.nan, "not finite")],
)
def test_rounds_that_cannot_be_fitted(options, one_line, monkeypatch, prompts_of_rounds, logit, word):
    count = len(prompts_of_rounds)
    rounds = Rounds(np.array(prompts_of_rounds), np.full((count, 7), logit), np.zeros(count, int))
    monkeypatch.setattr(Recorder, "rounds", lambda *_: rounds)
    one_line(arguments(options), word)
    assert not options["output"].exists()


def test_turns(tmp_path, write_rows, tokenizer, monkeypatch):
    """Every turn's rounds belong to its prompt, and a reply is part of the next turn's context."""
    contexts, finished = [], []

    def fake(target, drafter, tokens, lengths, requests, config):
        asked = np.flatnonzero(requests.max_tokens)
        contexts.extend(tokenizer.decode(tokens[row, : lengths[row]].tolist()) for row in asked)
        counts = zero_counts(2, NEW, 7).replace(rounds=jnp.where(requests.max_tokens > 0, 2, 0))
        new, yes = jnp.asarray([list(b"yes.")] * 2), jnp.ones(2, bool)
        recording = Recording(None, jnp.zeros((2, NEW, 7)), None)
        return Generation(new, jnp.full(2, 4), yes, yes, counts, None), recording

    monkeypatch.setattr("train.recorded.record_rounds", fake)
    rows = [{"prompt": "Ann"}, {"turns": ["How many?", "And now?"]}, {"turns": ["a", "b", "c"]}]
    prompts = read_prompts(write_rows(tmp_path / "chat.jsonl", rows), PromptEncoder(tokenizer, 260, 1000))
    recorder = Recorder(golden_target(), golden_drafter("dspark_vanilla"), decode_config(), {}, 0, 2)
    rounds = recorder.rounds(prompts, finished.append)
    np.testing.assert_array_equal(rounds.prompts, [0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2])
    assert finished == [2, 1] and len(contexts) == 6
    assert contexts[0] == "Ann" and "How many?" in contexts[2] and "yes." in contexts[2] and "And now?" in contexts[2]
    assert contexts[5].count("yes.") == 2
