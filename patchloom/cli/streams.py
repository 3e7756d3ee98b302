"""Standard output and error while a command runs: nothing printed steers the terminal, nothing is lost unnoticed.

Names of files and classes are a stranger's words. Whatever a verb prints, control characters in it are escaped here,
in the form JSON has for them, so that JSON stays what it is. Line ends stay: a name with one is escaped where it is
printed (`printable`). rich, which colours its own text, writes past this. What could not be written is remembered.
"""

import errno
import io
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ACTING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


class Failures:
    """The first thing that could not be written to standard output."""

    def __init__(self, *, terminal: bool = False) -> None:
        self.first: OSError | None = None
        self._terminal = terminal

    @property
    def nobody_reads(self) -> signal.Signals | None:
        """What tells of a closed pipe or terminal, which is no failure; None where it was one."""
        if isinstance(self.first, BrokenPipeError):
            return signal.SIGPIPE
        closed = self._terminal and self.first is not None and self.first.errno == errno.EIO
        return signal.SIGHUP if closed else None


class Stream:
    """A text stream as another; `rich_proxied_file` is where rich writes instead, by its own convention."""

    def __init__(self, inner: Any, failures: Failures, *, escaped: bool = True) -> None:
        self._inner, self._failures, self._escaped = inner, failures, escaped
        if escaped:
            self.rich_proxied_file = Stream(inner, failures, escaped=False)

    def write(self, text: str) -> int:
        """Write; what is not rich's own is escaped."""
        shown = _ACTING.sub(lambda match: f"\\u{ord(match[0]):04x}", text) if self._escaped else text
        try:
            self._inner.write(shown)
        except OSError as error:
            self._failures.first = self._failures.first or error
            raise
        return len(text)

    def flush(self) -> None:
        """Flush."""
        try:
            self._inner.flush()
        except OSError as error:
            self._failures.first = self._failures.first or error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@contextmanager
def watched() -> Iterator[Failures]:
    """Inside, both standard streams are looked after; what standard output refused is known at the end."""
    failures, before = Failures(terminal=sys.stdout.isatty()), (sys.stdout, sys.stderr)
    for stream in before:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names that are not UTF-8, terminals that are not
    sys.stdout, sys.stderr = Stream(before[0], failures), Stream(before[1], Failures())
    try:
        yield failures
    finally:
        sys.stdout, sys.stderr = before
        try:
            sys.stdout.flush()
        except OSError as error:
            failures.first = failures.first or error
        if failures.first:
            # Python would try once more, and complain, while it ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
