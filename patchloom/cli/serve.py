"""`patchloom serve RUN`: a trained model behind HTTP."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from patchloom.cli.options import Device, IndexRun
from patchloom.options import Argument, Option

if TYPE_CHECKING:
    from patchloom.serving.app import App

LIMITS = "Limits"
MAX_PIXELS = 25_000_000


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """Options that `serve` and `app` share."""

    source: Annotated[str, Argument("A run, an artifact made by `export`, or an index.", complete="run")]
    host: Annotated[
        str,
        Option("Address to listen on. The default accepts this machine only; 0.0.0.0 listens on every address."),
    ] = "127.0.0.1"
    allow_host: Annotated[
        list[str] | None, Option("Host name that requests may use, such as a proxy's. Repeatable.")
    ] = None
    images: Annotated[
        list[str] | None, Option("Folder of an index's images, which clients may be shown. Repeatable.")
    ] = None
    device: Device = "auto"
    model: IndexRun = None
    name: Annotated[str | None, Option("Name of the model for clients. Default: the folder's name.")] = None


@dataclass(frozen=True, kw_only=True)
class ServeOptions(ServingOptions):
    """Options of `patchloom serve`."""

    port: Annotated[int, Option("Port to listen on; 0 takes a free one.", minimum=0, maximum=65535)] = 8000
    processes: Annotated[int, Option("Processes that hold the model; they share the cores.", minimum=1)] = 1
    api_key: Annotated[
        str | None,
        Option(
            "Key that requests must send. Prefer the environment variable: other users can see command lines.",
            environment="PATCHLOOM_API_KEY",
        ),
    ] = None
    queue: Annotated[int, Option("Images or lines that may wait; more are refused.", minimum=1, panel=LIMITS)] = 64
    batch: Annotated[int, Option("Images or lines per batch.", minimum=1, panel=LIMITS)] = 8
    deadline: Annotated[float, Option("Seconds after which a request fails.", minimum=0.1, panel=LIMITS)] = 30.0
    max_megabytes: Annotated[float, Option("Largest request body in MB.", minimum=0.001, panel=LIMITS)] = 20.0
    max_pixels: Annotated[int, Option("Most pixels per image.", minimum=16, maximum=MAX_PIXELS, panel=LIMITS)] = (
        MAX_PIXELS
    )
    as_json: Annotated[bool, Option("Print address and routes as JSON, once the server answers.", name="json")] = False


def serve(options: ServeOptions) -> None:
    """Answer requests over HTTP: classes, vectors, similar files, masks, boxes or translations.

    patchloom serve runs/photos, then curl --data-binary @new.jpg http://127.0.0.1:8000/predict
    """
    from patchloom.serving.limits import Limits
    from patchloom_runtime.errors import UsageError

    key = options.api_key
    if key is not None and (not key.strip() or not key.isascii()):
        raise UsageError(
            "the key of --api-key or PATCHLOOM_API_KEY is empty or has letters outside ASCII; give another"
        )
    limits = Limits(
        queue=options.queue,
        batch=options.batch,
        deadline_seconds=options.deadline,
        body_bytes=int(options.max_megabytes * 1e6),
        pixels=options.max_pixels,
    )

    def on_start(url: str, app: "App") -> None:
        _print_start(url, app, options)

    run_server(options, limits, options.port, on_start, count=options.processes, api_key=key)


def run_server(
    options: ServingOptions, limits: Any, port: int, on_start: Any, *, count: int = 1, **server_options: Any
) -> None:
    """Start the model processes and serve until a signal."""
    from patchloom.serving import server
    from patchloom.serving.admission import Admission
    from patchloom.serving.asgi import check_model_path, served_name
    from patchloom.serving.processes import ModelProcesses
    from patchloom.serving.thumbnails import NO_IMAGES, ThumbnailProcess, image_roots

    check_model_path(options.source)
    roots = image_roots(options.source, options.images or ())

    def started(url: str, app: "App") -> None:
        if "search" in app.processes.about["verbs"] and not roots:
            print_status(NO_IMAGES)
        on_start(url, app)

    server.serve(
        ModelProcesses(
            options.source,
            Admission(limits),
            count=count,
            device=options.device,
            model=options.model,
            say=print_status,
        ),
        served_name(options.source if options.name is None else options.name),
        host=options.host,
        port=port,
        say=print_status,
        began=started,
        allowed_hosts=options.allow_host or (),
        thumbnails=ThumbnailProcess(roots, limits, say=print_status) if roots else None,
        **server_options,
    )


def print_status(text: str) -> None:
    """Print a line about the server to stderr."""
    from patchloom_runtime.printable import printable

    print(printable(text), file=sys.stderr, flush=True)


def _print_start(url: str, app: "App", options: ServeOptions) -> None:
    from patchloom.cli.output import print_json, print_result
    from patchloom.serving.hosts import is_local
    from patchloom_runtime.printable import plural, printable

    about = app.processes.about
    if not is_local(options.host) and options.api_key is None:
        print_status(f"note: anyone who can reach {options.host} can send requests; set a key with PATCHLOOM_API_KEY")
    if options.as_json:
        print_json({"url": url, "model": app.name, "verbs": about["verbs"], "pids": app.processes.pids})
        return
    threads = plural(app.processes.threads, "thread")
    count = options.processes
    held = f"{count} processes of {threads} each" if count > 1 else f"one process of {threads}"
    print(f"{printable(about['network'])} in {held}")
    print(
        f"batches of {options.batch}; refuses requests beyond {options.queue:,} waiting; "
        f"fails them after {options.deadline:g} s"
    )
    for name in about["verbs"]:
        print_result(f"POST {url}/{name}")
    print_result(f"GET  {url}/openapi.json  /ready  /metrics")
