"""Stop when told to: finish the step, save, leave with the exit code a shell expects."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from patchloom.errors import PatchloomError

CAUGHT = (signal.SIGTERM, signal.SIGINT)


class Stopped(PatchloomError):  # noqa: N818 - nothing went wrong
    """A run that was told to stop, after it was saved. `exit_code` is 143 for SIGTERM, 130 for Ctrl-C."""

    def __init__(self, number: int, step: int, total: int, saved: bool) -> None:
        self.exit_code = 128 + number
        then = "saved. The same command goes on from there." if saved else "nothing was saved: no folder was given."
        super().__init__(f"Stopped by {signal.Signals(number).name} after step {step} of {total}; {then}")


@dataclass
class Caught:
    """The signal that arrived, or 0."""

    number: int = 0


@contextmanager
def caught_signals() -> Iterator[Caught]:
    """Note SIGTERM and SIGINT instead of dying of them; a second SIGINT ends the process at once."""
    caught = Caught()

    def note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        caught.number = number
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    if threading.current_thread() is not threading.main_thread():
        # Python hands signals to the main thread alone.
        yield caught
        return
    before = {number: signal.getsignal(number) for number in CAUGHT}
    try:
        for number in CAUGHT:
            signal.signal(number, note)
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
