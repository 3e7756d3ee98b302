"""`patchloom app RUN`: a page for trying a trained model on images."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from patchloom.cli.serve import ServingOptions, arguments_of
from patchloom.options import Option

if TYPE_CHECKING:
    from patchloom.serving.app import App


@dataclass(frozen=True, kw_only=True)
class AppOptions(ServingOptions):
    port: Annotated[
        int | None,
        Option("Port to listen on. Default: 8000, or a free one if that is taken.", minimum=0, maximum=65535),
    ] = None
    browser: Annotated[bool, Option("Open the page in the browser.")] = True
    as_json: Annotated[bool, Option("Print the address as JSON, once the server answers.", name="json")] = False


def app(options: AppOptions) -> None:
    """Open a page for trying a model: classes and the evidence for them, masks, boxes, similar images, translations.

    patchloom app runs/photos

    Images can be dropped, pasted, chosen or photographed; they are sent to this command only. Ctrl-C ends it.
    """
    from patchloom.serving.verbs import app as run

    run(**arguments_of(options), on_start=lambda url, app: _print_start(url, app, options))


def _print_start(url: str, app: "App", options: AppOptions) -> None:
    from patchloom.cli.output import print_json, print_result
    from patchloom.serving.hosts import is_local
    from patchloom.serving.verbs import print_status
    from patchloom_runtime.printable import printable

    about = app.processes.about
    if not is_local(options.host):
        print_status(f"note: anyone who can reach {options.host} can use the page")
    if options.as_json:
        print_json({"url": url, "model": app.name, "verbs": about["verbs"], "pids": app.processes.pids})
    else:
        print(f"{printable(about['network'])} at the address below; Ctrl-C ends it")
        print_result(url)
