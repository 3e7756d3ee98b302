"""What is refused before its body was read: the answer comes first, then the body is taken and dropped."""

import asyncio
from typing import Any

from patchloom.serving.exchange import Exchange, refusal
from patchloom.serving.limits import Limits
from patchloom.serving.refusal import overloaded


def test_refused_bodies_are_read_together_after_all_were_answered() -> None:
    events: list[str] = []

    async def refuse(name: str) -> None:
        parts = [{"type": "http.request", "body": b"x", "more_body": more} for more in (True, False)]

        async def receive() -> Any:
            events.append(f"{name} read")
            return parts.pop(0)

        async def send(message: Any) -> None:
            events.append(f"{name} {message['type']}")

        scope = {"method": "POST", "path": "/predict", "headers": [(b"content-length", b"2")]}
        await Exchange(scope, receive, send, Limits()).respond(refusal(overloaded("64 wait", 2)))

    async def run() -> None:
        await asyncio.gather(refuse("first"), refuse("second"))

    asyncio.run(run())
    answered = ["http.response.start", "http.response.body"]
    assert events[:4] == [f"{name} {message}" for name in ("first", "second") for message in answered]
    assert sorted(events[4:]) == ["first read"] * 2 + ["second read"] * 2


def test_a_reason_is_json_whatever_a_client_sent() -> None:
    told = refusal(overloaded('there is no "ö"\n', 3))
    assert told.body == rb'{"error": "there is no \"\u00f6\"\\n; try again in 3 s"}'
    assert (told.status, told.headers) == (503, {"Retry-After": "3"})
