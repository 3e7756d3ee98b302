"""`patchloom look RUN IMAGE…`: predictions on images, next to the labels and the maps of the network."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from patchloom.cli.options import Json, Trunk
from patchloom.options import Argument, Option

PRINTED = 20  # images printed in the terminal, a screenful; the page has all
TOP = 5
TOP_RANKED = 10


@dataclass(frozen=True, kw_only=True)
class LookOptions:
    run: Annotated[
        str,
        Argument(
            "Run or artifact folder, published weights such as resmlp_s12:in1k, or NAME@FILE (a network and its "
            "weights).",
            complete="run",
        ),
    ]
    images: Annotated[
        list[str] | None,
        Argument(
            "Image files or folders. Default: the run's worst mistakes, or some val images if it has no classes. "
            "With --ranked: further runs."
        ),
    ] = None
    ranked: Annotated[bool, Option("For each val image, its nearest training images, framed by correctness.")] = False
    data: Annotated[str | None, Option("The run's data, if they were moved; for mistakes and ranked lists.")] = None
    count: Annotated[int | None, Option("Largest number of images, spread over the classes. Default: 24.")] = None
    page: Annotated[str | None, Option("HTML page. Default: look.html or ranked.html in the run folder.")] = None
    top: Annotated[int | None, Option("Classes per image (default: 5); with --ranked, images per query (10).")] = None
    trunk: Trunk = False
    as_json: Json = False


def look(options: LookOptions) -> None:
    """Draw predictions on images: the network's input, its classes next to the label, and maps of what it looked at.

    patchloom look runs/photos photos/test/
    """
    from patchloom_runtime.errors import UsageError

    folder = Path(options.run) if Path(options.run).is_dir() else Path()
    page = Path(options.page) if options.page else folder / ("ranked.html" if options.ranked else "look.html")
    if options.ranked:
        _ranked(options, page)
        return
    if options.trunk:
        raise UsageError("--trunk chooses the vectors that images are compared by; pass it with --ranked")
    looks = _look(options, folder, page)
    _print(looks, as_json=options.as_json)


def _look(options: LookOptions, folder: Path, page: Path) -> Any:
    from patchloom.runs.config import is_run
    from patchloom.tasks.images.look_page import look_at
    from patchloom.tasks.table import task_named, task_of_run
    from patchloom.tasks.task import Task
    from patchloom_runtime.artifacts.metadata import is_artifact, read_about

    task: Task | None = None
    if is_artifact(folder):
        task = task_named(read_about(folder).task)
    elif is_run(folder):
        task = task_of_run(folder)
    keywords: dict[str, Any] = {"data": options.data, "out": page, "top": TOP if options.top is None else options.top}
    if options.count is not None:
        keywords["count"] = options.count
    if task is not None and task.report.draws_looks:
        return task.report.look(folder, options.images or [], **keywords)
    return look_at(options.run, options.images or [], **keywords)


def _print(looks: Any, *, as_json: bool) -> None:
    from patchloom.cli.output import print_json, print_result
    from patchloom_runtime.printable import printable

    if as_json:
        answers = [{"name": name, "answers": one.answers} for name, _, one in looks.looks]
        print_json({"page": str(looks.path), "pictures": answers, "notes": looks.notes})
        return
    for note in looks.notes:
        print(f"note: {note}")
    for name, detail, one in looks.looks[:PRINTED]:
        truth = getattr(one, "truth", "")
        parts = [name, one.in_words(), f"(true: {truth})" if truth else "", f"({detail})" if detail else ""]
        print_result(printable("  ".join(filter(None, parts))))
    if len(looks.looks) > PRINTED:
        print_result(f"… {len(looks.looks) - PRINTED:,} more on the page")
    print_result(looks.path)


def _ranked(options: LookOptions, page: Path) -> None:
    from patchloom.cli.output import print_json, print_result
    from patchloom.runs.locate import find_run
    from patchloom.runs.run_metadata import data_path, read_run_metadata
    from patchloom.tasks.classification.ranked_page import write_ranked
    from patchloom_runtime.errors import UsageError

    runs = [options.run, *(options.images or [])]
    folders = [find_run(run) for run in runs]
    for run, folder in zip(runs, folders, strict=True):
        if folder is None:
            raise UsageError(f"{run} is not a run folder: it has no config.json; with --ranked, pass --data DATA")
    metadata = read_run_metadata(folders[0]) if folders[0] else None
    data = data_path(folders[0], metadata, options.data or None)
    top = TOP_RANKED if options.top is None else options.top
    ranked = write_ranked(runs, data, out=page, top=top, trunk=options.trunk)
    if options.as_json:
        queries = {
            query: {run: [vars(hit) for hit in hits] for run, hits in of.items()}
            for query, of in ranked.queries.items()
        }
        print_json({"page": str(ranked.path), "picture": str(ranked.png), "queries": queries, "notes": ranked.notes})
        return
    for note in ranked.notes:
        print(f"note: {note}")
    print_result(ranked.path)
    print_result(ranked.png)
