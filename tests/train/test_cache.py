"""`python -m train cache`, and `fit` that trains on what it has stored."""

import json
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest

from dspark_jax.io import describe_target
from dspark_jax.training import step
from tests.train.jobs import contents, killed, start
from train import cache, cache_layout
from train.__main__ import main
from train.cache_files import MANIFEST, open_arrays, read_manifest
from train.cache_layout import plan, row_length
from train.cached_features import CachedFeatures, FeatureRows
from train.data import Encoding, load_documents, row_packer

ROOT = Path(__file__).parents[2]
# The data's 30 documents then make several shards.
SHARD_BYTES = 2**17


@pytest.fixture(autouse=True)
def small_shards(monkeypatch) -> None:
    monkeypatch.setattr(cache_layout, "SHARD_BYTES", SHARD_BYTES)


@pytest.fixture
def arguments(chat_target, data):
    """Arguments of `cache` for a folder; later options come last."""

    def make(output: Path, *more: object) -> list[str]:
        given = ("cache", "--target", chat_target, "--data", data, "--output", output, "--batch-size", 4, *more)
        return [str(part) for part in given]

    return make


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of an uninterrupted cache, which the first test makes."""
    return tmp_path_factory.mktemp("whole") / "cache"


@pytest.fixture
def cached(whole, arguments) -> Path:
    if not whole.exists():
        assert main(arguments(whole)) == 0
    return whole


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def curve(rows: list[dict], name: str) -> list[float]:
    return [row[name] for row in rows if name in row]


def test_every_document_has_one_place_and_little_padding():
    lengths = np.random.default_rng(0).integers(2, 5000, 300)
    layout = plan(lengths, 8, 100)
    placed = np.concatenate([batch for shard in layout.shards for batch in shard])
    assert sorted(placed) == list(range(300)) and len(layout.shards) > 20
    order = np.argsort(layout.starts)
    ends = layout.starts + lengths
    assert (ends[order][:-1] <= layout.starts[order][1:]).all()
    assert (layout.starts // layout.shard_tokens == (ends - 1) // layout.shard_tokens).all()
    assert sum(layout.rows) == lengths.sum() and max(layout.rows) <= layout.shard_tokens
    rows = [row_length(length) for length in range(1, 5000)]
    assert all(length <= row for length, row in enumerate(rows, 1))
    assert all(row - length <= row / 5 for length, row in enumerate(rows, 1) if length > 32)
    assert len(set(rows)) < 40


@pytest.mark.parametrize("storage", ["bfloat16", "int8"])
def test_the_estimate_is_the_size(storage, arguments, cached, tmp_path, capsys):
    folder = tmp_path / "cache"
    assert main(arguments(folder, "--storage", storage, "--estimate")) == 0
    told = capsys.readouterr().out
    assert not folder.exists() and " free" in told
    if storage == "int8":
        assert main(arguments(folder, "--storage", storage)) == 0
    else:
        folder = cached
    estimated = float(told.split(" MB")[0].split()[-1]) * 1e6
    real = sum(len(value) for name, value in contents(folder).items() if name.split("/")[0] in ("states", "scales"))
    assert estimated == pytest.approx(real, rel=0.03)
    assert read_manifest(folder).shards > 2


def test_what_is_stored_is_what_the_target_computes(cached, chat_target, data):
    description = describe_target(chat_target)
    target, manifest = description.load(), read_manifest(cached)
    documents = load_documents([data], Encoding(tokenizer=None, vocab_size=260, max_length=4096))
    arrays = open_arrays(cached, manifest)
    starts = CachedFeatures(cached, manifest).starts(documents, 4096)
    assert manifest.documents == 30 and manifest.tokens == len(documents.tokens) and (starts >= 0).all()
    for index in (0, 7, 29):
        ids, _ = documents[index]
        at = slice(int(starts[index]), int(starts[index]) + len(ids))
        np.testing.assert_array_equal(arrays["tokens"][at].read().result(), ids)
        row = np.pad(ids, (0, 64 - len(ids)))[None]
        lengths = np.asarray([len(ids)], np.int32)
        taps = manifest.target_layer_ids
        computed = cache.compute_features(target.params, target.config, taps, row, lengths, "bfloat16")
        got = arrays["states"][at].read().result().astype(np.float32)
        np.testing.assert_allclose(got, np.asarray(computed.states[0, : len(ids)], np.float32), rtol=2**-6, atol=0.02)


def test_packed_rows_hold_each_document_s_own_features(cached, data):
    documents = load_documents([data], Encoding(tokenizer=None, vocab_size=260, max_length=4096))
    manifest = read_manifest(cached)
    states = open_arrays(cached, manifest)["states"]
    starts, stored = CachedFeatures(cached, manifest).starts(documents, 4096), states.read().result()
    chosen = np.asarray([3, 29, 0, 7, 11])
    packer = row_packer(documents, documents.valid_anchors(0), [chosen], 192)
    rows = FeatureRows(cached, {"states": states}, starts)(packer(chosen))
    assert len(rows["states"]) < len(chosen)
    for number, document in enumerate(chosen):
        own = rows["states"][rows["document_ids"] == number]
        np.testing.assert_array_equal(own, stored[starts[document] : starts[document] + len(own)])
    assert not rows["states"][rows["document_ids"] == -1].any()


def test_rows_of_other_processes_are_not_read(cached, data, monkeypatch):
    documents = load_documents([data], Encoding(tokenizer=None, vocab_size=260, max_length=4096))
    manifest = read_manifest(cached)
    arrays = {"states": open_arrays(cached, manifest)["states"]}
    starts, chosen = CachedFeatures(cached, manifest).starts(documents, 4096), np.asarray([3, 29, 0, 7, 11])
    rows = row_packer(documents, documents.valid_anchors(0), [chosen], 128)(chosen)
    whole = FeatureRows(cached, arrays, starts)(rows)["states"]
    monkeypatch.setattr("train.cached_features.local_rows", lambda rows, _: np.arange(len(rows["tokens"])) == 1)
    # What another process reads may be gone.
    own = rows["row"] == 1
    own_starts = np.full_like(starts, -1)
    own_starts[chosen[own]] = starts[chosen[own]]
    part = FeatureRows(cached, arrays, own_starts)(rows)["states"]
    assert len(part) == len(whole) > 1 and 0 < own.sum() < len(chosen)
    np.testing.assert_array_equal(part[1], whole[1])
    assert not np.delete(part, 1, axis=0).any() and np.delete(whole, 1, axis=0).any()
    monkeypatch.setattr("train.cached_features.local_rows", lambda rows, _: np.zeros(len(rows["tokens"]), bool))
    assert not FeatureRows(cached, arrays, own_starts)(rows)["states"].any()


def test_fit_reads_the_features_and_never_runs_the_target(cached, fit_arguments, tmp_path, monkeypatch):
    options = ("--steps", 8, "--checkpoint-every", 4, "--eval-every", 8, "--init-layers", 1)
    assert main(fit_arguments(tmp_path / "online", *options)) == 0
    monkeypatch.setattr(step, "forward_documents", None)
    options = (*options, "--features", cached)
    assert main(fit_arguments(tmp_path / "run", *options)) == 0
    online, run = metrics(tmp_path / "online"), metrics(tmp_path / "run")
    for name in ("loss", "held_out_loss", "held_out_expected_accepted_length"):
        assert curve(run, name) == pytest.approx(curve(online, name), rel=0.02)
    # From the checkpoint in the middle, the same again.
    whole = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "8")
    assert main(fit_arguments(tmp_path / "run", *options)) == 0
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("eagle3", ("--block-size", 2, "--draft-vocab-size", 20, "--target-layer-ids", 0)),
        ("mtp", ()),
        ("dflash", ("--num-layers", 1)),
        ("jetspec", ("--num-layers", 1)),
    ],
)
@pytest.mark.parametrize("storage", ["bfloat16", "int8"])
def test_every_kind_trains_on_one_cache(kind, options, storage, arguments, chat_target, data, tmp_path, monkeypatch):
    assert main(arguments(tmp_path / "cache", "--storage", storage, "--target-layer-ids", 0, 1)) == 0
    base = ["fit", "--config", ROOT / f"train/configs/{kind}.yaml", "--target", chat_target, "--data", data]
    base += ["--batch-size", 4, "--steps", 4, "--log-every", 1, *options]
    assert main([str(part) for part in (*base, "--output", tmp_path / "online")]) == 0
    monkeypatch.setattr(step, "forward_documents", None)
    assert main([str(part) for part in (*base, "--output", tmp_path / "run", "--features", tmp_path / "cache")]) == 0
    run, online = (curve(metrics(tmp_path / name), "loss") for name in ("run", "online"))
    assert run == pytest.approx(online, rel=0.03 if storage == "bfloat16" else 0.1)


def test_shorter_documents_are_prefixes_and_longer_ones_refused(
    cached, arguments, fit_arguments, one_line, tmp_path, data
):
    short = load_documents([data], Encoding(tokenizer=None, vocab_size=260, max_length=40))
    assert (CachedFeatures(cached, read_manifest(cached)).starts(short, 40) >= 0).all()
    assert main(arguments(tmp_path / "short", "--max-length", 40)) == 0
    words = ("max_length 40 is under", "use --max-length 40")
    one_line(fit_arguments(tmp_path / "run", "--features", tmp_path / "short"), *words)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("target", "0123", ["target 0123 is not the --target"]),
        ("complete", False, ["incomplete", "again"]),
        ("format", "other", ["format 'other'", "make the cache again"]),
        ("storage", "int4", ["storage 'int4'"]),
        ("tokens", "many", ["tokens is missing or malformed"]),
        ("hidden_size", 3, ["hidden_size 3"]),
        ("target_layer_ids", [1, 0], ["target_layer_ids [1, 0] must be ascending integers"]),
        ("target_layer_ids", ["0", "1"], ["target_layer_ids ['0', '1'] must be ascending integers"]),
        ("shard_tokens", 2**62, ["could not be read"]),
    ],
)
def test_a_manifest_that_does_not_fit_is_one_line(
    field, value, words, cached, fit_arguments, one_line, tmp_path, no_weights
):
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / MANIFEST).write_text(json.dumps(json.loads((cached / MANIFEST).read_text()) | {field: value}))
    one_line(fit_arguments(tmp_path / "run", "--features", folder), folder, *words)
    assert not (tmp_path / "run").exists()


def test_what_is_not_in_the_cache_is_one_line(
    cached, chat_target, arguments, fit_arguments, one_line, tmp_path, records, write_rows, monkeypatch
):
    run = tmp_path / "run"
    one_line(fit_arguments(run, "--features", tmp_path / "nothing"), "nothing", "has no manifest.json")
    one_line(fit_arguments(run, "--features", cached, "--target-layer-ids", -1, 0), "lack layer -1", "-layer-ids -1 0")
    other = write_rows(tmp_path / "other.jsonl", [*records, {"text": "not there"}])
    one_line(fit_arguments(run, "--features", cached, "--data", other), "record 30", "other files than --data")
    broken = Path(shutil.copytree(cached, tmp_path / "broken"))
    manifest = json.loads((broken / MANIFEST).read_text())
    (broken / MANIFEST).write_text(json.dumps(manifest | {"tokenizer": "0123"}))
    one_line(fit_arguments(run, "--features", broken, "--data", other), "another tokenizer or chat template")
    # Other files with documents of the same tokens are as good, and some of the layers are enough.
    data = write_rows(tmp_path / "reversed.jsonl", records[::-1][:20])
    options = ("--features", cached, "--data", data, "--target-layer-ids", 1, "--steps", 1)
    monkeypatch.setattr(step, "forward_documents", None)
    assert main(fit_arguments(run, *options)) == 0


def test_damaged_shards_are_one_line(cached, fit_arguments, one_line, tmp_path):
    folder = Path(shutil.copytree(cached, tmp_path / "cache"))
    for file in (folder / "states" / "c").rglob("0"):
        if file.is_file():
            data = bytearray(file.read_bytes())
            data[len(data) // 3] ^= 1
            file.write_bytes(data)
    one_line(fit_arguments(tmp_path / "run", "--features", folder), folder, "could not be read", "make it again")


@pytest.mark.parametrize("array", ["states", "tokens"])
def test_a_lost_shard_is_one_line_and_written_again(array, cached, arguments, fit_arguments, one_line, tmp_path):
    """TensorStore reads zeros where it was."""
    folder = Path(shutil.copytree(cached, tmp_path / "cache"))
    next(path for path in (folder / array / "c" / "1").parent.rglob("*") if path.is_file()).unlink()
    one_line(fit_arguments(tmp_path / "run", "--features", folder), folder, "is gone; run the `cache` command")
    assert main(arguments(folder)) == 0
    assert contents(folder) == contents(cached)


def test_held_out_files_are_read_from_the_cache_or_else_the_target_runs(
    cached, fit_arguments, tmp_path, records, write_rows, capsys, monkeypatch
):
    held_out = write_rows(tmp_path / "held_out.jsonl", records[:3])
    options = ("--steps", 1, "--features", cached, "--held-out-data")
    with monkeypatch.context() as patch:
        patch.setattr(step, "forward_documents", None)
        assert main(fit_arguments(tmp_path / "inside", *options, held_out)) == 0
    other = write_rows(tmp_path / "others.jsonl", [*records[:3], {"text": "something else"}])
    assert main(fit_arguments(tmp_path / "outside", *options, other)) == 0
    assert "lacks documents of --held-out-data" in capsys.readouterr().out


def test_an_interrupted_cache_is_refused_and_ends_equal(cached, arguments, fit_arguments, one_line, tmp_path):
    folder = tmp_path / "cache"
    shards = f"import train.cache_layout as layout; layout.SHARD_BYTES = {SHARD_BYTES}"
    (process,) = start(arguments(folder), devices=8, before=shards)
    assert killed(process, lambda: len(list((folder / "states").rglob("c/*/0/0"))) > 1)
    assert not read_manifest(folder).complete
    one_line(fit_arguments(tmp_path / "run", "--features", folder), folder, "incomplete")
    assert main(arguments(folder)) == 0
    assert contents(folder) == contents(cached)
    # Once more: nothing is computed.
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert main(arguments(folder)) == 0
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_a_full_disk_is_one_line_and_the_command_goes_on(cached, arguments, one_line, tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 5, 5))
        one_line(arguments(folder), folder, "0.00 MB are free", "--storage int8")
    assert not folder.exists()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    original = cache._shard

    def shard(manifest, target, documents, layout, number, bar):
        if number == 2:
            # From here on files may not grow beyond 16 KiB.
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**14, hard))
        return original(manifest, target, documents, layout, number, bar)

    try:
        with monkeypatch.context() as patch:
            patch.setattr(cache, "_shard", shard)
            one_line(arguments(folder), folder, "File too large", "run the command again")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert main(arguments(folder)) == 0
    assert contents(folder) == contents(cached)


def test_other_settings_in_the_same_folder_are_refused(cached, arguments, one_line, tmp_path, write_rows, records):
    one_line(arguments(cached, "--storage", "int8"), cached, "--storage bfloat16, not int8")
    one_line(arguments(cached, "--max-length", 45), "--max-length 1024, not 45")
    other = write_rows(tmp_path / "other.jsonl", records[1:])
    one_line(arguments(cached, "--data", other), "other contents of --data")
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "model.safetensors").write_text("")
    one_line(arguments(tmp_path / "else"), "holds model.safetensors", "not made by `cache`")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--batch-size", 0), ["--batch-size 0"]),
        (("--max-length", 1), ["--max-length 1"]),
        (("--target-layer-ids", 2), ["--target-layer-ids", "not a tap"]),
        (("--storage", "int4"), ["--storage", "int4"]),
        (("--data", "nowhere.jsonl"), ["nowhere.jsonl"]),
        (("--target", "nowhere/target"), ["nowhere/target"]),
    ],
)
def test_bad_options_are_one_line(options, words, arguments, one_line, tmp_path, no_weights):
    one_line(arguments(tmp_path / "cache", *options), *words)
    assert not (tmp_path / "cache").exists()
