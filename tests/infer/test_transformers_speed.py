"""`python -m infer transformers-speed` on the golden target: what it reports, and what it refuses."""

import json
import shutil
import sys

import pytest

BAD = {
    "no such target": ({"target": "./none"}, ["./none: no such folder"]),
    "a drafter": ({"target": "tests/goldens/dspark_vanilla"}, ["config.json: unknown key block_size"]),
    "a mesh": ({"mesh": "data=1"}, ["--mesh", "transformers-speed --help"]),
    "int8": ({"dtype": "int8"}, ["--dtype", "transformers-speed --help"]),
    "repeats": ({"repeats": -1}, ["--repeats -1 must be at least 1"]),
    "steps": ({"steps": 0}, ["--steps 0 must be at least 1"]),
    "context": ({"context": 0}, ["--context 0 must be at least 1"]),
    "no room": ({"context": 1000}, ["--context and --steps are more than the target's 1024 positions"]),
    "a folder as output": ({"output": "tests"}, ["tests: is a folder; name a file"]),
    "output without its folder": ({"output": "none/x.json"}, ["none/x.json", "none does not exist"]),
}


@pytest.fixture
def options(models, tmp_path) -> dict:
    return {"target": models["target"], "output": tmp_path / "speed.json"}


@pytest.fixture
def copied(options, tmp_path):
    """The target in a folder of its own."""
    folder = shutil.copytree(options["target"], tmp_path / "target")
    return options | {"target": folder}


@pytest.mark.parametrize("case", BAD)
def test_bad_options_are_one_line(infer, options, case):
    changes, words = BAD[case]
    outcome = infer("transformers-speed", **options | changes)
    assert outcome.code == 2
    assert all(word in outcome.error_line for word in words), outcome.error_line
    assert not options["output"].exists()


def test_a_family_that_is_not_supported(infer, copied, files):
    files.edit_config(copied["target"], model_type="gpt2")
    outcome = infer("transformers-speed", **copied)
    assert outcome.code == 2 and "config.json: model_type 'gpt2' is not supported" in outcome.error_line


def test_an_output_that_is_the_targets(infer, copied):
    before = (copied["target"] / "config.json").read_bytes()
    outcome = infer("transformers-speed", **copied | {"output": copied["target"] / "config.json"})
    assert outcome.code == 2 and "is read by this command" in outcome.error_line
    assert (copied["target"] / "config.json").read_bytes() == before


@pytest.mark.parametrize("module", ["torch", "transformers"])
def test_without_its_packages(infer, options, monkeypatch, module):
    if module == "transformers":
        pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, module, None)
    outcome = infer("transformers-speed", **options)
    assert outcome.code == 2
    assert f"{module} is not installed: pip install -e '.[parity]'" in outcome.error_line


@pytest.fixture
def transformers():
    pytest.importorskip("torch")
    return pytest.importorskip("transformers")


def test_what_transformers_cannot_read_is_one_line(infer, options, monkeypatch, transformers):
    def fail(*_, **__):
        raise ValueError("no such\narchitecture")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    outcome = infer("transformers-speed", **options)
    assert outcome.code == 2
    assert f"{options['target']}: transformers {transformers.__version__} cannot read it" in outcome.error_line
    assert "(no such architecture)" in outcome.error_line


@pytest.mark.filterwarnings("default")
def test_a_run(infer, copied, files, transformers):
    """Both write the same tokens, and an unknown key can be allowed."""
    files.edit_config(copied["target"], new_field=1)
    small = {"context": 8, "steps": 3, "repeats": 1, "allow_config_key": "new_field"}
    outcome = infer("transformers-speed", **copied | small)
    assert outcome.code == 0, outcome.error
    report = json.loads(copied["output"].read_text())
    assert (report["target"], report["context"], report["steps"]) == ("target", 8, 3)
    assert report["agreeing_tokens"] == 3 and "3 of 3 greedy tokens agree" in outcome.out
    assert set(report["milliseconds"]) == {"ours", "theirs"} and "ratio" in report
    assert report["transformers"]["transformers"] == transformers.__version__
    assert {"torch"} < set(report["transformers"])
    assert {"device", "platform", "versions", "date"} <= set(report)
