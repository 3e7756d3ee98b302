"""A served model as an ASGI application, for servers and clusters other than `patchloom serve`, such as Ray Serve.

They bring their own connections and their own end; queue, batches, model processes, routes and metrics are the same.
"""

from patchloom.serving.admission import Admission
from patchloom.serving.app import App
from patchloom.serving.limits import Limits
from patchloom.serving.naming import check_given, served_name
from patchloom.serving.processes import ModelProcesses


def asgi(
    source: str,
    *,
    name: str | None = None,
    workers: int = 1,
    threads: int | None = None,
    device: str = "auto",
    model: str | None = None,
    api_key: str | None = None,
    limits: Limits | None = None,
) -> App:
    """The application of a run, an artefact or an index; the model is loaded when the server starts it (lifespan).

    `workers` processes hold the model, with `threads` each: where several such applications share a machine, give each
    its part.
    """
    check_given(source)
    admission = Admission(limits or Limits())
    processes = ModelProcesses(source, admission, count=workers, threads=threads, device=device, model=model)
    return App(processes, served_name(source if name is None else name), api_key=api_key)
