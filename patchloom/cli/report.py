"""`patchloom report RUN…`: one page about a run, or about several side by side."""

from dataclasses import dataclass
from typing import Annotated

from patchloom.cli.options import Json, ReadingOptions, keywords
from patchloom.data.reading_options import AS_IT_IS
from patchloom.options import Argument, Option


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    runs: Annotated[list[str], Argument("Run folders; two or more are compared.", complete="run")]
    data: Annotated[str | None, Option("Where the data are now. Several runs are evaluated on it.")] = None
    split: Annotated[
        str | None, Option("Evaluate this split of the data now and report on it.", metavar="train|val|test|all")
    ] = None
    level: Annotated[str | None, Option("Label level to compare with. Default: that of the model's classes.")] = None
    v2: Annotated[bool, Option("Folder names of --data are class numbers, as in ImageNet-V2.")] = False
    val: Annotated[
        str | None,
        Option("With several runs: data whose top-1 is plotted against that of --data. Default: each run's val."),
    ] = None
    page: Annotated[
        str | None,
        Option("HTML page. Default: RUN/report.html, RUN/report-SPLIT.html, or comparison.html here."),
    ] = None
    reading: ReadingOptions = AS_IT_IS
    as_json: Json = False


def report(options: ReportOptions) -> None:
    """Write one self-contained HTML page: numbers, curves, confusion, mistakes, images, recipe, cost.

    patchloom report runs/photos --data photos/ --split test

    patchloom report runs/a runs/b
    """
    from patchloom.cli.output import print_json, print_result
    from patchloom.tasks.report import report as write_report

    page = write_report(**keywords(options))
    if options.as_json:
        print_json({"page": str(page), "runs": options.runs})
    else:
        print_result(page)
