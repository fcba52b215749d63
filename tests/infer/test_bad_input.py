"""Bad input ends with exit code 2 and one line that names the file and the field."""

import json
import os
import shutil
from pathlib import Path

import pytest

GOLDENS = Path(__file__).parents[1] / "goldens"


@pytest.fixture
def options(tmp_path, models, prompts) -> dict:
    return {**models, "prompts": prompts, "output": tmp_path / "out.jsonl", "max_new_tokens": 64}


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


BAD_PROMPTS = {
    "empty": ("", ["empty"]),
    "malformed": ('{"input_ids": [1]}\n{"input_ids": [1\n', ["line 2", "malformed JSON"]),
    "not UTF-8": (b'{"input_ids": [1]}\n\xff\n', ["line 2", "UTF-8"]),
    "too many digits": ('{"input_ids": [' + "9" * 5000 + "]}", ["line 1", "malformed JSON"]),
    "no content": ('{"text": "x"}\n', ["line 1", "input_ids, prompt, turns, messages"]),
    "too long": (json.dumps({"input_ids": [1]}) + "\n" + json.dumps({"input_ids": [1] * 1024}), ["line 2", "1024 tok"]),
    "no token": ('{"input_ids": []}\n', ["line 1", "empty"]),
    "outside the vocabulary": ('{"input_ids": [1, 260]}\n', ["line 1", "260", "vocabulary"]),
    "negative": ('{"input_ids": [-1]}\n', ["line 1", "-1", "vocabulary"]),
    "without a tokenizer": ('{"prompt": "x"}\n', ["line 1", "tokenizer"]),
}


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_prompts(infer, options, tmp_path, case):
    content, named = BAD_PROMPTS[case]
    prompts = write(tmp_path / "bad.jsonl", content)
    outcome = infer("generate", **options | {"prompts": prompts})
    assert outcome.code == 2
    for text in (str(prompts), *named):
        assert text in outcome.error_line
    assert {path.name for path in tmp_path.iterdir()} == {"bad.jsonl", "prompts.jsonl"}


