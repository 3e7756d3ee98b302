"""The process that talks to object stores: `python -m patchloom.data.buckets.helper DESCRIPTOR SECONDS`.

It uses obstore, whose threads do not survive a fork, and training forks its workers. So a process that reads a bucket
starts this one (`objects`) and sends it requests through a pipe; it ends when the pipe does. A request is the name of a
method here with its arguments. The reply is ("ok", result), or ("error", kind, detail, address) where `kind` is a key
of `objects.ADVICE`.

obstore does not retry when a body ends early, so all retries are here: until the deadline of a request has passed.
"""

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import obstore
from obstore.store import HTTPStore, from_url

from patchloom.data.buckets.objects import REQUESTS_AT_ONCE, ObjectFacts, Span, put_rounds
from patchloom.machine import STOP_SIGNALS

T = TypeVar("T")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0  # between two attempts
_CONNECT_S, _SILENCE_S = 5.0, 10.0  # for a connection, and without a byte of a body, before an attempt has failed
_ATTEMPTS_PER_DEADLINE = 4  # that stall: a short deadline shortens both
_DETAIL_LETTERS = 200
# Words in a message of obstore → kind. The first that occurs counts.
_FINAL = (
    ("RequestTimeTooSkewed", "skewed"),
    ("ExpiredToken", "expired"),
    ("TokenRefreshRequired", "expired"),
    ("NoSuchBucket", "no bucket"),
    ("ContainerNotFound", "no bucket"),
    ("InvalidBucketName", "no bucket"),
    ("InvalidAccessKeyId", "denied"),
    ("SignatureDoesNotMatch", "denied"),
    ("401 Unauthorized", "denied"),
    ("403 Forbidden", "denied"),
    ("404 Not Found", "missing"),
    ("416 Range Not Satisfiable", "changed"),
    ("Received non-partial response", "no ranges"),
    ("Range request not supported", "no ranges"),
    ("PROPFIND", "no listing"),
    ("405 Method Not Allowed", "no listing"),
)
_UNREACHABLE = ("dns error", "tcp connect", "onnection refused", "unreachable", "HTTP connect", "No route")
_NO_CREDENTIALS = ("169.254.169.254", "metadata.google.internal", "metadata/computeMetadata")


class _FailedError(Exception):
    """A failure that no retry helps."""

    def __init__(self, kind: str, detail: str = "", url: str = "") -> None:
        super().__init__(detail)
        self.kind, self.detail, self.url = kind, detail, url


def serve(connection: Connection, deadline_s: float) -> None:
    """Reply to requests until the other end is closed."""
    stores = _Stores(deadline_s)
    operations: dict[str, Callable[..., Any]]
    operations = {
        "list_folder": stores.list_folder,
        "list_tree": stores.list_tree,
        "stat": stores.stat,
        "read": stores.read,
        "put": stores.put,
        "delete": stores.delete,
    }
    while True:
        try:
            name, *values = connection.recv()
        except EOFError:
            return
        try:
            reply: tuple[Any, ...] = ("ok", operations[name](*values))
        except _FailedError as failure:
            reply = ("error", failure.kind, failure.detail, failure.url)
        try:
            connection.send(reply)
        except OSError:  # the process that asked has ended
            return


