"""`patchloom app RUN`: a page for trying a trained model on images."""

import os
import sys
import threading
import webbrowser
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from patchloom.cli.serve import ServingOptions, print_status, run_server
from patchloom.options import Option

if TYPE_CHECKING:
    from patchloom.serving.app import App

PORT = 8000


@dataclass(frozen=True, kw_only=True)
class AppOptions(ServingOptions):
    """Options of `patchloom app`."""

    port: Annotated[
        int | None,
        Option("Port to listen on. Default: 8000, or a free one if that is taken.", minimum=0, maximum=65535),
    ] = None
    browser: Annotated[bool, Option("Open the page in the browser.")] = True
    as_json: Annotated[bool, Option("Print the address as JSON, once the server answers.", name="json")] = False


def app(options: AppOptions) -> None:
    """Open a page for trying a model: classes and the evidence for them, masks, boxes, similar images, translations.

    Images can be dropped, pasted, chosen or photographed; they are sent to this command only. Ctrl-C ends it.
    """
    from patchloom.serving.asgi import check_model_path
    from patchloom.serving.limits import Limits
    from patchloom.serving.page import PageApp
    from patchloom.serving.server import free_port

    check_model_path(options.source)
    port = free_port(options.host, PORT) if options.port is None else options.port
    if options.port is None and port != PORT:
        print_status(f"note: port {PORT} is taken by another program; a free one is used")

    def on_start(url: str, app: "App") -> None:
        _print_start(url, app, options)

    run_server(options, Limits(), port, on_start, make=PageApp)


def _print_start(url: str, app: "App", options: AppOptions) -> None:
    from patchloom.cli.output import print_json, print_result
    from patchloom.serving.hosts import is_local
    from patchloom_runtime.printable import printable

    about = app.processes.about
    if not is_local(options.host):
        print_status(f"note: anyone who can reach {options.host} can use the page")
    if options.as_json:
        print_json({"url": url, "model": app.name, "verbs": about["verbs"], "pids": app.processes.pids})
    else:
        print(f"{printable(about['network'])} at the address below; Ctrl-C ends it")
        print_result(url)
    if options.browser:
        _open(url)


def _open(url: str) -> None:
    """Open the page in a graphical browser, if there is a screen, without waiting for it."""
    has_screen = sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if not has_screen:  # a text browser would take over the terminal
        return
    threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
