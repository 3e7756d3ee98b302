"""Boxes and masks that were found beside those that are there: average precision by COCO's rules, in percent.

name                     value
ap                       mean over the classes and over IoU 0.50, 0.55 … 0.95 of the precision at 101 recalls
ap50, ap75               at one IoU
ap_small, _medium, _large  of objects up to 32², up to 96² and above, in pixels of the picture
recall                   mean over IoU and classes of the share of objects found, by at most 100 detections per picture
                         and class
mask_ap …                the same, by masks instead of boxes
images, objects          counted; crowds are no objects

A class without objects has no average precision and does not count. A detection inside a crowd counts neither as right
nor as wrong; nor does one that matches, or is of, a size outside the range asked for. Tests hold all of it equal to a
slow copy of COCO's own loops and to faster-coco-eval.

Letters: D detections, G objects, A ranges of size, T thresholds of IoU, K classes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from patchloom.evaluation.intervals import bootstrap
from patchloom_runtime.errors import UsageError
from patchloom_runtime.images.object_masks import ObjectMask

Kind = Literal["box", "mask"]
THRESHOLDS = np.linspace(0.5, 0.95, 10)  # of IoU
RECALLS = np.linspace(0, 1, 101)
MOST_DETECTIONS = 100  # of a picture and class
AREAS = {"all": (0.0, 1e10), "small": (0.0, 32.0**2), "medium": (32.0**2, 96.0**2), "large": (96.0**2, 1e10)}
SURE = 0.5  # the score from which a detection counts in `image_scores`
_CERTAIN = 1 - 1e-10  # IoU of 1 may come out a little less


@dataclass(frozen=True)
class TrueObjects:
    """The objects of one picture."""

    boxes: np.ndarray  # (G, 4): x0, y0, x1, y1 in pixels of the picture
    categories: np.ndarray  # (G,)
    crowd: np.ndarray  # (G,) bool
    areas: np.ndarray  # (G,) by which they are small, medium or large
    masks: Sequence[ObjectMask] | None = None


@dataclass(frozen=True)
class Detections:
    """What was found in one picture."""

    boxes: np.ndarray  # (D, 4)
    categories: np.ndarray  # (D,)
    scores: np.ndarray  # (D,)
    masks: Sequence[ObjectMask] | None = None

    def rows(self, chosen: np.ndarray) -> "Detections":
        """Some of them."""
        masks = None if self.masks is None else [self.masks[i] for i in np.arange(len(self.scores))[chosen]]
        return Detections(self.boxes[chosen], self.categories[chosen], self.scores[chosen], masks)


class Matches(NamedTuple):
    """Detections of one class over all pictures, by falling score."""

    images: np.ndarray  # (D,) the picture of each
    scores: np.ndarray  # (D,)
    right: np.ndarray  # (A, T, D) matches an object that counts
    wrong: np.ndarray  # (A, T, D) matches nothing
    objects: np.ndarray  # (A, images) that count


class Curve(NamedTuple):
    """Precision over recall of one class at one IoU."""

    recall: np.ndarray
    precision: np.ndarray
    scores: np.ndarray


@dataclass(frozen=True)
class DetectionReport:
    """Everything that was found in some pictures, judged; one entry per picture in `truths` and `found`."""

    classes: tuple[str, ...]
    truths: Sequence[TrueObjects]
    found: Sequence[Detections]
    _intervals: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict, repr=False)  # known ones

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """What is judged: masks only where there are some."""
        return ("box", "mask") if self.has_masks else ("box",)

    @property
    def has_masks(self) -> bool:
        """Whether objects and detections have masks."""
        given = [each.masks is not None for each in self.truths] + [each.masks is not None for each in self.found]
        return bool(given) and all(given)

    def __iter__(self) -> Iterator[tuple[str, float]]:
        for kind in self.kinds:
            before = "" if kind == "box" else "mask_"
            for name, value in self.summary(kind).items():
                yield before + name, value
        yield "images", float(len(self.truths))
        yield "objects", float(sum(int((~truth.crowd).sum()) for truth in self.truths))

    def summary(self, kind: Kind = "box") -> dict[str, float]:
        """The numbers of one kind; those of sizes that no object has are left out."""
        precision, recall = self.precision(kind), self.recall(kind)
        values = {
            "ap": _mean(precision[:, 0]),
            "ap50": _mean(precision[:, 0, 0]),
            "ap75": _mean(precision[:, 0, 5]),
            **{f"ap_{name}": _mean(precision[:, i]) for i, name in enumerate(AREAS) if i},
            "recall": _mean(recall[:, 0]),
        }
        kept = ("ap", "ap50", "ap75", "recall")
        return {name: 0.0 if np.isnan(v) else 100 * v for name, v in values.items() if name in kept or not np.isnan(v)}

    def class_ap(self, kind: Kind = "box") -> list[dict[str, float]]:
        """`ap`, `ap50`, `ap75` in percent and `objects` of each class; NaN where it has none."""
        precision = self.precision(kind)
        return [
            {
                "ap": 100 * float(of.mean()),
                "ap50": 100 * float(of[0].mean()),
                "ap75": 100 * float(of[5].mean()),
                "objects": int(matches.objects[0].sum()),
            }
            for of, matches in zip(precision[:, 0], self.matches(kind), strict=True)
        ]

    def precision(self, kind: Kind = "box") -> np.ndarray:
        """(K, A, T, 101) at each recall, NaN for classes without objects."""
        return np.stack([_precision(matches) for matches in self.matches(kind)])

    def recall(self, kind: Kind = "box") -> np.ndarray:
        """(K, A, T) of all detections, NaN for classes without objects."""
        counted = [(m.right.sum(2), m.objects.sum(1)[:, None]) for m in self.matches(kind)]
        return np.stack([np.where(n > 0, right / np.maximum(n, 1), np.nan) for right, n in counted])

    def curve(self, category: int, threshold: int = 0, kind: Kind = "box") -> Curve:
        """Precision and recall of one class, as more and more detections are believed."""
        matches = self.matches(kind)[category]
        right, wrong = matches.right[0, threshold].cumsum(), matches.wrong[0, threshold].cumsum()
        total = max(1, int(matches.objects[0].sum()))
        precision = np.maximum.accumulate((right / np.maximum(right + wrong, 1))[::-1])[::-1]
        return Curve(right / total, precision, matches.scores)

    def interval(self, name: str = "ap", *, rounds: int = 200) -> tuple[float, float]:
        """Where `ap`, `ap50`, `mask_ap` … of other such pictures are likely: a bootstrap over the pictures."""
        key = name, rounds
        if key not in self._intervals:
            self._intervals[key] = bootstrap(self.resampled(name), len(self.truths), rounds=rounds)
        return self._intervals[key]

    def resampled(self, name: str) -> Callable[[np.ndarray], float]:
        """`ap`, `ap50`, `ap75` or the same of masks, as if each picture were there so often as is then said."""
        kind: Kind = "mask" if name.startswith("mask_") else "box"
        which = {"ap": slice(None), "ap50": slice(0, 1), "ap75": slice(5, 6)}.get(name.removeprefix("mask_"))
        if which is None:
            raise UsageError(f"an interval of {name!r}; expected ap, ap50, ap75, mask_ap, mask_ap50 or mask_ap75")
        chosen = [
            m._replace(right=m.right[:1, which], wrong=m.wrong[:1, which], objects=m.objects[:1])
            for m in self.matches(kind)
        ]
        return lambda counts: 100 * _mean(np.stack([_precision(m, counts) for m in chosen])[:, 0])

    def image_scores(self, kind: Kind = "box") -> np.ndarray:
        """(images,) 2·right/(detections + objects) at IoU 0.5 with a score of 0.5 or more; 1 where there is neither."""
        right, counted = np.zeros(len(self.truths)), np.zeros(len(self.truths))
        for matches in self.matches(kind):
            sure = matches.scores >= SURE
            right += np.bincount(matches.images, sure & matches.right[0, 0], len(self.truths))
            counted += np.bincount(matches.images, sure & (matches.right | matches.wrong)[0, 0], len(self.truths))
            counted += matches.objects[0]
        return np.where(counted > 0, 2 * right / np.maximum(counted, 1), 1.0)

    def matches(self, kind: Kind = "box") -> list[Matches]:
        """Detections of each class, matched to its objects."""
        return self._box_matches if kind == "box" else self._mask_matches

    @cached_property
    def _box_matches(self) -> list[Matches]:
        return [_matches(self, number, "box") for number in range(len(self.classes))]

    @cached_property
    def _mask_matches(self) -> list[Matches]:
        return [_matches(self, number, "mask") for number in range(len(self.classes))]


def difference(one: DetectionReport, other: DetectionReport, name: str = "ap50") -> tuple[float, float, float]:
    """How much better one is than another on the same pictures, and the interval of that, by drawing them together."""
    if len(one.truths) != len(other.truths):
        raise UsageError(f"reports on {len(one.truths)} and {len(other.truths)} pictures; expected the same pictures")
    first, second = one.resampled(name), other.resampled(name)
    once = np.ones(len(one.truths))
    low, high = bootstrap(lambda counts: first(counts) - second(counts), len(one.truths))
    return first(once) - second(once), low, high


def box_iou(found: np.ndarray, truth: np.ndarray, crowd: np.ndarray) -> np.ndarray:
    """(D, 4) and (G, 4) → (D, G); with a crowd the share of the detection that lies in it."""
    corners = np.minimum(found[:, None, 2:], truth[None, :, 2:]) - np.maximum(found[:, None, :2], truth[None, :, :2])
    shared = corners.clip(0).prod(2)
    areas, others = _box_areas(found)[:, None], _box_areas(truth)[None]
    return shared / np.maximum(np.where(crowd[None], areas, areas + others - shared), 1e-12)


def mask_iou(found: Sequence[ObjectMask], truth: Sequence[ObjectMask], crowd: np.ndarray) -> np.ndarray:
    """(D, G); with a crowd the share of the detection that lies in it."""
    areas, others = [mask.area for mask in found], [mask.area for mask in truth]
    iou = np.zeros((len(found), len(truth)))
    for d, one in enumerate(found):
        for g, other in enumerate(truth):
            if shared := one.overlap(other):
                iou[d, g] = shared / (areas[d] if crowd[g] else areas[d] + others[g] - shared)
    return iou


def _box_areas(boxes: np.ndarray) -> np.ndarray:
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])


def _matches(report: DetectionReport, category: int, kind: Kind) -> Matches:
    """All pictures' detections of a class, by falling score; equal scores in the order of the pictures."""
    parts = [
        (image, *_match_image(truth, found, category, kind))
        for image, (truth, found) in enumerate(zip(report.truths, report.found, strict=True))
    ]
    images = np.repeat([image for image, *_ in parts], [len(scores) for _, scores, *_ in parts]).astype(np.int64)
    scores = np.concatenate([np.zeros(0), *(scores for _, scores, *_ in parts)])
    shape = (len(AREAS), len(THRESHOLDS), 0)
    right = np.concatenate([np.zeros(shape, bool), *(right for *_, right, _, _ in parts)], axis=2)
    wrong = np.concatenate([np.zeros(shape, bool), *(wrong for *_, wrong, _ in parts)], axis=2)
    objects = np.stack([objects for *_, objects in parts], axis=1) if parts else np.zeros((len(AREAS), 0))
    order = np.argsort(-scores, kind="stable")
    return Matches(images[order], scores[order], right[:, :, order], wrong[:, :, order], objects)


