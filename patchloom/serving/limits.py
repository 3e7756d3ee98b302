"""How much a server takes: of one request, of one client, and of all together."""

from dataclasses import dataclass

from patchloom.errors import UsageError


@dataclass(frozen=True)
class Limits:
    """What `patchloom serve` can be told; the rest are constants below."""

    queue: int = 64  # pictures or lines that may wait; one more is refused
    batch: int = 8  # of them answered together
    wait_seconds: float = 0.002  # how long a free model waits for others to join a batch
    deadline_seconds: float = 30.0  # from the end of the upload to the answer
    body_bytes: int = 20_000_000  # of one request
    pixels: int = 25_000_000  # of one picture: those of every command
    upload_seconds: float = 10.0  # that a body may take, beside what BYTES_PER_SECOND allow it
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
BYTES_PER_SECOND = 20_000  # a client that sends less for longer than `upload_seconds` is cut
HEADER_BYTES = 64 << 10
UNREAD_SECONDS = 10  # how long an answer may lie at a client that does not read it
CONNECTIONS = 1024  # at once; further ones wait in the system's queue
