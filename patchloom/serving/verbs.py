"""`serve` and `app` from Python: both block until a signal."""

import os
import sys
import threading
import webbrowser
from collections.abc import Callable, Sequence
from typing import Any

from patchloom.serving import server
from patchloom.serving.admission import Admission
from patchloom.serving.app import App
from patchloom.serving.asgi import check_model_path, served_name
from patchloom.serving.limits import Limits
from patchloom.serving.page import PageApp
from patchloom.serving.processes import ModelProcesses
from patchloom.serving.thumbnails import NO_IMAGES, ThumbnailProcess, image_roots
from patchloom_runtime.errors import UsageError, at_least, with_near_options
from patchloom_runtime.printable import printable

APP_PORT = 8000
MAX_PIXELS = 25_000_000

OnStart = Callable[[str, App], None]  # called with the address and the application once requests are answered


@with_near_options
def serve(
    source: str | os.PathLike[str],
    *,
    host: str = "127.0.0.1",
    allow_host: Sequence[str] | None = None,
    images: Sequence[str] | None = None,
    device: str = "auto",
    model: str | None = None,
    name: str | None = None,
    port: int = 8000,
    processes: int = 1,
    api_key: str | None = None,
    queue: int = 64,
    batch: int = 8,
    deadline: float = 30.0,
    max_megabytes: float = 20.0,
    max_pixels: int = MAX_PIXELS,
    on_start: OnStart | None = None,
) -> None:
    """Serve a model over HTTP until SIGINT (Ctrl-C) or SIGTERM. Call it from the main thread of a program.

    `patchloom.serving.asgi` returns the same application for other servers.

    source         A run, an artifact made by `export`, or an index.
    host           Address to listen on. The default accepts this machine only; 0.0.0.0 listens on every address.
    allow_host     Host names that requests may use, such as a proxy's.
    images         Folders of an index's images, which clients may be shown.
    device         'cpu', 'cuda', 'cuda:1' or 'mps'; 'auto' uses a GPU if there is one.
    model          Run of the index, if it was moved.
    name           Name of the model for clients. Default: the folder's name.
    port           Port to listen on; 0 takes a free one.
    processes      Processes that hold the model; they share the cores.
    api_key        Key that requests must send.
    queue          Images or lines that may wait in the queue; further ones are refused.
    batch          Images or lines per batch.
    deadline       Seconds after which a request fails.
    max_megabytes  Largest request body in MB.
    max_pixels     Most pixels per image.
    on_start       Called with the address and the application once requests are answered. Default: prints the address.
    """
    for option, value in (("processes", processes), ("queue", queue), ("batch", batch), ("max_pixels", max_pixels)):
        at_least(option, value, 1)
    if not (deadline > 0 and max_megabytes > 0):
        raise UsageError(f"deadline is {deadline} and max_megabytes {max_megabytes}; expected numbers above 0")
    if api_key is not None and (not api_key.strip() or not api_key.isascii()):
        raise UsageError(
            "the key of --api-key or PATCHLOOM_API_KEY is empty or has letters outside ASCII; pass another"
        )
    limits = Limits(
        queue=queue, batch=batch, deadline_seconds=deadline, body_bytes=int(max_megabytes * 1e6), pixels=max_pixels
    )
    _run(
        source, limits, host=host, allow_host=allow_host, images=images, device=device, model=model, name=name,
        port=port, processes=processes, on_start=on_start, api_key=api_key,
    )  # fmt: skip


@with_near_options
def app(
    source: str | os.PathLike[str],
    *,
    host: str = "127.0.0.1",
    allow_host: Sequence[str] | None = None,
    images: Sequence[str] | None = None,
    device: str = "auto",
    model: str | None = None,
    name: str | None = None,
    port: int | None = None,
    browser: bool = True,
    on_start: OnStart | None = None,
) -> None:
    """Open a page for trying a model, until SIGINT (Ctrl-C) or SIGTERM. Call it from the main thread of a program.

    source      A run, an artifact made by `export`, or an index.
    host        Address to listen on. The default accepts this machine only; 0.0.0.0 listens on every address.
    allow_host  Host names that requests may use, such as a proxy's.
    images      Folders of an index's images, which clients may be shown.
    device      'cpu', 'cuda', 'cuda:1' or 'mps'; 'auto' uses a GPU if there is one.
    model       Run of the index, if it was moved.
    name        Name of the model for clients. Default: the folder's name.
    port        Port to listen on. Default: 8000, or a free one if that is taken.
    browser     Open the page in the browser.
    on_start    Called with the address and the application once the page can be opened. Default: prints the address.
    """
    check_model_path(os.fspath(source))
    chosen = server.free_port(host, APP_PORT) if port is None else port
    if port is None and chosen != APP_PORT:
        print_status(f"note: port {APP_PORT} is taken by another program; a free one is used")

    def started(url: str, page: App) -> None:
        (on_start or _print_address)(url, page)
        if browser:
            _open(url)

    _run(
        source, Limits(), host=host, allow_host=allow_host, images=images, device=device, model=model, name=name,
        port=chosen, processes=1, on_start=started, make=PageApp,
    )  # fmt: skip


def _run(
    source: str | os.PathLike[str],
    limits: Limits,
    *,
    host: str,
    allow_host: Sequence[str] | None,
    images: Sequence[str] | None,
    device: str,
    model: str | None,
    name: str | None,
    port: int,
    processes: int,
    on_start: OnStart | None,
    **server_options: Any,
) -> None:
    """Start the model processes and serve until a signal."""
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("a server is ended by a signal, which only the main thread gets; start it there")
    source = os.fspath(source)
    check_model_path(source)
    roots = image_roots(source, images or ())

    def started(url: str, app: App) -> None:
        if "search" in app.processes.about["verbs"] and not roots:
            print_status(NO_IMAGES)
        (on_start or _print_address)(url, app)

    server.serve(
        ModelProcesses(source, Admission(limits), count=processes, device=device, model=model, say=print_status),
        served_name(source if name is None else name),
        host=host,
        port=port,
        say=print_status,
        began=started,
        allowed_hosts=allow_host or (),
        thumbnails=ThumbnailProcess(roots, limits, say=print_status) if roots else None,
        **server_options,
    )


def print_status(text: str) -> None:
    """Print a line about the server to stderr."""
    print(printable(text), file=sys.stderr, flush=True)


def _print_address(url: str, app: App) -> None:
    print_status(f"{app.name} answers at {url}; Ctrl-C ends it")


def _open(url: str) -> None:
    """Open the page in a graphical browser, if there is a screen, without waiting for it."""
    has_screen = sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if not has_screen:  # a text browser would take over the terminal
        return
    threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
