"""`python -m infer generate` on the golden models."""

import json
from pathlib import Path

import numpy as np
import pytest

from dspark_jax.io import padded_length
from infer.decoding import Decoder

GOLDENS = Path(__file__).parents[1] / "goldens"
SHORT = {"max_new_tokens": 64, "batch_size": 4}


@pytest.mark.parametrize("threshold", [0.0, 0.5])
@pytest.mark.parametrize("name", ["dspark_vanilla", "dspark_gated", "dspark_rnn", "dflash"])
def test_greedy_output_is_the_reference_s(infer, tmp_path, files, name, threshold):
    entries = json.loads((GOLDENS / f"{name}_greedy.json").read_text())
    entries = [entry for entry in entries if entry["confidence_threshold"] == threshold]
    if not entries:
        pytest.skip("dflash has no confidences")
    prompts = files.write_lines(tmp_path / "prompts.jsonl", [{"input_ids": entry["prompt"]} for entry in entries])
    output = tmp_path / "out.jsonl"
    outcome = infer(
        "generate",
        target=GOLDENS / "target",
        drafter=GOLDENS / name,
        prompts=prompts,
        output=output,
        confidence_threshold=threshold,
        **SHORT,
    )
    assert outcome.code == 0, outcome.error
    assert "KV caches" in outcome.out
    lines = files.read_lines(output)
    assert len(lines) == len(entries)
    for line, entry in zip(lines, entries, strict=True):
        assert set(line) == {"input_ids", "output_ids", "text", "accepted_lengths", "verified_nodes", "finish_reason"}
        assert line["input_ids"] == entry["prompt"]
        assert line["input_ids"] + line["output_ids"] == entry["output"]
        assert line["text"] is None
        rounds = len(line["accepted_lengths"])
        # The reference may run one round more than there are tokens to make.
        assert rounds in (len(entry["acceptance_lengths"]), len(entry["acceptance_lengths"]) - 1)
        assert line["accepted_lengths"] == entry["acceptance_lengths"][:rounds]
        assert line["finish_reason"] == "length"


def test_results_do_not_depend_on_the_batching(infer, tmp_path, files, models, prompts):
    outputs = []
    for size in (4, 3, 1):
        output = tmp_path / f"{size}.jsonl"
        options = SHORT | {"batch_size": size, "temperature": 1.0, "top_p": 0.95, "seed": 3}
        assert infer("generate", **models, prompts=prompts, output=output, **options).code == 0
        outputs.append(files.read_lines(output))
    assert outputs[0] == outputs[1] == outputs[2]


def test_seed_and_place_make_the_samples(infer, tmp_path, files, models, golden_requests):
    prompt = {"input_ids": golden_requests[0]["prompt"]}
    prompts = files.write_lines(tmp_path / "prompts.jsonl", [prompt] * 4)
    samples = {}
    for seed in (0, 1):
        output = tmp_path / f"{seed}.jsonl"
        infer("generate", **models, prompts=prompts, output=output, temperature=1.0, top_p=0.95, seed=seed, **SHORT)
        for place, line in enumerate(files.read_lines(output)):
            samples[seed, place] = tuple(line["output_ids"])
    assert len(set(samples.values())) == len(samples)


def test_no_drafter_gives_the_same_greedy_tokens(infer, tmp_path, files, models, prompts, golden_requests):
    output = tmp_path / "out.jsonl"
    outcome = infer(
        "generate", "--no-drafter", "--log-probabilities", **models, prompts=prompts, output=output, **SHORT
    )
    assert outcome.code == 0, outcome.error
    for line, entry in zip(files.read_lines(output), golden_requests, strict=True):
        assert line["input_ids"] + line["output_ids"] == entry["output"]
        assert line["accepted_lengths"] == [1] * (len(line["output_ids"]) - 1)
        assert len(line["log_probabilities"]) == len(line["output_ids"])
        assert np.max(line["log_probabilities"]) <= 0


def interrupt_second_batch(monkeypatch) -> list[int]:
    """Ctrl-C during the second batch; the returned list grows with each batch that is begun."""
    run, begun = Decoder.run, []

    def interrupted(self, batch):
        begun.append(len(begun))
        if len(begun) == 2:
            raise KeyboardInterrupt
        return run(self, batch)

    monkeypatch.setattr(Decoder, "run", interrupted)
    return begun


def test_interrupted_work_goes_on(infer, tmp_path, files, models, prompts, monkeypatch):
    options = {**models, "prompts": prompts, "max_new_tokens": 64, "batch_size": 3}
    whole, output = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert infer("generate", output=whole, **options).code == 0

    begun = interrupt_second_batch(monkeypatch)
    outcome = infer("generate", output=output, **options)
    partial = tmp_path / "out.jsonl.partial"
    assert outcome.code == 130
    assert f"interrupted; 3 of 4 lines are in {partial}" in outcome.error.splitlines()[-1]
    assert not output.exists()
    assert len(files.read_lines(partial)) == 4
    with open(partial, "a") as file:
        file.write('{"index": 3, "tu')  # a line that a killed run left half-written

    refused = infer("generate", output=output, **options, temperature=0.5)
    assert refused.code == 2
    assert str(partial) in refused.error_line and "temperature (0.0, now 0.5)" in refused.error_line

    outcome = infer("generate", output=output, **options)
    assert outcome.code == 0, outcome.error
    assert len(begun) == 3, "only the unfinished batch is run again"
    assert output.read_bytes() == whole.read_bytes()
    assert not partial.exists()


