"""`python -m infer batch` on the golden models: `generate`'s lines, through the engine."""

import json
import os
import signal

import pytest

from dspark_jax import Verifier
from dspark_jax.io import load_drafter, load_target
from dspark_jax.io.calibration import CalibrationLaw
from dspark_jax.io.step_table import StepTableLaw
from dspark_jax.serving import Engine
from infer import step_table

MOST = 24
# One length and few slots, that few programs are compiled.
FULL = {"slots": 2, "policy": "fixed", "policy_length": 7}


@pytest.fixture
def options(tmp_path, models, prompts) -> dict:
    return {**models, "prompts": prompts, "output": tmp_path / "out.jsonl", "max_new_tokens": MOST}


@pytest.fixture
def generated(infer, tmp_path, files):
    """The lines of `generate` with the same options."""

    def run(options: dict) -> list[dict]:
        output = tmp_path / "generated.jsonl"
        outcome = infer("generate", **options | {"output": output, "batch_size": 4})
        assert outcome.code == 0, outcome.error
        return files.read_lines(output)

    return run


def write_table(path, options: dict, rates: list[float], **changes):
    """A table for two slots of the golden models, as `profile` would write it."""
    target = load_target(options["target"])
    law = StepTableLaw.of(target, load_drafter(options["drafter"], target=target), None, 2, (1, 2, 4, 8, 16))
    fields = {"capacities": list(law.buckets), "steps_per_second": rates, "law": law.fields() | changes}
    path.write_text(json.dumps(fields))
    return path


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_p": 0.95, "seed": 3}], ids=["greedy", "coupled"])
def test_lines_are_those_of_generate(infer, files, options, generated, sampling):
    outcome = infer("batch", **options, **sampling, **FULL)
    assert outcome.code == 0, outcome.error
    assert "KV caches of 2 requests of 92 positions" in outcome.out
    assert "4/4" in outcome.error and "tokens/s" in outcome.error
    lines = files.read_lines(options["output"])
    assert lines == generated(options | sampling)
    assert all(len(line["output_ids"]) == MOST for line in lines)


def check_golden(lines: list[dict], golden_requests: list[dict]) -> None:
    """Greedy lines have the golden outputs, whatever was drafted and scheduled."""
    assert len(lines) == len(golden_requests)
    for line, entry in zip(lines, golden_requests, strict=True):
        assert line["input_ids"] == entry["prompt"]
        assert line["input_ids"] + line["output_ids"] == entry["output"][: 60 + MOST]


def test_trees(infer, files, options, golden_requests):
    outcome = infer("batch", **options | FULL | {"tree": "pctree", "tree_budget": 3, "tree_k": 1, "slots": 1})
    assert outcome.code == 0, outcome.error
    lines = files.read_lines(options["output"])
    check_golden(lines, golden_requests)
    assert {nodes for line in lines for nodes in line["verified_nodes"]} == {3}


def test_a_measured_table(infer, files, options, golden_requests, monkeypatch):
    monkeypatch.setattr(step_table, "is_flat", lambda _: True)
    outcome = infer("batch", **options, slots=2)
    assert outcome.code == 0, outcome.error
    assert outcome.error.count("measuring the engine's steps") == 1 and "warning: a step of 16 tokens" in outcome.error
    check_golden(files.read_lines(options["output"]), golden_requests)


def test_a_table_and_a_calibration_schedule(infer, tmp_path, files, options, golden_requests):
    """Where every token costs its whole price, confidences of nearly nothing let nothing be verified but roots."""
    target = load_target(options["target"])
    drafter = load_drafter(options["drafter"], target=target)
    law = CalibrationLaw.of(target, drafter, Verifier.COUPLED)
    calibration = {"temperatures": [1e-3] * drafter.config.num_drafts, "law": vars(law)}
    (tmp_path / "calibration.json").write_text(json.dumps(calibration))
    table = write_table(tmp_path / "table.json", options, [16, 8, 4, 2, 1])
    scheduled = options | {"table": table, "calibration": tmp_path / "calibration.json", "slots": 2}
    outcome = infer("batch", **scheduled, policy="stale-capacity")
    assert outcome.code == 0, outcome.error
    assert "measuring" not in outcome.error
    lines = files.read_lines(options["output"])
    check_golden(lines, golden_requests)
    assert any(nodes < 8 for line in lines for nodes in line["verified_nodes"])


