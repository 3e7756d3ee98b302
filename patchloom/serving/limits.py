"""Limits of a server: per request, per client, and for all clients together."""

from dataclasses import dataclass
from http import HTTPStatus

from starlette.exceptions import HTTPException

from patchloom_runtime.errors import UsageError


@dataclass(frozen=True)
class Limits:
    """Limits that options of `patchloom serve` set; the constants below are fixed."""

    queue: int = 64  # images or lines that may wait; further ones are refused
    batch: int = 8  # images or lines per batch
    wait_seconds: float = 0.002  # how long a free model process waits for a batch to fill
    deadline_seconds: float = 30.0  # from the end of the upload to the response
    body_bytes: int = 20_000_000  # per request
    pixels: int = 25_000_000  # per image; the same in every command
    upload_seconds: float = 10.0  # grace period of BYTES_PER_SECOND: the longest pause while a client sends a body
    header_seconds: float = 5.0  # from the connection, or the last response, to the end of the next headers

    def __post_init__(self) -> None:
        for name, least in (("queue", 1), ("batch", 1), ("body_bytes", 1), ("pixels", 16)):
            if getattr(self, name) < least:
                raise UsageError(f"{name} is {getattr(self, name)}, expected at least {least}")
        for name in ("deadline_seconds", "upload_seconds", "header_seconds"):
            if getattr(self, name) <= 0:
                raise UsageError(f"{name} is {getattr(self, name):g}, expected more than 0")

    @property
    def held_bytes(self) -> int:
        """Memory for all request bodies together, so that many large uploads cannot exhaust it."""
        return max(256 << 20, 2 * self.body_bytes)


INPUTS = 16  # images or lines per request
LINE_CHARACTERS = 5_000  # per line to translate
SLOWDOWN = 3  # accepted requests meet their deadline even if the model becomes this many times slower
QUEUE_SECONDS = 3.0  # expected wait above which a request is refused, once every model process has its next batch
BYTES_PER_SECOND = 20_000  # a client that falls behind this rate by more than `upload_seconds` is cut off
UPLOADS = 1024  # bodies read at the same time; at most half of the connections
SECONDS_BEHIND = 1.0  # lag behind BYTES_PER_SECOND from which a body is cut off if another needs its slot
UNREAD_GRACE_SECONDS = 2.0  # grace period of a refused body, which is read so that its client reads the response
HEADER_BYTES = 64 << 10
UNREAD_SECONDS = 10  # how long a response may stay unread by its client
CONNECTIONS = 4096  # open at the same time, if the system allows as many open files; further ones wait in its queue
BACKLOG = 1024  # length of that queue
RESERVED_FILES = 64  # open files that are not connections


def overloaded(reason: str, retry_seconds: int) -> HTTPException:
    """Return the refusal of a valid request that may be retried."""
    return HTTPException(
        HTTPStatus.SERVICE_UNAVAILABLE, f"{reason}; try again in {retry_seconds} s", {"Retry-After": str(retry_seconds)}
    )
