"""Stop when told to: finish the step, save, leave with the exit code a shell expects."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from patchloom_runtime.errors import PatchloomError

CAUGHT = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stopped(PatchloomError):  # noqa: N818 - nothing went wrong
    """A run that was told to stop, after it was saved. `exit_code`: SIGTERM 143, Ctrl-C 130, a closed terminal 129."""

    def __init__(self, number: int, step: int, total: int, saved: bool) -> None:
        self.exit_code = 128 + number
        then = "saved. The same command resumes from there." if saved else "nothing was saved: no folder was given."
        super().__init__(f"Stopped by {signal.Signals(number).name} after step {step} of {total}; {then}")


class Interrupted(BaseException):
    """Raised by a signal in what may be given up. No `Exception`: guards against bad files must let it through."""


@dataclass
class CaughtSignal:
    """The signal that arrived, or 0."""

    number: int = 0
    _raises: bool = False

    @contextmanager
    def giving_up(self) -> Iterator[None]:
        """What changes nothing of the run is done inside, and given up when a signal comes."""
        self._raises = True
        try:
            self.check()
            yield
        finally:
            self._raises = False

    def check(self) -> None:
        """Leave with `GivenUp` where a signal came and that may be."""
        if self._raises and self.number:
            raise Interrupted


@contextmanager
def caught_signals() -> Iterator[CaughtSignal]:
    """Note these signals instead of dying of them; a second SIGINT ends the process at once."""
    caught = CaughtSignal()

    def note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        caught.number = number
        # torchrun sends its ranks a Ctrl-C that the terminal has sent them already.
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        caught.check()

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
