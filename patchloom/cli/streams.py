"""Signals and standard streams while a command runs.

A signal ends a command with one line and the exit code that a shell expects. Training catches the same signals while
it runs, to save first (`engine.signals`).

Names of files and classes are untrusted text. Control characters in anything that a verb prints are escaped here as
\\uXXXX, so that JSON stays valid and no name steers the terminal. Line ends stay; `printable` escapes those in names.
rich, which colors its own text, bypasses this. The first failed write is remembered.
"""

import errno
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from patchloom.machine import STOP_SIGNALS

PIPE_CLOSED, TERMINAL_CLOSED = 128 + 13, 128 + 1  # exit codes of SIGPIPE and SIGHUP, which Windows lacks
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


class StopRequested(BaseException):
    """Raised by a signal. It is not an `Exception`, so that guards against bad files let it through."""

    def __init__(self, number: int) -> None:
        self.exit_code = 128 + number
        super().__init__(f"stopped by {signal.Signals(number).name}; run the same command to resume")


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Raise StopRequested on a signal. A second Ctrl-C ends the process at once, and nohup is respected."""
    own = os.getpid()

    def leave(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        if os.getpid() != own:  # a forked child exits without a message
            os._exit(128 + number)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        raise StopRequested(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class WriteFailures:
    """The first failed write to standard output."""

    def __init__(self, *, terminal: bool = False) -> None:
        self.first: OSError | None = None
        self._terminal = terminal

    @property
    def closed(self) -> int | None:
        """The exit code for a closed pipe or terminal, which is not a failure; None for a real failure."""
        number = self.first.errno if self.first else None
        if number == errno.EPIPE or (sys.platform == "win32" and number == errno.EINVAL):
            return PIPE_CLOSED
        return TERMINAL_CLOSED if self._terminal and number == errno.EIO else None


class Stream:
    """A wrapper of a text stream that escapes control characters. rich writes to `rich_proxied_file` instead."""

    def __init__(self, inner: Any, failures: WriteFailures, *, escaped: bool = True) -> None:
        self._inner, self._failures, self._escaped = inner, failures, escaped
        if escaped:
            self.rich_proxied_file = Stream(inner, failures, escaped=False)

    def write(self, text: str) -> int:
        """Write text, escaped unless it comes from rich."""
        safe = _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text) if self._escaped else text
        try:
            self._inner.write(safe)
        except OSError as error:
            self._failures.first = self._failures.first or error
            raise
        return len(text)

    def flush(self) -> None:
        try:
            self._inner.flush()
        except OSError as error:
            self._failures.first = self._failures.first or error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@contextmanager
def watched_streams() -> Iterator[WriteFailures]:
    """Wrap both standard streams, and yield the failures of standard output."""
    failures, before = WriteFailures(terminal=sys.stdout.isatty()), (sys.stdout, sys.stderr)
    for stream in before:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names that are not UTF-8, terminals that are not
    sys.stdout, sys.stderr = Stream(before[0], failures), Stream(before[1], WriteFailures())
    try:
        yield failures
    finally:
        sys.stdout, sys.stderr = before
        try:
            sys.stdout.flush()
        except OSError as error:
            failures.first = failures.first or error
        if failures.first:
            # Python would try to write once more, and print an error, while it exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
