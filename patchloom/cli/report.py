"""`patchloom report RUN…`: one page about a run, or about several side by side."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from patchloom.cli.options import Json, ReadingOptions
from patchloom.data.reading import AS_IT_IS
from patchloom.options import Argument, Option


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Options of `patchloom report`."""

    runs: Annotated[list[str], Argument("Run folders; two or more are compared.", complete="run")]
    data: Annotated[str | None, Option("Where the data are now. Several runs are evaluated on it.")] = None
    split: Annotated[
        str | None, Option("Evaluate this split of the data now and report on it.", metavar="train|val|test|all")
    ] = None
    level: Annotated[str | None, Option("Label level to compare with. Default: that of the model's classes.")] = None
    v2: Annotated[bool, Option("Folder names of --data are class numbers, as in ImageNet-V2.")] = False
    val: Annotated[
        str | None,
        Option("Several runs: plot their top-1 on this data, instead of each run's val, against --data."),
    ] = None
    page: Annotated[
        str | None,
        Option("HTML page. Default: RUN/report.html, RUN/report-SPLIT.html, or comparison.html here."),
    ] = None
    reading: ReadingOptions = AS_IT_IS
    as_json: Json = False


def report(options: ReportOptions) -> None:
    """Write one self-contained HTML page: numbers, curves, confusion, mistakes, images, recipe, cost."""
    from patchloom.cli.output import print_json, print_result

    _check(options)
    shared: dict[str, Any] = {name: getattr(options, name) for name in ("data", "split", "reading", "level", "v2")}
    if len(options.runs) == 1:
        from patchloom.runs.locate import find_run
        from patchloom.tasks.report import page_name, report_run

        (run,) = options.runs
        # A page about published weights goes here, not into their cache.
        default = None if Path(run).exists() else Path(page_name("v2" if options.v2 else options.split or ""))
        page = report_run(find_run(run) or Path(run), out=Path(options.page) if options.page else default, **shared)
    else:
        from patchloom.tasks.classification.comparison_page import report_runs

        page = report_runs(options.runs, val=options.val, out=Path(options.page or "comparison.html"), **shared)
    if options.as_json:
        print_json({"page": str(page), "runs": options.runs})
    else:
        print_result(page)


def _check(options: ReportOptions) -> None:
    from patchloom_runtime.errors import UsageError

    reads = options.split or options.level or options.reading.chosen()
    is_one = len(options.runs) == 1
    if not is_one and options.data is None and reads:
        raise UsageError("--split, --level and how data are read need data: several runs are evaluated on --data DATA")
    if (options.v2 or options.val) and options.data is None:
        raise UsageError(f"{'--v2' if options.v2 else '--val'} needs images to evaluate on now: give --data DATA")
    if options.v2 and reads:
        raise UsageError("--v2 reads all of --data by its folders' numbers; leave --split, --level and labels out")
    if options.val and is_one:
        raise UsageError("--val is plotted against --data for several runs; for one give --data DATA --split val")
    if is_one and options.level and options.split is None:
        raise UsageError("--level chooses the labels that a split is compared with; give --split too")
