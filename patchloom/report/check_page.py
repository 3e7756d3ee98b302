"""What `check` found as one HTML file: numbers, faults, and contact sheets to see with one's own eyes.

Free of torch, so that a check stays quick.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from patchloom.data.checking.check import CheckReport
from patchloom.data.checking.survey import ImageLocation
from patchloom.data.datasets import Listing
from patchloom.report.page import data_uri, write_page
from patchloom_runtime.errors import DataError
from patchloom_runtime.images.samples import UNLABELED
from patchloom_runtime.printable import printable

THUMBNAIL = 96  # pixels
CLASSES, EACH = 60, 6  # classes shown, and pictures of each
GROUPS, MEMBERS = 60, 8  # groups of duplicates shown of each kind, and pictures of each
LINES = 500  # files named in a list


def write_check_page(path: Path, report: CheckReport, *, problems: Sequence[str]) -> None:
    """Write the page; what it leaves out it counts."""
    write_page(
        path,
        "check.html.j2",
        title=f"Check of {report.name}",
        report=report,
        problems=problems,
        facts=_facts(report),
        groups=_groups(report),
        sheets=_contact_sheets(report),
        lines=LINES,
        shown_groups=GROUPS,
        members=MEMBERS,
    )


def _facts(report: CheckReport) -> list[tuple[str, str]]:
    facts = [(split, f"{count:,}") for split, count in report.splits.items()]
    if report.classes:
        facts.append(("classes", f"{len(report.classes):,}"))
    if report.widths and report.heights:
        for name, (low, middle, high) in (("width", report.widths), ("height", report.heights)):
            facts.append((name, f"{low} … {high}, median {middle}" if low < high else f"{low}"))
    if report.balance:
        facts.append(("per class, train", "{:,} … {:,}".format(*report.balance)))
    return facts


def _groups(report: CheckReport) -> list[tuple[str, str, str, int, list[dict[str, Any]]]]:
    """(anchor, title, explanation, number of groups, groups shown with pictures), worst kinds first."""
    kinds = [
        *(
            (
                f"leaks-{number}" if number else "leaks",
                f"In {splits}",
                f"The same {report.unit} in both: the score is too good.",
                groups,
            )
            for number, (splits, groups) in enumerate(report.leaks_between().items())
        ),
        ("labels", "Under two labels", "The same pixels under two labels, of which one is wrong.", report.conflicts()),
        *_shared(report),
        ("dups", "Duplicates", f"The same {report.unit}.", report.duplicates),
        ("near", "Near-duplicates", "Perhaps saved again or scaled; look before removing.", report.near_duplicates),
    ]
    return [
        (anchor, title, text, len(groups), [_group(report, group) for group in groups[:GROUPS]])
        for anchor, title, text, groups in kinds
        if groups
    ]


def _shared(report: CheckReport) -> list[tuple[str, str, str, list[tuple[ImageLocation, ...]]]]:
    """What train shares with another set: the same pictures, then those that are nearly the same."""
    if report.against is None:
        return []
    kinds = ((report.against.same, "same", "The same pixels"), (report.against.near, "near", "Nearly the same"))
    return [
        (
            f"against-{anchor}",
            f"{text} in train and {report.against.name}",
            "A test on these tells too much; leave them out of training with --without LIST.",
            [(shared.place, shared.of) for shared in overlaps],
        )
        for overlaps, anchor, text in kinds
    ]


def _group(report: CheckReport, group: Sequence[ImageLocation]) -> dict[str, Any]:
    def shown_as(place: ImageLocation) -> tuple[str, str]:
        """File and picture; a pair of sentences has none."""
        listing = report.listing_of(place)
        if listing is None:
            return place.where, ""
        return printable(listing.images.key(place.row)), _thumbnail(listing, place.row)

    shown = [(place, *shown_as(place)) for place in group[:MEMBERS]]
    return {"size": len(group), "pictures": shown}


def _contact_sheets(report: CheckReport) -> list[tuple[str, str, list[str]]]:
    """(class, its counts, pictures from all over it), of train, or of val for a class that train has not."""
    rows: dict[str, dict[str, list[int]]] = {}
    unreadable = {(bad.place.split, bad.place.row) for bad in report.unreadable}
    for split, listing in report.listings.items():
        for row, label in zip(listing.rows.tolist(), listing.labels.tolist(), strict=True):
            if (split, row) not in unreadable:
                name = "" if label == UNLABELED else listing.names[label]
                rows.setdefault(name, {}).setdefault(split, []).append(row)
    sheets = []
    for name in sorted(rows)[:CLASSES]:
        split, found = next(iter(rows[name].items()))
        chosen = found[:: max(1, len(found) // EACH)][:EACH]
        counts = ", ".join(f"{len(members):,} {where}" for where, members in rows[name].items())
        sheets.append((name or "without a label", counts, [_thumbnail(report.listings[split], row) for row in chosen]))
    return sheets


def _thumbnail(listing: Listing, row: int) -> str:
    """The picture as a JPEG inside an address; grey where it has gone since the scan."""
    try:
        picture = listing.images.read(row)
    except DataError:
        picture = Image.new("RGB", (THUMBNAIL, THUMBNAIL), "grey")
    picture.thumbnail((2 * THUMBNAIL, 2 * THUMBNAIL))
    return data_uri(picture, "JPEG", quality=80)
