"""`patchloom look RUN IMAGE…`: predictions on images, beside the truth and the maps of the network."""

from pathlib import Path
from typing import Annotated, Any

import typer

from patchloom.cli.verb import completed

LINES = 20  # printed at most: a screenful


def look(
    run: Annotated[
        str,
        typer.Argument(
            help="Folder of a run or of an artifact, published weights such as resmlp_s12:in1k, or NAME@FILE.",
            autocompletion=completed("run"),
        ),
    ],
    images: Annotated[
        list[str] | None,
        typer.Argument(
            help="Image files or folders. Without any: the run's worst mistakes, or some val images if it names no "
            "classes. With --ranked: further runs."
        ),
    ] = None,
    ranked: Annotated[
        bool,
        typer.Option(
            "--ranked",
            help="For val images the most similar training images, framed by whether the class is right.",
        ),
    ] = False,
    data: Annotated[
        str | None, typer.Option(help="Where the run's data lie now, for mistakes and ranked lists.")
    ] = None,
    count: Annotated[int | None, typer.Option(help="Images shown at most, from all classes (default: 24).")] = None,
    out: Annotated[
        str | None, typer.Option(help="The page; look.html or ranked.html in the run's folder when left out.")
    ] = None,
    top: Annotated[int | None, typer.Option(help="Answers per image, 5; with --ranked, images per query, 10.")] = None,
    trunk: Annotated[
        bool, typer.Option("--trunk", help="With --ranked: by the vectors before the projector of a run that has one.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answers for machines.")] = False,
) -> None:
    """Draw predictions on images: the network's view, its classes beside the truth, and the maps its family has."""
    folder = Path(run) if Path(run).is_dir() else Path()
    page = Path(out) if out else folder / ("ranked.html" if ranked else "look.html")
    if ranked:
        _ranked([run, *(images or [])], data, page, 10 if top is None else top, trunk, as_json)
        return
    from patchloom.cli.output import print_json, print_result
    from patchloom.runs.config import is_run
    from patchloom.tasks.images.look_page import look_at
    from patchloom.tasks.table import task_named, task_of_run
    from patchloom.tasks.task import Task
    from patchloom_runtime.artifacts.metadata import is_artifact, read_about
    from patchloom_runtime.errors import UsageError
    from patchloom_runtime.printable import printable

    if trunk:
        raise UsageError("--trunk says what images are compared by; give it with --ranked")
    if is_artifact(folder):
        task: Task | None = task_named(read_about(folder).task)
    else:
        task = task_of_run(folder) if is_run(folder) else None
    drawn: dict[str, Any] = {"data": data, "out": page, "top": 5 if top is None else top}
    if count is not None:
        drawn["count"] = count
    own = task is not None and task.report.draws_looks
    found = task.report.look(folder, images or [], **drawn) if task and own else look_at(run, images or [], **drawn)
    if as_json:
        answers = [{"name": name, "answers": one.answers} for name, _, one in found.looks]
        print_json({"page": str(found.path), "pictures": answers, "notes": found.notes})
        return
    for note in found.notes:
        print(f"note: {note}")
    for name, detail, one in found.looks[:LINES]:
        truth = getattr(one, "truth", "")
        told = [one.in_words(), f"(true: {truth})" if truth else "", f"({detail})" if detail else ""]
        print_result(printable("  ".join([name, *filter(None, told)])))
    if len(found.looks) > LINES:
        print_result(f"… {len(found.looks) - LINES} more on the page")
    print_result(found.path)


def _ranked(runs: list[str], data: str | None, page: Path, top: int, trunk: bool, as_json: bool) -> None:
    from patchloom.cli.output import print_json, print_result
    from patchloom.runs.locate import find_run
    from patchloom.runs.run_metadata import data_path, read_run_metadata
    from patchloom.tasks.classification.ranked_page import write_ranked
    from patchloom_runtime.errors import UsageError

    folders = [find_run(run) for run in runs]
    for run, folder in zip(runs, folders, strict=True):
        if folder is None:
            raise UsageError(f"{run} is not the folder of a run: it has no config.json; with --ranked give --data DATA")
    record = read_run_metadata(folders[0]) if folders[0] else None
    found = write_ranked(runs, data_path(folders[0], record, data or None), out=page, top=top, trunk=trunk)
    if as_json:
        queries = {
            query: {run: [vars(hit) for hit in hits] for run, hits in of.items()} for query, of in found.queries.items()
        }
        print_json({"page": str(found.path), "picture": str(found.png), "queries": queries, "notes": found.notes})
        return
    for note in found.notes:
        print(f"note: {note}")
    print_result(found.path)
    print_result(found.png)
