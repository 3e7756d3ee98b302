"""Requests to object stores, from any process: s3://, gs://, az:// and https://.

Each process has a helper process of its own for them (`helper` says why), started with the first request.
"""

import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from patchloom_runtime.errors import BucketError, UsageError
from patchloom_runtime.printable import printable

REQUESTS_AT_ONCE = 16
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
DEADLINE, _DEADLINE_S = "PATCHLOOM_BUCKET_TIMEOUT_S", 60.0  # shorter than a run waits for a worker
_BYTES_PER_DEADLINE = 32 << 20  # of an object that is written: a link of 4 Mbit/s reaches that in a minute
_GRACE_S = 15.0  # in which the helper itself reports a deadline that has passed
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_SERVICE_ACCOUNT",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}


class ObjectFacts(NamedTuple):
    """An object of a bucket."""

    url: str
    size: int
    version: str  # differs once the object was replaced


class Span(NamedTuple):
    """A range of an object, at the version that it had when it was opened."""

    url: str
    size: int  # of the object
    version: str
    start: int
    end: int


class MissingError(UsageError):
    """An object that does not exist."""


class ExistsError(UsageError):
    """An object that exists where one was to be created."""


class NoListingError(UsageError):
    """A server that cannot list its files."""


# Kind of failure → (class, what is wrong and what to do).
ADVICE: dict[str, tuple[type[UsageError] | type[BucketError], str]] = {
    "no bucket": (UsageError, "the bucket {bucket} does not exist; check its name, and the region and endpoint"),
    "missing": (MissingError, "does not exist; list the bucket to see what it holds"),
    "exists": (ExistsError, "exists already and is not replaced; write to another place"),
    "no listing": (
        NoListingError,
        "the server has no lists of files; name each file, or a pattern such as a-{{000..099}}.tar",
    ),
    "unusable": (UsageError, "cannot be opened ({detail}); check the address and {credentials}"),
    "denied": (BucketError, "access was denied; check {credentials}, and the rights of this account ({detail})"),
    "no credentials": (
        BucketError,
        "there are no credentials; set {credentials}, or AWS_SKIP_SIGNATURE=true for a public bucket",
    ),
    "expired": (BucketError, "the token has expired; get a new one and run the same command again"),
    "skewed": (BucketError, "the server refuses requests from a wrong time; set the clock of this machine"),
    "gone": (BucketError, "was removed after it was opened; put it back, or use other data"),
    "changed": (BucketError, "has changed since it was opened; run the command again to use the new one"),
    "no ranges": (BucketError, "the server ignores ranges and sends whole files; use one that supports them"),
    "unreachable": (BucketError, "no connection for {seconds:g} s ({detail}); check network and address"),
    "failed": (BucketError, "requests fail for {seconds:g} s ({detail}); run the same command again later"),
}  # fmt: skip


def list_folder(url: str) -> list[ObjectFacts]:
    """Return the objects directly below a folder, ordered by name."""
    return sorted(_request("list_folder", url))


def stat(url: str) -> ObjectFacts:
    """Return size and version of an object."""
    facts: ObjectFacts = _request("stat", url)
    return facts


def read_spans(spans: Sequence[Span]) -> list[bytes]:
    """Return ranges of objects, read at once. Raises BucketError if one of them has changed."""
    data: list[bytes] = _request("read", spans[0].url, list(spans)) if spans else []
    return data


def list_tree(url: str) -> list[ObjectFacts]:
    """Return the objects below a folder, at any depth, ordered by name."""
    return sorted(_request("list_tree", url))


def put(url: str, content: bytes | Path, *, create: bool = True) -> bool:
    """Write an object, all of it or nothing. Return False if one exists already, unless it may be replaced."""
    try:
        put_version(url, content, create=create)
    except ExistsError:
        return False
    return True


def put_version(url: str, content: bytes | Path, *, create: bool) -> str:
    """Write an object as `put` does, and return its version ("" if the server states none). Raises ExistsError."""
    version: str = _request("put", url, content, create)
    return version


