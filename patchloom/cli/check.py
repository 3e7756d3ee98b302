"""`patchloom check DATA`: the contents of a dataset and its problems, before training."""

import os
import re
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchloom.cli.options import OmitFields
from patchloom.cli.output import refuse_inside
from patchloom.data.reading_options import AS_IT_IS, Reading
from patchloom.data.sources.specs import is_url, join_specs
from patchloom.options import Argument, Option
from patchloom_runtime.errors import UsageError
from patchloom_runtime.printable import plural, printable

if TYPE_CHECKING:
    from patchloom.data.checking.check_report import CheckReport
    from patchloom.data.checking.survey import ImageLocation

LISTED = 5  # files, groups or classes per line in the terminal; the page, --json and --verbose have all


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    data: Annotated[tuple[str, ...], Argument("Folder, or any other data that `train` takes.", metavar="DATA")]
    page: Annotated[
        str | None, Option("HTML page. Default: check.html in runs/check-NAME or --out, if there are problems.")
    ] = None
    against: Annotated[
        str | None,
        Option("Test set to compare with: list the training images that it also contains, or nearly.", metavar="DATA"),
    ] = None
    list_file: Annotated[
        str | None, Option("Where to write that list. Default: runs/check-NAME/in-OTHER.tsv.", name="list")
    ] = None
    strict: Annotated[
        bool, Option("Treat warnings about the data as errors: near-duplicates across splits and labels.")
    ] = False
    workers: Annotated[int | None, Option("Processes that read images. Default: one per core.", minimum=1)] = None
    cache: Annotated[bool, Option("Read only the files that changed since the last check.")] = True
    reading: Annotated[Reading, OmitFields(("val",))] = AS_IT_IS
    out: Annotated[
        str | None,
        Option("Check in parts, with bounded memory: folder, or address in a bucket, for the parts and the report."),
    ] = None
    part: Annotated[
        str | None, Option("Scan one of several shares of the data, such as 3/8, for --join.", metavar="I/N")
    ] = None
    join: Annotated[bool, Option("Join the parts that were made with --part; make none.")] = False
    as_json: Annotated[bool, Option("Print JSON; a page is written only with --page.", name="json")] = False

    @property
    def data_text(self) -> str:
        """The data as one string, quoted as a shell would if there are several."""
        return join_specs(self.data)


def check(options: CheckOptions) -> None:
    """Find unreadable and odd files, duplicates, copies between splits, uneven classes. Exits with 3 if there are any.

    patchloom check photos/
    """
    from patchloom.cli.output import print_json
    from patchloom.data.checking.check import check as check_data
    from patchloom.data.checking.check_report import JoinedReport
    from patchloom.data.checking.large_check import publish_report
    from patchloom.data.checking.scan import scan_bar

    data, against = options.data_text, options.against
    page = Path(options.page) if options.page else None
    if options.out and not is_url(options.out):
        refuse_inside(Path(options.out), data, what="folder of the parts")
    if page:
        refuse_inside(page, data)
    if options.list_file and against is None:
        raise UsageError("--list names the file for the list of --against; pass both")
    if options.list_file:
        refuse_inside(Path(options.list_file), data, against or "", what="list")
    started = time.perf_counter()
    with scan_bar() as progress:
        report = check_data(
            data,
            reading=options.reading,
            against=against,
            workers=options.workers,
            cache=options.cache,
            out=options.out,
            part=options.part,
            join=options.join,
            progress=progress,
        )
    seconds = time.perf_counter() - started
    if options.part:
        _print_share(report, options, seconds)
        return
    problems = report.problems(strict=options.strict)
    list_file = _write_list(report, options)
    if not page and problems and not options.as_json:
        page = _default_page(data) if not isinstance(report, JoinedReport) else Path(report.folder, "check.html")
    if page:
        from patchloom.report.check_page import write_check_page

        write_check_page(page, report, problems=problems)
        if options.out:
            publish_report(options.out)
    if options.as_json:
        more = {"seconds": round(seconds, 3)} | ({"list": str(list_file)} if list_file else {})
        print_json(report.to_dict(strict=options.strict) | more)
    else:
        _print(report, options, seconds, problems, page, list_file)
    if problems:
        raise typer.Exit(3)


