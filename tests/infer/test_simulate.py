"""`python -m infer simulate` on the golden models: what is replayed is what is decoded."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import TreeSpec, request_keys
from dspark_jax.io.calibration import tree_fields
from dspark_jax.scheduling import stale_capacity
from dspark_jax.scheduling.policy import Policy, PolicyKind
from dspark_jax.scheduling.simulation import Replay, simulate
from dspark_jax.scheduling.survival import uncalibrated
from dspark_jax.scheduling.throughput import StepTable
from dspark_jax.serving import Engine, EngineConfig
from dspark_jax.serving import Request as EngineRequest
from infer.batching import Request, make_batch
from infer.decoding import make_decoder
from infer.options import DecodingOptions
from infer.recorded_run import RecordedRun, RecordedTrees, record_run
from tests.models import golden_drafter, golden_prompts, golden_target

PNG = b"\x89PNG"
NEW_TOKENS = 48
TREE, SMALL_TREE = TreeSpec(k=3, budget=12), TreeSpec(k=2, budget=4)
LAW = {
    "target": "T",
    "drafter": "D",
    "target_fingerprint": "t",
    "drafter_fingerprint": "d",
    "verifier": "coupled",
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
}
FLAT = StepTable(jnp.asarray([12], jnp.int32), jnp.ones(1, jnp.float32))
WHOLE, EVERYTHING = Policy(kind=PolicyKind.FIXED, length=7), Policy(kind=PolicyKind.THRESHOLD, threshold=0.0)


class Prompt:
    """A golden prompt as `infer.batching` asks for it."""

    num_turns = 1

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids

    def turn_ids(self, turn: int = 0, replies=()) -> list[int]:
        return self._ids


class Golden:
    """Two golden prompts: decoded with chains or trees, and recorded."""

    def __init__(self, temperature: float, tree: TreeSpec | None = TREE) -> None:
        entries, *_ = golden_prompts("dspark_vanilla")
        self.prompts = [Prompt(entry["prompt"]) for entry in entries if entry["confidence_threshold"] == 0][:2]
        self.options = DecodingOptions(
            target="target", drafter="drafter", temperature=temperature, max_new_tokens=NEW_TOKENS, seed=3
        )
        self.models = golden_target(), golden_drafter("dspark_vanilla")
        self.decoder = make_decoder(*self.models, self.options, tree=tree)
        self.run = record_run(self.decoder, self.prompts, 2, {}, lambda requests: None)

    def decoded(self, threshold: float, tree: TreeSpec | None) -> np.ndarray:
        """Tokens of each round of `generate`, one request after the other, the last one of each cut at its end."""
        options = dataclasses.replace(self.options, confidence_threshold=threshold)
        requests = [Request(index, 0, prompt, prompt.turn_ids()) for index, prompt in enumerate(self.prompts)]
        context = golden_target().config.max_position_embeddings
        batch = make_batch(requests, 2, context, NEW_TOKENS, request_keys(self.options.seed, 2))
        result = make_decoder(*self.models, options, tree=tree).run(batch)
        np.testing.assert_array_equal(result.lengths, self.run.lengths)
        rounds = []
        for row in range(2):
            accepted = result.counts.accepted_lengths[row, : result.counts.rounds[row]].copy()
            accepted[-1] -= 1 + accepted.sum() - result.lengths[row]
            rounds.append(accepted)
        return np.concatenate(rounds)

    def replayed(self, policy: Policy, replay: Replay) -> np.ndarray:
        return simulate(replay, FLAT, policy, np.arange(2), np.zeros(2), 1).committed


@pytest.fixture(scope="module", params=[0.0, 1.0], ids=["greedy", "coupled"])
def golden(request) -> Golden:
    return Golden(request.param)


def test_a_replay_is_what_is_decoded(golden):
    replay = golden.run.replay(uncalibrated(7))
    everything = golden.replayed(WHOLE, replay)
    np.testing.assert_array_equal(everything, golden.decoded(0.0, None))
    # A decoding threshold is about each draft's own confidence: the least along the chain must reach it.
    confidence = 1 / (1 + np.exp(-golden.run.confidence_logits.astype(np.float64)))
    least = np.minimum.accumulate(np.pad(confidence, ((0, 0), (1, 0)), constant_values=1), axis=1)
    replay = dataclasses.replace(replay, forest=replay.forest.replace(survival=least))
    for threshold in (0.3, 0.7):
        found = golden.replayed(Policy(kind=PolicyKind.THRESHOLD, threshold=threshold), replay)
        np.testing.assert_array_equal(found, golden.decoded(threshold, None))
        assert len(found) > len(everything)


def test_a_replay_of_trees_is_what_is_decoded(golden):
    replay = golden.run.tree_replay(uncalibrated(7))
    everything, decoded = golden.replayed(EVERYTHING, replay), golden.decoded(0.0, TREE)
    np.testing.assert_array_equal(everything, decoded)
    np.testing.assert_array_equal(golden.replayed(WHOLE, replay), decoded)
    chains = golden.replayed(WHOLE, golden.run.replay(uncalibrated(7)))
    assert len(everything) < len(chains), "a tree must accept more for the test to mean anything"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tree", "buckets", "slowest", "plain"),
    [
        (None, (2, 3, 16), 46, None),
        (None, (2, 3, 16), 58, 130),
        (TREE, (2, 6, 24), 54, None),
        (TREE, (2, 6, 24), 54, 130),
    ],
    ids=["chain", "chain switching", "tree", "tree switching"],
)
def test_the_engine_schedules_the_same(monkeypatch, tree, buckets, slowest, plain):
    """Two requests together, on a table whose best bucket changes with the confidences: the engine's every round."""
    monkeypatch.setattr(stale_capacity, "_FEWEST_PLAIN_ROUNDS", 3)
    golden = Golden(0.0, tree)
    policy, rates = Policy(kind=PolicyKind.STALE_CAPACITY), jnp.asarray([100, 70, slowest], jnp.float32)
    table = StepTable(
        jnp.asarray(buckets, jnp.int32), rates, None if plain is None else jnp.full(3, plain, jnp.float32)
    )
    replay = golden.run.replay(uncalibrated(7)) if tree is None else golden.run.tree_replay(uncalibrated(7))
    run = simulate(replay, table, policy, np.arange(2), np.zeros(2), 2)
    assert {buckets[0], buckets[-1]} <= set((run.drafts + run.active).tolist()[2:])
    config = EngineConfig(decode=golden.decoder.config, slots=2, capacity=128, buckets=buckets, prefill_tokens=64)
    models = golden_target().params, golden_drafter("dspark_vanilla").params
    keys = request_keys(golden.options.seed, 2)
    requests = [
        EngineRequest(id=index, input_ids=prompt.turn_ids(), key=keys[index])
        for index, prompt in enumerate(golden.prompts)
    ]
    nodes = np.zeros(NEW_TOKENS, int)
    for result in Engine(*models, config, table).generate(requests):
        nodes[: len(result.verified_nodes)] += result.verified_nodes
    # Until one of the two ends, which an engine knows a round later.
    together = int((run.active == 2).sum())
    assert together > 15
    np.testing.assert_array_equal((run.drafts + run.active)[:together], nodes[:together])


