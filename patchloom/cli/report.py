"""`patchloom report RUN…`: one page on a run, or on several side by side."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchloom.cli.reading_options import reads_data
from patchloom.cli.verb import completed

if TYPE_CHECKING:
    from patchloom.data.reading import Reading


@reads_data()
def report(
    runs: Annotated[
        list[str], typer.Argument(help="Folders of runs; two or more are compared.", autocompletion=completed("run"))
    ],
    reading: "Reading",
    data: Annotated[str | None, typer.Option(help="Where the data lie now; several runs are evaluated on it.")] = None,
    split: Annotated[
        str | None,
        typer.Option(metavar="train|val|test|all", help="Evaluate this split of the data now and report on it."),
    ] = None,
    level: Annotated[
        str | None, typer.Option(help="Label level to compare with; that of the model's classes by default.")
    ] = None,
    v2: Annotated[
        bool, typer.Option("--v2", help="Folder names of --data are class numbers, as in ImageNet-V2.")
    ] = False,
    val: Annotated[
        str | None,
        typer.Option(
            help="Several runs: draw their top-1 on this data, rather than on each run's val, against --data."
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(help="The page; RUN/report.html, RUN/report-SPLIT.html, or comparison.html here when left out."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print where the page is for machines.")] = False,
) -> None:
    """Write one HTML file that needs nothing else: numbers, curves, confusion, mistakes, pictures, recipe, cost."""
    from pathlib import Path

    from patchloom.cli.output import print_json, print_result
    from patchloom_runtime.errors import UsageError

    shown: dict[str, Any] = {"split": split, "reading": reading, "level": level, "v2": v2}
    if len(runs) > 1 and data is None and (split or level or reading.chosen()):
        raise UsageError("--split, --level and how data are read need data: several runs are evaluated on --data DATA")
    if (v2 or val) and data is None:
        raise UsageError(f"{'--v2' if v2 else '--val'} needs images to evaluate on now: give --data DATA")
    if v2 and (split or level or reading.chosen()):
        raise UsageError("--v2 reads all of --data by its folders' numbers; leave --split, --level and labels out")
    if val and len(runs) == 1:
        raise UsageError("--val is drawn against --data for several runs; for one give --data DATA --split val")
    if len(runs) == 1 and level and split is None:
        raise UsageError("--level says what labels a split is compared with; give --split too")
    if len(runs) == 1:
        from patchloom.runs.locate import find_run
        from patchloom.tasks.report import page_name, report_run

        folder = find_run(runs[0]) or Path(runs[0])
        # The cache of published weights is no place for a page.
        default = None if Path(runs[0]).exists() else Path(page_name("v2" if v2 else split or ""))
        page = report_run(folder, data=data, out=Path(out) if out else default, **shown)
    else:
        from patchloom.tasks.classification.comparison_page import report_runs

        page = report_runs(runs, data=data, val=val, out=Path(out or "comparison.html"), **shown)
    if as_json:
        print_json({"page": str(page), "runs": runs})
    else:
        print_result(page)
