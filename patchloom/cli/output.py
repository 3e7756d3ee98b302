"""Where a command prints: results go to stdout, everything else to stdout, stderr or nowhere.

With --json, stdout holds one JSON value and everything else goes to stderr. With --quiet only results and errors are
printed. Both hold for all that the stages print, because the streams are redirected here, around every verb.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from patchloom_runtime.errors import UsageError


@dataclass
class _Verbosity:
    quiet: bool = False
    verbose: bool = False
    stdout: TextIO | None = None  # the stream of results while `sys.stdout` is redirected


_verbosity = _Verbosity()


def configure(*, quiet: bool = False, verbose: bool = False) -> None:
    """Set --quiet or --verbose for this command. Options that were set before stay set."""
    _verbosity.quiet, _verbosity.verbose = _verbosity.quiet or quiet, _verbosity.verbose or verbose
    if _verbosity.quiet and _verbosity.verbose:
        reset()
        raise UsageError("--quiet and --verbose cannot be used together; drop one")


def reset() -> None:
    """Clear --quiet and --verbose before the next command."""
    _verbosity.quiet = _verbosity.verbose = False


def is_quiet() -> bool:
    """Return whether only results and errors are printed."""
    return _verbosity.quiet


def is_verbose() -> bool:
    """Return whether tracebacks and whole lists are printed."""
    return _verbosity.verbose


def shortened(usual: int) -> int | None:
    """Return the number of list items to print: `usual`, or None (all) with --verbose."""
    return None if _verbosity.verbose else usual


@contextmanager
def only_results(*, as_json: bool) -> Iterator[None]:
    """Redirect ordinary prints away from the results, with --json or --quiet."""
    if not (as_json or _verbosity.quiet):
        yield
        return
    with ExitStack() as stack:
        _verbosity.stdout = sys.stdout
        stack.callback(setattr, _verbosity, "stdout", None)
        if _verbosity.quiet:
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        else:
            stack.enter_context(redirect_stdout(sys.stderr))
        yield


def results() -> TextIO:
    """Return the stream of results."""
    return _verbosity.stdout or sys.stdout


def print_result(text: object) -> None:
    """Print one line of the result."""
    print(text, file=results(), flush=True)


def print_json(value: Any) -> None:
    """Print the one JSON value of a command."""
    print_result(json.dumps(value, indent=2, ensure_ascii=_is_ascii(results())))


def _is_ascii(file: TextIO) -> bool:
    """Return whether a stream may refuse some characters, so that JSON must escape them."""
    return (file.encoding or "").lower().replace("-", "") != "utf8"


class JsonList:
    """A JSON list that is written item by item, one per line, so that it may be long or arrive slowly."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._file, self._begun = file or results(), False

    def add(self, item: Any) -> None:
        """Write one item now."""
        mark, self._begun = "," if self._begun else "[", True
        print(f"{mark}{json.dumps(item, ensure_ascii=_is_ascii(self._file))}", file=self._file, flush=True)

    def close(self) -> None:
        """Write the closing bracket. It is omitted after an error, so that a partial list is not valid JSON."""
        print("]" if self._begun else "[]", file=self._file, flush=True)


def refuse_inside(target: Path, *data: str, what: str = "page") -> None:
    """Raise UsageError if a file that a command writes would lie in the data, which are never written to."""
    from patchloom.data.sources.specs import split_specs

    for part in [part for one in data if one for part in split_specs(one)]:
        folder = Path(part).expanduser()
        if folder.is_dir() and target.resolve().is_relative_to(folder.resolve()):
            raise UsageError(f"the {what} {target} would lie in the data; choose a path outside {part}")