def test_stop_strings(infer, tmp_path, files, models, prompts, chat_target, golden_requests):
    files.edit_config(chat_target, max_position_embeddings=1024)
    options = models | {"target": chat_target, "prompts": prompts, "output": tmp_path / "out.jsonl", **SHORT}
    assert infer("generate", **options, stop=("total", "e s")).code == 0
    lines = files.read_lines(tmp_path / "out.jsonl")
    for line, entry in zip(lines, golden_requests, strict=True):
        new = entry["output"][60:]
        text = bytes(new).decode()
        ends = [text.index(string) + len(string) for string in ("total", "e s") if string in text]
        assert line["output_ids"] == (new[: min(ends)] if ends else new)
        assert line["finish_reason"] == ("stop" if ends else "length")
        cut = min(text.index(string) for string in ("total", "e s") if string in text) if ends else None
        assert line["text"] == text[:cut]
        rounds = len(line["accepted_lengths"])
        assert line["accepted_lengths"] == entry["acceptance_lengths"][:rounds]
        before_last = 1 + sum(line["accepted_lengths"][:-1])
        assert before_last < len(line["output_ids"]) <= before_last + line["accepted_lengths"][-1]


def test_stream_prints_the_text(infer, tmp_path, files, models, prompts, chat_target):
    files.edit_config(chat_target, max_position_embeddings=1024)
    options = models | {"target": chat_target, "prompts": prompts, "max_new_tokens": 64}
    output = tmp_path / "out.jsonl"
    outcome = infer("generate", "--stream", **options, output=output, stop="number")
    assert outcome.code == 0, outcome.error
    assert outcome.out == "".join(f"{line['text']}\n" for line in files.read_lines(output))


def test_turns_run_in_order_and_end_with_the_context(infer, tmp_path, files, models, chat_target):
    rows = [{"turns": ["Ann has 3 apples.", "And Ben?", "x" * 20]}, {"prompt": "Ann has"}]
    prompts = files.write_lines(tmp_path / "prompts.jsonl", rows)
    output = tmp_path / "out.jsonl"
    options = models | {"target": chat_target, "max_new_tokens": 24, "batch_size": 2}
    outcome = infer("generate", **options, prompts=prompts, output=output)
    assert outcome.code == 0, outcome.error
    first, second, third, plain = files.read_lines(output)
    assert [first["turn"], second["turn"], third["turn"]] == [0, 1, 2]
    assert "turn" not in plain and len(plain["output_ids"]) == 24
    assert bytes(first["input_ids"]).decode() == "Ann has 3 apples.\n"
    assert bytes(second["input_ids"]).decode() == f"Ann has 3 apples.\n{first['text']}\nAnd Ben?\n"
    assert third == {
        "input_ids": [],
        "output_ids": [],
        "text": "",
        "accepted_lengths": [],
        "verified_nodes": [],
        "finish_reason": "length",
        "turn": 2,
    }
    assert f"turn 2 of {prompts}, line 1" in outcome.error


def test_new_tokens_end_with_the_context(infer, tmp_path, files, models, chat_target, golden_requests):
    prompts = files.write_lines(tmp_path / "prompts.jsonl", [{"input_ids": golden_requests[0]["prompt"]}])
    output = tmp_path / "out.jsonl"
    infer("generate", **models | {"target": chat_target}, prompts=prompts, output=output, max_new_tokens=64)
    (line,) = files.read_lines(output)
    assert line["input_ids"] + line["output_ids"] == golden_requests[0]["output"][:96]


def test_one_compilation_for_a_bucket(infer, tmp_path, files, models, golden_requests, compilations):
    for length in (60, 50):
        rows = [{"input_ids": entry["prompt"][:length]} for entry in golden_requests]
        prompts = files.write_lines(tmp_path / f"{length}.jsonl", rows)
        compilations.reset()
        infer("generate", **models, prompts=prompts, output=tmp_path / f"{length}.out", max_new_tokens=64, batch_size=2)
    assert compilations.count == 0


def test_buckets_are_few_and_close():
    lengths = np.arange(32, 5000)
    padded = np.array([padded_length(int(length)) for length in lengths])
    assert (padded >= lengths).all() and (padded < lengths * 1.5).all()
    assert len(set(padded)) < 20


def test_yaml_and_overrides(infer, tmp_path, files, models, prompts):
    values = models | {"prompts": str(prompts), "output": str(tmp_path / "a.jsonl"), "max-new-tokens": 64}
    config = tmp_path / "run.yaml"
    config.write_text("".join(f"{key}: {value}\n" for key, value in values.items()))
    outcome = infer("generate", config=config, output=tmp_path / "b.jsonl", batch_size=4)
    assert outcome.code == 0, outcome.error
    assert not (tmp_path / "a.jsonl").exists()
    assert len(files.read_lines(tmp_path / "b.jsonl")) == 4


def test_a_tree_writes_the_chains_tokens(infer, tmp_path, models, prompts, files):
    lines = {}
    for name, tree in {"chain": {}, "tree": {"tree": "pctree", "tree_k": 3, "tree_budget": 12}}.items():
        output = tmp_path / f"{name}.jsonl"
        outcome = infer("generate", **models, prompts=prompts, output=output, max_new_tokens=48, **tree)
        assert outcome.code == 0, outcome.error
        lines[name] = files.read_lines(output)
    for chain, tree in zip(lines["chain"], lines["tree"], strict=True):
        assert tree["output_ids"] == chain["output_ids"]
        assert set(chain["verified_nodes"]) == {8} and set(tree["verified_nodes"]) == {12}
        assert len(tree["verified_nodes"]) == len(tree["accepted_lengths"]) < len(chain["accepted_lengths"])
