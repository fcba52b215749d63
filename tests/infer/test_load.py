"""`python -m infer load` on the golden models."""

import json

import numpy as np
import pytest

MOST = 8


@pytest.fixture
def options(tmp_path, models, prompts) -> dict:
    return {
        **models,
        "prompts": prompts,
        "output": tmp_path / "load.json",
        "max_new_tokens": MOST,
        "concurrency": (1,),
        "length": (7,),
        "repeats": 2,
    }


@pytest.mark.slow
def test_policies_side_by_side(infer, options):
    outcome = infer("load", **options)
    assert outcome.code == 0, outcome.error
    report = json.loads(options["output"].read_text())
    assert options["output"].with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    (load,) = report["loads"]
    assert load["slots"] == 1 and load["capacities"] == [1, 2, 4, 8]
    policies = load["policies"]
    assert set(policies) == {"scheduled", "plain", "fixed 7"}
    for runs in policies.values():
        # Four prompts, three times each; greedy, so every policy emits the same tokens.
        assert runs["requests"] == runs["identical_to_plain"] == 12
        assert len(runs["tokens_per_second_of_turns"]) == 2
        assert runs["tokens_per_second"] == pytest.approx(np.median(runs["tokens_per_second_of_turns"]))
        assert runs["prefills"] == 2 * 12
    assert policies["plain"]["tau"] == policies["plain"]["verified_nodes"] == 1
    # A request's last round is read when one more is under way.
    assert policies["plain"]["plain"] == policies["plain"]["rounds"] == 2 * 12 * MOST
    assert policies["fixed 7"]["verified_nodes"] == 8 and policies["fixed 7"]["tau"] > 1.5
    best = max(("plain", "fixed 7"), key=lambda name: policies[name]["tokens_per_second"])
    assert load["best_other"] == best
    ratio = policies["scheduled"]["tokens_per_second"] / policies[best]["tokens_per_second"]
    assert load["scheduled_over_best"] == pytest.approx(ratio)
    fixed = policies["fixed 7"]["tokens_per_second"] / policies["plain"]["tokens_per_second"]
    assert report["sweep"]["fixed 7"] == pytest.approx(fixed) and report["sweep"]["plain"] == 1
    assert load["schedule_ms"] > 0 and load["schedule_share_of_round"] < 1
    for word in ("1 at once", "scheduled / best", "36/36", "geometric mean"):
        assert word in outcome.out
    assert {"device", "date", "verifier", "target_fingerprint"} <= set(report["law"])


BAD = {
    "no drafter": ({"drafter": None}, ["--drafter is missing"]),
    "no prompts": ({"prompts": "none.jsonl"}, ["none.jsonl: no such file"]),
    "concurrency": ({"concurrency": (1, 0)}, ["--concurrency 0", "1..65536"]),
    "length": ({"length": (0,)}, ["--length 0", "1..1024"]),
    "no round": ({"max_new_tokens": 1}, ["--max-new-tokens 1", "at least 2"]),
    "repeats": ({"repeats": 0}, ["--repeats 0"]),
    "requests": ({"requests_per_slot": 0}, ["--requests-per-slot 0"]),
    "calibration": ({"calibration": "none.json"}, ["none.json: no such file"]),
    "output": ({"output": "load.png"}, ["load.png", ".json"]),
    "tree option": ({"tree_k": 3}, ["--tree-k", "leave it out"]),
    "a tree under rejection": ({"tree": "pctree", "verifier": "rejection"}, ["verifier rejection", "coupled"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_options(infer, options, case):
    changed, words = BAD[case]
    given = {name: value for name, value in (options | changed).items() if value is not None}
    outcome = infer("load", **given)
    assert outcome.code == 2
    for word in words:
        assert word in outcome.error_line
    assert not options["output"].exists()
