"""`python -m infer chat`: answers by plain and by speculative decoding, side by side, and what the drafter is worth."""

import dataclasses
import sys
from collections.abc import Sequence
from functools import partial

import jax.numpy as jnp

from dspark_jax import Generation, TreeSpec, Verifier, request_keys
from dspark_jax.io import Drafter, InputError, PromptEncoder, Target, padded_length, parse_prompt
from dspark_jax.io.report import shown, table
from dspark_jax.verification.statistics import AcceptanceCounts, count_acceptance
from infer.batching import Batch, Request, make_batch
from infer.comparison import collect, in_turns
from infer.decoding import Decoder, decode_config, make_decoder
from infer.methods import Method
from infer.models import describe, load_described, load_named
from infer.options import DraftingOptions, under_mesh
from infer.results import Result
from infer.text import Texts, TextStream

_PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that tells whether a number is prime.",
    "A baker sells 12 loaves at 3 dollars each. What does she earn?",
)
# Drafts of a round, beside all of a block: the longer, the more costs a pass of the target, and the less it adds.
_LENGTHS = (1, 3)
# More than any request has.
_ALL_ROUNDS = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatOptions(DraftingOptions):
    """Answer a few prompts by plain and by speculative decoding, and compare their texts and speeds.

    Both answers are printed as they come. Then each prompt is decoded again, plainly and with one, three and all drafts
    of a block (or --max-drafts), in turns and after compilation, for the times. On a terminal it goes on with the
    prompts that are typed, each a conversation of its own.
    """

    drafter: str = dataclasses.field()
    """Folder or hub id of the drafter (DeepSpec layout), or smollm2-dspark, which comes with this project."""
    prompt: str | None = None
    """The one prompt to answer, instead of three built-in ones and those that are typed."""
    repeats: int = 3
    """How often each prompt is timed; the median counts."""

    def check(self) -> None:
        super().check()
        self.check_tree()
        if self.prompt is not None and not self.prompt.strip():
            raise InputError("--prompt: is empty; write what to answer, or leave it out")
        if self.repeats < 1:
            raise InputError(f"--repeats {self.repeats} must be at least 1")


@under_mesh
def chat(options: ChatOptions) -> None:
    options.check()
    description = describe(options, options.drafter)
    if description.target.tokenizer is None:
        raise InputError(f"{options.target}: has no tokenizer, which chat needs; name a target that has one")
    encoder = description.target.prompt_encoder(options.enable_thinking)
    if options.prompt is None:
        named = [(f"built-in prompt {number}", text) for number, text in enumerate(_PROMPTS, 1)]
    else:
        named = [("--prompt", options.prompt)]
    requests = [_request(text, place, index, encoder) for index, (place, text) in enumerate(named)]
    # Asked before the weights are read.
    tree = options.chosen_tree
    decode_config(description.target.config, description.drafter_config, options.max_new_tokens, tree=tree)
    target = load_described(options, description)
    drafter = load_named(options, options.drafter, target)
    session = _Session(
        options,
        make_decoder(target, None, options),
        _speculative(options, target, drafter, tree),
        Texts(description.target.tokenizer, ()),
        padded_length(max(len(request.ids) for request in requests)),
    )
    for request, (_, text) in zip(requests, named, strict=True):
        print(f"> {text}")
        session.answer(request, len(requests))
    print(report(session.measure(requests), options.repeats))
    if options.prompt is None and sys.stdin.isatty():
        _converse(session, encoder)


def _speculative(options: ChatOptions, target: Target, drafter: Drafter, tree: TreeSpec | None) -> dict[str, Decoder]:
    """What is compared with plain decoding, by its name; the last one is what answers."""
    if tree is not None:
        return {tree.kind.value: make_decoder(target, drafter, options, tree=tree)}
    most = drafter.config.num_drafts
    asked = (*_LENGTHS, most) if options.max_drafts is None else (options.max_drafts,)
    return {
        f"{length} draft{'s' * (length > 1)}": make_decoder(
            target, drafter, dataclasses.replace(options, max_drafts=length)
        )
        for length in sorted({min(length, most) for length in asked})
    }


def _request(text: str, place: str, index: int, encoder: PromptEncoder) -> Request:
    prompt = parse_prompt({"turns": [text]}, place, encoder)
    return Request(index, 0, prompt, prompt.turn_ids())


def _converse(session: "_Session", encoder: PromptEncoder) -> None:
    """Answers what is typed, until an empty line."""
    print("Your own prompts; an empty line ends.")
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            return
        if not text:
            return
        try:
            generation = session.answer(_request(text, "this prompt", 0, encoder), 1)
        except InputError as error:
            print(error, file=sys.stderr)
            continue
        counts = count_acceptance(generation.counts, generation.lengths, generation.stopped)
        print(f"τ {shown(counts.tau)}, {int(generation.lengths[0])} tokens\n")


