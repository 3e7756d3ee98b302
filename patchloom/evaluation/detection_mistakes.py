"""Detection mistakes per object: found, confused with another class, or missed; and false detections.

Average precision considers all score thresholds. Here only confident detections count (score ≥ 0.5, IoU ≥ 0.5), as a
user would see them. In order of score, each takes the free object of its own class that it covers best; the remaining
ones then take objects of other classes. A detection in a crowd is not a mistake.
"""

from dataclasses import dataclass

import numpy as np

from patchloom.evaluation.detection import (
    SURE,
    THRESHOLDS,
    DetectionReport,
    Detections,
    Kind,
    TrueObjects,
    box_iou,
    mask_iou,
)


@dataclass(frozen=True)
class ImageMistakes:
    """Confident detections of one image, highest score first, and its missed objects."""

    sure: np.ndarray  # (S,) rows of detections
    object_of: np.ndarray  # (S,) matched object, or −1
    excused: np.ndarray  # (S,) bool: in a crowd
    missed: np.ndarray  # rows of objects, crowds excluded, without a confident detection

    @property
    def false(self) -> np.ndarray:
        """Return which detections (S,) match no object, or one that another detection matches already."""
        return (self.object_of < 0) & ~self.excused


def outcome(truth: TrueObjects, detections: Detections, kind: Kind = "box") -> ImageMistakes:
    """Match the confident detections of one image to its objects."""
    sure = np.flatnonzero(detections.scores >= SURE)
    sure = sure[np.argsort(-detections.scores[sure], kind="stable")]
    confident = detections.rows(sure)
    if kind == "mask":
        assert confident.masks is not None
        assert truth.masks is not None
        iou = mask_iou(confident.masks, truth.masks, truth.crowd)
    else:
        iou = box_iou(confident.boxes, truth.boxes, truth.crowd)
    same = confident.categories[:, None] == truth.categories[None]
    taken, object_of = truth.crowd.copy(), np.full(len(sure), -1)
    for allowed in (same, ~same):
        for d in np.flatnonzero(object_of < 0):
            free = allowed[d] & ~taken & (iou[d] >= THRESHOLDS[0])
            if free.any():
                object_of[d] = int(np.where(free, iou[d], -1).argmax())
                taken[object_of[d]] = True
    in_crowd = ((iou >= THRESHOLDS[0]) & truth.crowd[None] & same).any(1)
    return ImageMistakes(sure, object_of, (object_of < 0) & in_crowd, np.flatnonzero(~taken))


def outcomes(report: DetectionReport) -> list[ImageMistakes]:
    """Match all images, by masks if there are any."""
    kind: Kind = "mask" if report.has_masks else "box"
    return [outcome(truth, own, kind) for truth, own in zip(report.truths, report.detections, strict=True)]


def detection_confusion(report: DetectionReport) -> np.ndarray:
    """Return counts (K + 1, K + 1) of objects of class [row] detected as class [column].

    The last column counts missed objects, the last row false detections.
    """
    classes = len(report.classes)
    counts = np.zeros((classes + 1, classes + 1), np.int64)
    for truth, detections, each in zip(report.truths, report.detections, outcomes(report), strict=True):
        for detection, matched in zip(each.sure[~each.excused], each.object_of[~each.excused], strict=True):
            row = truth.categories[matched] if matched >= 0 else classes
            counts[row, detections.categories[detection]] += 1
        np.add.at(counts, (truth.categories[each.missed], classes), 1)
    return counts
