"""What a command says, and where: results on stdout, the rest beside them, on stderr, or nowhere.

With --json stdout holds one JSON value and everything else goes to stderr; with --quiet only results and errors are
left. That holds for whatever the stages print, because it is done here, once, around every verb.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any, TextIO


@dataclass
class _Manner:
    quiet: bool = False
    verbose: bool = False
    stdout: TextIO | None = None  # where results go while `sys.stdout` is turned elsewhere


_manner = _Manner()


def configure(*, quiet: bool = False, verbose: bool = False) -> None:
    """Say how much is told from now on; what was asked for before stays."""
    from patchloom_runtime.errors import UsageError

    _manner.quiet, _manner.verbose = _manner.quiet or quiet, _manner.verbose or verbose
    if _manner.quiet and _manner.verbose:
        reset()
        raise UsageError("--quiet and --verbose do not go together; leave one out")


def reset() -> None:
    """Begin a command with nothing asked for."""
    _manner.quiet = _manner.verbose = False


def is_quiet() -> bool:
    """Whether only results and errors are wanted."""
    return _manner.quiet


def is_verbose() -> bool:
    """Whether tracebacks and everything that is usually shortened are wanted."""
    return _manner.verbose


def shortened(usual: int) -> int | None:
    """How many of a list are shown: as many as usual, or with --verbose all (None)."""
    return None if _manner.verbose else usual


@contextmanager
def only_results(*, as_json: bool) -> Iterator[None]:
    """Inside, what is printed the ordinary way keeps away from the results where those must stand alone."""
    if not (as_json or _manner.quiet):
        yield
        return
    with ExitStack() as stack:
        _manner.stdout = sys.stdout
        stack.callback(setattr, _manner, "stdout", None)
        if _manner.quiet:
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        else:
            stack.enter_context(redirect_stdout(sys.stderr))
        yield


def results() -> TextIO:
    """The stream of results."""
    return _manner.stdout or sys.stdout


def print_result(text: object) -> None:
    """A line of what the command was called for."""
    print(text, file=results(), flush=True)


def print_json(value: Any) -> None:
    """The one JSON value of a command."""
    print_result(json.dumps(value, indent=2, ensure_ascii=_is_ascii(results())))


def _is_ascii(file: TextIO) -> bool:
    """Whether a stream might not take every letter; JSON has a way to write those."""
    return (file.encoding or "").lower().replace("-", "") != "utf8"


class JsonList:
    """A JSON list that is written item by item, each on a line of its own, so that it may be long or come slowly."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._file, self._begun = file or results(), False

    def add(self, item: Any) -> None:
        """Write one item now."""
        mark, self._begun = "," if self._begun else "[", True
        print(f"{mark}{json.dumps(item, ensure_ascii=_is_ascii(self._file))}", file=self._file, flush=True)

    def close(self) -> None:
        """Write the end. After an error it is left out, so that half a list is not taken for a whole one."""
        print("]" if self._begun else "[]", file=self._file, flush=True)
