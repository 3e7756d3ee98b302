"""Stop when told to: finish the step, save, leave with the exit code a shell expects."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from patchloom.errors import PatchloomError, ResourceError

CAUGHT = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stopped(PatchloomError):  # noqa: N818 - nothing went wrong
    """A run that was told to stop, after it was saved. `exit_code`: SIGTERM 143, Ctrl-C 130, a closed terminal 129."""

    def __init__(self, number: int, step: int, total: int, saved: bool) -> None:
        self.exit_code = 128 + number
        then = "saved. The same command goes on from there." if saved else "nothing was saved: no folder was given."
        super().__init__(f"Stopped by {signal.Signals(number).name} after step {step} of {total}; {then}")


@dataclass
class Caught:
    """The signal that arrived, or 0, and whether the loop waits for data."""

    number: int = 0
    waiting: bool = False


@contextmanager
def caught_signals() -> Iterator[Caught]:
    """Note these signals instead of dying of them; a second SIGINT ends the process at once."""
    caught = Caught()

    def note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        caught.number = number
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        # The workers may die of the same signal, for which torch raises at any place, even while the run is saved.
        signal.signal(signal.SIGCHLD, end_wait)

    def end_wait(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        if caught.waiting:
            raise ResourceError("A worker that prepares pictures stopped.")

    if threading.current_thread() is not threading.main_thread():
        # Python hands signals to the main thread alone.
        yield caught
        return
    before = {number: signal.getsignal(number) for number in CAUGHT}
    if before[signal.SIGHUP] == signal.SIG_IGN:
        del before[signal.SIGHUP]  # nohup: the run outlives its terminal
    try:
        for number in before:
            signal.signal(number, note)
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
