"""The page of `patchloom check`: numbers, problems, and contact sheets.

This module does not import torch, so that a check stays fast.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from PIL import Image

from patchloom.data.checking.check_report import CheckReport, JoinedReport, total_of
from patchloom.data.checking.survey import ImageLocation
from patchloom.data.datasets import Listing
from patchloom.report.page import data_uri, write_page
from patchloom_runtime.errors import DataError
from patchloom_runtime.printable import printable

THUMBNAIL = 96  # pixels
MAX_CLASSES, IMAGES_PER_CLASS = 60, 6
MAX_GROUPS, IMAGES_PER_GROUP = 60, 8  # groups of duplicates of each kind
MAX_LINES = 500  # files in a list


def write_check_page(path: Path, report: CheckReport, *, problems: Sequence[str]) -> None:
    """Write the page of a check; it states how many items it leaves out."""
    write_page(
        path,
        "check.html.j2",
        title=f"Check of {report.name}",
        report=report,
        problems=problems,
        facts=_facts(report),
        groups=_groups(report),
        sheets=_contact_sheets(report),
        totals={
            "unreadable": total_of(report.unreadable),
            "odd": total_of(report.odd),
            "faults": sum(map(total_of, report.faults_by_kind().values())),
        },
        lists=_lists(path, report) if isinstance(report, JoinedReport) else {},
        lines=MAX_LINES,
        members=IMAGES_PER_GROUP,
    )


def _lists(page: Path, report: JoinedReport) -> dict[str, str]:
    """Map the names of the files that list all problems to links."""
    folder = os.path.relpath(report.folder, page.parent)
    return {file: quote(Path(folder, file).as_posix()) for file in report.lists.values()}


def _facts(report: CheckReport) -> list[tuple[str, str]]:
    facts = [(split, f"{count:,}") for split, count in report.splits.items()]
    if report.classes:
        facts.append(("classes", f"{len(report.classes):,}"))
    if report.widths and report.heights:
        for name, (low, middle, high) in (("width", report.widths), ("height", report.heights)):
            facts.append((name, f"{low} … {high}, median {middle}" if low < high else f"{low}"))
    if report.balance:
        facts.append(("balance of train", report.balance_text()))
    return facts


def _groups(report: CheckReport) -> list[tuple[str, str, str, int, list[dict[str, Any]]]]:
    """Return (anchor, title, explanation, number of groups, first groups) per kind of duplicates, worst kinds first."""
    kinds = [
        *(
            (
                f"leaks-{number}" if number else "leaks",
                f"In {splits}",
                f"The same {report.unit} is in both, so the score is too high.",
                groups,
            )
            for number, (splits, groups) in enumerate(report.leaks_between().items())
        ),
        ("labels", "Under two labels", "The same pixels have two labels, so one of them is wrong.", report.conflicts()),
        *_overlaps(report),
        ("dups", "Duplicates", f"The same {report.unit}.", report.duplicates),
        ("near", "Near-duplicates", "Possibly re-encoded or resized; look before removing.", report.near_duplicates),
    ]
    return [
        (anchor, title, text, total_of(groups), [_group(report, group) for group in groups[:MAX_GROUPS]])
        for anchor, title, text, groups in kinds
        if groups
    ]


def _overlaps(report: CheckReport) -> list[tuple[str, str, str, list[tuple[ImageLocation, ...]]]]:
    """Return the images that train shares with another dataset: identical ones, then nearly identical ones."""
    if report.against is None:
        return []
    kinds = ((report.against.same, "same", "The same pixels"), (report.against.near, "near", "Nearly the same"))
    return [
        (
            f"against-{anchor}",
            f"{text} in train and {report.against.name}",
            "A test on these images is too optimistic; exclude them from training with --exclude LIST.",
            [(shared.place, shared.of) for shared in overlaps],
        )
        for overlaps, anchor, text in kinds
    ]


def _group(report: CheckReport, group: Sequence[ImageLocation]) -> dict[str, Any]:
    def member(place: ImageLocation) -> tuple[ImageLocation, str, str]:
        """Return the location, its file and a thumbnail; a pair of sentences has none."""
        listing = report.listing_of(place)
        if listing is None:
            return place, place.where, ""
        return place, printable(listing.images.key(place.row)), thumbnail_uri(listing, place.row)

    return {"size": total_of(group), "pictures": [member(place) for place in group[:IMAGES_PER_GROUP]]}


def _contact_sheets(report: CheckReport) -> list[tuple[str, str, list[str]]]:
    """Return (class, its counts, evenly spaced thumbnails), from train, or from val if train lacks the class."""
    rows: dict[str, dict[str, list[int]]] = {}
    unreadable = {(bad.place.split, bad.place.row) for bad in report.unreadable}
    for split, listing in report.listings.items():
        for position, row in enumerate(listing.rows.tolist()):
            if (split, row) not in unreadable:
                for name in listing.labels_of(position) or [""]:
                    rows.setdefault(name, {}).setdefault(split, []).append(row)
    sheets = []
    for name in sorted(rows)[:MAX_CLASSES]:
        split, members = next(iter(rows[name].items()))
        chosen = members[:: max(1, len(members) // IMAGES_PER_CLASS)][:IMAGES_PER_CLASS]
        counts = ", ".join(f"{len(in_split):,} {where}" for where, in_split in rows[name].items())
        sheets.append(
            (name or "without a label", counts, [thumbnail_uri(report.listings[split], row) for row in chosen])
        )
    return sheets


def thumbnail_uri(listing: Listing, row: int) -> str:
    """Return a JPEG data URI; gray if the image has disappeared since the scan."""
    try:
        image = listing.images.read(row)
    except DataError:
        image = Image.new("RGB", (THUMBNAIL, THUMBNAIL), "gray")
    image.thumbnail((2 * THUMBNAIL, 2 * THUMBNAIL))
    return data_uri(image, "JPEG", quality=80)
