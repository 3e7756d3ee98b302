"""The result of `audit`: what is likely wrong with the labels of a dataset."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from patchloom.data.checking.check_report import CheckReport
from patchloom.data.checking.survey import ImageLocation
from patchloom.data.sources.corrections import Correction, write_corrections
from patchloom.report.notebook import html_card
from patchloom.runs.out_of_fold import OutOfFold
from patchloom_runtime.printable import printable

Group = tuple["AuditedImage", ...]


@dataclass(frozen=True)
class AuditedImage:
    """An image of the audited dataset: its key and where it is."""

    key: str  # within the dataset; what a corrections file names it by
    place: ImageLocation

    @property
    def label(self) -> str:
        """The given label."""
        return self.place.label


@dataclass(frozen=True)
class WrongLabel:
    """An image whose label is likely wrong."""

    image: AuditedImage
    suggestion: str  # most likely other class
    probability: float  # of the suggestion
    label_probability: float  # of the given label


@dataclass(frozen=True)
class Outlier:
    """An image that is unlike the others of its fold."""

    image: AuditedImage
    distance: float  # to the nearest images; 1 is the median


@dataclass(frozen=True)
class WorthLabeling:
    """An unlabeled image that the models are unsure about."""

    path: str
    prediction: str
    probability: float  # of the prediction
    uncertainty: float  # entropy of the class probabilities, from 0 to 1


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """Result of `audit`."""

    data: str
    folds_run: Path
    predictions: OutOfFold = field(repr=False)
    estimated_wrong: float  # images with a wrong label, estimated from the confident joint
    wrong_labels: tuple[WrongLabel, ...]  # most certain first
    conflicts: tuple[Group, ...]  # equal or nearly equal images with different labels
    leaks: tuple[Group, ...]  # equal or nearly equal images in different splits
    outliers: tuple[Outlier, ...]  # farthest first
    unlabeled: tuple[WorthLabeling, ...] = ()
    reviewed: int = 0  # images that earlier corrections mention; they are not listed again
    notes: tuple[str, ...] = ()
    check: CheckReport = field(repr=False, compare=False)  # the images, and all else that `check` finds

    @property
    def top1(self) -> float:
        """Out-of-fold top-1 with the given labels, in percent."""
        return self.predictions.top1

    @property
    def predicted_top1(self) -> float:
        """Out-of-fold top-1 if every likely wrong label is changed to the suggestion, in percent."""
        classes = self.predictions.classes
        row = {key: number for number, key in enumerate(self.predictions.keys)}
        guesses = self.predictions.predictions
        corrected = sum(classes[guesses[row[one.image.key]]] == one.suggestion for one in self.wrong_labels)
        return self.top1 + 100 * corrected / len(self.predictions)

    @property
    def unseen_split(self) -> str | None:
        """The split that no run of the audit has seen, if the data have one."""
        return next((split for split in ("test", "val") if split in self.check.splits), None)

    def corrections(self) -> list[Correction]:
        """Return one correction per likely wrong label: the suggested class."""
        return [Correction(one.image.key, "relabel", one.suggestion) for one in self.wrong_labels]

    def save_corrections(self, file: str | Path) -> None:
        """Write the suggestions as a corrections file, for `train --corrections`. Look through it before use."""
        write_corrections(Path(file), self.corrections())

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "data": self.data,
            "folds_run": str(self.folds_run),
            "images": len(self.predictions),
            "classes": list(self.predictions.classes),
            "top1": self.top1,
            "predicted_top1": self.predicted_top1,
            "estimated_wrong": self.estimated_wrong,
            "wrong_labels": [
                _location(one.image)
                | {"suggestion": one.suggestion, "probability": one.probability}
                | {"label_probability": one.label_probability}
                for one in self.wrong_labels
            ],
            "conflicts": _groups(self.conflicts),
            "leaks": _groups(self.leaks),
            "outliers": [_location(one.image) | {"distance": one.distance} for one in self.outliers],
            "unlabeled": [asdict(one) for one in self.unlabeled],
            "reviewed": self.reviewed,
            "notes": list(self.notes),
        }

    def facts(self) -> list[tuple[str, str]]:
        """Return the main numbers as (name, text)."""
        return [
            ("images", f"{len(self.predictions):,}"),
            ("classes", f"{len(self.predictions.classes):,}"),
            ("likely wrong labels", f"{len(self.wrong_labels):,}"),
            ("estimated share", f"{100 * self.estimated_wrong / len(self.predictions):.1f} %"),
            ("top-1 out of fold", f"{self.top1:.2f} %"),
            ("with suggested labels", f"{self.predicted_top1:.2f} %"),
            ("conflicts", f"{len(self.conflicts):,}"),
            ("leaks", f"{len(self.leaks):,}"),
            ("outliers", f"{len(self.outliers):,}"),
        ]

    def __repr__(self) -> str:
        counts = f"{len(self.wrong_labels)} likely wrong labels in {len(self.predictions):,} images"
        return f"AuditReport({printable(self.data)}: {counts})"

    def _repr_html_(self) -> str:
        rows = [
            [one.image.key, one.image.label, one.suggestion, f"{one.probability:.1%}"] for one in self.wrong_labels[:20]
        ]
        columns = ["image", "label", "suggestion", "probability"]
        return html_card(f"Audit of {self.data}", facts=self.facts(), columns=columns, rows=rows, notes=self.notes)


def _location(image: AuditedImage) -> dict[str, str]:
    return {"image": image.key, "where": image.place.where, "split": image.place.split, "label": image.label}


def _groups(groups: Iterable[Group]) -> list[list[dict[str, str]]]:
    return [[_location(image) for image in group] for group in groups]
