"""How much a server takes: of one request, of one client, and of all together."""

from dataclasses import dataclass

from patchloom_runtime.errors import UsageError


@dataclass(frozen=True)
class Limits:
    """What `patchloom serve` can be told; the rest are constants below."""

    queue: int = 64  # images or lines that may wait; one more is refused
    batch: int = 8  # of them answered together
    wait_seconds: float = 0.002  # how long a free model waits for others to join a batch
    deadline_seconds: float = 30.0  # from the end of the upload to the answer
    body_bytes: int = 20_000_000  # of one request
    pixels: int = 25_000_000  # of one picture: those of every command
    upload_seconds: float = 10.0  # grace period of BYTES_PER_SECOND: the longest pause of a client that sends a body
    header_seconds: float = 5.0  # from the connection, or the last answer, to the end of the next request's headers

    def __post_init__(self) -> None:
        for name, least in (("queue", 1), ("batch", 1), ("body_bytes", 1), ("pixels", 16)):
            if getattr(self, name) < least:
                raise UsageError(f"{name} is {getattr(self, name)}, expected at least {least}")
        for name in ("deadline_seconds", "upload_seconds", "header_seconds"):
            if getattr(self, name) <= 0:
                raise UsageError(f"{name} is {getattr(self, name):g}, expected more than 0")

    @property
    def held_bytes(self) -> int:
        """Of all bodies in memory together, so that many large uploads cannot take all of it."""
        return max(256 << 20, 2 * self.body_bytes)


INPUTS = 16  # pictures or lines of one request
LINE_CHARACTERS = 5_000  # of one line to translate
SLOWDOWN = 3  # what is accepted is in time even where the model becomes so many times slower
QUEUE_SECONDS = 3.0  # expected wait beyond which a request is refused where each model process has its next batch
BYTES_PER_SECOND = 20_000  # a client that falls behind this rate by more than `upload_seconds` is cut
UPLOADS = 1024  # bodies that are read at once, and at most half of the connections
SECONDS_BEHIND = 1.0  # behind BYTES_PER_SECOND, after which a body is cut where others need its slot
UNREAD_GRACE_SECONDS = 2.0  # the same for a refused body, which is read so that its client reads the answer
HEADER_BYTES = 64 << 10
UNREAD_SECONDS = 10  # how long an answer may lie at a client that does not read it
CONNECTIONS = 4096  # at once, where the system allows as many open files; further ones wait in its queue
BACKLOG = 1024  # length of that queue
RESERVED_FILES = 64  # open files that are no connections
