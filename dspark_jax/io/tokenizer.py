"""Text to token ids and back, with the chat template of the same folder."""

import dataclasses
import functools
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from dspark_jax.io import chat_template
from dspark_jax.io.errors import InputError
from dspark_jax.io.files import read_json, reported, write_json, write_text

Messages = Sequence[Mapping[str, Any]]

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """A tokenizers.Tokenizer with its chat template.

    `special_tokens` maps `bos_token`, `eos_token`, … to their texts; `name` is the file that errors name.
    """

    backend: tokenizers.Tokenizer
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
    name: str = "tokenizer"

    @property
    def num_ids(self) -> int:
        """One more than the largest id."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @functools.cached_property
    def fingerprint(self) -> str:
        """A short hash of all that turns text and conversations into ids."""
        parts = [self.backend.to_str(), self.chat_template, sorted(self.special_tokens.items())]
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    @property
    def eos_token_id(self) -> int | None:
        return self.token_id(self.special_tokens.get("eos_token", ""))

    def token_id(self, token: str) -> int | None:
        """The id of one token's text, or None."""
        return self.backend.token_to_id(token)

    def encode(self, text: str) -> list[int]:
        """Ids of raw text, with the special tokens that the tokenizer itself adds (such as BOS)."""
        return self.backend.encode(text).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; ids without a token are left out."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def render_chat(
        self, messages: Messages, add_generation_prompt: bool = True, enable_thinking: bool | None = None
    ) -> str:
        """The text of a conversation; InputError without a chat template or if it refuses the messages."""
        if self.chat_template is None:
            raise InputError(f"{self.name}: has no chat template; give prompts as `prompt` or `input_ids`")
        return chat_template.render(
            self.chat_template, messages, self.special_tokens, add_generation_prompt, enable_thinking
        )

    def encode_chat(
        self, messages: Messages, add_generation_prompt: bool = True, enable_thinking: bool | None = None
    ) -> list[int]:
        """Ids of a conversation, by default up to where the assistant's reply begins."""
        text = self.render_chat(messages, add_generation_prompt, enable_thinking)
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_chat_with_offsets(
        self, messages: Messages, enable_thinking: bool | None = None
    ) -> tuple[list[int], list[int]]:
        """Ids of a whole conversation, and a mask of what the assistant says in it.

        The mask is 1 on the tokens of each assistant message as rendered, from the end of the generation prompt
        to the special token that ends the turn (included), found by the tokens' character offsets.

        Raises:
          InputError: no chat template, or one whose replies do not follow its generation prompt or end in no
            special token.
        """
        text = self.render_chat(messages, False, enable_thinking)
        encoding = self.backend.encode(text, add_special_tokens=False)
        special = {i for i, token in self.backend.get_added_tokens_decoder().items() if token.special}
        mask = [0] * len(encoding.ids)
        for index, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            begin = self._reply_begin(text, messages[:index], enable_thinking)
            first = next((i for i, (start, _) in enumerate(encoding.offsets) if start >= begin), len(mask))
            last = next((i for i in range(first, len(mask)) if encoding.ids[i] in special), None)
            if last is None:
                raise InputError(f"{self.name}: its chat template ends an assistant's turn with no special token")
            mask[first : last + 1] = [1] * (last + 1 - first)
        return encoding.ids, mask

    def _reply_begin(self, text: str, before: Messages, enable_thinking: bool | None) -> int:
        """Where the reply to `before` begins in the whole conversation's text, in characters.

        A template may end its generation prompt with what it leaves out of the conversation's past (a thinking
        block), so the plain prompt is tried too, and then only the prompt's tokens that the text shares count.
        """
        for thinking in (enable_thinking, None):
            prompt = self.render_chat(before, True, thinking)
            if text.startswith(prompt):
                return len(prompt)
        shared = next((i for i, (a, b) in enumerate(zip(text, prompt, strict=False)) if a != b), len(text))
        if shared <= len(self.render_chat(before, False, enable_thinking)):
            raise InputError(f"{self.name}: its chat template changes earlier messages; replies cannot be located")
        ends = [end for _, end in self.backend.encode(prompt, add_special_tokens=False).offsets if end <= shared]
        return max(ends, default=0)

    def save(self, folder: str | os.PathLike) -> None:
        """Writes tokenizer.json, tokenizer_config.json and, if there is one, chat_template.jinja."""
        folder = Path(folder)
        write_text(folder / "tokenizer.json", self.backend.to_str(pretty=True))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        write_json(folder / "tokenizer_config.json", {**config, **self.special_tokens})
        if self.chat_template is not None:
            write_text(folder / "chat_template.jinja", self.chat_template)


def load_tokenizer(folder: str | os.PathLike) -> Tokenizer | None:
    """The tokenizer of a Hugging Face folder, or None where it has no tokenizer.json.

    Raises:
      InputError: a malformed file.
    """
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise InputError(f"{path}: malformed tokenizer ({error}); download it again") from error
    backend.no_truncation()
    backend.no_padding()
    fields: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).exists():
            fields |= read_json(folder / name)
    config = folder / "tokenizer_config.json"
    special = {key: _token_text(fields[key], f"{config}: {key}") for key in _SPECIAL_TOKENS if fields.get(key)}
    return Tokenizer(backend, _find_chat_template(folder, fields.get("chat_template"), config), special, str(path))


def _token_text(token: Any, location: str) -> str:
    text = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(text, str):
        raise InputError(f"{location} must be a string, or an object with a string content, not {token!r}")
    return text


def _find_chat_template(folder: Path, field: Any, config: Path) -> str | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        try:
            with reported(file):
                return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{file}: not UTF-8; convert the file") from error
    if isinstance(field, list):
        named = {entry.get("name"): entry.get("template") for entry in field if isinstance(entry, Mapping)}
        if "default" not in named:
            raise InputError(f"{config}: chat_template has no entry named default")
        field = named["default"]
    if field is not None and not isinstance(field, str):
        raise InputError(f"{config}: chat_template must be a string or a list of named ones, not {field!r}")
    return field


def byte_alphabet() -> list[str]:
    """The printable character that stands for each of the 256 bytes in byte-level vocabularies."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = (byte for byte in range(256) if byte not in printable)
    characters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [characters[byte] for byte in range(256)]


def byte_tokenizer() -> Tokenizer:
    """A tokenizer whose ids 0 to 255 are the bytes of the text: 256 is <pad>, 257 <eos>, 258 <mask>."""
    vocabulary = {character: byte for byte, character in enumerate(byte_alphabet())}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "mask_token": "<mask>"}
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special.values()])
    return Tokenizer(backend, None, special, "the byte tokenizer")
