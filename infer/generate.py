"""`python -m infer generate`: prompts in, completions out."""

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro
from tqdm import tqdm

from dspark_jax import Generation, Verifier, request_keys
from dspark_jax.io import InputError, Prompt, padded_length
from dspark_jax.io.outputs import check_input, check_output
from dspark_jax.verification.statistics import rounds_until
from infer.batching import Batch, Request, converse, make_batch, read_prompt_file
from infer.decoding import Decoder, decode_config, make_decoder
from infer.models import describe, load_described, load_named, print_cache_size
from infer.options import DecodingOptions, under_mesh
from infer.outputs import ResumableOutput, resume_settings
from infer.text import Texts, TextStream

_ROUNDS_PER_CHUNK = 4
# Options that do not change what is generated.
_IRRELEVANT = ("batch_size", "stream", "output", "mesh", "allow_config_key", "no_drafter")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateOptions(DecodingOptions):
    """Complete prompts by speculative or plain decoding.

    A prompt line has `input_ids`, `prompt` (raw text), `messages` or `turns` (both through the chat template). An
    output line has `input_ids`, `output_ids` (new tokens only), `text`, `accepted_lengths` (tokens of each round, bonus
    included), `verified_nodes` (nodes of each round's verification pass, the root included), `finish_reason` (stop or
    length), and `turn` for prompts with turns. Interrupted work is kept in OUTPUT.partial, and the same command goes on
    with it.
    """

    prompts: Path
    """JSON Lines file, one prompt a line."""
    output: Path
    """JSON Lines file to write, in the order of the prompts."""
    no_drafter: tyro.conf.FlagCreatePairsOff[bool] = False
    """Decode plainly, even if a drafter is named."""
    verifier: Verifier = Verifier.COUPLED
    """How drafts are accepted at a temperature above 0: coupled yields plain sampling's tokens, the others its law;
    rejection and block are for chains."""
    stop: tuple[str, ...] = ()
    """Strings that end a request; the text ends before them."""
    log_probabilities: tyro.conf.FlagCreatePairsOff[bool] = False
    """Also write each new token's log-probability under the target (temperature 1, unfiltered)."""
    stream: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the text as it comes, one prompt at a time."""

    def check(self) -> None:
        super().check()
        if self.drafter is None and not self.no_drafter:
            raise InputError("--drafter is missing; name one, or decode plainly with --no-drafter")
        if self.tree is not None and self.no_drafter:
            raise InputError("--tree: plain decoding has none; leave out --no-drafter or --tree")
        if self.tree is not None and self.verifier.chains_only:
            raise InputError(f"--verifier {self.verifier.value}: is for chains; take coupled or target-walk for a tree")
        self.check_tree()
        if "" in self.stop:
            raise InputError("--stop: a stop string must not be empty")


@under_mesh
def generate(options: GenerateOptions) -> None:
    options.check()
    check_input(options.prompts)
    drafter_name = None if options.no_drafter else options.drafter
    check_output(options.output, [options.prompts, options.target, drafter_name])
    output = ResumableOutput(options.output, resume_settings(options, drafter_name, _IRRELEVANT))
    description = describe(options, drafter_name)
    prompts = read_prompt_file(options.prompts, description, options)
    tree = options.chosen_tree
    config = decode_config(
        description.target.config, description.drafter_config, options.max_new_tokens, options.verifier, tree
    )
    if description.target.tokenizer is None and (options.stop or options.stream):
        raise InputError(f"{options.target}: has no tokenizer, which --stop and --stream need")
    rows = 1 if options.stream else min(options.batch_size, len(prompts))
    longest = padded_length(max(len(prompt.turn_ids()) for prompt in prompts))
    if not options.stream:
        print_cache_size(description, rows, longest + config.max_new_tokens + config.width, options.dtype)
    target = load_described(options, description)
    drafter = None if drafter_name is None else load_named(options, drafter_name, target)
    decoder = make_decoder(target, drafter, options, options.verifier, tree, options.log_probabilities)
    _Run(options, decoder, output, prompts, rows).run()


class _Run:
    """One command's loop over batches."""

    def __init__(
        self, options: GenerateOptions, decoder: Decoder, output: ResumableOutput, prompts: Sequence[Prompt], rows: int
    ) -> None:
        self._options, self._decoder, self._output = options, decoder, output
        self._prompts, self._rows = prompts, rows
        self._keys = request_keys(options.seed, len(prompts))
        tokenizer = decoder.target.tokenizer
        self._texts = None if tokenizer is None else Texts(tokenizer, options.stop)
        self._tokens = 0

    def run(self) -> None:
        known = {key: row["text"] or "" for key, row in self._output.rows.items()}
        if known:
            print(f"going on with {len(known)} lines of {self._output.partial}", file=sys.stderr)
        total = sum(prompt.num_turns for prompt in self._prompts)
        self._begin = time.perf_counter()
        with tqdm(total=total, initial=len(known), unit="output", disable=self._options.stream) as self._bar:
            try:
                converse(self._prompts, self._rows, self._answer, known, self._no_room)
            except KeyboardInterrupt:
                kept = f"{len(self._output.rows)} of {total} lines are in {self._output.partial}"
                raise KeyboardInterrupt(f"{kept}; the same command goes on with them") from None
            finally:
                self._output.close()
        self._output.finish()
        seconds = time.perf_counter() - self._begin
        print(
            f"{self._tokens} new tokens in {seconds:.1f} s, compilation included "
            f"({self._tokens / seconds:.1f} tokens/s); wrote {self._output.path}",
            file=sys.stderr,
        )

    def _answer(self, requests: list[Request]) -> list[str]:
        context = self._decoder.config.target.max_position_embeddings
        batch = make_batch(requests, self._rows, context, self._options.max_new_tokens, self._keys)
        if self._texts is not None and self._options.stream:
            result = self._stream(batch, self._texts)
        elif self._texts is not None and self._options.stop:
            *_, result = self._decoder.stream(batch, _ROUNDS_PER_CHUNK, self._texts)
        else:
            result = self._decoder.run(batch)
        replies = []
        for row, request in enumerate(requests):
            line = self._line(request, result, row)
            self._output.add(request.index, request.turn, line)
            replies.append(line["text"] or "")
            self._tokens += len(line["output_ids"])
        self._bar.set_postfix_str(f"{self._tokens / (time.perf_counter() - self._begin):.1f} tokens/s", refresh=False)
        self._bar.update(len(requests))
        return replies

    def _stream(self, batch: Batch, texts: Texts) -> Generation:
        shown = TextStream(texts)
        for result in self._decoder.stream(batch, 1, texts):
            ids = result.tokens[0, : result.lengths[0]].tolist()
            print(shown.push(ids, bool(result.done[0])), end="", flush=True)
        print(flush=True)
        return result

    def _line(self, request: Request, result: Generation, row: int) -> dict[str, Any]:
        length = int(result.lengths[row])
        ids = result.tokens[row, :length].tolist()
        counts = result.counts
        accepted = counts.accepted_lengths[row, : counts.rounds[row]]
        rounds = rounds_until(accepted, length)
        line = {
            "input_ids": request.ids,
            "output_ids": ids,
            "text": None if self._texts is None else self._texts.decode(ids),
            "accepted_lengths": accepted[:rounds].tolist(),
            "verified_nodes": counts.verified_nodes[row, :rounds].tolist(),
            "finish_reason": "stop" if result.stopped[row] else "length",
        }
        if request.prompt.turns is not None:
            line["turn"] = request.turn
        if result.log_probabilities is not None:
            line["log_probabilities"] = result.log_probabilities[row, :length].tolist()
        return line

    def _no_room(self, index: int, turn: int) -> None:
        line = {"input_ids": [], "output_ids": [], "text": "", "accepted_lengths": [], "verified_nodes": []}
        line |= {"finish_reason": "length", "turn": turn}
        if self._options.log_probabilities:
            line["log_probabilities"] = []
        self._output.add(index, turn, line)
        self._bar.update(1)
