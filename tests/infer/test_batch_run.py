"""The loop of `python -m infer batch`, without a model."""

from types import SimpleNamespace

from dspark_jax.io import PromptEncoder, load_tokenizer, parse_prompt
from dspark_jax.serving import Request, Result, Update
from infer.batch_run import BatchRun
from infer.options import SamplingOptions
from infer.outputs import ResumableOutput
from infer.text import Texts


class Parrot:
    """In the engine's place: answers every request with eight times x."""

    def __init__(self, room: int):
        target = SimpleNamespace(max_position_embeddings=1024)
        decode = SimpleNamespace(width=2, max_new_tokens=8, target=target)
        self.config, self.waiting = SimpleNamespace(capacity=room + 2, decode=decode), []

    @property
    def free(self) -> int:
        return 2 - len(self.waiting)

    @property
    def busy(self) -> bool:
        return bool(self.waiting)

    def submit(self, request: Request) -> None:
        self.waiting.append(request)

    def step(self) -> list[Update]:
        request, tokens = self.waiting.pop(0), (ord("x"),) * 8
        result = Result(id=request.id, tokens=tokens, finish_reason="length")
        return [Update(id=request.id, tokens=tokens, result=result)]


def test_a_turn_that_outgrows_its_slot_fails_alone(tmp_path, files, chat_target):
    tokenizer = load_tokenizer(chat_target)
    encoder = PromptEncoder(tokenizer, 260, 1024)
    prompts = [parse_prompt({"turns": turns}, f"line {n}", encoder) for n, turns in enumerate((["a", "b", "c"], ["d"]))]
    output = ResumableOutput(tmp_path / "out.jsonl", {})
    BatchRun(SamplingOptions(target="t"), Parrot(20), Texts(tokenizer, ()), output, prompts).run()
    lines = files.read_lines(tmp_path / "out.jsonl")
    assert [line["finish_reason"] for line in lines] == ["length", "error", "error", "length"]
    assert [line["turn"] for line in lines] == [0, 1, 2, 0]
    assert "line 0: the prompt has 13 tokens with its replies" in lines[1]["error"]
