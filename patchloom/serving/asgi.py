"""A served model as an ASGI application, for servers and clusters other than `patchloom serve`, such as Ray Serve.

They bring their own connections and shutdown; queue, batches, model processes, routes and metrics are the same.
"""

import os
from collections.abc import Sequence

from patchloom.serving.admission import Admission
from patchloom.serving.app import App
from patchloom.serving.limits import Limits
from patchloom.serving.processes import ModelProcesses
from patchloom.serving.thumbnails import ThumbnailProcess, image_roots
from patchloom_runtime.errors import UsageError


def asgi(
    source: str,
    *,
    name: str | None = None,
    workers: int = 1,
    threads: int | None = None,
    device: str = "auto",
    model: str | None = None,
    api_key: str | None = None,
    images: Sequence[str] = (),
    limits: Limits | None = None,
) -> App:
    """Return the application of a run, an artifact or an index; the server's lifespan event loads the model.

    Args:
        source: folder of the run, artifact or index, or the name of published weights.
        name: model name for clients (default: the name of the folder).
        workers: number of model processes.
        threads: threads per model process (default: the cores divided by the workers). Set it if several applications
            share a machine.
        device: device of the model; `auto` uses a GPU if there is one.
        model: run folder of an index, if it was moved.
        api_key: key that clients must send.
        images: folders whose images an index may show.
        limits: limits of requests and queue.
    """
    check_model_path(source)
    roots = image_roots(source, images)
    admission = Admission(limits or Limits())
    processes = ModelProcesses(source, admission, count=workers, threads=threads, device=device, model=model)
    thumbnails = ThumbnailProcess(roots, admission.limits) if roots else None
    return App(processes, served_name(source if name is None else name), api_key=api_key, thumbnails=thumbnails)


def check_model_path(source: str) -> None:
    """Raise UsageError if nothing can be served, before a process starts; names of weights are looked up later."""
    if os.path.isdir(source):
        files = ("config.json", "index.json", "artifact.json")
        if not any(os.path.isfile(os.path.join(source, file)) for file in (*files, "artefact.json")):
            raise UsageError(f"{source} is not a run, an artifact or an index: it has none of {', '.join(files)}")
    elif ":" not in source:
        raise UsageError(
            f"{source} does not exist; pass a run, an artifact, an index, or weights such as resmlp_s12:in1k"
        )


def served_name(source: str) -> str:
    """Return the model name for clients: the name of the folder, in characters that need no quoting in a URL."""
    name = os.path.basename(os.path.realpath(source)) if os.path.isdir(source) else source
    plain = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "-_.") else "-" for letter in name)
    return plain.strip(".") or "model"
