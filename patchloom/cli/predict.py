"""`patchloom predict RUN IMAGE…`: names, not numbers."""

from pathlib import Path
from typing import Annotated, Any

import typer

from patchloom.cli.verb import completed


def predict(
    run: Annotated[
        str,
        typer.Argument(
            help="Folder of a run or of an artifact, or published weights such as resmlp_s12:in1k.",
            autocompletion=completed("run"),
        ),
    ],
    images: Annotated[list[str], typer.Argument(help="Image files, folders or videos.")],
    top: Annotated[int, typer.Option(help="Answers per image.")] = 3,
    every: Annotated[
        int | None,
        typer.Option(min=1, help="Every N-th frame of videos; by default one per second, of animations all."),
    ] = None,
    out: Annotated[
        str | None, typer.Option(help="Folder for masks, boxes and overlays (segmentation and detection).")
    ] = None,
    index: Annotated[
        str | None,
        typer.Option(help="Name classes by the nearest files of this index of the run; no classifier is needed."),
    ] = None,
    level: Annotated[
        str | None, typer.Option(help="Level of the index's labels, fine for the finest; the index's own by default.")
    ] = None,
    neighbours: Annotated[
        int | None, typer.Option(min=1, help="Files of the index that vote for each image; by default 20.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda …; auto takes a GPU if there is one.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="For machines: a list with one object per image.")] = False,
) -> None:
    """Classify images, or their pixels; one that cannot be read is named, and the others are answered.

    A run without a classifier names classes by its neighbours: --index INDEX, which `patchloom index` makes.
    """
    from patchloom.cli.output import JsonList, print_result
    from patchloom.runs.checksums import reading_once
    from patchloom_runtime.printable import printable

    index_options = {"index": index, "level": level, "neighbours": neighbours}
    by_index = {name: value for name, value in index_options.items() if value is not None}
    with reading_once():
        model = _open_model(run, device, by_index, writes=out is not None)
    written = {} if out is None else {"out": out}
    unreadable = 0
    listed = JsonList() if as_json else None
    for answer in model.predict_files(images, top=top, every=every, **written, **by_index):
        unreadable += answer.error is not None
        if listed:
            more = {"written": answer.written} if written else {}
            more |= {"level": answer.level, "reason": answer.reason} if by_index else {}
            listed.add({"path": answer.path, "answers": answer.answers, "error": answer.error, **more})
        elif answer.error:
            print_result(printable(f"{answer.path}  unreadable: {answer.error}"))
        else:
            print_result(printable(f"{answer.path}  {answer.in_words()}"))
    if listed:
        listed.close()
    if unreadable:
        raise typer.Exit(3)


def _open_model(run: str, device: str, by_index: dict[str, Any], *, writes: bool) -> Any:
    """Load a run or an artifact; raise UsageError for options that its task does not have."""
    from patchloom.runs.config import is_run
    from patchloom.tasks.table import task_named, task_of_run
    from patchloom_runtime.errors import UsageError

    exported = False
    if is_run(run):
        folder, task = Path(run), task_of_run(Path(run))
    else:
        from patchloom.runs.locate import run_folder
        from patchloom_runtime.artifacts.metadata import is_artifact, read_about  # not needed for a local run folder

        exported = is_artifact(run)
        folder = Path(run) if exported else run_folder(run)
        task = task_named(read_about(folder).task) if exported else task_of_run(folder)
    if writes and not task.model.writes_files:
        raise UsageError(f"--out {task.refusal}")
    if by_index and not task.whole_images:
        raise UsageError(f"--{next(iter(by_index))} {task.refusal}")
    if exported and by_index:
        raise UsageError(f"--{next(iter(by_index))} compares images by a run; {run} is an artifact: give the run")
    return task.model.open_artifact(folder) if exported else task.model.predictor(folder, device=device)
