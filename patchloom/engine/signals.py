"""Stopping by a signal: finish the step, save, and exit with the code that a shell expects."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from patchloom.machine import STOP_SIGNALS
from patchloom_runtime.errors import PatchloomError


class Stopped(PatchloomError):  # noqa: N818 - not an error
    """Raised after a signal stopped the run. `exit_code` is 143 for SIGTERM, 130 for Ctrl-C, 129 for SIGHUP."""

    def __init__(self, number: int, step: int, total: int, saved: bool) -> None:
        self.exit_code = 128 + number
        then = "saved. The same command resumes from there." if saved else "nothing was saved: no folder was given."
        super().__init__(f"Stopped by {signal.Signals(number).name} after step {step} of {total}; {then}")


class Interrupted(BaseException):
    """Raised by a signal inside `interruptible`. Not an `Exception`, so that handlers for bad files let it through."""


@dataclass
class CaughtSignal:
    """The number of the signal that arrived, or 0."""

    number: int = 0
    _raises: bool = False

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Raise Interrupted inside this context when a signal arrives. Only for code that does not change the run."""
        self._raises = True
        try:
            self.check()
            yield
        finally:
            self._raises = False

    def check(self) -> None:
        """Raise Interrupted if a signal has arrived and the code is interruptible."""
        if self._raises and self.number:
            raise Interrupted


@contextmanager
def caught_signals() -> Iterator[CaughtSignal]:
    """Record these signals instead of being killed by them. A second SIGINT ends the process at once."""
    caught = CaughtSignal()

    def handle(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        caught.number = number
        # torchrun repeats to its ranks a Ctrl-C that the terminal has already sent them.
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        caught.check()

    if threading.current_thread() is not threading.main_thread():
        # Python delivers signals to the main thread only.
        yield caught
        return
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    if hasattr(signal, "SIGHUP") and before[signal.SIGHUP] == signal.SIG_IGN:
        del before[signal.SIGHUP]  # nohup: the run survives its terminal
    try:
        for number in before:
            signal.signal(number, handle)
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