class _Stores:
    """Operations on the objects of any bucket, each within the deadline."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._threads = ThreadPoolExecutor(REQUESTS_AT_ONCE)

    def list_folder(self, url: str) -> list[ObjectFacts]:
        """Return the objects directly below a folder."""

        def attempt(store: Any, path: str) -> Any:
            return obstore.list_with_delimiter(store, path.rstrip("/") or None)

        return _facts(url, self._retried(url, attempt)["objects"])

    def list_tree(self, url: str) -> list[ObjectFacts]:
        """Return the objects below a folder, at any depth."""

        def attempt(store: Any, path: str) -> Any:
            return [entry for entries in obstore.list(store, path.rstrip("/") or None) for entry in entries]

        return _facts(url, self._retried(url, attempt))

    def stat(self, url: str) -> ObjectFacts:
        """Return size and version of an object. Its first byte is read: only that reply says why access is denied."""
        meta = self._retried(url, lambda store, path: obstore.get(store, path, options={"range": (0, 1)}).meta)
        return ObjectFacts(url, meta["size"], _version(meta))

    def read(self, spans: Sequence[Span]) -> list[bytes]:
        """Return ranges of objects. Fails if one of these was replaced."""
        return list(self._threads.map(self._read_span, spans))

    def _read_span(self, span: Span) -> bytes:
        def attempt(store: Any, path: str) -> bytes:
            result = obstore.get(store, path, options={"range": (span.start, span.end)})
            if (result.meta["size"], _version(result.meta)) != (span.size, span.version):
                raise _FailedError("changed", url=span.url)
            data = bytes(result.bytes())
            if len(data) != span.end - span.start:
                raise OSError(f"{len(data):,} of {span.end - span.start:,} bytes")
            return data

        try:
            return self._retried(span.url, attempt)
        except _FailedError as failure:
            if failure.kind in ("missing", "no bucket"):
                raise _FailedError("gone", url=span.url) from failure
            raise

    def put(self, url: str, content: bytes | Path, create: bool) -> str:
        """Write an object, all of it or nothing, and return its version. With `create`, fail if one exists."""
        mode: Any = "create" if create else "overwrite"
        in_parts = isinstance(content, Path)

        def attempt(store: Any, path: str) -> str:
            return _tag(obstore.put(store, path, content, mode=mode, use_multipart=in_parts)["e_tag"])

        return self._retried(url, attempt, put_rounds(content))

    def delete(self, url: str) -> None:
        """Remove an object."""
        self._retried(url, obstore.delete)

    def _retried(self, url: str, attempt: Callable[[Any, str], T], rounds: int = 1) -> T:
        """Call `attempt` with the store and the path in it until it succeeds or the deadline has passed."""
        deadline = time.monotonic() + rounds * self._deadline_s
        pause = _FIRST_PAUSE_S
        root, path = _split(url)
        store = _open_store(root, self._deadline_s)
        while True:
            try:
                return attempt(store, path)
            except _FailedError:
                raise
            except Exception as error:  # obstore has a class per kind, but not for all that matter here
                failure = _failure(error, url)
                left = deadline - time.monotonic()
                if failure.kind not in ("failed", "unreachable") or left <= pause:
                    raise failure from error
            time.sleep(pause * random.uniform(0.5, 1))
            pause = min(2 * pause, _LONGEST_PAUSE_S)


def _failure(error: Exception, url: str) -> _FailedError:
    """Return what an error of obstore means."""
    text = str(error)
    detail = text.partition("\n\nDebug source")[0].replace("\n", " ")
    detail = detail.partition("Server returned ")[2] or detail.rpartition(": ")[2]
    detail = detail[:_DETAIL_LETTERS]
    if type(error).__name__ == "AlreadyExistsError":
        return _FailedError("exists", detail, url)
    for words, kind in _FINAL:
        if words.lower() in text.lower():
            return _FailedError(kind, detail, url)
    if isinstance(error, FileNotFoundError):
        return _FailedError("missing", detail, url)
    if any(words in text for words in _NO_CREDENTIALS):
        return _FailedError("no credentials", detail, url)
    return _FailedError("unreachable" if any(words in text for words in _UNREACHABLE) else "failed", detail, url)


def _split(url: str) -> tuple[str, str]:
    """Return the root of a bucket, such as s3://bucket, and the path in it."""
    scheme, _, rest = url.partition("://")
    bucket, _, path = rest.partition("/")
    return f"{scheme}://{bucket}", path


def _version(about: Any) -> str:
    """Return the ETag, which listings and replies of some stores quote differently, or else the time of the change."""
    return _tag(about["e_tag"]) or str(about["last_modified"].isoformat())


def _tag(tag: str | None) -> str:
    return (tag or "").removeprefix("W/").strip('"')


def _facts(url: str, entries: Sequence[Any]) -> list[ObjectFacts]:
    root = _split(url)[0]
    return [ObjectFacts(f"{root}/{entry['path']}", entry["size"], _version(entry)) for entry in entries]


@cache
def _open_store(root: str, deadline_s: float) -> Any:
    stalled_s = deadline_s / _ATTEMPTS_PER_DEADLINE
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or root
    options = {
        "allow_http": endpoint.startswith("http://") or os.environ.get("AWS_ALLOW_HTTP", "").lower() == "true",
        "connect_timeout": timedelta(seconds=min(_CONNECT_S, stalled_s)),
        "read_timeout": timedelta(seconds=min(_SILENCE_S, stalled_s)),
        "timeout": timedelta(seconds=deadline_s),
    }
    retries = {"max_retries": 0, "retry_timeout": timedelta(seconds=deadline_s)}
    try:
        if root.startswith("http"):
            return HTTPStore.from_url(root, client_options=options, retry_config=retries)  # type: ignore[arg-type]
        return from_url(root, client_options=options, retry_config=retries)  # type: ignore[call-overload]
    except Exception as error:
        raise _FailedError("unusable", str(error).partition("\n")[0][:_DETAIL_LETTERS], root) from error


def main() -> None:
    """Serve the process that started this one. Signals are for that process."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    descriptor, deadline_s = sys.argv[1:]
    serve(Connection(int(descriptor)), float(deadline_s))


if __name__ == "__main__":
    main()
