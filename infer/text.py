"""Text that grows token by token: stop strings, and printing while it comes."""

import bisect
from collections.abc import Sequence

from dspark_jax.io import Tokenizer

# What a tokenizer makes of an incomplete UTF-8 sequence.
_INCOMPLETE = "\ufffd"


class Texts:
    """Turns new tokens into text that ends before the first of the `stop` strings."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self.longest_stop = max(map(len, self._stop), default=0)

    def decode(self, tokens: Sequence[int]) -> str:
        text = self._tokenizer.decode(tokens)
        return text[: min((text.index(string) for string in self._stop if string in text), default=len(text))]

    def find_stop(self, tokens: Sequence[int]) -> int | None:
        """How many tokens it takes to complete a stop string, or None."""

        def complete(count: int) -> bool:
            text = self._tokenizer.decode(tokens[:count])
            return any(string in text for string in self._stop)

        if not complete(len(tokens)):
            return None
        return bisect.bisect_left(range(len(tokens) + 1), True, key=complete)


class TextStream:
    """The part of a growing text that is new and final."""

    def __init__(self, texts: Texts) -> None:
        self._texts, self._shown = texts, 0

    def push(self, tokens: Sequence[int], last: bool) -> str:
        """What can be shown now; an incomplete character or stop string waits, unless `last`."""
        text = self._texts.decode(tokens)
        if not last:
            text = text.rstrip(_INCOMPLETE)
            text = text[: max(len(text) - max(self._texts.longest_stop - 1, 0), 0)]
        new = text[self._shown :]
        self._shown = max(self._shown, len(text))
        return new