def test_without_a_drafter(infer, files, options, golden_requests):
    del options["drafter"]
    outcome = infer("batch", **options, slots=2)
    assert outcome.code == 0 and "measuring" not in outcome.error
    lines = files.read_lines(options["output"])
    check_golden(lines, golden_requests)
    assert all(line["verified_nodes"] == line["accepted_lengths"] == [1] * (MOST - 1) for line in lines)


def after(monkeypatch, results: int, act) -> None:
    """Acts once the engine has given so many results."""
    step, seen = Engine.step, []

    def patched(self):
        updates = step(self)
        before = len(seen)
        seen.extend(update.id for update in updates if update.result is not None)
        if before < results <= len(seen):
            act()
        return updates

    monkeypatch.setattr(Engine, "step", patched)


def crash():
    raise RuntimeError("crash")


def test_a_killed_run_goes_on(infer, tmp_path, files, options, generated):
    whole, partial = generated(options), tmp_path / "out.jsonl.partial"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="crash"):
        after(patch, 3, crash)
        infer("batch", **options, **FULL)
    kept = files.read_lines(partial)
    assert 2 <= len(kept) <= 4 and not options["output"].exists()
    with open(partial, "a") as file:
        file.write('{"index": 3, "tu')  # a line that a killed run left half-written

    refused = infer("batch", **options | {"temperature": 0.5}, **FULL)
    assert refused.code == 2 and "temperature (0.0, now 0.5)" in refused.error
    refused = infer("batch", **options, **FULL | {"policy_length": 3})
    assert refused.code == 2 and "policy_length (7, now 3)" in refused.error_line

    outcome = infer("batch", **options, **FULL)
    assert outcome.code == 0, outcome.error
    assert f"going on with {len(kept) - 1} lines" in outcome.error
    assert files.read_lines(options["output"]) == whole
    assert not partial.exists()


