"""`python -m infer evaluate` and `profile` on the golden models."""

import json

import numpy as np
import pytest

from dspark_jax.io.step_table import load_step_table
from dspark_jax.verification.statistics import rounds_until
from infer import profile
from infer.decoding import Decoder

PNG = b"\x89PNG"
OPTIONS = {"max_new_tokens": 64, "batch_size": 4}


def test_greedy(infer, tmp_path, models, prompts, golden_requests, files):
    second = files.write_lines(tmp_path / "second.jsonl", files.read_lines(prompts)[:2])
    output = tmp_path / "report.json"
    outcome = infer("evaluate", **models, prompts=(prompts, second), output=output, repeats=2, **OPTIONS)
    assert outcome.code == 0, outcome.error
    assert output.with_suffix(".png").read_bytes().startswith(PNG)
    report = json.loads(output.read_text())
    first, again, pooled = *report["results"], *report["pooled"]
    # The reference may run a round more than there are tokens to make.
    lengths = [entry["acceptance_lengths"] for entry in golden_requests]
    lengths = [request[: rounds_until(request, 64)] for request in lengths]
    assert first["tau"] == pytest.approx(np.mean([length for request in lengths for length in request]))
    assert again["tau"] == pytest.approx(np.mean([length for request in lengths[:2] for length in request]))
    assert first["tau_to_eos"] == first["tau"], "none of the goldens ends with an EOS"
    assert first["identical_outputs"] == 4 and pooled["identical_outputs"] == 6
    assert first["mean_prompt_tokens"] == 60 and first["mean_new_tokens"] == 64
    assert first["drafts_proposed"] == 7 * first["rounds"] == first["drafts_verified"]
    assert pooled["rounds"] == first["rounds"] + again["rounds"]
    assert first["tau"] == pytest.approx(1 + sum(first["prefix_survival"]))
    survival = np.cumprod(first["conditional_acceptance"])
    np.testing.assert_allclose(first["prefix_survival"], survival)
    ratio = first["speculative_tokens_per_second"] / first["plain_tokens_per_second"]
    assert first["speed_ratio"] == pytest.approx(ratio)
    law = report["law"]
    assert law["temperature"] == 0 and law["dtype"] == "float32" and law["drafter"] == "dspark_vanilla"
    assert {"target_fingerprint", "device", "date", "versions", "top_p"} <= set(law)
    for heading in ("τ to EOS", "conditional acceptance of position", "prefix survival to position", "pooled"):
        assert heading in outcome.out


def test_both_verifiers_at_temperature_1(infer, tmp_path, models, prompts):
    output = tmp_path / "report.json"
    verifiers = ("coupled", "rejection")
    options = OPTIONS | {"temperature": 1.0, "verifier": verifiers, "repeats": 1, "limit": 3}
    outcome = infer("evaluate", **models, prompts=prompts, output=output, **options)
    assert outcome.code == 0, outcome.error
    coupled, rejection = json.loads(output.read_text())["results"]
    assert [coupled["verifier"], rejection["verifier"]] == list(verifiers)
    assert coupled["requests"] == rejection["requests"] == 3
    assert coupled["identical_outputs"] == 3 and rejection["identical_outputs"] is None
    assert "same law" in outcome.out


def test_a_tree_is_measured_and_drawn(infer, tmp_path, models, prompts):
    output, picture = tmp_path / "report.json", tmp_path / "tree.png"
    options = OPTIONS | {"repeats": 1, "limit": 1, "max_new_tokens": 48, "batch_size": 1}
    options |= {"tree": "pctree", "tree_budget": 12, "draw_tree": picture}
    outcome = infer("evaluate", **models, prompts=prompts, output=output, **options)
    assert outcome.code == 0, outcome.error
    (result,) = json.loads(output.read_text())["results"]
    assert result["method"] == "pctree N=12" and result["identical_outputs"] == 1
    assert result["verified_nodes"] == 12 * result["rounds"] and 0 < result["second_choice_mass"] < 1
    assert picture.read_bytes().startswith(PNG)


@pytest.mark.slow
def test_methods_side_by_side(infer, tmp_path, models, prompts):
    """Chain, trees, their controls, the sweep and the picture, on one golden prompt."""
    output, picture = tmp_path / "report.json", tmp_path / "tree.png"
    options = OPTIONS | {"repeats": 1, "limit": 1, "max_new_tokens": 48, "batch_size": 1}
    options |= {"compare": ("chain", "pctree"), "sweep_budget": 12, "tree_budget": 20, "tree_k": 3}
    outcome = infer("evaluate", **models, prompts=prompts, output=output, draw_tree=picture, **options)
    assert outcome.code == 0, outcome.error
    results = {result["method"]: result for result in json.loads(output.read_text())["results"]}
    assert list(results) == [
        "chain",
        "pctree N=20",
        "pctree N=8, no spine",
        "chain and second choices",
        "pctree N=12",
    ]
    assert all(result["identical_outputs"] == 1 for result in results.values())
    chain, tree = results["chain"], results["pctree N=20"]
    assert tree["tau"] > results["pctree N=12"]["tau"] > chain["tau"]
    assert tree["tree"] == {"kind": "pctree", "k": 3, "width": 3, "budget": 20, "spine": True}
    assert chain["tree"] is None and chain["verified_nodes"] == 8 * chain["rounds"]
    assert tree["verified_nodes"] == 20 * tree["rounds"]
    share = tree["tau"] * tree["rounds"] / tree["verified_nodes"]
    assert tree["committed_share_of_verified_nodes"] == pytest.approx(share)
    assert chain["second_choice_mass"] is None
    # The chain's nodes are in the probe's tree, whose other nodes end a path: it gains at most one token a round.
    probe = results["chain and second choices"]
    assert 0 < probe["second_choice_mass"] < 1 and chain["tau"] < probe["tau"] < chain["tau"] + 1
    assert set(tree["round_parts_ms"]) == {"backbone", "tree", "verify", "commit"}
    assert all(value > 0 for value in tree["round_parts_ms"].values())
    for path in (picture, output.with_suffix(".png"), tmp_path / "report_budgets.png"):
        assert path.read_bytes().startswith(PNG)
    assert "its second choice is" in outcome.out and "milliseconds of a round's parts" in outcome.out


