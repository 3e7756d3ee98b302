"""`patchloom serve`: the application on Granian, which parses HTTP outside of Python and closes slow connections.

The port is bound before the model is loaded, so that a port in use is reported at once, and opened when the model is
ready. On a signal the server accepts no further connection, completes accepted requests, ends the model processes, and
exits.
"""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any

from patchloom.machine import END_AT_ONCE, STOP_SIGNALS, allow_open_files
from patchloom.serving.app import App
from patchloom.serving.hosts import Hosts
from patchloom.serving.limits import BACKLOG, CONNECTIONS, HEADER_BYTES, RESERVED_FILES, UNREAD_SECONDS, UPLOADS
from patchloom.serving.processes import ModelProcesses
from patchloom_runtime.errors import UsageError

LAST_SECONDS = 10  # in addition to the deadline of a request, until a stopping server exits

Say = Callable[[str], None]


def serve(
    processes: ModelProcesses,
    name: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    say: Say = print,
    began: Callable[[str, App], None] = lambda _url, _app: None,
    make: Callable[..., App] = App,
    allowed_hosts: Sequence[str] = (),
    thumbnails: ModelProcesses | None = None,
) -> None:
    """Serve until a signal; call `began` with the address once the model is ready."""
    if find_spec("granian") is None:
        raise UsageError("serving needs Granian, which is not installed: pip install 'patchloom[serve]'")
    with listening(host, port) as bound:
        address, own_port = bound.getsockname()[:2]
        hosts = Hosts(host, address, own_port, allowed_hosts)
        app = make(processes, name, api_key=api_key, hosts=hosts, thumbnails=thumbnails)
        asyncio.run(_serve(bound, app, say, began))


def listening(host: str, port: int) -> socket.socket:
    """Return a bound socket; its connections are dropped if a response stays unread."""
    bound = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        if sys.platform != "win32":  # there, it would share a port that is in use
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * UNREAD_SECONDS)
        bound.bind(address)
    except (OSError, OverflowError, UnicodeError) as error:
        if bound is not None:
            bound.close()
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot listen on {host} port {port}: {reason}. Pass another --host or --port.") from None
    return bound


def free_port(host: str, wanted: int) -> int:
    """Return the wanted port, or 0 (any free port) if another program uses it."""
    try:
        listening(host, wanted).close()
    except UsageError as error:
        try:
            listening(host, 0).close()
        except UsageError:  # the host is wrong, not the port
            raise error from None
        return 0
    return wanted


async def _serve(bound: socket.socket, app: App, say: Say, began: Callable[[str, App], None]) -> None:
    stopping = asyncio.Event()
    broken: list[asyncio.Task[None]] = []
    with _on_signals(stopping, app):
        starting = asyncio.create_task(app.start())
        stopped = asyncio.create_task(stopping.wait())
        await asyncio.wait([starting, stopped], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            broken = await _serve_requests(bound, app, stopped, say, began)
        else:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        await app.stop()
        for task in broken:
            task.result()  # raises its error
        say(f"stopped after {app.metrics.total_requests:,} requests")


async def _serve_requests(
    bound: socket.socket, app: App, stopped: asyncio.Task[Any], say: Say, began: Callable[[str, App], None]
) -> list[asyncio.Task[None]]:
    """Serve a started application until `stopped` ends; return background tasks that ended with an error."""
    _schedule_as_batch()
    connections = _connections(say)
    app.admission.uploads.limit = min(UPLOADS, connections // 2)
    bound.listen(BACKLOG)
    server, address = _granian(app, bound, connections), address_of(bound)
    serving = asyncio.create_task(server.serve())
    began(address, app)
    await asyncio.wait([serving, stopped, *app.tasks], return_when=asyncio.FIRST_COMPLETED)
    app.is_ending, broken = True, [task for task in app.tasks if task.done()]
    say("stopping: no further requests are accepted, accepted ones are completed")
    server.stop()
    with suppress(TimeoutError):
        async with asyncio.timeout(app.admission.limits.deadline_seconds + LAST_SECONDS):
            await serving
    return broken


def address_of(bound: socket.socket) -> str:
    """Return the URL of a bound socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextmanager
def _on_signals(stopping: asyncio.Event, app: App) -> Iterator[None]:
    """Set `stopping` at the first signal; kill all processes at the second.

    The loop's own handlers lose a signal that arrives while Granian's threads have filled the pipe that wakes the loop.
    """
    loop = asyncio.get_running_loop()

    def handle(number: int, _frame: object) -> None:
        if stopping.is_set():
            for pid in app.pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, END_AT_ONCE)
            os._exit(128 + number)
        loop.call_soon_threadsafe(stopping.set)

    handled = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # nohup
    previous = {number: signal.signal(number, handle) for number in handled}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _schedule_as_batch() -> None:
    """Schedule this process so that it does not interrupt a model process on the same core.

    It then accepts several requests when the model's time slice ends, instead of ending that slice with each of them.
    Threads that libraries started count too; Granian's start later and inherit it.
    """
    if hasattr(os, "SCHED_BATCH"):  # Linux
        with suppress(OSError):
            for thread in os.listdir("/proc/self/task"):
                os.sched_setscheduler(int(thread), os.SCHED_BATCH, os.sched_param(0))


def _connections(say: Say) -> int:
    """Return the maximum number of open connections.

    Without a free file descriptor, Granian would retry to accept the next connection in a busy loop.
    """
    wanted = CONNECTIONS + RESERVED_FILES
    files = allow_open_files(wanted)
    if files == wanted:
        return CONNECTIONS
    connections = max(files // 4, files - RESERVED_FILES)
    say(f"note: at most {connections} connections, since the system allows {files} open files (see ulimit -n)")
    return connections


def _granian(app: App, bound: socket.socket, connections: int) -> Any:
    from granian.constants import HTTPModes, Interfaces
    from granian.http import HTTP1Settings
    from granian.net import SocketHolder
    from granian.server.embed import Server

    class OnSocket(Server):
        """A server on our socket; Granian's own would share a port that is in use."""

        def _init_shared_socket(self: Any) -> None:
            holder: Any = SocketHolder  # its type stub has one of three arguments
            self._sfd = bound.detach()  # closed by the server when it stops
            self._shd, self._ssp = holder(self._sfd, False, BACKLOG), None

    settings = HTTP1Settings(
        header_read_timeout=int(1000 * app.admission.limits.header_seconds), max_buffer_size=HEADER_BYTES
    )
    return OnSocket(
        app,
        interface=Interfaces.ASGINL,  # without lifespan: the application has been started
        http=HTTPModes.http1,
        websockets=False,
        backlog=BACKLOG,
        backpressure=connections,
        http1_settings=settings,
        log_enabled=False,
    )
