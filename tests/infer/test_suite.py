"""`python -m infer suite` on the golden models: what evaluate measures, from texts that are decoded once."""

import json
from pathlib import Path

import pytest
import yaml

from infer import suite_file

GOLDENS = Path(__file__).parents[1] / "goldens"
PNG = b"\x89PNG"


@pytest.fixture
def write_suite(tmp_path, prompts, files):
    """Writes a suite of golden drafters: its values, with those given instead; None leaves one out."""
    files.write_lines(tmp_path / "second.jsonl", files.read_lines(prompts)[:2])

    def write(**changes) -> Path:
        values = {
            "target": str(GOLDENS / "target"),
            "prompts": ["prompts.jsonl", "second.jsonl"],
            "drafters": [drafter()],
            "max_new_tokens": 24,
            "tree_budget": 12,
        }
        values = {name: value for name, value in (values | changes).items() if value is not None}
        path = tmp_path / "small.yaml"
        path.write_text(yaml.safe_dump(values), encoding="utf-8")
        return path

    return write


def drafter(name: str = "dspark_vanilla", **changes) -> dict:
    return {"label": name, "path": str(GOLDENS / name)} | changes


@pytest.mark.slow
def test_tables_are_those_of_evaluate(infer, tmp_path, models, prompts, write_suite):
    published = {"paper": {"prompts": 5.1, "mean": 4.25}, "paper_temperature": 0, "paper_note": "another model"}
    drafters = [
        drafter(label="DSpark", methods=["chain", "pctree"]),
        drafter("dflash", label="DFlash", **published),
        {"label": "Eagle3", "path": "none", "optional": True, "paper": {"mean": 3.5}},
    ]
    output = tmp_path / "suite_report.json"
    outcome = infer("suite", str(write_suite(drafters=drafters)), output=output, batch_size=4)
    assert outcome.code == 0, outcome.error
    assert output.with_suffix(".png").read_bytes().startswith(PNG)
    report = json.loads(output.read_text())
    hot, greedy = report["temperatures"]
    assert (hot["temperature"], greedy["temperature"]) == (1, 0)
    assert {"target_fingerprint", "device", "date", "versions", "dtype"} <= set(report["law"])

    for found in (hot, greedy):
        assert found["not_measured"] == ["Eagle3"]
        assert found["texts"]["second"] == {"requests": 2, "prompt_tokens": 120, "new_tokens": 48, "ended": 0}
        chain, tree, _ = found["methods"]
        assert [row["name"] for row in found["methods"]] == ["DSpark, chain", "DSpark, pctree", "DFlash"]
        options = {"max_new_tokens": 24, "batch_size": 4, "repeats": 1, "temperature": found["temperature"]}
        options |= {"compare": ("chain", "pctree"), "tree_budget": 12, "output": tmp_path / "evaluation.json"}
        assert infer("evaluate", **models, prompts=prompts, **options).code == 0
        evaluated = {x["method"]: x for x in json.loads((tmp_path / "evaluation.json").read_text())["results"]}
        for row, method in ((chain, "chain"), (tree, "pctree N=12")):
            for field in ("tau", "rounds", "conditional_acceptance", "prefix_survival"):
                assert row["files"]["prompts"][field] == evaluated[method][field], field
        assert chain["mean_tau"] == pytest.approx(sum(file["tau"] for file in chain["files"].values()) / 2)
        assert tree["mean_tau"] > chain["mean_tau"] and tree["tree"]["budget"] == 12
        # A threshold of 0 cuts nothing, one of 1 everything.
        first, *_, last = chain["thresholds"]
        assert first["tau"] == pytest.approx(chain["pooled"]["tau"]) and first["drafts_verified_per_round"] == 7
        assert last == {"threshold": 1.0, "tau": 1.0, "drafts_verified_per_round": 0.0}
        assert sum(chain["reliability"]["count"]) == sum(chain["pooled"]["reached"])
        assert "thresholds" not in tree

    assert greedy["methods"][2]["paper"] == {"tau": published["paper"], "note": "another model"}
    assert "paper" not in hot["methods"][2]
    at_one, at_zero = outcome.out.split("Accepted length τ at T = 0")
    lines = {line.split(" | ")[0].strip("| "): line for line in at_zero.splitlines()}
    assert lines["method"] == "| method | prompts | second | mean |" and lines["---"] == "| --- | ---: | ---: | ---: |"
    assert "(5.10) |" in lines["DFlash"] and lines["DFlash"].endswith(" (4.25) |")
    assert "In brackets: another model." in at_zero and "In brackets" not in at_one
    # What is published stands there even where nothing is measured, at the suite's first temperature by default.
    assert "| Eagle3 | not measured |  | (3.50) |" in at_one and "| Eagle3 | not measured |  |  |" in at_zero


def test_options_instead_of_the_suites(infer, tmp_path, models, write_suite, monkeypatch):
    """A shipped suite by its name, one prompt of each file, a few tokens, another temperature."""
    path = write_suite(target=None, prompts=["second.jsonl"])
    monkeypatch.setattr(suite_file, "SHIPPED", path.parent)
    options = {"limit": 1, "max_new_tokens": 6, "temperature": 0.5, "target": models["target"]}
    output = tmp_path / "report.json"
    outcome = infer("suite", "small", output=output, **options)
    assert outcome.code == 0, outcome.error
    (found,) = json.loads(output.read_text())["temperatures"]
    assert found["temperature"] == 0.5 and found["texts"]["second"]["new_tokens"] == 6


