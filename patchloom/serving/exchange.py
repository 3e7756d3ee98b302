"""One HTTP exchange: the body read within its limits of size and time, the answer sent, the rest of the body drained.

This is ASGI, so any server of that interface can stand in front of it.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, TypeAlias

from patchloom.serving.admission import Admission
from patchloom.serving.limits import UNREAD_GRACE_SECONDS, UNREAD_SECONDS, Limits
from patchloom.serving.refusals import Refused, overloaded
from patchloom.serving.uploads import Upload, paced

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

JSON = "application/json"
_ALWAYS = [(b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store")]
_MOST_DRAINED = 64 << 20  # bytes of a refused body that are read, so that its client gets to read the answer


@dataclass(frozen=True)
class Response:
    """What a client is told."""

    status: int = HTTPStatus.OK
    body: bytes = b""
    kind: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict)


def json_response(value: Any, status: int = HTTPStatus.OK, headers: Mapping[str, str] | None = None) -> Response:
    """A value as JSON."""
    return Response(status, json.dumps(value).encode(), JSON, headers or {})


def refusal(refused: Refused) -> Response:
    """The reason as JSON."""
    return json_response({"error": refused.reason}, refused.status, refused.headers)


class Exchange:
    """A request and the way back to its client."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: Limits) -> None:
        self.method, self.path = str(scope["method"]), str(scope["path"])
        self.query: bytes = scope.get("query_string", b"")
        self.seconds: dict[str, float] = {}  # of waiting, by reason
        self.began = time.monotonic()
        self._headers: list[tuple[bytes, bytes]] = list(scope["headers"])  # names in lower case, as ASGI has them
        self._receive, self._send, self._limits = receive, send, limits
        self._unread = True

    def header(self, name: str) -> str:
        """Its value, '' where it was not sent; the last of several."""
        return next(iter(reversed(self.headers(name))), "")

    def headers(self, name: str) -> list[str]:
        """All of its values."""
        return [bytes(value).decode("latin-1") for each, value in self._headers if each == name.encode()]

    @property
    def kind(self) -> str:
        """The type of the body, without parameters."""
        return self.header("content-type").partition(";")[0].strip().lower()

    async def body(self, admission: Admission) -> bytes:
        """The whole body; the caller gives its bytes back to `admission.held_bytes`."""
        limit = self._limits.body_bytes
        told = self.header("content-length")
        if told.isdecimal() and int(told) > limit:
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body has {told} bytes, at most {limit:,} are read")
        parts: list[bytes] = []
        try:
            async with admission.uploads.slot(self._limits.upload_seconds) as upload:
                await self._read(parts, upload, admission)
        except BaseException as error:
            size = sum(map(len, parts))
            admission.held_bytes -= size
            if isinstance(error, TimeoutError):
                seconds = time.monotonic() - self.began
                reason = f"only {size} bytes of the body came within {seconds:.1f} s"
                raise Refused(HTTPStatus.REQUEST_TIMEOUT, reason) from None
            raise
        self._unread = False
        self.seconds["upload"] = time.monotonic() - self.began
        return b"".join(parts)

    async def _read(self, parts: list[bytes], upload: Upload, admission: Admission) -> None:
        """Add the parts of the body to `parts` and to `admission.held_bytes`."""
        limit = self._limits.body_bytes
        size, more = 0, True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Refused(HTTPStatus.BAD_REQUEST, "the body ended before its end")
            part, more = message.get("body", b""), bool(message.get("more_body"))
            size += len(part)
            if size > limit:
                reason = f"the body has more than the {limit:,} bytes that are read"
                raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, reason)
            upload.received(len(part))
            admission.held_bytes += len(part)
            parts.append(part)
            if admission.held_bytes > self._limits.held_bytes:
                raise overloaded("others are uploading as much as there is memory for", 1)

    async def respond(self, response: Response) -> None:
        """Answer; then take what the client still sends, for a while, since one that cannot send does not read."""
        refused_unread = self._unread and self.method not in ("GET", "HEAD")
        headers = {"Content-Type": response.kind, "Content-Length": str(len(response.body)), **response.headers}
        if refused_unread:
            headers["Connection"] = "close"
        if self.seconds:
            timing = (f"{reason};dur={1000 * seconds:.1f}" for reason, seconds in self.seconds.items())
            headers["Server-Timing"] = ", ".join(timing)
        encoded = [(name.lower().encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
        body = b"" if self.method == "HEAD" else response.body
        await self._send({"type": "http.response.start", "status": int(response.status), "headers": _ALWAYS + encoded})
        await self._send({"type": "http.response.body", "body": body})
        if refused_unread:
            await self._drain()

    async def _drain(self) -> None:
        size = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(UNREAD_SECONDS), paced(UNREAD_GRACE_SECONDS) as upload:
                while size < _MOST_DRAINED:
                    message = await self._receive()
                    part = message.get("body", b"")
                    size += len(part)
                    upload.received(len(part))
                    if message["type"] != "http.request" or not message.get("more_body"):
                        return