def test_a_recorded_run_is_kept(golden, tmp_path):
    golden.run.save(tmp_path / "run.npz")
    kept = RecordedRun.load(tmp_path / "run.npz")
    for found, expected in ((kept, golden.run), (kept.trees, golden.run.trees)):
        for name, value in vars(expected).items():
            if name != "trees":
                np.testing.assert_array_equal(vars(found)[name], value)


@pytest.fixture
def table(tmp_path):
    capacities = [2**i for i in range(8)]
    fields = {"capacities": capacities, "steps_per_second": [100 / (1 + max(c - 16, 0) / 16) for c in capacities]}
    path = tmp_path / "table.json"
    path.write_text(json.dumps(fields | {"device": "none"}))
    return path


@pytest.fixture
def recording(tmp_path):
    """A run as a file: 12 requests of 20 tokens, three drafts."""
    rng = np.random.default_rng(0)
    logits = rng.normal(1, 1, (12 * 19, 3)).astype(np.float32)
    accepted = np.cumprod(rng.random(logits.shape) < 1 / (1 + np.exp(-logits)), axis=1).sum(axis=1)
    RecordedRun(np.full(12, 20), logits, accepted, LAW).save(tmp_path / "run.npz")
    return tmp_path / "run.npz"


@pytest.fixture
def tree_recording(tmp_path, recording):
    """The same with trees of two first drafts, of which the first has one of its own."""
    run, rng = RecordedRun.load(recording), np.random.default_rng(1)
    scores = np.tile(np.log([1, 0.5, 0.25, 0.25]), (len(run.accepted), 1)).astype(np.float32)
    parents, chosen = np.tile(np.array([-1, 0, 0, 1], np.int16), (len(scores), 1)), rng.integers(0, 4, len(scores))
    paths = np.array([[0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 1, 0, 1]], bool)
    trees = RecordedTrees(scores, parents, paths[chosen])
    law = LAW | {"tree": tree_fields(SMALL_TREE)}
    dataclasses.replace(run, law=law, trees=trees).save(tmp_path / "trees.npz")
    return tmp_path / "trees.npz"


