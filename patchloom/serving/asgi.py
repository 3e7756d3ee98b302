"""A served model as an ASGI application, for servers and clusters other than `patchloom serve`, such as Ray Serve.

They bring their own connections and their own end; queue, batches, model processes, routes and metrics are the same.
"""

from collections.abc import Sequence

from patchloom.serving.admission import Admission
from patchloom.serving.app import App
from patchloom.serving.limits import Limits
from patchloom.serving.names import check_model_path, image_roots, served_name
from patchloom.serving.processes import ModelProcesses
from patchloom.serving.thumbnails import ThumbnailProcess


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
    """The application of a run, an artefact or an index; the model is loaded when the server starts it (lifespan).

    `workers` processes hold the model, with `threads` each: where several such applications share a machine, give each
    its part. `images` are the folders whose images an index may show.
    """
    check_model_path(source)
    roots = image_roots(source, images)
    admission = Admission(limits or Limits())
    processes = ModelProcesses(source, admission, count=workers, threads=threads, device=device, model=model)
    thumbnails = ThumbnailProcess(roots, admission.limits) if roots else None
    return App(processes, served_name(source if name is None else name), api_key=api_key, thumbnails=thumbnails)
