"""`patchloom check DATA`: what is in a data set and what is wrong with it, before training."""

import os
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from patchloom.cli.reading_options import reads_data
from patchloom_runtime.printable import plural, printable

if TYPE_CHECKING:
    from pathlib import Path

    from patchloom.data.checking.check_report import CheckReport
    from patchloom.data.checking.survey import ImageLocation
    from patchloom.data.reading import Reading

SHOWN = 5  # files, groups or classes named in the terminal; the page, --json and --verbose have all
OF_ITS_OWN = ("strip", "tiny", "uneven sides", "no objects")  # kinds of odd whose detail differs from one to the next
UNEVEN = 10  # times as many pictures in the largest class as in the smallest


@reads_data(leave_out=["val"])
def check(
    given: Annotated[
        list[str], typer.Argument(metavar="DATA...", help="A folder or any other data that `train` takes.")
    ],
    reading: "Reading",
    page: Annotated[
        str | None, typer.Option(help="Where to write the page; runs/check-NAME/check.html when left out.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="DATA", help="A test set: list the training images that it holds too, the same or nearly."
        ),
    ] = None,
    listed: Annotated[
        str | None,
        typer.Option("--list", help="Where to write that list; runs/check-NAME/in-OTHER.tsv when left out."),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Near-duplicates across splits and labels are problems too.")
    ] = False,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes that read; one per core when left out.")] = None,
    cache: Annotated[bool, typer.Option(help="Look only at files that changed since the last check.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="For machines; a page only with --page.")] = False,
) -> None:
    """Find unreadable and odd files, duplicates, leaks and imbalance; exit code 3 where something is wrong."""
    import time
    from pathlib import Path

    from patchloom.cli.output import print_json
    from patchloom.data.checking.check import check as look_through
    from patchloom.data.checking.scan import scan_bar
    from patchloom.data.sources.specs import join_specs
    from patchloom_runtime.errors import UsageError

    data = join_specs(given)
    target = Path(page) if page else None
    if target:
        _refuse_inside(target, data)
    if listed and against is None:
        raise UsageError("--list says where the list of --against goes; give both")
    if listed:
        _refuse_inside(Path(listed), data, against or "", what="list")
    started = time.perf_counter()
    with scan_bar() as progress:
        report = look_through(data, reading=reading, against=against, workers=workers, cache=cache, progress=progress)
    seconds = time.perf_counter() - started
    problems = report.problems(strict=strict)
    written = _write_list(report, data, against or "", listed, reading.without)
    if not target and problems and not as_json:
        target = _usual_page(data)
    if target:
        from patchloom.report.check_page import write_check_page

        write_check_page(target, report, problems=problems)
    if as_json:
        told = {"seconds": round(seconds, 3)} | ({"list": str(written)} if written else {})
        print_json(report.to_dict(strict=strict) | told)
    else:
        _print(report, data, reading, seconds, problems, target, written)
    if problems:
        raise typer.Exit(3)


def _print(
    report: "CheckReport",
    data: str,
    reading: "Reading",
    seconds: float,
    problems: list[str],
    page: "Path | None",
    written: "Path | None",
) -> None:
    from patchloom.cli.output import print_result

    splits = " + ".join(f"{count:,} {split}" for split, count in report.splits.items())
    counted = splits if len(report.splits) > 1 else f"{report.images:,} {report.unit}s, no val split"
    number = len(report.classes) or len(report.annotated)
    classes = f"{plural(number, 'class')}, " if number else ""
    task = {"segment": "segmentation, ", "detect": "detection, "}.get(report.task, "")
    decoded = f", {report.decoded:,} decoded" if report.unit == "image" else ""
    speed = f"{seconds:.1f} s ({report.images / seconds:,.0f}/s{decoded})"
    print_result(f"{data}  {task}{classes}{counted}   {speed}")
    rows = [(printable(name), count, printable(detail)) for name, count, detail in _rows(report, data)]
    width = max([16, *(len(name) for name, _, _ in rows)])
    for name, count, detail in rows:
        print_result(f"  {name:<{width}}{count:>7}  {detail}".rstrip())
    for note in report.notes:
        print_result(f"  note: {printable(note)}")
    if problems:
        print_result(f"Problems: {printable('; '.join(problems))}.")
    else:
        print_result("Nothing is wrong.")
    if page:
        print_result(f"Page: {page}")
    if written:
        print_result(f"List: {written}")
        from dataclasses import replace

        reading = replace(reading, without=written)
        print(f"Next: patchloom train {shlex.quote(data)}{reading.options()}")
    elif report.classes or report.task != "classify":
        print(f"Next: patchloom train {shlex.quote(data)}{reading.options()}")


def _rows(report: "CheckReport", data: str) -> Iterator[tuple[str, str, str]]:
    """Name, number and detail of every line; further files stand on lines without a name."""
    from pathlib import Path

    given = Path(data).expanduser()
    folder = f"{given.parent if given.is_file() else given}{os.sep}"

    def short(place: "ImageLocation") -> str:
        return place.where.removeprefix(folder)

    if report.widths and report.heights:
        (w0, w1, w2), (h0, h1, h2) = report.widths, report.heights
        yield "sizes", "", f"{w0} … {w2} wide, {h0} … {h2} high, median {w1}×{h1}"
    yield from _listed("unreadable", [f"{short(bad.place)}: {bad.reason}" for bad in report.unreadable])
    if report.odd:
        kinds = Counter((odd.kind, "" if odd.kind in OF_ITS_OWN else odd.read_as) for odd in report.odd)
        told = [f"{count} {kind}{f' ({read_as})' if read_as else ''}" for (kind, read_as), count in kinds.items()]
        named = [f"; the first: {short(odd.place)}, {odd.read_as}" for odd in report.odd if odd.kind in OF_ITS_OWN]
        yield "odd", f"{len(report.odd):,}", ", ".join(told) + "".join(named[:1])
    leaks, conflicts = report.leaks_between(near=True), report.conflicts(near=True)
    counted = [f"{len(groups)} across {splits}" for splits, groups in leaks.items()] or ["0 across splits"]
    across = f"; {', '.join(counted)}, {len(conflicts)} across labels" if leaks or conflicts else ""
    if report.duplicates:
        yield "duplicates", f"{len(report.duplicates):,}", " = ".join(map(short, report.duplicates[0][:SHOWN]))
    if report.near_duplicates:
        first = " ≈ ".join(map(short, report.near_duplicates[0][:SHOWN]))
        yield "near-duplicates", f"{len(report.near_duplicates):,}", first + across
    for splits, groups in report.leaks_between().items():
        yield from _listed(f"in {splits}", [" = ".join(map(short, group[:SHOWN])) for group in groups])
    yield from _listed(
        "two labels", [" = ".join(f"{short(p)} ({p.label})" for p in group[:SHOWN]) for group in report.conflicts()]
    )
    if report.against:
        yield "against", f"{report.against.images:,}", f"{report.against.name} ({report.against.why})"
        for name, shared in (("in both", report.against.same), ("nearly in both", report.against.near)):
            yield from _listed(
                name, [f"{short(one.place)} {'≈' if one.near else '='} {one.of.where}" for one in shared]
            )
    for kind in dict.fromkeys(fault.kind for fault in report.faults):
        same = [fault for fault in report.faults if fault.kind == kind]
        yield from _listed(kind, [f"{fault.where.removeprefix(folder)}: {fault.detail}" for fault in same])
    yield from _listed("empty classes", list(report.empty_classes))
    for splits, names in report.strays().items():
        yield from _listed(f"only in {splits}", [f"{name} ({count})" for name, count in names.items()])
    if report.balance:
        low, high = report.balance
        yield (
            "balance",
            "",
            f"{low:,} … {high:,} per class{'' if high < UNEVEN * low else f', uneven: 1 to {high / low:.0f}'}",
        )


def _listed(name: str, lines: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    from patchloom.cli.output import shortened

    shown = lines[: shortened(SHOWN)]
    for i, line in enumerate(shown):
        yield (name, f"{len(lines):,}", line) if not i else ("", "", line)
    if more := len(lines) - len(shown):
        yield "", "", f"and {more:,} more"


def _safe_name(data: str) -> str:
    import re
    from pathlib import Path

    name = Path(data).expanduser().resolve().name if Path(data).expanduser().exists() else data
    return re.sub(r"[^\w.-]+", "-", name)


def _usual_page(data: str) -> "Path | None":
    """None where that would lie in the data: nothing is ever written there."""
    from pathlib import Path

    from patchloom_runtime.errors import UsageError

    target = Path("runs", f"check-{_safe_name(data)}", "check.html")
    try:
        _refuse_inside(target, data)
    except UsageError:
        return None
    return target


def _write_list(
    report: "CheckReport", data: str, other: str, listed: str | None, without: "str | os.PathLike[str] | None"
) -> "Path | None":
    """The training images that another set holds too, as `train --without` takes them; None where there is none.

    Those of a list that was given stay in it.
    """
    from pathlib import Path

    from patchloom.data.sources.exclusions import read_list, write_list

    if report.against is None or not report.against.overlaps:
        return None
    target = Path(listed) if listed else Path("runs", f"check-{_safe_name(data)}", f"in-{_safe_name(other)}.tsv")
    _refuse_inside(target, data, other, what="list")
    before = sorted(read_list(Path(without).expanduser())) if without else []
    listed_before = [(name, f"listed in {without}") for name in before]
    write_list(target, [*listed_before, *((one.key, one.reason) for one in report.against.overlaps)])
    return target


def _refuse_inside(target: "Path", *data: str, what: str = "page") -> None:
    from pathlib import Path

    from patchloom.data.sources.specs import split_specs
    from patchloom_runtime.errors import UsageError

    for part in [part for one in data if one for part in split_specs(one)]:
        folder = Path(part).expanduser()
        if folder.is_dir() and target.resolve().is_relative_to(folder.resolve()):
            raise UsageError(f"the {what} {target} would lie in the data; choose a path outside {part}")
