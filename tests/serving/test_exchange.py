"""What is refused before its body was read: the answer comes first, then the body is taken and dropped."""

import asyncio
import json
from typing import Any

from patchloom.serving.exchange import Exchange, error_response
from patchloom.serving.limits import overloaded


def test_a_refused_body_is_read_after_its_answer() -> None:
    events: list[str] = []

    async def refuse() -> None:
        parts = [{"type": "http.request", "body": b"x", "more_body": more} for more in (True, False)]

        async def receive() -> Any:
            events.append("read")
            return parts.pop(0)

        async def send(message: Any) -> None:
            events.append(message["type"])

        scope = {"type": "http", "method": "POST", "path": "/predict", "headers": [(b"content-length", b"2")]}
        exchange = Exchange(scope, receive, send)
        await error_response(overloaded("64 wait", 2))(scope, receive, exchange.send)
        await exchange.drain()

    asyncio.run(refuse())
    assert events == ["http.response.start", "http.response.body", "read", "read"]


def test_a_reason_is_json_whatever_a_client_sent() -> None:
    reply = error_response(overloaded('there is no "ö"\n', 3))
    assert rb"there is no \"\u00f6\"\\n" in reply.body
    assert "3 s" in json.loads(reply.body)["error"]
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "3")