BAD_OPTIONS = {
    "missing prompts": ({"prompts": "none.jsonl"}, ["none.jsonl: no such file"]),
    "missing target": ({"target": "./none"}, ["./none: no such folder"]),
    "missing drafter": ({"drafter": "./none"}, ["./none: no such folder"]),
    "missing output folder": ({"output": "none/out.jsonl"}, ["none/out.jsonl", "folder none"]),
    "output is a folder": ({"output": str(GOLDENS)}, [str(GOLDENS), "is a folder"]),
    "temperature": ({"temperature": -1}, ["--temperature -1"]),
    "top-p": ({"top_p": 0}, ["--top-p 0"]),
    "top-k too large": ({"top_k": 2**31}, ["--top-k 2147483648"]),
    "unknown choice": ({"dtype": "float23"}, ["--dtype", "float23", "generate --help"]),
    "no number": ({"seed": "x"}, ["--seed", "'x'"]),
    "top-k": ({"top_k": -1}, ["--top-k -1"]),
    "temperature that float32 lacks": ({"temperature": 1e39}, ["--temperature 1e+39"]),
    "threshold without confidences": (
        {"drafter": str(GOLDENS / "dflash"), "confidence_threshold": 0.5},
        ["--confidence-threshold 0.5", "dflash has no confidence head; leave it out"],
    ),
    "min-p": ({"min_p": 2}, ["--min-p 2"]),
    "max-new-tokens": ({"max_new_tokens": 0}, ["--max-new-tokens 0"]),
    "batch-size": ({"batch_size": 0}, ["--batch-size 0"]),
    "confidence-threshold": ({"confidence_threshold": 1.5}, ["--confidence-threshold 1.5"]),
    "seed": ({"seed": -1}, ["--seed -1"]),
    "stop needs a tokenizer": ({"stop": "x"}, ["--stop", "tokenizer"]),
    "tree kind": ({"tree": "beam"}, ["--tree", "beam"]),
    "tree option without a tree": ({"tree_k": 3}, ["--tree-k: drafting a chain has none"]),
    "tree option of another kind": ({"tree": "jetspec", "tree_width": 3}, ["--tree-width: jetspec has none"]),
    "tree budget without a tree": ({"tree_budget": 16}, ["--tree-budget", "--tree"]),
    "tree budget": ({"tree": "pctree", "tree_budget": 1}, ["--tree-budget 1 must be in 2..1024"]),
    "tree k": ({"tree": "pctree", "tree_k": 0}, ["--tree-k 0"]),
    "tree k beyond the vocabulary": ({"tree": "pctree", "tree_k": 300}, ["--tree-k 300", "260 tokens"]),
    "tree under rejection": ({"tree": "pctree", "verifier": "rejection"}, ["--verifier rejection", "coupled"]),
    "GGUF": ({"target": "none.gguf"}, ["none.gguf: no such file"]),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_options(infer, options, case):
    changed, named = BAD_OPTIONS[case]
    outcome = infer("generate", **options | changed)
    assert outcome.code == 2
    for text in named:
        assert text in outcome.error_line


BAD_COMPARISONS = {
    "tree beside compare": ({"tree": "pctree", "compare": "chain"}, ["--tree pctree", "--compare"]),
    "no verifier for trees": ({"compare": ("chain", "pctree"), "verifier": "block"}, ["--verifier block", "coupled"]),
    "nothing to draw": ({"draw_tree": "tree.png"}, ["--draw-tree tree.png", "no tree"]),
    "sweep": ({"sweep_budget": (8, 1)}, ["--sweep-budget 1"]),
    "unknown method": ({"compare": "eagle"}, ["--compare", "eagle"]),
    "the picture over the plot": ({"tree": "pctree", "draw_tree": "PLOT"}, ["--draw-tree", "name another"]),
    "no folder for the picture": ({"tree": "pctree", "draw_tree": "none/tree.png"}, ["none/tree.png"]),
}


@pytest.mark.parametrize("case", BAD_COMPARISONS)
def test_comparisons(infer, options, case):
    changed, named = BAD_COMPARISONS[case]
    output = options["output"].with_suffix(".json")
    changed = {name: output.with_suffix(".png") if value == "PLOT" else value for name, value in changed.items()}
    outcome = infer("evaluate", **options | {"output": output} | changed)
    assert outcome.code == 2
    for text in named:
        assert text in outcome.error_line


BAD_PROFILES = {
    "slots": ({"slots": 0}, ["--slots 0"]),
    "slots of no machine": ({"slots": 10**9}, ["--slots 1000000000 must be in 1..65536"]),
    "slots without a drafter": ({"slots": 2, "drafter": None}, ["--slots", "add --drafter"]),
    "table without slots": ({"table": "t.json"}, ["--table", "add --slots"]),
    "tree without slots": ({"tree": "pctree"}, ["--tree", "add --slots"]),
    "table over the report": ({"slots": 2, "table": "profile.json"}, ["--table profile.json", "--output"]),
    "no folder for the table": ({"slots": 2, "table": "none/t.json"}, ["none/t.json", "folder none"]),
}


@pytest.mark.parametrize("case", BAD_PROFILES)
def test_profiles_of_an_engine(infer, models, case):
    changed, named = BAD_PROFILES[case]
    options = {name: value for name, value in (models | changed).items() if value is not None}
    outcome = infer("profile", **options)
    assert outcome.code == 2
    for text in named:
        assert text in outcome.error_line


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"tree_budget": 5000}, "--tree-budget 5000 must be in 2..1024"),
        ({"tree_k": 0}, "--tree-k 0 must be in 1..1024"),
        ({"vocab_size": 10**13}, "--vocab-size 10000000000000 must be in 1..10000000"),
        ({"vocab_size": 4}, "--vocab-size 4 must be more than --tree-k 4"),
        ({"requests": 10**9}, "--requests 1000000000"),
    ],
)
def test_tree_cost(infer, tmp_path, changed, named):
    outcome = infer("tree-cost", output=tmp_path / "cost.json", **changed)
    assert outcome.code == 2
    assert named in outcome.error_line


def test_neither_a_drafter_nor_plain(infer, options):
    del options["drafter"]
    outcome = infer("generate", **options)
    assert outcome.code == 2
    assert "--no-drafter" in outcome.error_line


BAD_MODELS = {
    "unknown key of the target": ("target", {"new_field": 1}, "new_field"),
    "unknown key of the drafter": ("drafter", {"new_field": 1}, "new_field"),
    "drafter of a deeper target": ("drafter", {"num_target_layers": 8}, "num_target_layers"),
    "drafter of another vocabulary": ("drafter", {"vocab_size": 300}, "vocab_size"),
    "mask outside the vocabulary": ("drafter", {"mask_token_id": 260}, "mask_token_id"),
    "layers beyond any memory": ("target", {"num_hidden_layers": 10**9, "layer_types": None}, "num_hidden_layers"),
    "not a number": ("target", {"rms_norm_eps": float("nan")}, "NaN"),
    "EOS outside 32 bits": ("target", {"eos_token_id": 2**40}, "eos_token_id"),
    "block longer than the context": ("drafter", {"block_size": 10**9}, "block_size"),
    "last layer tapped": ("drafter", {"target_layer_ids": [0, 5]}, "target_layer_ids"),
}


@pytest.mark.parametrize("case", BAD_MODELS)
def test_configs(infer, options, tmp_path, files, case):
    which, values, field = BAD_MODELS[case]
    folder = tmp_path / "model"
    shutil.copytree(options[which], folder)
    files.edit_config(folder, **values)
    outcome = infer("generate", **options | {which: folder})
    assert outcome.code == 2
    assert f"{folder}/config.json" in outcome.error_line and field in outcome.error_line


