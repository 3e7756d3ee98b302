"""What a detector did with each object: found, taken for another class, missed; and what it found where nothing is.

Average precision believes detections more and more; here only sure ones count, those with a score of 0.5 or more, at
an IoU of 0.5, as somebody would see them. Surest first, each takes the object of its own class that it covers best and
nobody has taken; what is left then takes objects of other classes. A detection in a crowd is no mistake.
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
    """One picture: rows of its sure detections, surest first, and of its objects."""

    sure: np.ndarray  # (S,) rows of detections
    object_of: np.ndarray  # (S,) the object that each shows, −1 where there is none
    excused: np.ndarray  # (S,) bool: in a crowd
    missed: np.ndarray  # rows of objects, crowds apart, that no sure detection shows

    @property
    def false(self) -> np.ndarray:
        """(S,) bool: nothing is there, or something that another detection shows already."""
        return (self.object_of < 0) & ~self.excused


def outcome(truth: TrueObjects, found: Detections, kind: Kind = "box") -> ImageMistakes:
    """What became of the objects of one picture."""
    sure = np.flatnonzero(found.scores >= SURE)
    sure = sure[np.argsort(-found.scores[sure], kind="stable")]
    seen = found.rows(sure)
    if kind == "mask":
        assert seen.masks is not None
        assert truth.masks is not None
        iou = mask_iou(seen.masks, truth.masks, truth.crowd)
    else:
        iou = box_iou(seen.boxes, truth.boxes, truth.crowd)
    same = seen.categories[:, None] == truth.categories[None]
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
    """Of all pictures, by masks where there are some."""
    kind: Kind = "mask" if report.has_masks else "box"
    return [outcome(truth, found, kind) for truth, found in zip(report.truths, report.found, strict=True)]


def taken_for(report: DetectionReport) -> np.ndarray:
    """(K + 1, K + 1) counts: objects of class [row] that were found as class [column].

    In the last column objects that were missed, in the last row detections of nothing.
    """
    classes = len(report.classes)
    counts = np.zeros((classes + 1, classes + 1), np.int64)
    for truth, found, each in zip(report.truths, report.found, outcomes(report), strict=True):
        for detection, thing in zip(each.sure[~each.excused], each.object_of[~each.excused], strict=True):
            row = truth.categories[thing] if thing >= 0 else classes
            counts[row, found.categories[detection]] += 1
        np.add.at(counts, (truth.categories[each.missed], classes), 1)
    return counts
