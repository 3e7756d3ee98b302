"""`patchloom serve RUN`: a trained model behind HTTP."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

from patchloom.cli.options import Device, IndexRun
from patchloom.options import Argument, Option

if TYPE_CHECKING:
    from patchloom.serving.app import App

LIMITS = "Limits"
MAX_PIXELS = 25_000_000  # as in `patchloom.serve`, which is not imported for --help


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """Options that `serve` and `app` share."""

    source: Annotated[str, Argument("A run, an artifact made by `export`, or an index.", complete="run")]
    host: Annotated[
        str,
        Option("Address to listen on. The default accepts this machine only; 0.0.0.0 listens on every address."),
    ] = "127.0.0.1"
    allow_host: Annotated[
        list[str] | None, Option("Host names that requests may use, such as a proxy's. Repeatable.")
    ] = None
    images: Annotated[
        list[str] | None, Option("Folders of an index's images, which clients may be shown. Repeatable.")
    ] = None
    device: Device = "auto"
    model: IndexRun = None
    name: Annotated[str | None, Option("Name of the model for clients. Default: the folder's name.")] = None


@dataclass(frozen=True, kw_only=True)
class ServeOptions(ServingOptions):
    port: Annotated[int, Option("Port to listen on; 0 takes a free one.", minimum=0, maximum=65535)] = 8000
    processes: Annotated[int, Option("Processes that hold the model; they share the cores.", minimum=1)] = 1
    api_key: Annotated[
        str | None,
        Option(
            "Key that requests must send. Prefer the environment variable: other users can see command lines.",
            environment="PATCHLOOM_API_KEY",
        ),
    ] = None
    queue: Annotated[
        int, Option("Images or lines that may wait in the queue; further ones are refused.", minimum=1, panel=LIMITS)
    ] = 64
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
    from patchloom.serving.verbs import serve as run

    run(**arguments_of(options), on_start=lambda url, app: _print_start(url, app, options))


def arguments_of(options: ServingOptions) -> dict[str, Any]:
    """Return the options as keywords of the Python function."""
    return {field.name: getattr(options, field.name) for field in fields(options) if field.name != "as_json"}


def _print_start(url: str, app: "App", options: ServeOptions) -> None:
    from patchloom.cli.output import print_json, print_result
    from patchloom.serving.hosts import is_local
    from patchloom.serving.verbs import print_status
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