def test_an_unknown_key_may_be_allowed(infer, options, tmp_path, files):
    folder = tmp_path / "model"
    shutil.copytree(options["target"], folder)
    files.edit_config(folder, new_field=1)
    prompts = write(tmp_path / "long.jsonl", json.dumps({"input_ids": [1] * 2000}))
    outcome = infer("generate", **options | {"target": folder, "prompts": prompts}, allow_config_key="new_field")
    assert "new_field" not in outcome.error_line, "the next mistake is told"


@pytest.mark.parametrize("which", ["target", "drafter"])
def test_truncated_weights(infer, options, tmp_path, which):
    folder = tmp_path / "model"
    shutil.copytree(options[which], folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    outcome = infer("generate", **options | {which: folder})
    assert outcome.code == 2
    assert str(weights) in outcome.error_line


@pytest.mark.parametrize("file", ["model.safetensors", "model.safetensors.index.json"])
def test_a_folder_instead_of_weights(infer, options, tmp_path, file):
    folder = tmp_path / "model"
    shutil.copytree(options["drafter"], folder)
    (folder / "model.safetensors").unlink()
    (folder / file).mkdir()
    outcome = infer("generate", **options | {"drafter": folder})
    assert outcome.code == 2 and f"{folder}: has neither model.safetensors nor" in outcome.error_line


def test_an_output_that_is_read(infer, options, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(options["target"], folder)
    for output in (options["prompts"], folder / "config.json"):
        before = output.read_bytes()
        outcome = infer("generate", **options | {"target": folder, "output": output})
        assert outcome.code == 2
        assert f"{output}: is read by this command" in outcome.error_line
        assert output.read_bytes() == before


def test_reports_do_not_overwrite_inputs_or_themselves(infer, models, prompts, tmp_path):
    before = prompts.read_bytes()
    outcome = infer("evaluate", **models, prompts=prompts, output=prompts)
    assert outcome.code == 2 and "is read by this command" in outcome.error_line
    assert prompts.read_bytes() == before
    for command in ("evaluate", "profile"):
        more = {"prompts": prompts} if command == "evaluate" else {}
        outcome = infer(command, **models, **more, output=tmp_path / "report.png")
        assert outcome.code == 2 and "report.png: the plot" in outcome.error_line
    (tmp_path / "report.png").mkdir()
    outcome = infer("profile", **models, output=tmp_path / "report.json")
    assert outcome.code == 2 and "report.png: is a folder" in outcome.error_line


def test_an_output_that_is_no_regular_file(infer, options, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    outcome = infer("generate", **options | {"output": tmp_path / "pipe"})
    assert outcome.code == 2 and "pipe: is no regular file" in outcome.error_line
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("content", ["precious", '{"a": 1}\n', '{"settings": [1]}\n{"index": 0}\n', b"\xff\n"])
def test_partial_work_of_something_else_is_kept(infer, options, content):
    partial = write(Path(f"{options['output']}.partial"), content)
    before = partial.read_bytes()
    outcome = infer("generate", **options)
    assert outcome.code == 2 and str(partial) in outcome.error_line
    assert partial.read_bytes() == before


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("top_k: .inf", ["top_k must be an integer"]),
        ("top_p: " + "9" * 400, ["top_p must be a number"]),
        ("top_k: 2001-99-99", ["malformed YAML"]),
        ("[" * 5000, ["malformed YAML", "nested too deeply"]),
        ('output: "a\\0b"', ["output must be a string"]),
    ],
)
def test_yaml_values(infer, options, tmp_path, text, named):
    config = write(tmp_path / "run.yaml", text)
    outcome = infer("generate", config=config, **options)
    assert outcome.code == 2
    for words in (str(config), *named):
        assert words in outcome.error_line


def test_yaml(infer, options, tmp_path):
    config = write(tmp_path / "run.yaml", "temprature: 1\n")
    outcome = infer("generate", config=config, **options)
    assert outcome.code == 2
    assert f"{config}: unknown key temprature; known:" in outcome.error_line
    assert "temperature" in outcome.error_line


@pytest.mark.parametrize("command", ["evaluate", "profile"])
def test_other_commands(infer, models, prompts, tmp_path, command):
    options = {**models, "output": tmp_path / "none" / "report.json"}
    if command == "evaluate":
        options["prompts"] = prompts
    outcome = infer(command, **options)
    assert outcome.code == 2
    assert str(options["output"]) in outcome.error_line


def test_usage_errors(infer):
    missing = infer("generate", target="x")
    assert missing.code == 2 and "--prompts" in missing.error_line
    unknown = infer("generate", "--no-such-option", target="x", prompts="x", output="x")
    assert unknown.code == 2 and "--no-such-option" in unknown.error_line
    assert infer("no-such-command").code == 2
    assert infer("generate", "--help").code == 0
    assert infer("--help").code == 0