def _print(
    report: "CheckReport",
    options: CheckOptions,
    seconds: float,
    problems: list[str],
    page: Path | None,
    list_file: Path | None,
) -> None:
    from patchloom.cli.output import print_result
    from patchloom.tasks.table import DEFAULT, TASKS

    splits = " + ".join(f"{count:,} {split}" for split, count in report.splits.items())
    counted = splits if len(report.splits) > 1 else f"{report.images:,} {report.unit}s, no val split"
    number = len(report.classes) or len(report.annotated)
    classes = f"{plural(number, 'class')}, " if number else ""
    names = {task.word: task.name for task in TASKS.values() if task.name != DEFAULT}
    task = f"{names[report.task]}, " if report.task in names else ""
    decoded = f", {report.decoded:,} decoded" if report.unit == "image" else ""
    speed = f"{seconds:.1f} s ({report.images / seconds:,.0f}/s{decoded})"
    print_result(f"{options.data_text}  {task}{classes}{counted}   {speed}")
    rows = [(printable(name), count, printable(detail)) for name, count, detail in _rows(report, options.data_text)]
    width = max([16, *(len(name) for name, _, _ in rows)])
    for name, count, detail in rows:
        print_result(f"  {name:<{width}}{count:>7}  {detail}".rstrip())
    for note in report.notes:
        print_result(f"  note: {printable(note)}")
    print_result(f"Problems: {printable('; '.join(problems))}." if problems else "No problems found.")
    if page:
        print_result(f"Page: {page}")
    if options.out:
        print_result(f"Lists: {options.out}/*.csv")
    reading = options.reading
    if list_file:
        print_result(f"List: {list_file}")
        reading = replace(reading, exclude=list_file)
    if list_file or report.classes or report.task != "classify":
        print(f"Next: patchloom train {shlex.quote(options.data_text)}{reading.options()}")


def _print_share(report: "CheckReport", options: CheckOptions, seconds: float) -> None:
    from patchloom.cli.output import print_json, print_result
    from patchloom.data.checking.check_report import total_of

    unreadable, (made,) = total_of(report.unreadable), report.notes
    if options.as_json:
        print_json({"part": options.part, "images": report.images, "unreadable": unreadable, "made": made})
        return
    speed = f"{seconds:.1f} s ({report.images / seconds:,.0f}/s)"
    print_result(f"{report.name}: {made} of {report.images:,} images, {unreadable:,} unreadable   {speed}")
    command = shlex.join(["patchloom", "check", *options.data, "--out", options.out or "", "--join"])
    print(f"Next, once all parts are made: {command}")