def test_record_and_simulate(infer, tmp_path, models, prompts, table):
    output, record = tmp_path / "out.json", tmp_path / "kept.npz"
    options = {"requests": 16, "max_new_tokens": NEW_TOKENS, "batch_size": 2, "seed": 3, "rate": 4}
    options |= {"tree": "pctree", "tree_k": TREE.k, "tree_budget": TREE.budget}
    outcome = infer("simulate", **models, prompts=prompts, table=table, output=output, record=record, **options)
    assert outcome.code == 0, outcome.error
    for name in ("thresholds", "users", "concurrency"):
        assert (tmp_path / f"out_{name}.png").read_bytes().startswith(PNG)
    report = json.loads(output.read_text())
    assert report["law"]["drafter"] == "dspark_vanilla"
    assert [drafts["nodes"] for drafts in (report["drafts"]["chain"], report["drafts"]["tree"])] == [8, 12]
    assert [load["slots"] for load in report["loads"]] == [1, 2, 4, 8, 8]
    assert [load["kind"] for load in report["loads"]] == ["closed"] * 4 + ["poisson"]
    names = ["fixed 1", "fixed 7", "threshold 0.5", "early-stop", "global-best", "stale-capacity"]
    names = ["plain", *names, *(f"tree {name}" for name in names)]
    for load in report["loads"]:
        assert set(load["policies"]) == set(names)
        assert {policy["tokens"] for policy in load["policies"].values()} == {16 * (NEW_TOKENS - 1)}
    for name in names:
        assert name in outcome.out
    for drafts in report["drafts"].values():
        first = drafts["thresholds"][0]
        assert first["accepted_drafts"] + first["rejected_drafts"] == pytest.approx(drafts["nodes"] - 1)
    # The recorded run, and no model, gives the same again.
    again = infer("simulate", recording=record, table=table, output=output, requests=16, seed=3, rate=4)
    assert again.code == 0, again.error
    assert json.loads(output.read_text()) == report


def test_trace_and_calibration(infer, tmp_path, table, recording, files):
    trace = files.write_lines(tmp_path / "trace.jsonl", [{"arrival_seconds": 5 + i / 10} for i in range(30)])
    calibration = tmp_path / "calibration.json"
    calibration.write_text(json.dumps({"temperatures": [1, 2, 1.5], "law": LAW}))
    output = tmp_path / "out.json"
    options = {"recording": recording, "table": table, "trace": trace, "calibration": calibration, "output": output}
    outcome = infer("simulate", **options, concurrency=(2, 1), slots=3, requests=20)
    assert outcome.code == 0, outcome.error
    report = json.loads(output.read_text())
    assert [(load["kind"], load["slots"]) for load in report["loads"]] == [("closed", 1), ("closed", 2), ("trace", 3)]
    assert report["loads"][2]["requests"] == 30 and report["survival"]["slopes"] == pytest.approx([1, 1 / 2, 1 / 1.5])
    assert set(report["drafts"]) == {"chain"}
    calibration.write_text(json.dumps({"temperatures": [1, 2, 1.5], "law": LAW | {"temperature": 1.0}}))
    outcome = infer("simulate", **options, requests=20)
    assert outcome.code == 2 and "law.temperature is 1.0, not 0.0" in outcome.error_line