def _match_image(
    truth: TrueObjects, found: Detections, category: int, kind: Kind
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Scores (D,), right and wrong (A, T, D) and objects that count (A,) of one picture and class."""
    own = np.flatnonzero(found.categories == category)
    own = own[np.argsort(-found.scores[own], kind="stable")[:MOST_DETECTIONS]]
    there = np.flatnonzero(truth.categories == category)
    found, crowd = found.rows(own), truth.crowd[there]
    ranges = np.array(list(AREAS.values()))[:, :, None]  # (A, 2, 1)
    ignored = crowd | (truth.areas[there] < ranges[:, 0]) | (truth.areas[there] > ranges[:, 1])  # (A, G)
    if kind == "mask":
        assert found.masks is not None
        assert truth.masks is not None
        areas = np.array([mask.area for mask in found.masks], np.float64)
        iou = mask_iou(found.masks, [truth.masks[i] for i in there.tolist()], crowd)
    else:
        areas, iou = _box_areas(found.boxes), box_iou(found.boxes, truth.boxes[there], crowd)
    matched, excused = _assign(iou, crowd, ignored)
    excused |= ~matched & ((areas < ranges[:, 0]) | (areas > ranges[:, 1]))[:, None]
    return found.scores, matched & ~excused, ~matched & ~excused, (~ignored).sum(1)


def _assign(iou: np.ndarray, crowd: np.ndarray, ignored: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which detections match an object, and which match one that does not count, (A, T, D) each.

    In the order of their scores, each takes the object of highest IoU that is left, one that counts if it can; of
    equals the last. A crowd is never used up.
    """
    thresholds = np.minimum(THRESHOLDS, _CERTAIN)[None, :, None]
    shape = (len(AREAS), len(THRESHOLDS))
    matched, excused = np.zeros((2, *shape, len(iou)), bool)
    taken = np.zeros((*shape, iou.shape[1]), bool)
    counts = ~ignored[:, None]  # (A, 1, G)
    # Most detections of low scores touch nothing.
    for d in np.flatnonzero((iou >= THRESHOLDS[0]).any(1)):
        near = (iou[d] >= thresholds) & (~taken | crowd)  # (A, T, G)
        counted = near & counts
        chosen = np.where(counted.any(2, keepdims=True), counted, near)
        best = iou.shape[1] - 1 - np.where(chosen, iou[d], -1)[:, :, ::-1].argmax(2)
        found = chosen.any(2)
        matched[:, :, d] = found
        excused[:, :, d] = found & np.take_along_axis(ignored, best, 1)
        np.put_along_axis(
            taken, best[:, :, None], found[:, :, None] | np.take_along_axis(taken, best[:, :, None], 2), 2
        )
    return matched, excused


def _precision(matches: Matches, counts: np.ndarray | None = None) -> np.ndarray:
    """(A, T, 101) precision at each recall; with `counts` of a bootstrap, as if a picture were there so often."""
    times = np.ones(matches.objects.shape[1]) if counts is None else counts
    objects = matches.objects @ times  # (A,)
    each = times[matches.images]
    right, wrong = (each * matches.right).cumsum(2), (each * matches.wrong).cumsum(2)
    recall = right / np.maximum(objects, 1)[:, None, None]
    precision = right / np.maximum(right + wrong, np.spacing(1))
    precision = np.maximum.accumulate(precision[:, :, ::-1], axis=2)[:, :, ::-1]
    out = np.zeros((*right.shape[:2], len(RECALLS)))
    for a, t in np.ndindex(*right.shape[:2]):
        places = np.searchsorted(recall[a, t], RECALLS)
        reached = places < recall.shape[2]
        out[a, t, reached] = precision[a, t, places[reached]]
    out[objects == 0] = np.nan
    return out


def _mean(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")