def test_tree_cost(infer, tmp_path):
    output = tmp_path / "cost.json"
    options = {"vocab_size": 1000, "markov_rank": 8, "block_size": 3, "tree_budget": 6, "repeats": 2}
    outcome = infer("tree-cost", output=output, **options)
    assert outcome.code == 0, outcome.error
    report = json.loads(output.read_text())
    assert report["tree_over_bound"] == pytest.approx(report["tree_ms"] / report["bound_ms"])
    assert f"tree / bound = {report['tree_over_bound']:.2f}" in outcome.out


def test_a_difference_is_reported_with_its_gap(infer, tmp_path, models, prompts, monkeypatch):
    run = Decoder.run

    def altered(self, batch):
        result = run(self, batch)
        if self.drafter is None:
            return result
        tokens = result.tokens.copy()
        tokens[1, 5] = (tokens[1, 5] + 1) % 256
        return result.replace(tokens=tokens)

    monkeypatch.setattr(Decoder, "run", altered)
    output = tmp_path / "report.json"
    outcome = infer("evaluate", **models, prompts=prompts, output=output, repeats=1, **OPTIONS)
    (result,) = json.loads(output.read_text())["results"]
    assert result["identical_outputs"] == 3
    (difference,) = result["differences"]
    assert (difference["prompt"], difference["position"], difference["near_tie"]) == (1, 5, False)
    assert difference["score_gap"] > 1e-3
    assert "3/4, 0 near ties" in outcome.out


def test_a_collapse_is_warned_of(infer, tmp_path, models, prompts, monkeypatch):
    run = Decoder.run

    def collapsed(self, batch):
        result = run(self, batch)
        if self.drafter is None:
            return result
        reached, accepted = np.zeros_like(result.counts.reached), np.zeros_like(result.counts.accepted)
        reached[:, :2], accepted[:, 0], accepted[:, 1] = (50, 40), 40, 1
        return result.replace(counts=result.counts.replace(reached=reached, accepted=accepted))

    monkeypatch.setattr(Decoder, "run", collapsed)
    outcome = infer("evaluate", **models, prompts=prompts, output=tmp_path / "r.json", repeats=1, **OPTIONS)
    assert outcome.code == 0
    assert "from 0.80 at position 0 to 0.03 at position 1; likely the drafter's layout" in outcome.error


def test_sample(infer, tmp_path, models, prompts, chat_target, files, golden_requests):
    files.edit_config(chat_target, max_position_embeddings=1024)
    options = models | OPTIONS | {"target": chat_target, "prompts": prompts, "output": tmp_path / "r.json"}
    outcome = infer("evaluate", "--sample", **options, repeats=1)
    entry = golden_requests[0]
    text = f"{bytes(entry['prompt']).decode()} ▶ {bytes(entry['output'][60:]).decode()}"
    assert text in outcome.out


def test_profile(infer, tmp_path, models, monkeypatch):
    monkeypatch.setattr(profile, "_BANDWIDTH_BYTES", 2**20)
    monkeypatch.setattr(profile, "_WIDTHS", (1, 8))
    output = tmp_path / "profile.json"
    outcome = infer("profile", **models, output=output, context=20, steps=8, repeats=2)
    assert outcome.code == 0, outcome.error
    assert "step / bound" in outcome.out and "verify(8) / step" in outcome.out
    report = json.loads(output.read_text())
    # 6 layers of 96 (96 + 2·48) + 96·96 + 3·96·192 and norms of 2·96 + 2·24, the final norm, the tied embedding.
    layer = 96 * (96 + 2 * 48) + 96 * 96 + 3 * 96 * 192 + 2 * 96 + 2 * 24
    assert report["weight_bytes_per_token"] == 4 * (6 * layer + 96 + 260 * 96)
    assert set(report["times"]) == {
        "bound: weights read once",
        "step: one token",
        "verify 8 tokens",
        "draft: backbone",
        "draft: head and sequential stage",
        "speculative round",
    }
    assert output.with_suffix(".png").read_bytes().startswith(PNG)


def test_profile_refuses_more_than_the_context(infer, tmp_path, models):
    outcome = infer("profile", **models, output=tmp_path / "p.json", context=1000, steps=24)
    assert outcome.code == 2
    assert "1024 positions" in outcome.error_line


@pytest.mark.slow
def test_profile_of_an_engine(infer, tmp_path, models, monkeypatch):
    monkeypatch.setattr(profile, "_BANDWIDTH_BYTES", 2**20)
    monkeypatch.setattr(profile, "_WIDTHS", (1, 8))
    options = models | {"output": tmp_path / "profile.json", "context": 20, "steps": 8, "repeats": 1}
    outcome = infer("profile", **options, slots=1, tree="pctree", tree_budget=3, tree_k=1)
    assert outcome.code == 0, outcome.error
    steps = tmp_path / "profile_steps.json"
    table = load_step_table(steps)
    assert table.capacities.tolist() == [1, 2, 3]
    law = json.loads(steps.read_text())["law"]
    assert (law["slots"], law["tree"]["budget"], law["context"], law["dtype"]) == (1, 3, 20, "float32")
    assert steps.with_suffix(".png").read_bytes().startswith(PNG)
    assert f"{float(table.steps_per_second[1]):,.1f}" in outcome.out
