"""`patchloom predict RUN IMAGE…`: class names, masks or boxes of images."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchloom.cli.options import Device, Json, changed
from patchloom.options import Argument, Option

if TYPE_CHECKING:
    from patchloom.tasks.task import Task


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """Options of `patchloom predict`."""

    run: Annotated[
        str, Argument("Run or artifact folder, or published weights such as resmlp_s12:in1k.", complete="run")
    ]
    images: Annotated[list[str], Argument("Image files, folders or videos.")]
    top: Annotated[int, Option("Classes per image.")] = 3
    every: Annotated[
        int | None,
        Option("Use every N-th frame of videos. Default: one per second; animations: all.", minimum=1, metavar="N"),
    ] = None
    out: Annotated[str | None, Option("Folder for masks, boxes and overlays (segmentation and detection).")] = None
    index: Annotated[
        str | None, Option("Classify by the nearest files of this index of the run; needs no classifier.")
    ] = None
    level: Annotated[str | None, Option("Level of the index's labels, fine for the finest. Default: the index's.")] = (
        None
    )
    neighbors: Annotated[int | None, Option("Files of the index that vote on each image. Default: 20.", minimum=1)] = (
        None
    )
    device: Device = "auto"
    as_json: Json = False


def predict(options: PredictOptions) -> None:
    """Predict the class, the mask or the boxes of images. Unreadable files are reported, and the others predicted.

    A run without a classifier classifies by nearest neighbors: --index INDEX, made by `patchloom index`.
    """
    from patchloom.cli.output import JsonList, print_result
    from patchloom.runs.checksums import reading_once
    from patchloom_runtime.printable import printable

    with reading_once():
        model, keywords = _open_model(options)
    unreadable = 0
    json_list = JsonList() if options.as_json else None
    for prediction in model.predict_files(options.images, top=options.top, every=options.every, **keywords):
        unreadable += prediction.error is not None
        if json_list:
            more = {"written": prediction.written} if options.out is not None else {}
            if keywords.keys() - {"out"}:
                more |= {"level": prediction.level, "reason": prediction.reason}
            answers = {"path": prediction.path, "answers": prediction.answers, "error": prediction.error}
            json_list.add(answers | more)
        elif prediction.error:
            print_result(printable(f"{prediction.path}  unreadable: {prediction.error}"))
        else:
            print_result(printable(f"{prediction.path}  {prediction.in_words()}"))
    if json_list:
        json_list.close()
    if unreadable:
        raise typer.Exit(3)


def _open_model(options: PredictOptions) -> tuple[Any, dict[str, Any]]:
    """Open a run or an artifact; return it with the keywords that its `predict_files` takes."""
    from patchloom_runtime.errors import UsageError

    folder, task, is_exported = _find_model(options.run)
    if options.out is not None and not task.model.writes_files:
        raise UsageError(f"--out {task.refusal}")
    by_index = changed(options, "index", "level", "neighbors")
    if by_index and not task.whole_images:
        raise UsageError(f"{by_index[0]} {task.refusal}")
    if is_exported and by_index:
        raise UsageError(f"{by_index[0]} needs a run to compare images; {options.run} is an artifact: give the run")
    named = {"index": options.index, "level": options.level, "neighbours": options.neighbors, "out": options.out}
    keywords = {name: value for name, value in named.items() if value is not None}
    if is_exported:
        return task.model.open_artifact(folder), keywords
    return task.model.predictor(folder, device=options.device), keywords


def _find_model(run: str) -> "tuple[Path, Task, bool]":
    """Return the folder of a run or artifact, its task, and whether it is an artifact."""
    from patchloom.runs.config import is_run
    from patchloom.tasks.table import task_named, task_of_run

    if is_run(run):
        return Path(run), task_of_run(Path(run)), False
    from patchloom.runs.locate import run_folder
    from patchloom_runtime.artifacts.metadata import is_artifact, read_about  # not needed for run folders

    if is_artifact(run):
        return Path(run), task_named(read_about(Path(run)).task), True
    folder = run_folder(run)
    return folder, task_of_run(folder), False
