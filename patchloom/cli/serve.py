"""`patchloom serve RUN`: a trained model behind HTTP."""

from typing import Annotated

import typer

from patchloom.cli.verb import completed

_LIMITS = "Limits"


AllowHost = Annotated[
    list[str] | None,
    typer.Option(help="Host name that requests may come by, such as a proxy's; may be given several times."),
]
ImageFolders = Annotated[
    list[str] | None, typer.Option(help="Folder whose images an index may show; may be given several times.")
]


def serve(
    served: Annotated[
        str, typer.Argument(help="A run, an artefact of `export`, or an index.", autocompletion=completed("run"))
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on; by default only this machine can ask. 0.0.0.0 listens on every address."
        ),
    ] = "127.0.0.1",
    workers: Annotated[int, typer.Option(min=1, help="Processes that hold the model; they share the cores.")] = 1,
    allow_host: AllowHost = None,
    images: ImageFolders = None,
    device: Annotated[str, typer.Option(help="cpu, cuda …; auto takes a GPU if there is one.")] = "auto",
    model: Annotated[str | None, typer.Option(help="Where the run of an index lies now, if it was moved.")] = None,
    name: Annotated[str | None, typer.Option(help="What clients call the model; by default its folder's name.")] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="PATCHLOOM_API_KEY",
            show_envvar=True,
            help="Answer only those who send it; better in the environment, since others see what you type.",
        ),
    ] = None,
    queue: Annotated[
        int, typer.Option(min=1, help="Images or lines that may wait; more are refused.", rich_help_panel=_LIMITS)
    ] = 64,
    batch: Annotated[int, typer.Option(min=1, help="Answered together.", rich_help_panel=_LIMITS)] = 8,
    deadline: Annotated[
        float, typer.Option(min=0.1, help="Seconds until an answer is given up.", rich_help_panel=_LIMITS)
    ] = 30.0,
    max_megabytes: Annotated[
        float, typer.Option(min=0.001, help="Of one request's body.", rich_help_panel=_LIMITS)
    ] = 20.0,
    max_pixels: Annotated[
        int, typer.Option(min=16, max=25_000_000, help="Of one image.", rich_help_panel=_LIMITS)
    ] = 25_000_000,
    as_json: Annotated[bool, typer.Option("--json", help="For machines: address and routes, once it answers.")] = False,
) -> None:
    """Answer requests over HTTP: classes, vectors, nearest files, masks, boxes or translations, as the model does.

    patchloom serve runs/photos, then curl --data-binary @new.jpg http://127.0.0.1:8000/predict
    """
    import sys

    from patchloom.cli.output import print_json, print_result
    from patchloom.serving.admission import Admission
    from patchloom.serving.app import App
    from patchloom.serving.asgi import check_model_path, served_name
    from patchloom.serving.hosts import is_local
    from patchloom.serving.limits import Limits
    from patchloom.serving.processes import ModelProcesses
    from patchloom.serving.server import serve as serve_model
    from patchloom.serving.thumbnails import NO_IMAGES, ThumbnailProcess, image_roots
    from patchloom_runtime.errors import UsageError
    from patchloom_runtime.printable import printable

    check_model_path(served)
    roots = image_roots(served, images or ())
    if api_key is not None and (not api_key.strip() or not api_key.isascii()):
        raise UsageError(
            "the key of --api-key or PATCHLOOM_API_KEY is empty or has letters outside ASCII; give another"
        )

    def say(text: str) -> None:
        print(printable(text), file=sys.stderr, flush=True)

    def began(url: str, app: App) -> None:
        about = app.processes.about
        if not is_local(host) and api_key is None:
            say(f"note: whoever reaches {host} may ask; PATCHLOOM_API_KEY sets a key")
        if "search" in about["verbs"] and not roots:
            say(NO_IMAGES)
        if as_json:
            print_json({"url": url, "model": app.name, "verbs": about["verbs"], "pids": app.processes.pids})
            return
        threads = f"{app.processes.threads} thread{'s' if app.processes.threads > 1 else ''}"
        held = f"{workers} processes of {threads} each" if workers > 1 else f"one process of {threads}"
        print(f"{printable(about['network'])} in {held}")
        print(f"answers {batch} together; refuses more than {queue} that wait; gives up after {deadline:g} s")
        for verb in about["verbs"]:
            print_result(f"POST {url}/{verb}")
        print_result(f"GET  {url}/openapi.json  /ready  /metrics")

    limits = Limits(
        queue=queue,
        batch=batch,
        deadline_seconds=deadline,
        body_bytes=int(max_megabytes * 1e6),
        pixels=max_pixels,
    )
    processes = ModelProcesses(served, Admission(limits), count=workers, device=device, model=model, say=say)
    called = served_name(served if name is None else name)
    serve_model(
        processes,
        called,
        host=host,
        port=port,
        api_key=api_key,
        say=say,
        began=began,
        allowed_hosts=allow_host or (),
        thumbnails=ThumbnailProcess(roots, limits, say=say) if roots else None,
    )
