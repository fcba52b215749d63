"""`python -m infer chat`: two answers to each prompt, what the report says of them, and typed prompts."""

import io
import re
import sys

import numpy as np
import pytest

from dspark_jax import Verifier
from dspark_jax.verification.statistics import AcceptanceCounts
from infer.chat import report
from infer.comparison import in_turns
from infer.decoding import Decoder
from infer.methods import Method
from infer.results import Difference, Result

ANSWERS = re.compile(r"^(?:> )?\[plain\] (.*?)\n\n\[speculative\] (.*?)\n\n", re.MULTILINE | re.DOTALL)


@pytest.fixture
def options(models, chat_target) -> dict:
    return models | {"target": chat_target, "max_new_tokens": 24, "repeats": 1}


def test_built_in_prompts(infer, options, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    outcome = infer("chat", **options)
    assert outcome.code == 0, outcome.error
    assert outcome.out.count("\n> ") + outcome.out.startswith("> ") == 3
    answers = ANSWERS.findall(outcome.out)
    assert len(answers) == 3 and all(plain == speculative != "" for plain, speculative in answers)
    assert re.search(r"^plain +72 +[\d.]+ +[\d.]+ +1\.00$", outcome.out, re.MULTILINE)
    lengths = re.findall(r"^(\d) drafts? +72 +[\d.]+ +[\d.]+ +(\d\.\d\d) +[\d.]+$", outcome.out, re.MULTILINE)
    assert [int(length) for length, _ in lengths] == [1, 3, 7]
    assert 1 < float(lengths[0][1]) <= 2 and lengths[0][1] < lengths[1][1] <= lengths[2][1]
    assert re.search(
        r"decoding is (NOT )?faster here: with \d drafts?, τ [1-8]\.\d\d tokens a round and [\d.]+ times", outcome.out
    )
    assert outcome.out.count("the same text both ways with") == outcome.out.count(": 3 of 3 prompts") == 3
    # One shape for the three.
    assert outcome.error == "compiling for prompts of at most 64 tokens\n"


@pytest.mark.slow
def test_one_prompt_sampled_with_a_tree(infer, options):
    outcome = infer("chat", **options, prompt="Ann has 3 ducks.", temperature=1, tree="pctree", tree_budget=8)
    assert outcome.code == 0, outcome.error
    assert outcome.out.startswith("> Ann has 3 ducks.\n[plain] ")
    assert "the same text both ways: 1 of 1 prompts" in outcome.out


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_typed_prompts_until_an_empty_line(infer, options, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Terminal(f"Ben has 2 coins.\n{'x' * 100}\n\nnever read\n"))
    outcome = infer("chat", **options)
    assert outcome.code == 0, outcome.error
    assert len(ANSWERS.findall(outcome.out)) == 4
    after = outcome.out.partition("Your own prompts; an empty line ends.\n")[2]
    assert re.search(r"\nτ [1-8]\.\d\d, 24 tokens\n\n> > $", after)
    assert "this prompt: the prompt has 101 tokens" in outcome.error and outcome.error.count("compiling") == 1


def test_a_difference_is_told(infer, options, monkeypatch):
    stream = Decoder.stream

    def altered(self, batch, rounds, texts):
        for result in stream(self, batch, rounds, texts):
            tokens = result.tokens.copy()
            if self.drafter is not None:
                tokens[0, 5] = (tokens[0, 5] + 1) % 256
            yield result.replace(tokens=tokens)

    monkeypatch.setattr(Decoder, "stream", altered)
    outcome = infer("chat", **options, prompt="Ann has 3 ducks.")
    assert "the same text both ways with 3 drafts: 0 of 1 prompts" in outcome.out
    assert re.search(r"prompt 1 differs from new token 6 on, .* logits are .* apart: more than rounding", outcome.out)


def result(name: str, seconds: float, *differences: Difference) -> Result:
    found = Result("chat", Method(name, None, Verifier.COUPLED, True), 0.0, AcceptanceCounts.zero(7), 8)
    found.requests, found.plain_tokens, found.tokens, found.plain_seconds, found.seconds = 2, 90, 90, 2.0, seconds
    found.differences = list(differences)
    return found


def test_the_report_is_honest():
    slower = report([result("1 draft", 3.0), result("3 drafts", 4.0)], 3)
    assert "speculative decoding is NOT faster here: with 1 draft, " in slower
    assert "0.67 times plain decoding's tokens/s" in slower
    assert "45.0" in slower and "30.0" in slower and "with 3 drafts: 2 of 2 prompts" in slower
    assert "is NOT faster here" in report([result("1 draft", 2.0)], 3)
    faster = report([result("1 draft", 4.0), result("3 drafts", 1.0, Difference(1, 0, 11, 2e-4, True))], 3)
    assert "is faster here: with 3 drafts, " in faster and "2.00 times" in faster and "1 of 2 prompts" in faster
    assert "prompt 2 differs from new token 12 on, where the two tokens' logits are 0.0002 apart: a tie" in faster


def test_runs_take_turns(monkeypatch):
    order, clock = [], iter(np.cumsum([0, 1, 0, 5, 0, 9, 0, 5, 0, 2, 0, 6]))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    runs = [lambda name=name: order.append(name) or name for name in "ab"]
    generations, seconds = in_turns(runs, 3)
    assert "".join(order) == "ababab" and generations == ["a", "b"] and seconds == [2.0, 5.0]


BAD = {
    "no tokenizer": ({"target": "tests/goldens/target"}, "has no tokenizer, which chat needs"),
    "empty prompt": ({"prompt": " "}, "--prompt: is empty"),
    "repeats": ({"repeats": 0}, "--repeats 0 must be at least 1"),
    "tree without a kind": ({"tree_k": 2}, "--tree-k: drafting a chain has none"),
    "long prompt": ({"prompt": "x" * 100}, "--prompt: the prompt has 101 tokens, more than the 95"),
    "drafter that is not there": ({"drafter": "smollm2-dsprak"}, "smollm2-dsprak: no such folder"),
    "no drafts": ({"max_drafts": 0}, "--max-drafts 0 must be at least 1"),
    "threshold": ({"confidence_threshold": 2}, "--confidence-threshold 2.0 must be in [0, 1]"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(infer, options, case):
    changes, words = BAD[case]
    outcome = infer("chat", **options | changes)
    assert outcome.code == 2
    assert words in outcome.error_line


def test_a_target_without_a_chat_template_is_one_line(infer, options, chat_target):
    for file in chat_target.glob("*"):
        if file.name == "chat_template.jinja":
            file.unlink()
        elif file.name == "tokenizer_config.json":
            file.write_text("{}")
    outcome = infer("chat", **options)
    assert outcome.code == 2 and "built-in prompt 1" in outcome.error_line and "template" in outcome.error_line