def test_trees_on_their_own_table(infer, tmp_path, table, tree_recording):
    """A tree whose steps cost ten times as much, and a calibration of its edges."""
    law, tree = LAW | {"tree": tree_fields(SMALL_TREE)}, tmp_path / "tree.json"
    rates = {"steps_per_second": [10.0, 9.0], "plain_steps_per_second": [10.0, 10.0]}
    tree.write_text(json.dumps({"capacities": [4, 16], **rates, "law": law}))
    calibration = tmp_path / "calibration.json"
    edge_map = {"alpha": 2.0, "beta": 0.5, "tree": tree_fields(SMALL_TREE)}
    calibration.write_text(json.dumps({"temperatures": [1, 2, 1.5], "law": LAW, "edge_map": edge_map}))
    options = {"recording": tree_recording, "table": table, "tree_table": tree, "calibration": calibration}
    outcome = infer("simulate", **options, output=tmp_path / "out.json", requests=8)
    assert outcome.code == 0, outcome.error
    report = json.loads((tmp_path / "out.json").read_text())
    assert [load["slots"] for load in report["loads"]] == [1, 2, 4]
    assert report["drafts"]["tree"]["table"]["steps_per_second"] == [10.0, 9.0]
    assert (report["survival"]["alpha"], report["survival"]["beta"]) == (2, 0.5)
    policies = report["loads"][0]["policies"]
    assert policies["plain"]["tokens_per_second"] == pytest.approx(100)
    assert policies["tree fixed 3"]["tokens_per_second"] == pytest.approx(10 * policies["tree fixed 3"]["tau"])


def test_a_modelled_table_is_named_so(infer, tmp_path, table, recording):
    options = {"recording": recording, "table": table, "output": tmp_path / "out.json", "requests": 8}
    for modelled in (False, True):
        law = {"tree": None, "modelled": modelled}
        table.write_text(json.dumps(json.loads(table.read_text()) | {"law": law}))
        outcome = infer("simulate", **options)
        assert outcome.code == 0, outcome.error
        assert ("table.json (modelled, not measured)" in outcome.out) == modelled
        drafts = json.loads((tmp_path / "out.json").read_text())["drafts"]
        assert drafts["chain"]["table"]["modelled"] == modelled


BAD_FILES = {
    "no such table": ({}, {"table": "none.json"}, ["none.json: No such file"]),
    "no rates": ({"bad.json": '{"capacities": [1]}'}, {"table": "bad.json"}, ["bad.json: steps_per_second"]),
    "descending": (
        {"bad.json": '{"capacities": [8, 4], "steps_per_second": [1, 1]}'},
        {"table": "bad.json"},
        ["bad.json: step table: capacities [8, 4]"],
    ),
    "zero rate": (
        {"bad.json": '{"capacities": [32], "steps_per_second": [0]}'},
        {"table": "bad.json"},
        ["bad.json", "steps_per_second[0] must be a positive"],
    ),
    "tiny table": (
        {"bad.json": '{"capacities": [2], "steps_per_second": [1]}'},
        {"table": "bad.json"},
        ["bad.json: capacities end at 2, less than one request's 4"],
    ),
    "table of trees": (
        {"bad.json": json.dumps({"capacities": [32], "steps_per_second": [1], "law": {"tree": {"k": 1}}})},
        {"table": "bad.json"},
        ["bad.json: law.tree", "--tree-table"],
    ),
    "table of another tree": (
        {"bad.json": json.dumps({"capacities": [32], "steps_per_second": [1], "law": {"tree": None}})},
        {"recording": "trees.npz", "tree_table": "bad.json"},
        ["bad.json: law.tree", "--tree"],
    ),
    "tiny table for trees": (
        {"bad.json": '{"capacities": [3], "steps_per_second": [1]}'},
        {"recording": "trees.npz", "tree_table": "bad.json"},
        ["bad.json: capacities end at 3, less than one tree's 4 nodes", "--tree-table"],
    ),
    "concurrency beyond the trees' table": (
        {"t.json": '{"capacities": [8], "steps_per_second": [1]}'},
        {"recording": "trees.npz", "tree_table": "t.json", "concurrency": 3},
        ["--concurrency 3", "12 tokens a step with a tree each", "t.json ends at 8; take at most 2"],
    ),
    "tree table without trees": ({}, {"tree_table": "table.json"}, ["--tree-table: run.npz has no trees", "--tree"]),
    "tree of a recorded run": ({}, {"tree": "pctree"}, ["--tree: is for recording"]),
    "calibration of chains": (
        {"c.json": json.dumps({"temperatures": [1, 1, 1], "law": LAW})},
        {"recording": "trees.npz", "calibration": "c.json"},
        ["c.json: edge_map", "calibrate with this tree"],
    ),
    "recording is a folder": ({}, {"recording": "."}, [".: Is a directory"]),
    "many requests": ({}, {"requests": 10**7}, ["--requests 10000000 must be at most"]),
    "no such recording": ({}, {"recording": "none.npz"}, ["none.npz: No such file"]),
    "no recording": ({"bad.npz": "x"}, {"recording": "bad.npz"}, ["bad.npz: is no recorded run"]),
    "no such trace": ({}, {"trace": "none.jsonl"}, ["none.jsonl: No such file"]),
    "trace": ({"t.jsonl": '{"time": 1}\n'}, {"trace": "t.jsonl"}, ["t.jsonl, line 1: arrival_seconds"]),
    "unsorted trace": (
        {"t.jsonl": '{"arrival_seconds": 1}\n{"arrival_seconds": 0.5}\n'},
        {"trace": "t.jsonl"},
        ["t.jsonl, line 2: arrival_seconds 0.5 is before"],
    ),
    "calibration of another drafter": (
        {"c.json": '{"temperatures": [1]}'},
        {"calibration": "c.json"},
        ["c.json: has temperatures of 1 positions", "drafts 3"],
    ),
    "concurrency beyond the table": ({}, {"concurrency": 33}, ["--concurrency 33", "132", "at most 32"]),
    "concurrency": ({}, {"concurrency": 0}, ["--concurrency 0 must be at least 1"]),
    "few requests": ({}, {"concurrency": 16, "requests": 20}, ["--requests 20", "at least 32"]),
    "rate": ({}, {"rate": 0}, ["--rate 0.0 must be positive"]),
    "threshold": ({}, {"threshold": 2}, ["--threshold 2.0 must be in [0, 1]"]),
    "seed": ({}, {"seed": -1}, ["--seed -1 must be in 0..4294967295"]),
    "slots alone": ({}, {"slots": 4}, ["--slots", "--rate or --trace"]),
    "two sources": ({}, {"target": "x"}, ["--target: is for recording"]),
    "sampling of a recorded run": ({}, {"temperature": 1}, ["--temperature: is for recording"]),
    "output folder": ({}, {"output": "none/out.json"}, ["none/out.json", "folder none"]),
    "output over the table": ({}, {"output": "table.json"}, ["table.json: is read by this command"]),
}


