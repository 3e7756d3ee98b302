"""`patchloom look RUN IMAGE…`: what the network saw, answered and looked at."""

from pathlib import Path
from typing import Annotated, Any

import typer

from patchloom.cli.verb import completed


def look(
    run: Annotated[
        str,
        typer.Argument(
            help="Folder of a run, published weights such as resmlp_s12:in1k, or NAME@FILE.",
            autocompletion=completed("run"),
        ),
    ],
    images: Annotated[
        list[str] | None,
        typer.Argument(
            help="Image files or folders; when left out the run's worst mistakes, or some of val where it names no "
            "classes. With --ranked: further runs."
        ),
    ] = None,
    ranked: Annotated[
        bool, typer.Option("--ranked", help="What of train is most like images of val, framed by how right it is.")
    ] = False,
    data: Annotated[
        str | None, typer.Option(help="Where the run's data lie now, for mistakes and ranked lists.")
    ] = None,
    out: Annotated[
        str | None, typer.Option(help="The page; look.html or ranked.html in the run's folder when left out.")
    ] = None,
    top: Annotated[int | None, typer.Option(help="Answers per image, 5; with --ranked, images per query, 10.")] = None,
    trunk: Annotated[
        bool, typer.Option("--trunk", help="With --ranked: by the vectors before the projector of a run that has one.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answers for machines.")] = False,
) -> None:
    """Draw what a model made of pictures: its view, its answers, and the maps its family has."""
    folder = Path(run) if Path(run).is_dir() else Path()
    page = Path(out) if out else folder / ("ranked.html" if ranked else "look.html")
    if ranked:
        _ranked([run, *(images or [])], data, page, 10 if top is None else top, trunk, as_json)
        return
    from patchloom.cli.output import print_json, print_result
    from patchloom.errors import UsageError
    from patchloom.judging.look_page import look_at
    from patchloom.printable import printable
    from patchloom.runs.config import is_run
    from patchloom.tasks.table import task_of_run

    if trunk:
        raise UsageError("--trunk says what images are compared by; give it with --ranked")
    task = task_of_run(folder) if is_run(folder) else None
    drawn: dict[str, Any] = {"data": data, "out": page, "top": 5 if top is None else top}
    own = task is not None and task.draws_looks
    found = task.look(folder, images or [], **drawn) if task and own else look_at(run, images or [], **drawn)
    if as_json:
        answers = [{"name": name, "answers": one.answers} for name, _, one in found.looks]
        print_json({"page": str(found.path), "pictures": answers, "notes": found.notes})
        return
    for note in found.notes:
        print(f"note: {note}")
    for name, detail, one in found.looks:
        print_result(printable(f"{name}  {one.in_words()}" + (f"   ({detail})" if detail else "")))
    print_result(found.path)


def _ranked(runs: list[str], data: str | None, page: Path, top: int, trunk: bool, as_json: bool) -> None:
    from patchloom.cli.output import print_json, print_result
    from patchloom.errors import UsageError
    from patchloom.judging.ranked_page import write_ranked
    from patchloom.runs.named import found_run
    from patchloom.runs.record import read_run_record

    folders = [found_run(run) for run in runs]
    for run, folder in zip(runs, folders, strict=True):
        if folder is None:
            raise UsageError(f"{run} is not the folder of a run: it has no config.json; with --ranked give --data DATA")
    record = read_run_record(folders[0]) if folders[0] else None
    if not (place := data or (record.data if record else None)):
        raise UsageError(f"{runs[0]} did not record where its data lie; say it with --data")
    found = write_ranked(runs, place, out=page, top=top, trunk=trunk)
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