class _Session:
    """Decoders of one target, compiled for prompts of at most `width` tokens; a longer one compiles again."""

    def __init__(
        self, options: ChatOptions, plain: Decoder, speculative: dict[str, Decoder], texts: Texts, width: int
    ) -> None:
        self._options, self._texts, self._width = options, texts, width
        self._plain, self._speculative = plain, speculative
        self._compiled: set[tuple[int, ...]] = set()

    def answer(self, request: Request, prompts: int) -> Generation:
        """Prints both answers as they come; returns the speculative one. `prompts`: how many the keys are for."""
        batch, last = self._batch(request, prompts), list(self._speculative.values())[-1]
        if batch.shape not in self._compiled:
            self._compiled.add(batch.shape)
            print(f"compiling for prompts of at most {batch.shape[1]} tokens", file=sys.stderr)
            nothing = dataclasses.replace(batch, max_tokens=jnp.zeros_like(batch.max_tokens))
            for decoder in (self._plain, *self._speculative.values()):
                _whole(decoder, nothing, self._texts)
        self._show("plain", self._plain, batch)
        return self._show("speculative", last, batch)

    def _show(self, name: str, decoder: Decoder, batch: Batch) -> Generation:
        print(f"[{name}] ", end="", flush=True)
        stream, generation = TextStream(self._texts), None
        for generation in decoder.stream(batch, 1, self._texts):
            ids = generation.tokens[0, : generation.lengths[0]].tolist()
            print(stream.push(ids, bool(generation.done[0])), end="", flush=True)
        print("\n", flush=True)
        assert generation is not None  # A stream ends with the whole result.
        return generation

    def measure(self, requests: Sequence[Request]) -> list[Result]:
        """All ways of decoding prompts that were answered, timed in turns."""
        results = []
        for name, decoder in self._speculative.items():
            method = Method(name, decoder.config.tree, Verifier.COUPLED, named=True)
            counts = AcceptanceCounts.zero(decoder.config.depth)
            results.append(Result("chat", method, self._options.temperature, counts, decoder.config.width))
        for request in requests:
            batch = self._batch(request, len(requests))
            decoders = (self._plain, *self._speculative.values())
            runs = [partial(_whole, decoder, batch, self._texts) for decoder in decoders]
            (plain, *others), (plain_seconds, *seconds) = in_turns(runs, self._options.repeats)
            for result, generation, taken in zip(results, others, seconds, strict=True):
                collect(result, self._plain, [request], batch, plain, generation, plain_seconds, taken)
        return results

    def _batch(self, request: Request, prompts: int) -> Batch:
        context = self._plain.config.target.max_position_embeddings
        keys = request_keys(self._options.seed, prompts)
        return make_batch([request], 1, context, self._options.max_new_tokens, keys, self._width)


def _whole(decoder: Decoder, batch: Batch, texts: Texts) -> Generation:
    """The whole answer at once, by the programs that streaming has compiled."""
    *_, generation = decoder.stream(batch, _ALL_ROUNDS, texts)
    return generation


def report(results: Sequence[Result], repeats: int) -> str:
    """Speeds, their ratios, τ and whether the texts are equal, in words. All results are about the same plain runs."""
    first, best = results[0], max(results, key=lambda result: result.speed_ratio)
    rows = [["", "tokens", "seconds", "tokens/s", "τ", "/ plain"]]
    rows.append(["plain", first.plain_tokens, f"{first.plain_seconds:.2f}", f"{first.plain_speed:.1f}", "", "1.00"])
    for result in results:
        speeds = [f"{result.seconds:.2f}", f"{result.speed:.1f}", shown(result.counts.tau), f"{result.speed_ratio:.2f}"]
        rows.append([result.method.name, result.tokens, *speeds])
    verdict = "faster" if best.speed_ratio > 1 else "NOT faster"
    lines = [
        table(rows),
        f"median of {repeats} turns for each of {first.requests} prompts, prefill included, compilation excluded",
        "",
        f"speculative decoding is {verdict} here: with {best.method.name}, τ {shown(best.counts.tau)} tokens a round "
        f"and {best.speed_ratio:.2f} times plain decoding's tokens/s",
    ]
    for result in results:
        of = f" with {result.method.name}" if len(results) > 1 else ""
        lines.append(f"the same text both ways{of}: {result.identical} of {result.requests} prompts")
        scores = "logits" if result.temperature == 0 else "logits with their noise"
        for difference in result.differences:
            reason = "a tie that rounding decides" if difference.near_tie else "more than rounding explains"
            lines.append(
                f"prompt {difference.prompt + 1} differs from new token {difference.position + 1} on, where the two "
                f"tokens' {scores} are {difference.score_gap:.2g} apart: {reason}"
            )
    return "\n".join(lines)
