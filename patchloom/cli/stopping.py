"""A command that is told to stop leaves with one line and the exit code a shell expects, wherever it is.

Training catches the same signals while it runs, to save first (`engine.signals`).
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequested(BaseException):
    """Raised by a signal. No `Exception`: guards against bad files must let it through."""

    def __init__(self, number: int) -> None:
        self.exit_code = 128 + number
        super().__init__(f"stopped by {signal.Signals(number).name}; run the same command to resume")


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Signals raise ToldToStop inside; a second Ctrl-C ends the process at once, and nohup is respected."""
    own = os.getpid()

    def leave(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        if os.getpid() != own:  # a process this one started has nothing to say
            os._exit(128 + number)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        raise StopRequested(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
