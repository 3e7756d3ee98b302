"""One HTTP request and its response, on top of Starlette's objects.

Starlette reads a body without a minimum rate and without a limit for all clients together, and does not drain the body
of a refused request; `Exchange` does.
"""

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import aclosing, suppress
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from patchloom.serving.admission import Admission
from patchloom.serving.limits import UNREAD_GRACE_SECONDS, UNREAD_SECONDS, overloaded
from patchloom.serving.uploads import Upload, paced
from patchloom_runtime.errors import shortened
from patchloom_runtime.printable import printable

_COMMON_HEADERS = [(b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store")]
_DRAINED_BYTES = 64 << 20  # of a refused body, at most


class AsciiJSONResponse(JSONResponse):
    """JSON in ASCII, since file names may hold lone surrogates, which UTF-8 cannot encode."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode()


def error_response(error: HTTPException) -> AsciiJSONResponse:
    """Return `{"error": REASON}`, with the reason on one printable line whatever the client sent."""
    return AsciiJSONResponse({"error": shortened(printable(error.detail))}, int(error.status_code), error.headers)


class Exchange:
    """A request body read within its limits, and a response with common headers; `count` gets its status once."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, count: Callable[[int], None] = lambda _status: None
    ) -> None:
        self.wait_seconds: dict[str, float] = {}  # by reason
        self.began = time.monotonic()
        self._request, self._receive, self._send, self._count = Request(scope, receive), receive, send, count
        self.has_responded = False
        self._is_head = scope["method"] == "HEAD"
        self._is_unread = scope["method"] not in ("GET", "HEAD")

    async def read_body(self, admission: Admission) -> bytes:
        """Return the whole body; the caller subtracts its size from `admission.held_bytes` when it is done."""
        limit = admission.limits.body_bytes
        length = self._request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > limit:
            reason = f"the body has {length} bytes, the limit is {limit:,}"
            raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, reason)
        parts: list[bytes] = []
        try:
            async with admission.uploads.slot(admission.limits.upload_seconds) as upload:
                await self._read_parts(parts, upload, admission)
        except BaseException as error:
            size = sum(map(len, parts))
            admission.held_bytes -= size
            if isinstance(error, TimeoutError):
                reason = f"only {size} bytes of the body arrived within {time.monotonic() - self.began:.1f} s"
                raise HTTPException(HTTPStatus.REQUEST_TIMEOUT, reason) from None
            if isinstance(error, ClientDisconnect):
                raise HTTPException(HTTPStatus.BAD_REQUEST, "the request body is incomplete") from None
            raise
        self._is_unread = False
        self.wait_seconds["upload"] = time.monotonic() - self.began
        return b"".join(parts)

    async def _read_parts(self, parts: list[bytes], upload: Upload, admission: Admission) -> None:
        limits, size = admission.limits, 0
        async with aclosing(self._request.stream()) as stream:
            async for part in stream:
                size += len(part)
                if size > limits.body_bytes:
                    reason = f"the body has more than {limits.body_bytes:,} bytes, the limit"
                    raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, reason)
                upload.received(len(part))
                admission.held_bytes += len(part)
                parts.append(part)
                if admission.held_bytes > limits.held_bytes:
                    raise overloaded("the memory for uploads is in use", 1)

    async def send(self, message: Message) -> None:
        """Send a message of the response with the common headers; HEAD gets no body."""
        if message["type"] == "http.response.start":
            headers = [*_COMMON_HEADERS, *message["headers"]]
            if self._is_unread:
                headers.append((b"connection", b"close"))
            if self.wait_seconds:
                timing = (f"{reason};dur={1000 * seconds:.1f}" for reason, seconds in self.wait_seconds.items())
                headers.append((b"server-timing", ", ".join(timing).encode()))
            self.has_responded = True
            self._count(message["status"])
            message = {**message, "headers": headers}
        elif self._is_head:
            message = {**message, "body": b""}
        await self._send(message)

    async def drain(self) -> None:
        """Read what is left of a refused body for a while: a client that cannot send does not read the response."""
        if not self._is_unread:
            return
        size = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(UNREAD_SECONDS), paced(UNREAD_GRACE_SECONDS) as upload:
                while size < _DRAINED_BYTES:
                    message = await self._receive()
                    part = message.get("body", b"")
                    size += len(part)
                    upload.received(len(part))
                    if message["type"] != "http.request" or not message.get("more_body"):
                        return