def delete(url: str) -> None:
    """Remove an object, if there is one."""
    with suppress(MissingError):
        _request("delete", url)


def put_rounds(content: bytes | Path) -> int:
    """Return how many deadlines the writing of an object may take, by its size."""
    return 1 + (content.stat().st_size if isinstance(content, Path) else len(content)) // _BYTES_PER_DEADLINE


def deadline_s() -> float:
    """Return the seconds after which a request has failed, with all its retries."""
    text = os.environ.get(DEADLINE, "")
    try:
        seconds = float(text or _DEADLINE_S)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 86_400:
        raise UsageError(f"{DEADLINE} is {text!r}; expected a number of seconds above 0")
    return seconds


class _Helper:
    """The helper process, and the pipe to it."""

    def __init__(self) -> None:
        ours, theirs = Pipe()
        self.connection: Connection = ours
        self.deadline_s = deadline_s()
        command = [sys.executable, "-m", "patchloom.data.buckets.helper", str(theirs.fileno()), str(self.deadline_s)]
        paths = os.pathsep.join(path for path in sys.path if path)
        with theirs:
            self.process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": paths},
                start_new_session=True,
            )

    def ask(self, name: str, *values: Any) -> tuple[Any, ...]:
        """Return the reply. Raise EOFError if the helper has ended, or does not reply in time."""
        rounds = 1  # each of at most one deadline
        if name == "read":
            rounds += len(values[-1]) // REQUESTS_AT_ONCE
        elif name == "put":
            rounds = put_rounds(values[1])
        try:
            self.connection.send((name, *values))
            if self.connection.poll(rounds * self.deadline_s + _GRACE_S):
                reply: tuple[Any, ...] = self.connection.recv()
                return reply
        except OSError as error:
            raise EOFError from error
        raise EOFError

    def close(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.wait()


_helper: _Helper | None = None
_lock = threading.Lock()


def _forget_helper() -> None:
    """Leave the helper to the process that started it; this one was forked from it."""
    global _helper, _lock
    if _helper is not None:
        with suppress(OSError):
            _helper.connection.close()
        _helper.process.returncode = 0  # not a child of this process, which must not wait for it
    _helper, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_forget_helper)


def end_helper() -> None:
    """End the helper of this process. The next request starts another, with the environment of then."""
    global _helper
    with _lock:
        if _helper is not None:
            _helper.close()
        _helper = None


def _request(name: str, url: str, *values: Any) -> Any:
    global _helper
    _check(url)
    with _lock:
        if _helper is None:
            _helper = _Helper()
        try:
            kind, *reply = _helper.ask(name, *values) if name == "read" else _helper.ask(name, url, *values)
        except EOFError:
            seconds = _helper.deadline_s
            _helper.close()
            _helper = None
            raise BucketError(
                f"{printable(url)}: the process that reads buckets ended, or did not reply for {seconds:g} s; run the "
                "same command again"
            ) from None
        except BaseException:  # interrupted: the reply to this request would be taken for that to the next
            _helper.close()
            _helper = None
            raise
        seconds = _helper.deadline_s
    if kind == "ok":
        return reply[0]
    raise _error(reply[0], reply[1], reply[2], seconds)


def _check(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme == "http" and parts.hostname not in _LOOPBACK:
        raise UsageError(f"{printable(url)}: not encrypted; use https://")
    if importlib.util.find_spec("obstore") is None:
        raise UsageError(f"{printable(url)}: reading buckets needs obstore; pip install 'patchloom[buckets]'")


def _error(kind: str, detail: str, url: str, seconds: float) -> UsageError | BucketError:
    scheme, _, rest = url.partition("://")
    cls, text = ADVICE[kind]
    facts = {
        "bucket": printable(rest.partition("/")[0]),
        "detail": printable(detail),
        "seconds": seconds,
        "credentials": _CREDENTIALS.get(scheme, "the address"),
    }
    return cls(f"{printable(url)}: {text.format(**facts)}")