def test_a_drafter_by_its_name(write_suite, monkeypatch, tmp_path):
    """A folder beside the suite goes before the name; one where the command runs is not meant."""
    folder = GOLDENS / "dflash"
    monkeypatch.setattr(suite_file, "locate", lambda source: folder if source == "known" else source)
    monkeypatch.chdir(GOLDENS)
    drafters = [{"label": name, "path": name, "optional": True} for name in ("known", "dflash")]
    suite = suite_file.read_suite(write_suite(drafters=drafters))
    assert [each.path for each in suite.drafters] == [folder, tmp_path / "dflash"]
    (tmp_path / "known").mkdir()
    suite = suite_file.read_suite(write_suite(drafters=drafters))
    assert suite.drafters[0].path == tmp_path / "known"


WRONG = {
    "unknown key": ({"targt": "x"}, ["small.yaml", "unknown key targt", "known: drafters"]),
    "unknown key of a drafter": ({"drafters": [drafter(pth="x")]}, ["unknown key drafters[0].pth"]),
    "no drafters": ({"drafters": None}, ["drafters is missing"]),
    "no path": ({"drafters": [drafter(), {"label": "x"}]}, ["drafters[1].path is missing"]),
    "no target": ({"target": None}, ["target is missing", "--target"]),
    "missing drafter": ({"drafters": [{"label": "Eagle3", "path": "none"}]}, ["none", "Eagle3", "optional: true"]),
    "only missing ones": ({"drafters": [{"label": "x", "path": "none", "optional": True}]}, ["nothing to measure"]),
    "missing prompts": ({"prompts": ["other.jsonl"]}, ["other.jsonl: no such file"]),
    "a file twice": ({"prompts": ["second.jsonl", "./second.jsonl"]}, ["prompts: second is there twice"]),
    "a label twice": ({"drafters": [drafter(), drafter()]}, ["dspark_vanilla is there twice"]),
    "unknown method": ({"drafters": [drafter(methods=["tree"])]}, ["drafters[0].methods must be one of chain"]),
    "no method": ({"drafters": [drafter(methods=[])]}, ["drafters[0].methods: name at least one"]),
    "tree budget": ({"tree_budget": 1, "drafters": [drafter(methods=["pctree"])]}, ["tree budget 1"]),
    "tree k": ({"tree_k": 300, "drafters": [drafter(methods=["pctree"])]}, ["drafters[0].methods", "260 tokens"]),
    "paper of no file": ({"drafters": [drafter(paper={"gsm8k": 5.1})]}, ["paper.gsm8k", "known: prompts, second"]),
    "paper in words": ({"drafters": [drafter(paper={"mean": "x"})]}, ["paper.mean must be a number"]),
    "paper below 0": ({"drafters": [drafter(paper={"mean": -1})]}, ["must be a positive number"]),
    "paper of two methods": (
        {"drafters": [drafter(methods=["chain", "pctree"], paper={"mean": 5})]},
        ["labels of their own"],
    ),
    "paper at no temperature": ({"drafters": [drafter(paper_temperature=0.5)]}, ["0.5", "known: 1, 0"]),
    "temperature": ({"temperatures": [-1]}, ["temperatures: temperature -1"]),
    "temperature that float32 lacks": ({"temperatures": [1e300]}, ["small.yaml: temperatures: temperature 1e+300"]),
    "no label": ({"drafters": [drafter(label=" ")]}, ["drafters[0].label: ' ' is no name"]),
    "a label of two lines": ({"drafters": [drafter(label="a\nb")]}, ["drafters[0].label: 'a\\nb' is no name"]),
    "a label of two cells": ({"drafters": [drafter(label="a|b")]}, ["drafters[0].label", "without |"]),
    "half a character": ({"drafters": [drafter(label="\ud800")]}, ["drafters[0].label must be a string"]),
    "a temperature twice": ({"temperatures": [1, 1.0]}, ["temperatures: 1 is there twice"]),
    "limit": ({"limit": 0}, ["limit 0 must be at least 1"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_suite_is_refused_in_one_line(infer, write_suite, name):
    changes, words = WRONG[name]
    outcome = infer("suite", str(write_suite(**changes)))
    assert outcome.code == 2, outcome.error
    assert all(word in outcome.error_line for word in words), outcome.error_line


def test_prompts_named_as_the_mean(infer, tmp_path, write_suite):
    suite = write_suite(prompts=["second.jsonl", "mean.jsonl"])
    (tmp_path / "second.jsonl").rename(tmp_path / "mean.jsonl")
    (tmp_path / "second.jsonl").write_text("")
    outcome = infer("suite", str(suite))
    assert outcome.code == 2 and "prompts: mean is there twice" in outcome.error_line


def test_wrong_options_are_refused_in_one_line(infer, tmp_path, write_suite):
    suite = str(write_suite())
    for arguments, words in (
        ([], ["no suite is given", "YAML file"]),
        (["other"], ["other: no such suite", "shipped"]),
        (["other.yaml"], ["other.yaml: no such file"]),
        ([suite, "--limit", "0"], ["--limit 0"]),
        ([suite, "--max-new-tokens", "0"], ["--max-new-tokens 0"]),
        ([suite, "--temperature", "-1"], ["--temperature -1"]),
        ([suite, "--batch-size", "0"], ["--batch-size 0"]),
        ([suite, "--output", suite], ["is read by this command"]),
        ([suite, "--output", str(tmp_path / "none" / "x.json")], ["does not exist"]),
        ([suite, "--target", "none"], ["none: no such folder"]),
    ):
        outcome = infer("suite", *arguments)
        assert outcome.code == 2, outcome.error
        assert all(word in outcome.error_line for word in words), outcome.error_line
