"""A served model without a network: the application is called as a server would call it, its model in this process."""

import asyncio
import atexit
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from patchloom.serving import model_process
from patchloom.serving.admission import Admission
from patchloom.serving.app import App
from patchloom.serving.limits import Limits
from patchloom.serving.processes import ModelProcesses

LOOP = asyncio.new_event_loop()
atexit.register(LOOP.close)


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        assert set(self.json) == {"error"}
        return self.json["error"]


class InThisProcess(ModelProcesses):
    """What model processes do, at once."""

    def __init__(self, answers: Mapping[str, Any], about: Mapping[str, Any], limits: Limits | None = None) -> None:
        super().__init__("", Admission(limits or Limits()), say=str)
        self._answers = answers
        self.about = {**about, "verbs": list(answers)}
        self.ready = [None]  # type: ignore[list-item]

    @property
    def pids(self) -> list[int]:
        return []

    async def start(self) -> None:
        self.admission.processes = 1
        self.tasks = [asyncio.create_task(self._work())]

    async def _work(self) -> None:
        while True:
            await self.admission.wait_for_request()
            batch = self.admission.take()
            header = {"requests": [vars(one) | {"inputs": len(one.inputs)} for one in batch]}
            parts = [part for one in batch for part in one.inputs]
            statuses, bodies = model_process.run_batch(
                self._answers, header, parts, pixels=self.admission.limits.pixels
            )
            self.count_batch(len(parts), 0.001)
            for request, status, body in zip(batch, statuses, bodies, strict=True):
                from patchloom.serving.processes import _deliver

                _deliver(request, status, body, 0.001)


async def ask(
    app: App,
    method: str,
    path: str,
    body: bytes | Sequence[bytes] = b"",
    headers: Mapping[str, str] | Sequence[tuple[str, str]] | None = None,
    query: str = "",
) -> Reply:
    """One request; a body in parts comes in so many pieces."""
    parts = [body] if isinstance(body, bytes) else list(body)
    waiting = [
        {"type": "http.request", "body": part, "more_body": number < len(parts)} for number, part in enumerate(parts, 1)
    ]
    sent: list[Any] = []

    async def receive() -> Any:
        return waiting.pop(0) if waiting else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    pairs = headers.items() if isinstance(headers, Mapping) else headers or ()
    listed = [(name.lower().encode(), value.encode()) for name, value in pairs]
    scope = {"type": "http", "method": method, "path": path, "query_string": query.encode(), "headers": listed}
    await app(scope, receive, send)
    start, answer = sent
    reply = {name.decode(): value.decode() for name, value in start["headers"]}
    return Reply(start["status"], reply, answer["body"])


def send_all(app: App, *requests: tuple[Any, ...], **named: Any) -> list[Reply]:
    """Requests that come together, each as `ask` takes it."""

    async def run() -> list[Reply]:
        await app.start()
        reply = await asyncio.gather(*(ask(app, *request, **named) for request in requests))
        for task in app.tasks:
            task.cancel()
        return reply

    return LOOP.run_until_complete(run())


def post(app: App, path: str, body: Any = b"", kind: str = "image/png", query: str = "", **headers: str) -> Reply:
    """One answer of the model; what is no bytes is sent as JSON."""
    if isinstance(body, dict):
        body, kind = json.dumps(body).encode(), "application/json"
    return send_all(app, ("POST", path, body, {"content-type": kind, **headers}, query))[0]


def get(app: App, path: str, **headers: str) -> Reply:
    return send_all(app, ("GET", path, b"", headers))[0]
