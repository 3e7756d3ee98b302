"""The ASGI application: routes, access checks, and metrics.

No route changes anything: clients cannot load a model, write a file, or name a path or an address that is then read.

Starlette and prometheus-client add 14-24 µs of CPU time per probe and 50-120 µs per request to the model, which takes
the front process 1.4-1.9 ms without them (November 2026, 2 busy cores).
"""

import asyncio
import hmac
import json
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from typing import Any, TypeAlias

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from patchloom.serving import inference_protocol
from patchloom.serving.admission import ModelRequest
from patchloom.serving.endpoints import endpoints_of
from patchloom.serving.exchange import AsciiJSONResponse, Exchange, error_response
from patchloom.serving.hosts import Hosts
from patchloom.serving.metrics import CONTENT_TYPE, Metrics
from patchloom.serving.processes import ModelProcesses
from patchloom.serving.requests import check_encoding, content_type, inputs_and_options
from patchloom.serving.schema import openapi
from patchloom.serving.thumbnails import add_thumbnails, check_thumbnails
from patchloom.tasks.endpoints import Endpoint

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]
PROBES = ("/health", "/ready", "/v2/health/live", "/v2/health/ready")  # need no API key


class App:
    """ASGI application of one model."""

    def __init__(
        self,
        processes: ModelProcesses,
        name: str,
        *,
        api_key: str | None = None,
        hosts: Hosts | None = None,
        thumbnails: ModelProcesses | None = None,
    ) -> None:
        self.name, self.metrics = name, Metrics(processes)
        self.hosts, self.thumbnails = hosts or Hosts(), thumbnails
        self.processes, self.admission = processes, processes.admission
        self.processes.count_batch = self.metrics.count_batch
        self.is_ending = False  # accepted requests are completed, new ones refused
        self.paths: list[str] = []  # of all routes
        self._endpoints: dict[str, Endpoint] = {}  # by verb
        self._key = api_key
        self._router = Router(redirect_slashes=False, default=self._respond_404, lifespan=self._lifespan)

    async def start(self) -> None:
        """Load the model, unless it is loaded, and open the routes of its verbs."""
        await self.processes.start()
        if self.thumbnails is not None:
            await self.thumbnails.start()
        about = self.processes.about
        self._endpoints = endpoints_of(about["task"], about["verbs"])
        handlers = self._handlers()
        self.paths = list(handlers)
        self._router.routes = [Route(path, handler, methods=[method]) for path, (method, handler) in handlers.items()]

    async def stop(self) -> None:
        """End all processes."""
        await self.processes.stop()
        if self.thumbnails is not None:
            await self.thumbnails.stop()

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """Background tasks; one that ends has raised an unexpected error."""
        return self.processes.tasks + (self.thumbnails.tasks if self.thumbnails else [])

    @property
    def pids(self) -> list[int]:
        """Process ids of all processes that are ready."""
        return self.processes.pids + (self.thumbnails.pids if self.thumbnails else [])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, or the lifespan of the application; a websocket is closed."""
        scope["app"] = self  # with it, Starlette raises HTTPException for 405
        if scope["type"] != "http":
            await self._router(scope, receive, send)
            return
        path, began = scope["path"], time.monotonic()
        route = path if path in self.paths else "other"
        exchange = Exchange(
            scope,
            receive,
            send,
            count=lambda status: self.metrics.count_request(route, status, time.monotonic() - began),
        )
        scope["state"] = {"exchange": exchange}
        try:
            self._check_access(Headers(scope=scope), scope["method"], path)
            await self._router(scope, receive, exchange.send)
        except HTTPException as error:
            if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED and error.headers:
                error.detail = f"{path} accepts {error.headers['Allow']}, not {scope['method']}"
            await error_response(error)(scope, receive, exchange.send)
        except Exception as error:
            if exchange.has_responded:
                raise
            traceback.print_exception(error)
            failed = HTTPException(HTTPStatus.INTERNAL_SERVER_ERROR, "the server failed; see its log")
            await error_response(failed)(scope, receive, exchange.send)
        del scope["state"]  # or this cycle would keep Granian's connection open until it is collected
        await exchange.drain()

    def _check_access(self, headers: Headers, method: str, path: str) -> None:
        self.hosts.check(headers, method)
        if self._key is None or path in PROBES:
            return
        scheme, _, value = headers.get("authorization", "").partition(" ")
        sent = value.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        # Compared in constant time, so that nobody can guess the key letter by letter.
        if not hmac.compare_digest(sent.encode("utf-8", "replace"), self._key.encode()):
            reason = "the API key is missing or wrong; send Authorization: Bearer KEY"
            raise HTTPException(HTTPStatus.UNAUTHORIZED, reason, {"WWW-Authenticate": "Bearer"})

    @asynccontextmanager
    async def _lifespan(self, _: Any) -> AsyncIterator[None]:
        await self.start()
        yield
        await self.stop()

    async def _respond_404(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await Router().not_found(scope, receive, send)
            return
        raise HTTPException(
            HTTPStatus.NOT_FOUND, f"there is no route {scope['path']}; see /openapi.json for the routes"
        )

    # Routes ---------------------------------------------------------------------------------------------------------

    def _handlers(self) -> dict[str, tuple[str, Handler]]:
        """Return path → method and handler."""
        handlers: dict[str, tuple[str, Handler]] = {
            "/": ("GET", self._index),
            "/health": ("GET", self._health),
            "/ready": ("GET", self._ready),
            "/metrics": ("GET", self._metrics),
            "/openapi.json": ("GET", self._schema),
            **{f"/{verb}": ("POST", partial(self._run_verb, verb)) for verb in self._endpoints},
            "/v2": ("GET", self._protocol_server),
            "/v2/health/live": ("GET", self._health),
            "/v2/health/ready": ("GET", self._ready),
        }
        for name, verb in inference_protocol.models(self.name, self._endpoints).items():
            handlers |= {
                f"/v2/models/{name}": ("GET", partial(self._protocol_model, name, verb)),
                f"/v2/models/{name}/ready": ("GET", self._ready),
                f"/v2/models/{name}/infer": ("POST", partial(self._infer, name, verb)),
            }
        return handlers

    async def _run_verb(self, verb: str, request: Request) -> Response:
        async with self._body(request) as body:
            query = request.scope.get("query_string", b"")
            inputs, options = inputs_and_options(self._endpoints[verb], content_type(request.headers), query, body)
            check_thumbnails(len(inputs), options)
            model_request = ModelRequest(verb, options, inputs)
            results = await self._run_model(request, model_request)
        if self.thumbnails is not None and (side := options.get("thumbnails")):
            results = await add_thumbnails(results, side, self.thumbnails, model_request.began)
        return Response(b'{"results": ' + results + b"}", media_type="application/json")

    async def _infer(self, name: str, verb: str, request: Request) -> Response:
        async with self._body(request) as body:
            length = request.headers.get("inference-header-content-length", "")
            inference = inference_protocol.read(self._endpoints[verb], content_type(request.headers), body, length)
            results = await self._run_model(request, ModelRequest(verb, inference.options, inference.inputs))
        return inference_protocol.response(name, inference, json.loads(results))

    @asynccontextmanager
    async def _body(self, request: Request) -> AsyncIterator[bytes]:
        """Read the body if there is room for it; its memory counts until the end of the block."""
        if self.is_ending:
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, "the server is stopping", {"Retry-After": "1"})
        self.admission.check()
        check_encoding(request.headers.get("content-encoding", ""))
        body = await request.state.exchange.read_body(self.admission)
        try:
            yield body
        finally:
            self.admission.held_bytes -= len(body)

    async def _run_model(self, request: Request, model_request: ModelRequest) -> bytes:
        results = await self.admission.run(model_request)
        exchange: Exchange = request.state.exchange
        exchange.wait_seconds |= model_request.wait_seconds
        self.metrics.count_waits(exchange.wait_seconds)
        return results

    async def _index(self, _: Request) -> Response:
        about = self.processes.about
        facts = {name: about[name] for name in ("network", "verbs", "labels", "languages", "files")}
        return AsciiJSONResponse({"model": self.name, **facts, "routes": self.paths})

    async def _health(self, _: Request) -> Response:
        return AsciiJSONResponse({"live": True})

    async def _ready(self, _: Request) -> Response:
        ready = bool(self.processes.ready) and not self.is_ending
        state: dict[str, Any] = {"ready": ready, "processes": len(self.processes.ready)}
        if not ready:
            state["reason"] = "the server is stopping" if self.is_ending else self.processes.why_not_ready
        return AsciiJSONResponse(state, HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE)

    async def _metrics(self, _: Request) -> Response:
        return Response(self.metrics.text(), media_type=CONTENT_TYPE)

    async def _schema(self, _: Request) -> Response:
        return AsciiJSONResponse(self._openapi())

    def _openapi(self) -> dict[str, Any]:
        return openapi(self.name, self._endpoints, keyed=self._key is not None)

    async def _protocol_server(self, _: Request) -> Response:
        return AsciiJSONResponse(inference_protocol.server())

    async def _protocol_model(self, name: str, verb: str, _: Request) -> Response:
        return AsciiJSONResponse(inference_protocol.model(name, self._endpoints[verb]))