def _rows(report: "CheckReport", data: str) -> Iterator[tuple[str, str, str]]:
    """Yield name, count and detail of every line; further files follow on lines without a name."""
    from patchloom.data.checking.check_report import DETAILED, JoinedReport, total_of

    path = Path(data).expanduser()
    if isinstance(report, JoinedReport):
        path = path.absolute()
    folder = f"{path.parent if path.is_file() else path}{os.sep}"

    def short(place: "ImageLocation") -> str:
        return place.where.removeprefix(folder)

    if report.widths and report.heights:
        (w0, w1, w2), (h0, h1, h2) = report.widths, report.heights
        yield "sizes", "", f"{w0} … {w2} wide, {h0} … {h2} high, median {w1}×{h1}"
    yield from _listed("unreadable", report.unreadable, lambda bad: f"{short(bad.place)}: {bad.reason}")
    if report.odd:
        kinds = report.odd_counts().items()
        counts = [f"{count} {kind}{f' ({read_as})' if read_as else ''}" for (kind, read_as), count in kinds]
        examples = [f"; the first: {short(odd.place)}, {odd.read_as}" for odd in report.odd if odd.kind in DETAILED]
        yield "odd", f"{total_of(report.odd):,}", ", ".join(counts) + "".join(examples[:1])
    leaks, conflicts = report.leaks_between(near=True), report.conflicts(near=True)
    counted = [f"{total_of(groups)} across {splits}" for splits, groups in leaks.items()] or ["0 across splits"]
    across = f"; {', '.join(counted)}, {total_of(conflicts)} across labels" if leaks or conflicts else ""
    if report.duplicates:
        yield "duplicates", f"{total_of(report.duplicates):,}", " = ".join(map(short, report.duplicates[0][:LISTED]))
    if report.near_duplicates:
        first = " ≈ ".join(map(short, report.near_duplicates[0][:LISTED]))
        yield "near-duplicates", f"{total_of(report.near_duplicates):,}", first + across
    for splits, groups in report.leaks_between().items():
        yield from _listed(f"in {splits}", groups, lambda group: " = ".join(map(short, group[:LISTED])))
    yield from _listed(
        "two labels", report.conflicts(), lambda group: " = ".join(f"{short(p)} ({p.label})" for p in group[:LISTED])
    )
    if report.against:
        yield "against", f"{report.against.images:,}", f"{report.against.name} ({report.against.why})"
        for name, shared in (("in both", report.against.same), ("nearly in both", report.against.near)):
            yield from _listed(
                name, shared, lambda one: f"{short(one.place)} {'≈' if one.near else '='} {one.of.where}"
            )
    for kind, faults in report.faults_by_kind().items():
        yield from _listed(kind, faults, lambda fault: f"{fault.where.removeprefix(folder)}: {fault.detail}")
    yield from _listed("empty classes", report.empty_classes)
    for splits, names in report.strays().items():
        yield from _listed(f"only in {splits}", list(names.items()), lambda item: f"{item[0]} ({item[1]})")
    if report.balance:
        yield "balance", "", report.balance_text()
        if report.is_imbalanced:
            yield "", "", "training corrects for it (docs/imbalance.md)"


def _listed(name: str, items: Sequence[Any], line_of: Callable[[Any], str] = str) -> Iterator[tuple[str, str, str]]:
    from patchloom.cli.output import shortened
    from patchloom.data.checking.check_report import total_of

    first = items[: shortened(LISTED)]
    for i, item in enumerate(first):
        yield (name, f"{total_of(items):,}", line_of(item)) if not i else ("", "", line_of(item))
    if more := total_of(items) - len(first):
        yield "", "", f"and {more:,} more"


def _safe_name(data: str) -> str:
    name = Path(data).expanduser().resolve().name if Path(data).expanduser().exists() else data
    return re.sub(r"[^\w.-]+", "-", name)


def _default_page(data: str) -> Path | None:
    """Return the default path of the page; None if it would lie in the data, which is never written to."""
    page = Path("runs", f"check-{_safe_name(data)}", "check.html")
    try:
        refuse_inside(page, data)
    except UsageError:
        return None
    return page


def _write_list(report: "CheckReport", options: CheckOptions) -> Path | None:
    """Write the training images that the other set also contains, as `train --exclude` takes them.

    The images of a list given by --exclude stay in it. Returns None if there is nothing to list.
    """
    from patchloom.data.sources.exclusions import read_list, write_list

    if report.against is None or not report.against.overlaps:
        return None
    other, excluded = options.against or "", options.reading.exclude
    default = Path("runs", f"check-{_safe_name(options.data_text)}", f"in-{_safe_name(other)}.tsv")
    target = Path(options.list_file) if options.list_file else default
    refuse_inside(target, options.data_text, other, what="list")
    before = sorted(read_list(Path(excluded).expanduser())) if excluded else []
    listed_before = [(name, f"listed in {excluded}") for name in before]
    write_list(target, [*listed_before, *((one.key, one.reason) for one in report.against.overlaps)])
    return target
