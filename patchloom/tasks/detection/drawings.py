"""Detections next to the truth, drawn and counted: correct, missed, false, or of another class."""

from collections.abc import Callable, Sequence

import numpy as np
from markupsafe import Markup
from PIL import Image

from patchloom.evaluation.detection import DetectionReport
from patchloom.evaluation.detection_mistakes import ImageMistakes, detection_confusion, outcome
from patchloom.report.pictures.overlays import DrawnObject, draw_objects, object_text
from patchloom.report.sections import gallery_section, table_section
from patchloom_runtime.errors import DataError

CONFUSED = 12  # rows
CAPTION = (
    "First what is there, then what was found with a score of 50 % or more. Dashed red: objects that were missed, and "
    "detections that are false or of another class. The number is the share that is right of objects and detections."
)


def confused_section(report: DetectionReport) -> list[Markup]:
    """Return a table of confused, missed and false detections, by the share of objects."""
    counts, names = detection_confusion(report), (*report.classes, "")
    shares = 100 * counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    shares[-1] = 100 * counts[-1] / np.maximum(counts.sum(axis=0), 1)  # of its detections
    np.fill_diagonal(shares, 0)
    rows = []
    for place in np.argsort(-shares, axis=None, kind="stable")[:CONFUSED].tolist():
        i, j = divmod(place, len(names))
        if counts[i, j] == 0 or shares[i, j] == 0:
            break
        if i == len(report.classes):
            objects_text = f"{counts[i, j]:,} of {counts[:, j].sum():,} detections"
        else:
            objects_text = f"{counts[i, j]:,} of {counts[i].sum():,} objects"
        what, predicted = names[i] or "nothing there", names[j] or "not found"
        rows.append((what, predicted, f"{shares[i, j]:.1f} %", objects_text))
    title = "What is taken for what, by sure detections"
    return [table_section(title, ["there is", "found as", "share", ""], rows)] if rows else []


def worst_first(report: DetectionReport) -> tuple[np.ndarray, list[int]]:
    """Return the score of each image, 0 to 1, and the images in this order."""
    scores = report.image_scores("mask" if report.has_masks else "box")
    return scores, np.argsort(scores, kind="stable").tolist()


def gallery(
    title: str, chosen: Sequence[int], report: DetectionReport, names: Sequence[str], read: Callable[[int], Image.Image]
) -> list[Markup]:
    """Return a gallery of some images next to the truth, without those that cannot be read."""
    scores, _ = worst_first(report)
    images = []
    for i in chosen:
        try:
            picture = read(i)
        except (DataError, KeyError):
            continue
        images.append((draw_with_truth(picture, report, i), f"{names[i]}: {scores[i]:.0%}; {objects_text(report, i)}"))
    return [gallery_section(title.partition(" ")[0].lower(), title, CAPTION, images)] if images else []


def objects_text(report: DetectionReport, number: int) -> str:
    """Return the number of found, missed … objects of an image as text."""
    truth, detections = report.truths[number], report.detections[number]
    one = _outcome(report, number)
    matched = one.object_of >= 0
    right = detections.categories[one.sure[matched]] == truth.categories[one.object_of[matched]]
    counted = {
        "found": int(right.sum()),
        "of another class": int((~right).sum()),
        "missed": len(one.missed),
        "false": int(one.false.sum()),
    }
    objects = int((~truth.crowd).sum())
    text = ", ".join(f"{count} {what}" for what, count in counted.items() if count or what == "found")
    return f"{objects} object{'s' * (objects != 1)}: {text}"


def draw_with_truth(picture: Image.Image, report: DetectionReport, number: int) -> list[Image.Image]:
    """Draw the true objects and the detections with high scores; mistakes are marked in both."""
    truth, detections, names = report.truths[number], report.detections[number], report.classes
    one = _outcome(report, number)
    there = [
        DrawnObject(
            ("missed: " if missed else "crowd: " if truth.crowd[i] else "") + object_text(names[truth.categories[i]]),
            truth.boxes[i],
            int(truth.categories[i]),
            truth.masks[i] if truth.masks else None,
            mistake=bool(missed),
        )
        for i, missed in enumerate(np.isin(np.arange(len(truth.boxes)), one.missed))
    ]
    drawn = []
    for i, match, false in zip(one.sure.tolist(), one.object_of.tolist(), one.false.tolist(), strict=True):
        other = match >= 0 and truth.categories[match] != detections.categories[i]
        text = ("false: " if false else "") + object_text(names[detections.categories[i]], float(detections.scores[i]))
        text += f", is {object_text(names[truth.categories[match]])}" if other else ""
        mask = detections.masks[i] if detections.masks else None
        drawn.append(
            DrawnObject(text, detections.boxes[i], int(detections.categories[i]), mask, mistake=bool(false or other))
        )
    return [draw_objects(picture, there), draw_objects(picture, drawn)]


def _outcome(report: DetectionReport, number: int) -> ImageMistakes:
    kind = "mask" if report.has_masks else "box"
    return outcome(report.truths[number], report.detections[number], kind)  # type: ignore[arg-type]
