"""The application: which route is whose, who may ask, what is counted. Any ASGI server can run it.

There is no route that changes anything: nothing can be loaded, written or reached by a path or an address that a client
names.
"""

import asyncio
import hmac
import json
import time
import traceback
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from typing import Any, TypeAlias

from patchloom.serving import inference_protocol
from patchloom.serving.admission import Admission, Request
from patchloom.serving.exchange import Exchange, Receive, Response, Scope, Send, json_response, refusal
from patchloom.serving.hosts import Hosts
from patchloom.serving.metrics import Metrics
from patchloom.serving.processes import ModelProcesses
from patchloom.serving.refusals import Refused
from patchloom.serving.requests import check_encoding, inputs_and_options
from patchloom.serving.schema import openapi
from patchloom.serving.thumbnails import add_thumbnails, check_thumbnails

Handler: TypeAlias = Callable[[Exchange], Awaitable[Response]]
OPEN = ("/health", "/ready", "/v2/health/live", "/v2/health/ready")  # what probes ask has no key


class App:
    """ASGI: the served model with its routes."""

    def __init__(
        self,
        processes: ModelProcesses,
        name: str,
        *,
        api_key: str | None = None,
        hosts: Hosts | None = None,
        thumbnails: ModelProcesses | None = None,
    ) -> None:
        self.name, self.metrics = name, Metrics()
        self.hosts, self.thumbnails = hosts or Hosts(), thumbnails
        self.processes, self.admission = processes, processes.admission
        self.processes.batch_inputs = self.metrics.batch
        self.is_ending = False  # told to stop: what came is answered, nothing new is wanted
        self._key = api_key
        self._routes: dict[str, dict[str, Handler]] = {}

    async def start(self) -> None:
        """Load the model, if nobody has, and open the routes of what it does."""
        await self.processes.start()
        if self.thumbnails is not None:
            await self.thumbnails.start()
        about = self.processes.about
        self._routes = {
            "/": {"GET": self._index},
            "/health": {"GET": self._health},
            "/ready": {"GET": self._ready},
            "/metrics": {"GET": self._metrics},
            "/openapi.json": {"GET": self._schema},
            **{f"/{verb}": {"POST": partial(self._native, verb)} for verb in about["verbs"]},
            "/v2": {"GET": self._protocol},
            "/v2/health/live": {"GET": self._health},
            "/v2/health/ready": {"GET": self._ready},
        }
        for name, verb in inference_protocol.models(self.name, about["verbs"]).items():
            self._routes |= {
                f"/v2/models/{name}": {"GET": partial(self._protocol_model, name, verb)},
                f"/v2/models/{name}/ready": {"GET": self._ready},
                f"/v2/models/{name}/infer": {"POST": partial(self._infer, name, verb)},
            }

    async def stop(self) -> None:
        """End all processes."""
        await self.processes.stop()
        if self.thumbnails is not None:
            await self.thumbnails.stop()

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """What runs beside the requests; one that ends has met a fault of ours."""
        return self.processes.tasks + (self.thumbnails.tasks if self.thumbnails else [])

    @property
    def pids(self) -> list[int]:
        """Of all processes that are ready."""
        return self.processes.pids + (self.thumbnails.pids if self.thumbnails else [])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or the life of the application."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._exchange(Exchange(scope, receive, send, self.admission.limits))
        else:
            await receive()
            await send({"type": "websocket.close", "code": 1000})

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        await self.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.stop()
        await send({"type": "lifespan.shutdown.complete"})

    async def _exchange(self, exchange: Exchange) -> None:
        try:
            response = await self._handler(exchange)(exchange)
        except Refused as refused:
            response = refusal(refused)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # a fault of ours: the log has it, the client one line
            traceback.print_exception(error)
            response = json_response({"error": "the server failed; its log says why"}, HTTPStatus.INTERNAL_SERVER_ERROR)
        route = exchange.path if exchange.path in self._routes else "other"
        self.metrics.requests[route, int(response.status)] += 1
        self.metrics.answered.add(time.monotonic() - exchange.began, route=route)
        await exchange.respond(response)

    def _handler(self, exchange: Exchange) -> Handler:
        self.hosts.check(exchange)
        if self._key is not None and exchange.path not in OPEN:
            self._check_key(exchange)
        methods = self._routes.get(exchange.path)
        if methods is None:
            raise Refused(
                HTTPStatus.NOT_FOUND, f"there is no route {exchange.path}; /openapi.json lists those there are"
            )
        handler = methods.get("GET" if exchange.method == "HEAD" else exchange.method)
        if handler is None:
            allowed = ", ".join(methods)
            told = f"{exchange.path} takes {allowed}, not {exchange.method}"
            raise Refused(HTTPStatus.METHOD_NOT_ALLOWED, told, {"Allow": allowed})
        return handler

    def _check_key(self, exchange: Exchange) -> None:
        """In constant time, so that nobody learns a key letter by letter."""
        scheme, _, given = exchange.header("authorization").partition(" ")
        sent = given.strip() if scheme.lower() == "bearer" else exchange.header("x-api-key")
        assert self._key is not None
        if not hmac.compare_digest(sent.encode("utf-8", "replace"), self._key.encode()):
            told = "the key is missing or wrong: send Authorization: Bearer KEY"
            raise Refused(HTTPStatus.UNAUTHORIZED, told, {"WWW-Authenticate": "Bearer"})

    # What the model is asked ----------------------------------------------------------------------------------------

    async def _native(self, verb: str, exchange: Exchange) -> Response:
        requests: list[Request] = []

        def read(body: bytes) -> Request:
            inputs, options = inputs_and_options(verb, exchange.kind, exchange.query, body)
            check_thumbnails(len(inputs), options)
            requests.append(Request(verb, options, inputs))
            return requests[0]

        results = await self._asked(exchange, read)
        if self.thumbnails is not None and (side := requests[0].options.get("thumbnails")):
            results = await add_thumbnails(results, side, self.thumbnails, requests[0].began)
        return Response(body=b'{"results": ' + results + b"}")

    async def _infer(self, name: str, verb: str, exchange: Exchange) -> Response:
        wanted: list[inference_protocol.InferenceRequest] = []

        def read(body: bytes) -> Request:
            length = exchange.header("inference-header-content-length")
            wanted.append(inference_protocol.read(verb, exchange.kind, body, length))
            return Request(verb, wanted[0].options, wanted[0].inputs)

        results = await self._asked(exchange, read)
        return inference_protocol.response(name, wanted[0], json.loads(results))

    async def _asked(self, exchange: Exchange, read: Callable[[bytes], Request]) -> bytes:
        """Read the body, if there is room for it, and wait for the model's answer."""
        if self.is_ending:
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "the server is ending", {"Retry-After": "1"})
        self.admission.check()
        check_encoding(exchange.header("content-encoding"))
        body = await exchange.body(self.admission)
        try:
            request = read(body)
            results = await self.admission.answered(request)
        finally:
            self.admission.held_bytes -= len(body)
        exchange.seconds |= request.seconds
        for reason, seconds in exchange.seconds.items():
            self.metrics.waited.add(seconds, reason=reason)
        return results

    # What is said of the server -------------------------------------------------------------------------------------

    async def _index(self, _: Exchange) -> Response:
        about = self.processes.about
        told = {name: about[name] for name in ("network", "verbs", "labels", "languages", "files")}
        return json_response({"model": self.name, **told, "routes": list(self._routes)})

    async def _health(self, _: Exchange) -> Response:
        return json_response({"live": True})

    async def _ready(self, _: Exchange) -> Response:
        ready = bool(self.processes.ready) and not self.is_ending
        told: dict[str, Any] = {"ready": ready, "processes": len(self.processes.ready)}
        if not ready:
            told["reason"] = "the server is ending" if self.is_ending else self.processes.why_not_ready
        return json_response(told, HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE)

    async def _metrics(self, _: Exchange) -> Response:
        admission: Admission = self.admission
        gauges = {
            "patchloom_queue_inputs": ("Pictures or lines that wait.", admission.waiting),
            "patchloom_queue_limit": ("How many may.", admission.limits.queue),
            "patchloom_in_process_inputs": ("Pictures or lines that model processes have.", admission.in_process),
            "patchloom_expected_wait_seconds": ("Of one that comes now.", admission.expected_seconds()),
            "patchloom_uploads": ("Bodies that are being read.", len(admission.uploads)),
            "patchloom_held_bytes": ("Of bodies in memory.", admission.held_bytes),
            "patchloom_model_processes": ("That are ready.", len(self.processes.ready)),
            "patchloom_model_restarts_total": ("Of model processes that ended.", self.processes.restarts),
        }
        text = self.metrics.text(gauges, self.processes.pids)
        return Response(body=text.encode(), kind="text/plain; version=0.0.4; charset=utf-8")

    async def _schema(self, _: Exchange) -> Response:
        return json_response(self._described())

    def _described(self) -> dict[str, Any]:
        return openapi(self.name, self.processes.about["verbs"], keyed=self._key is not None)

    async def _protocol(self, _: Exchange) -> Response:
        return json_response(inference_protocol.server())

    async def _protocol_model(self, name: str, verb: str, _: Exchange) -> Response:
        return json_response(inference_protocol.model(name, verb))