@pytest.mark.parametrize(
    ("number", "code", "said"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_a_signal_lets_running_requests_finish(infer, tmp_path, files, options, number, code, said):
    prompts = files.write_lines(tmp_path / "many.jsonl", files.read_lines(options["prompts"]) * 2)
    options |= {"prompts": prompts}
    with pytest.MonkeyPatch.context() as patch:
        after(patch, 1, lambda: os.kill(os.getpid(), number))
        outcome = infer("batch", **options, **FULL)
    partial = files.read_lines(tmp_path / "out.jsonl.partial")
    assert outcome.code == code
    assert "finishing the requests that are running" in outcome.error
    last = outcome.error.splitlines()[-1]
    assert said in last and f"{len(partial) - 1} of 8 lines are in" in last and "the same command goes on" in last
    assert 2 <= len(partial) - 1 < 8
    assert all(len(line["row"]["output_ids"]) == MOST for line in partial[1:])
    outcome = infer("batch", **options, **FULL)
    assert outcome.code == 0 and len(files.read_lines(options["output"])) == 8
    assert signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL)


def test_a_second_signal_stops_at_once(infer, tmp_path, files, options, monkeypatch):
    def twice():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    after(monkeypatch, 1, twice)
    outcome = infer("batch", **options, **FULL)
    assert outcome.code == 130
    assert "0 of 4 lines are in" in outcome.error.splitlines()[-1]
    assert "finishing" not in outcome.error


def test_a_prompt_that_is_too_long_fails_alone(infer, tmp_path, files, options, generated):
    rows = files.read_lines(options["prompts"])
    expected = generated(options)
    prompts = files.write_lines(tmp_path / "long.jsonl", [rows[0], {"input_ids": [1] * 1024}, *rows[1:]])
    outcome = infer("batch", **options | {"prompts": prompts}, **FULL)
    assert outcome.code == 0, outcome.error
    first, failed, *rest = files.read_lines(options["output"])
    assert [first, *rest] == expected
    assert failed["finish_reason"] == "error" and failed["output_ids"] == []
    assert f"{prompts}, line 2: the prompt has 1024 tokens, more than the 1023" in failed["error"]
    assert failed["error"] in outcome.error


def test_turns_and_stop_strings(infer, tmp_path, files, options, generated, chat_target, golden_requests):
    files.edit_config(chat_target, max_position_embeddings=1024)
    rows = [{"turns": ["Ann has 3 apples.", "And Ben?"]}, {"prompt": "Ann has"}]
    rows.append({"input_ids": golden_requests[0]["prompt"]})
    prompts = files.write_lines(tmp_path / "turns.jsonl", rows)
    outcome = infer("batch", **options | {"target": chat_target, "prompts": prompts}, stop=("e ", "s"), **FULL)
    assert outcome.code == 0, outcome.error
    lines = files.read_lines(options["output"])
    first, second, *others = lines
    assert [first["turn"], second["turn"]] == [0, 1] and not any("turn" in line for line in others)
    assert bytes(first["input_ids"]).decode() == "Ann has 3 apples.\n"
    assert bytes(second["input_ids"]).decode() == f"Ann has 3 apples.\n{first['text']}\nAnd Ben?\n"
    alone = files.write_lines(tmp_path / "alone.jsonl", [{"input_ids": line["input_ids"]} for line in lines])
    for line, whole in zip(lines, generated(options | {"prompts": alone}), strict=True):
        text = bytes(whole["output_ids"]).decode()
        begins = {text.index(string): string for string in ("e ", "s") if string in text}
        end = min((begin + len(string) for begin, string in begins.items()), default=len(text))
        assert line["output_ids"] == whole["output_ids"][:end]
        assert line["text"] == text[: min(begins, default=len(text))]
        assert line["finish_reason"] == ("stop" if begins else "length")
    assert "stop" in [line["finish_reason"] for line in lines]


BAD_OPTIONS = {
    "slots": ({"slots": 0}, ["--slots 0"]),
    "policy": ({"policy": "best"}, ["--policy", "best"]),
    "no length": ({"policy": "fixed"}, ["--policy-length: fixed needs one"]),
    "a length too many": ({"policy_length": 3}, ["--policy-length: stale-capacity has none"]),
    "negative length": ({"policy": "fixed", "policy_length": -1}, ["--policy-length -1"]),
    "threshold": ({"policy": "threshold", "policy_threshold": 2}, ["--policy-threshold 2"]),
    "not lossless": (
        {"policy": "global-best", "verifier": "rejection"},
        ["--policy global-best with verifier rejection", "law"],
    ),
    "tree under rejection": ({"tree": "pctree", "verifier": "rejection"}, ["--verifier rejection on a tree"]),
    "tree without a drafter": ({"tree": "pctree", "drafter": None}, ["--tree: plain decoding has none", "--drafter"]),
    "table without a drafter": ({"table": "table.json", "drafter": None}, ["--table", "--drafter"]),
    "table that is not read": (
        {"policy": "fixed", "policy_length": 1, "table": "table.json"},
        ["--table: policy fixed reads none"],
    ),
    "missing table": ({"table": "none.json"}, ["none.json: no such file"]),
    "missing prompts": ({"prompts": "none.jsonl"}, ["none.jsonl: no such file"]),
    "stop needs a tokenizer": ({"stop": "x"}, ["--stop", "tokenizer"]),
    "temperature": ({"temperature": -1}, ["--temperature -1"]),
    "max-new-tokens": ({"max_new_tokens": 0}, ["--max-new-tokens 0"]),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_bad_options(infer, options, case, monkeypatch):
    monkeypatch.setattr("infer.batch.load_described", None)
    changed, named = BAD_OPTIONS[case]
    changed = {"slots": 2} | changed
    outcome = infer("batch", **{name: value for name, value in (options | changed).items() if value is not None})
    assert outcome.code == 2
    for text in named:
        assert text in outcome.error_line


def test_malformed_prompts_are_refused(infer, options, monkeypatch):
    monkeypatch.setattr("infer.batch.load_described", None)
    for text, named in (('{"input_ids": [1]}\n{"input_ids"', "malformed JSON"), ('{"input_ids": [300]}', "vocabulary")):
        options["prompts"].write_text(text)
        outcome = infer("batch", **options)
        assert outcome.code == 2 and named in outcome.error_line


@pytest.mark.parametrize(
    ("changes", "rates", "named"),
    [
        ({"device": "64 x TPU v5"}, [5, 4, 3, 2, 1], "law.device: the table is about 64 x TPU v5"),
        ({"slots": 4}, [5, 4, 3, 2, 1], "law.slots: the table is about 4, not 2"),
        ({}, [5, 4, None, 2, 1], "steps_per_second[2]"),
    ],
)
def test_a_table_of_something_else(infer, tmp_path, options, changes, rates, named):
    table = write_table(tmp_path / "table.json", options, rates, **changes)
    outcome = infer("batch", **options, slots=2, table=table)
    assert outcome.code == 2
    assert str(table) in outcome.error_line and named in outcome.error_line and "measure again" in outcome.error_line