@pytest.mark.parametrize("case", BAD_FILES)
@pytest.mark.usefixtures("table", "tree_recording")
def test_bad_input(infer, tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    written, changed, named = BAD_FILES[case]
    for name, text in written.items():
        (tmp_path / name).write_text(text)
    outcome = infer("simulate", **{"recording": "run.npz", "table": "table.json"} | changed)
    assert outcome.code == 2
    for text in named:
        assert text in outcome.error_line
    assert not (tmp_path / "simulation.json").exists()


BAD_RUNS = {
    "lengths": {"lengths": np.ones(12, np.int64)},
    "confidence_logits": {"confidence_logits": np.zeros((5, 3), np.float32)},
    "accepted": {"accepted": np.full(228, 4)},
    "law": {"law": np.array("[]")},
    "law.tree": {"law": np.array('{"tree": {"kind": "oak"}}')},
    "tree_scores": {"tree_scores": np.zeros((228, 5), np.float32)},
    "tree_parents": {"tree_parents": np.tile(np.array([-1, 0, 2, 1], np.int16), (228, 1))},
    "tree_accepted": {"tree_accepted": np.tile([False, True, True, False], (228, 1))},
}


@pytest.mark.parametrize("field", BAD_RUNS)
def test_a_damaged_run(infer, tmp_path, table, tree_recording, field):
    with np.load(tree_recording) as file:
        arrays = dict(file)
    np.savez(tmp_path / "bad.npz", **arrays | BAD_RUNS[field])
    outcome = infer("simulate", recording=tmp_path / "bad.npz", table=table)
    assert outcome.code == 2 and f"bad.npz: {field}" in outcome.error_line


def test_models_without_confidences_or_prompts(infer, models, prompts, table):
    outcome = infer("simulate", target=models["target"], table=table)
    assert outcome.code == 2 and "--drafter is missing" in outcome.error_line
    dflash = models["drafter"].replace("dspark_vanilla", "dflash")
    recorded = models | {"prompts": prompts, "table": table}
    outcome = infer("simulate", **recorded | {"drafter": dflash})
    assert outcome.code == 2 and "has no confidence head" in outcome.error_line
    for wrong, named in (
        ({"record": "run.txt"}, "--record run.txt: a recorded run is an .npz file"),
        ({"tree_table": table}, "--tree-table: is for trees; record them with --tree"),
        ({"tree_k": 3}, "--tree-k: drafting a chain has none"),
        ({"tree": "pctree", "tree_k": 261}, "--tree-k 261"),
        ({"prompts": table.parent}, f"{table.parent}: is a folder"),
    ):
        outcome = infer("simulate", **recorded | wrong)
        assert outcome.code == 2 and named in outcome.error_line
