"""The loop of `python -m infer batch`: conversations through an engine, results as they finish."""

import collections
import sys
import time
from collections.abc import Hashable, Sequence
from typing import Any

import jax
from tqdm import tqdm

from dspark_jax import request_keys
from dspark_jax.io import InputError, Prompt
from dspark_jax.serving import Engine, Request, Result, Update
from infer.interruption import Interruption, interruption
from infer.options import SamplingOptions
from infer.outputs import ResumableOutput
from infer.text import Texts

_ANNOUNCEMENT = "finishing the requests that are running; once more stops at once"


class BatchRun:
    """Each request is a turn of a prompt, known to the engine by (index, turn)."""

    def __init__(
        self,
        options: SamplingOptions,
        engine: Engine,
        texts: Texts | None,
        output: ResumableOutput,
        prompts: Sequence[Prompt],
    ) -> None:
        self._options, self._engine, self._texts = options, engine, texts
        self._output, self._prompts = output, prompts
        self._keys = request_keys(options.seed, len(prompts))
        self._replies = [self._known_replies(index) for index in range(len(prompts))]
        self._ready = collections.deque(
            index for index, prompt in enumerate(prompts) if len(self._replies[index]) < prompt.num_turns
        )
        self._asked: dict[Hashable, tuple[int, int, list[int]]] = {}
        self._tokens = 0

    def _known_replies(self, index: int) -> list[str]:
        """Of the turns that an interrupted run has finished."""
        rows, replies = self._output.rows, []
        while (index, len(replies)) in rows:
            replies.append(rows[index, len(replies)]["text"] or "")
        return replies

    def run(self) -> None:
        done = sum(map(len, self._replies))
        if done:
            print(f"going on with {done} lines of {self._output.partial}", file=sys.stderr)
        total = sum(prompt.num_turns for prompt in self._prompts)
        self._begin = time.perf_counter()
        with (
            interruption() as interrupted,
            tqdm(total=total, initial=done, unit="output") as self._bar,
        ):
            try:
                self._drive(interrupted)
            except KeyboardInterrupt:
                pass
            finally:
                self._output.close()
        if len(self._output.rows) < total:
            kept = f"{len(self._output.rows)} of {total} lines are in {self._output.partial}"
            interrupted.stop(f"{kept}; the same command goes on with them")
        self._output.finish()
        seconds = time.perf_counter() - self._begin
        print(
            f"{self._tokens} new tokens in {seconds:.1f} s, compilation included "
            f"({self._tokens / seconds:.1f} tokens/s); wrote {self._output.path}",
            file=sys.stderr,
        )

    def _drive(self, interrupted: Interruption) -> None:
        """Keeps the slots full until everything is done or, once interrupted, until the running requests are."""
        announced = False
        while self._ready or self._engine.busy:
            if interrupted.asked:
                self._ready.clear()
                if not announced:
                    tqdm.write(_ANNOUNCEMENT, file=sys.stderr)
                announced = True
            while self._ready and self._engine.free:
                self._submit(self._ready.popleft())
            for update in self._engine.step():
                self._take(update)

    def _submit(self, index: int) -> None:
        """Asks for the next turn of a prompt. One that cannot be asked for fails alone."""
        turn = len(self._replies[index])
        try:
            ids = self._prompts[index].turn_ids(turn, self._replies[index])
            self._check_room(index, ids)
        except InputError as error:
            self._fail(index, turn, str(error))
            return
        key = self._keys[index]
        options, texts = self._options, self._texts
        request = Request(
            id=(index, turn),
            input_ids=ids,
            # As in `make_batch`: a template may shorten earlier turns, so a position alone could return.
            key=jax.random.fold_in(key, turn) if turn else key,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            stop=texts.find_stop if texts is not None and texts.longest_stop else None,
        )
        self._asked[request.id] = (index, turn, ids)
        refused = self._engine.submit(request)
        if refused is not None:
            self._take(refused)

    def _check_room(self, index: int, ids: Sequence[int]) -> None:
        config = self._engine.config
        context = config.decode.target.max_position_embeddings
        location = self._prompts[index].location
        if len(ids) >= context:
            raise InputError(
                f"{location}: the prompt has {len(ids)} tokens, more than the {context - 1} that the context has room "
                "for; shorten it"
            )
        # Fewer new tokens than `generate` gives would pass for an answer.
        if min(len(ids) + config.decode.max_new_tokens, context) > config.capacity - config.decode.width:
            raise InputError(
                f"{location}: the prompt has {len(ids)} tokens with its replies, and a slot no room for them and "
                f"{config.decode.max_new_tokens} new ones; shorten it"
            )

    def _take(self, update: Update) -> None:
        self._tokens += len(update.tokens)
        if update.result is None:
            return
        (index, turn, ids), result = self._asked.pop(update.id), update.result
        if result.error is not None:
            self._fail(index, turn, f"{self._prompts[index].location}: {result.error}")
        else:
            self._finish(index, turn, self._line(ids, result))

    def _line(self, ids: list[int], result: Result) -> dict[str, Any]:
        tokens = list(result.tokens)
        return {
            "input_ids": ids,
            "output_ids": tokens,
            "text": None if self._texts is None else self._texts.decode(tokens),
            "accepted_lengths": list(result.accepted_lengths),
            "verified_nodes": list(result.verified_nodes),
            "finish_reason": result.finish_reason,
        }

    def _fail(self, index: int, turn: int, error: str) -> None:
        tqdm.write(f"warning: {error}", file=sys.stderr)
        empty = self._line([], Result(id=(index, turn), tokens=(), finish_reason="error"))
        self._finish(index, turn, empty | {"error": error})

    def _finish(self, index: int, turn: int, line: dict[str, Any]) -> None:
        prompt = self._prompts[index]
        if prompt.turns is not None:
            line["turn"] = turn
        self._output.add(index, turn, line)
        self._replies[index].append(line["text"] or "")
        if len(self._replies[index]) < prompt.num_turns:
            # Before prompts that have not begun: conversations end sooner, and fewer are lost to an interruption.
            self._ready.appendleft(index)
        rate = self._tokens / (time.perf_counter() - self._begin)
        self._bar.set_postfix_str(f"{rate:.1f} tokens/s", refresh=False)
        self._bar.update(1)
