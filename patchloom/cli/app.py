"""`patchloom app RUN`: a page on which a person shows pictures to a trained model."""

from typing import Annotated

import typer

from patchloom.cli.serve import AllowHost, ImageFolders
from patchloom.cli.verb import completed


def app(
    served: Annotated[
        str, typer.Argument(help="A run, an artefact of `export`, or an index.", autocompletion=completed("run"))
    ],
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="By default 8000, or a free one where that is taken.")
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on; by default this machine's own. 0.0.0.0 lets others in, such as a phone."
        ),
    ] = "127.0.0.1",
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in the browser.")] = True,
    allow_host: AllowHost = None,
    images: ImageFolders = None,
    device: Annotated[str, typer.Option(help="cpu, cuda …; auto takes a GPU if there is one.")] = "auto",
    model: Annotated[str | None, typer.Option(help="Where the run of an index lies now, if it was moved.")] = None,
    name: Annotated[str | None, typer.Option(help="Title of the page; by default the folder's name.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines: the address, once it answers.")] = False,
) -> None:
    """Open a page for trying a model: classes and what spoke for them, masks, boxes, nearest pictures, translations.

    Pictures are dropped, pasted, chosen or photographed; they go to this command alone. Ctrl-C ends it.
    """
    import sys

    from patchloom.cli.output import print_json, print_result
    from patchloom.serving.admission import Admission
    from patchloom.serving.app import App
    from patchloom.serving.asgi import check_model_path, served_name
    from patchloom.serving.hosts import is_local
    from patchloom.serving.limits import Limits
    from patchloom.serving.page import PageApp
    from patchloom.serving.processes import ModelProcesses
    from patchloom.serving.server import free_port, serve
    from patchloom.serving.thumbnails import NO_IMAGES, ThumbnailProcess, image_roots
    from patchloom_runtime.printable import printable

    check_model_path(served)
    roots = image_roots(served, images or ())

    def say(text: str) -> None:
        print(printable(text), file=sys.stderr, flush=True)

    def began(url: str, made: App) -> None:
        about = made.processes.about
        if not is_local(host):
            say(f"note: whoever reaches {host} may use the page")
        if "search" in about["verbs"] and not roots:
            say(NO_IMAGES)
        if as_json:
            print_json({"url": url, "model": made.name, "verbs": about["verbs"], "pids": made.processes.pids})
        else:
            print(f"{printable(about['network'])} at the address below; Ctrl-C ends it")
            print_result(url)
        if browser:
            _open(url)

    if port is None and (chosen := free_port(host, 8000)) != 8000:
        say("note: port 8000 is taken by another program; a free one is used")
    elif port is not None:
        chosen = port
    limits = Limits()
    processes = ModelProcesses(served, Admission(limits), device=device, model=model, say=say)
    called = served_name(served if name is None else name)
    serve(
        processes,
        called,
        host=host,
        port=chosen,
        say=say,
        began=began,
        make=PageApp,
        allowed_hosts=allow_host or (),
        thumbnails=ThumbnailProcess(roots, limits, say=say) if roots else None,
    )


def _open(url: str) -> None:
    """In the browser, where there is a screen for one; never waits for it."""
    import os
    import sys
    import threading
    import webbrowser

    has_screen = sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if not has_screen:  # one of the terminal would take it over
        return
    threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
