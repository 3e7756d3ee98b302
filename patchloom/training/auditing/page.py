"""The page of `patchloom audit`: cards with keep, relabel and drop buttons that make a corrections file."""

import hashlib
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from patchloom.data.sources.corrections import Correction
from patchloom.report.check_page import thumbnail_uri
from patchloom.report.page import data_uri, page_script, write_page
from patchloom.training.auditing.audit_report import AuditedImage, AuditReport, Group, WorthLabeling
from patchloom_runtime.errors import DataError
from patchloom_runtime.images.inputs import read_image
from patchloom_runtime.printable import printable, table_cell

THUMBNAIL = 192  # pixels
MAX_ITEMS, MAX_GROUPS, MAX_MEMBERS = 300, 60, 8

_ABOUT = (
    "Every image was predicted by a run that did not train on it. A label counts as likely wrong if the prediction "
    "disagrees by more than is usual for the two classes (confident learning). “With suggested labels” is the top-1 of "
    "these predictions after the changes below, without retraining: an estimate of the gain, not a measurement."
)


def write_audit_page(path: Path, report: AuditReport, *, earlier: Sequence[Correction] = ()) -> None:
    """Write the page of an audit. `earlier` corrections are part of the file that the page saves."""
    cards = _Cards(report)
    lists, group_lists = _lists(report, cards), _group_lists(report, cards)
    described = {
        "classes": list(report.predictions.classes),
        "items": cards.items,
        "earlier": [[table_cell(one.path), one.action, table_cell(one.label)] for one in earlier],
        "storage": _storage_key(report),
    }
    write_page(
        path,
        "audit.html.j2",
        title=f"Audit of {report.data}",
        facts=report.facts(),
        about=_ABOUT,
        notes=report.notes,
        lists=[one for one in lists if one[3]],
        group_lists=[one for one in group_lists if one[3]],
        unlabeled=[_unlabeled_card(one) for one in report.unlabeled],
        commands=gain_commands(report),
        described=_as_json(described),
        script=Markup(page_script("audit.js")),
    )


def _lists(report: AuditReport, cards: "_Cards") -> list[tuple[str, str, str, int, list[dict[str, Any]]]]:
    """Return (anchor, title, explanation, count, cards) of the lists of single images."""
    wrong = [
        cards.card(
            one.image,
            one.suggestion,
            [("labeled", one.image.label), (f"{one.probability:.0%} predicted".replace("%", " %"), one.suggestion)],
        )
        for one in report.wrong_labels[:MAX_ITEMS]
    ]
    outliers = [
        cards.card(one.image, one.image.label, [("labeled", one.image.label), (f"{one.distance:.1f}× as far", "")])
        for one in report.outliers[:MAX_ITEMS]
    ]
    return [
        ("wrong", "Likely wrong labels", "Most certain first.", len(report.wrong_labels), wrong),
        (
            "outliers",
            "Outliers",
            "Unlike all other images: how far the nearest ones are, compared with the median image.",
            len(report.outliers),
            outliers,
        ),
    ]


def _group_lists(report: AuditReport, cards: "_Cards") -> list[tuple[str, str, str, int, list[list[dict[str, Any]]]]]:
    """Return the same of the lists of copies."""
    return [
        (
            "conflicts",
            "Copies with different labels",
            "The same or nearly the same image has two labels.",
            len(report.conflicts),
            cards.groups(report.conflicts),
        ),
        (
            "leaks",
            "Copies in different splits",
            "The same or nearly the same image is in two splits, so the score is too high. Drop one of them.",
            len(report.leaks),
            cards.groups(report.leaks),
        ),
    ]


def gain_commands(report: AuditReport) -> list[str]:
    """Return the commands that measure the gain of the corrections."""
    data, name = shlex.quote(report.data), Path(report.data).name or "run"
    corrected = f"patchloom train {data} --corrections corrections.csv"
    if report.unseen_split is None:  # every image is needed: compare the tables of two cross-validations
        return [f"{corrected} --folds {len(report.predictions.weights)}"]
    before, after = (shlex.quote(f"runs/{name}-{end}") for end in ("before", "corrected"))
    return [
        f"patchloom train {data} --out {before}",
        f"{corrected} --out {after}",
        f"patchloom compare {before} {after} {data} --split {report.unseen_split} --corrections corrections.csv",
    ]


class _Cards:
    """The cards of a page; an image that is listed twice has one number, and so one decision."""

    def __init__(self, report: AuditReport) -> None:
        self.items: list[dict[str, str]] = []  # by number, for the script
        self._numbers: dict[str, int] = {}
        self._report = report

    def card(self, image: AuditedImage, suggestion: str, lines: Sequence[tuple[str, str]]) -> dict[str, Any]:
        """Return the values of a card."""
        if image.key not in self._numbers:
            self._numbers[image.key] = len(self.items)
            suggested = suggestion if suggestion != image.label else ""
            self.items.append({"path": table_cell(image.key), "suggestion": suggested, "choice": suggestion})
        listing = self._report.check.listing_of(image.place)
        assert listing is not None
        return {
            "number": self._numbers[image.key],
            "thumbnail": thumbnail_uri(listing, image.place.row),
            "file": printable(image.key),
            "lines": lines,
        }

    def groups(self, groups: Sequence[Group]) -> list[list[dict[str, Any]]]:
        """Return the cards of the first groups; each suggests the most frequent label of the group."""
        return [
            [
                self.card(image, _other_label(group, image), [("labeled", image.label), (image.place.split, "")])
                for image in group[:MAX_MEMBERS]
            ]
            for group in groups[:MAX_GROUPS]
        ]


def _other_label(group: Group, image: AuditedImage) -> str:
    """Return the label of another copy, or the own one if all agree."""
    return next((other.label for other in group if other.label != image.label), image.label)


def _unlabeled_card(one: WorthLabeling) -> dict[str, Any]:
    try:
        image = read_image(one.path)
        image.thumbnail((THUMBNAIL, THUMBNAIL))
        thumbnail = data_uri(image, "JPEG", quality=80)
    except DataError:
        thumbnail = ""
    lines = [(f"{one.probability:.0%} predicted".replace("%", " %"), one.prediction)]
    return {"thumbnail": thumbnail, "file": printable(one.path), "lines": lines}


def _storage_key(report: AuditReport) -> str:
    """Return the name under which a browser keeps the decisions: another audit has another."""
    digest = hashlib.sha256("\0".join(report.predictions.weights).encode()).hexdigest()
    return f"patchloom-audit-{digest[:16]}"


def _as_json(value: Any) -> Markup:
    """Return JSON that can stand in a script element."""
    text = json.dumps(value).replace("<", "\\u003c").replace("&", "\\u0026")
    return Markup(text)
