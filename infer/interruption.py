"""Ending on request: the first Ctrl-C or SIGTERM asks, the second one stops at once."""

import dataclasses
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


@dataclasses.dataclass
class Interruption:
    """`number`: of the signal that asked to end, or None."""

    number: int | None = None

    @property
    def asked(self) -> bool:
        return self.number is not None

    def stop(self, message: str) -> NoReturn:
        """Ends the command as the signal would: exit code 143 for SIGTERM, a KeyboardInterrupt for Ctrl-C."""
        if self.number == signal.SIGTERM:
            print(f"terminated; {message}", file=sys.stderr)
            raise SystemExit(128 + signal.SIGTERM)
        raise KeyboardInterrupt(message)


@contextmanager
def interruption() -> Iterator[Interruption]:
    """Within it the first signal is only noted; the second raises a KeyboardInterrupt.

    Only the main thread of a process gets signals; in others nothing is changed.
    """
    state = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield state
        return

    def note(number: int, _: object) -> None:
        again, state.number = state.asked, number
        if again:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield state
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
