"""Detection metrics: average precision by COCO's rules, of boxes and masks, in percent.

name                       value
ap                         precision at 101 recalls, averaged over classes and over IoU 0.50, 0.55 … 0.95
ap50, ap75                 at one IoU
ap_small, _medium, _large  for objects up to 32², up to 96² and above, in pixels of the image
recall                     share of objects found with at most 100 detections per image and class, averaged over IoU and
                           classes
mask_ap …                  the same for masks instead of boxes
images, objects            counts; crowds are not objects

A class without objects has no average precision and is not counted. A detection inside a crowd is neither right nor
wrong; nor is one that matches, or has, a size outside the range in question. Tests compare everything with a slow copy
of COCO's own loops and with faster-coco-eval. This implementation is kept because one pass over the matches also gives
intervals, curves and scores per image.

Letters: D detections, G objects, A size ranges, T IoU thresholds, K classes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from patchloom.data.images.image_batch import ImageBatch
from patchloom.data.images.image_store import Objects
from patchloom.evaluation.classification import in_eval_mode
from patchloom.evaluation.intervals import bootstrap
from patchloom.models.dense.detector import Detector
from patchloom.objectives.detection import prepare_inputs
from patchloom_runtime.errors import UsageError
from patchloom_runtime.images.object_masks import ObjectMask, paste_mask
from patchloom_runtime.images.samples import EXTENT

Kind = Literal["box", "mask"]
THRESHOLDS = np.linspace(0.5, 0.95, 10)  # IoU
RECALLS = np.linspace(0, 1, 101)
MOST_DETECTIONS = 100  # per image and class
AREAS = {"all": (0.0, 1e10), "small": (0.0, 32.0**2), "medium": (32.0**2, 96.0**2), "large": (96.0**2, 1e10)}
SURE = 0.5  # minimum score of a detection in `image_scores`
_CERTAIN = 1 - 1e-10  # an IoU of 1 may be rounded down


@dataclass(frozen=True)
class TrueObjects:
    """The objects of one image."""

    boxes: np.ndarray  # (G, 4): x0, y0, x1, y1 in pixels of the image
    categories: np.ndarray  # (G,)
    crowd: np.ndarray  # (G,) bool
    areas: np.ndarray  # (G,) pixels; decides between small, medium and large
    masks: Sequence[ObjectMask] | None = None


@dataclass(frozen=True)
class Detections:
    """The detections in one image."""

    boxes: np.ndarray  # (D, 4)
    categories: np.ndarray  # (D,)
    scores: np.ndarray  # (D,)
    masks: Sequence[ObjectMask] | None = None

    def rows(self, chosen: np.ndarray) -> "Detections":
        """Return a subset of the detections."""
        masks = None if self.masks is None else [self.masks[i] for i in np.arange(len(self.scores))[chosen]]
        return Detections(self.boxes[chosen], self.categories[chosen], self.scores[chosen], masks)


class Matches(NamedTuple):
    """Detections of one class over all images, by decreasing score."""

    images: np.ndarray  # (D,) index of the image
    scores: np.ndarray  # (D,)
    right: np.ndarray  # (A, T, D) matches an object that counts
    wrong: np.ndarray  # (A, T, D) matches nothing
    objects: np.ndarray  # (A, images) number of objects that count


class Curve(NamedTuple):
    """Precision over recall of one class at one IoU."""

    recall: np.ndarray
    precision: np.ndarray
    scores: np.ndarray


@dataclass(frozen=True)
class DetectionReport:
    """Detections and true objects of a dataset, one entry per image, and the metrics that follow from them."""

    classes: tuple[str, ...]
    truths: Sequence[TrueObjects]
    detections: Sequence[Detections]
    _intervals: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict, repr=False)  # cache

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Return the kinds of metrics: masks only if there are any."""
        return ("box", "mask") if self.has_masks else ("box",)

    @property
    def has_masks(self) -> bool:
        """Return whether all objects and detections have masks."""
        has = [each.masks is not None for each in self.truths] + [each.masks is not None for each in self.detections]
        return bool(has) and all(has)

    def __iter__(self) -> Iterator[tuple[str, float]]:
        for kind in self.kinds:
            prefix = "" if kind == "box" else "mask_"
            for name, value in self.summary(kind).items():
                yield prefix + name, value
        yield "images", float(len(self.truths))
        yield "objects", float(sum(int((~truth.crowd).sum()) for truth in self.truths))

    def summary(self, kind: Kind = "box") -> dict[str, float]:
        """Return the metrics of one kind. Size ranges without objects are omitted."""
        precision, recall = self.precision(kind), self.recall(kind)
        values = {
            "ap": _mean(precision[:, 0]),
            "ap50": _mean(precision[:, 0, 0]),
            "ap75": _mean(precision[:, 0, 5]),
            **{f"ap_{name}": _mean(precision[:, i]) for i, name in enumerate(AREAS) if i},
            "recall": _mean(recall[:, 0]),
        }
        always = ("ap", "ap50", "ap75", "recall")
        return {n: 0.0 if np.isnan(v) else 100 * v for n, v in values.items() if n in always or not np.isnan(v)}

    def class_ap(self, kind: Kind = "box") -> list[dict[str, float]]:
        """Return `ap`, `ap50`, `ap75` in percent and `objects` per class; NaN for classes without objects."""
        precision = self.precision(kind)
        return [
            {
                "ap": 100 * float(own.mean()),
                "ap50": 100 * float(own[0].mean()),
                "ap75": 100 * float(own[5].mean()),
                "objects": int(matches.objects[0].sum()),
            }
            for own, matches in zip(precision[:, 0], self.matches(kind), strict=True)
        ]

    def precision(self, kind: Kind = "box") -> np.ndarray:
        """Return precision (K, A, T, 101) at each recall; NaN for classes without objects."""
        return np.stack([_precision(matches) for matches in self.matches(kind)])

    def recall(self, kind: Kind = "box") -> np.ndarray:
        """Return recall (K, A, T) of all detections; NaN for classes without objects."""
        counted = [(m.right.sum(2), m.objects.sum(1)[:, None]) for m in self.matches(kind)]
        return np.stack([np.where(n > 0, right / np.maximum(n, 1), np.nan) for right, n in counted])

    def curve(self, category: int, threshold: int = 0, kind: Kind = "box") -> Curve:
        """Return precision and recall of one class as the score threshold decreases."""
        matches = self.matches(kind)[category]
        right, wrong = matches.right[0, threshold].cumsum(), matches.wrong[0, threshold].cumsum()
        total = max(1, int(matches.objects[0].sum()))
        precision = np.maximum.accumulate((right / np.maximum(right + wrong, 1))[::-1])[::-1]
        return Curve(right / total, precision, matches.scores)

    def interval(self, name: str = "ap", *, rounds: int = 200) -> tuple[float, float]:
        """Return the bootstrap interval over images of `ap`, `ap50`, `mask_ap` …"""
        key = name, rounds
        if key not in self._intervals:
            self._intervals[key] = bootstrap(self.resampled(name), len(self.truths), rounds=rounds)
        return self._intervals[key]

    def resampled(self, name: str) -> Callable[[np.ndarray], float]:
        """Return a function from image weights to `ap`, `ap50`, `ap75` or the same of masks."""
        kind: Kind = "mask" if name.startswith("mask_") else "box"
        which = {"ap": slice(None), "ap50": slice(0, 1), "ap75": slice(5, 6)}.get(name.removeprefix("mask_"))
        if which is None:
            raise UsageError(f"No interval of {name!r}; expected ap, ap50, ap75, mask_ap, mask_ap50 or mask_ap75")
        chosen = [
            m._replace(right=m.right[:1, which], wrong=m.wrong[:1, which], objects=m.objects[:1])
            for m in self.matches(kind)
        ]
        return lambda counts: 100 * _mean(np.stack([_precision(m, counts) for m in chosen])[:, 0])

    def image_scores(self, kind: Kind = "box") -> np.ndarray:
        """Return 2·right/(detections + objects) per image at IoU 0.5 and score ≥ 0.5; 1 for images with neither."""
        right, counted = np.zeros(len(self.truths)), np.zeros(len(self.truths))
        for matches in self.matches(kind):
            sure = matches.scores >= SURE
            right += np.bincount(matches.images, sure & matches.right[0, 0], len(self.truths))
            counted += np.bincount(matches.images, sure & (matches.right | matches.wrong)[0, 0], len(self.truths))
            counted += matches.objects[0]
        return np.where(counted > 0, 2 * right / np.maximum(counted, 1), 1.0)

    def matches(self, kind: Kind = "box") -> list[Matches]:
        """Return the detections of each class, matched to its objects."""
        return self._box_matches if kind == "box" else self._mask_matches

    @cached_property
    def _box_matches(self) -> list[Matches]:
        return [_matches(self, number, "box") for number in range(len(self.classes))]

    @cached_property
    def _mask_matches(self) -> list[Matches]:
        return [_matches(self, number, "mask") for number in range(len(self.classes))]


@torch.no_grad()
def find_objects(network: Detector, batches: Iterable[ImageBatch]) -> Iterator[tuple[int, tuple[int, int], Detections]]:
    """Yield index, (height, width) and detections of every image, in pixels of the image."""
    device = next(network.parameters()).device
    with in_eval_mode(network):
        for batch in batches:
            on_device = batch.to(device, non_blocking=True)
            images, sizes = prepare_inputs(on_device, network.pixel_mean, network.pixel_std, network.any_resolution)
            outputs = network(images, sizes)
            extents = batch.parts[EXTENT].tolist()  # type: ignore[union-attr]
            for index, extent, output in zip(batch.index.tolist(), extents, outputs, strict=True):
                height, width = extent[2:]
                yield index, (height, width), in_image_pixels(output, extent)


def in_image_pixels(output: Mapping[str, Tensor], extent: Sequence[int]) -> Detections:
    """Convert one image's detections from pixels of the canvas to pixels of the image."""
    canvas_height, canvas_width, height, width = extent
    on_host = {name: tensor.float().cpu() for name, tensor in output.items()}
    scale = torch.tensor([width / canvas_width, height / canvas_height] * 2)
    boxes = (on_host["boxes"] * scale).numpy()
    masks = None
    if "masks" in on_host:
        shares = on_host["masks"][:, 0].numpy()
        masks = [paste_mask(mask, box, (height, width)) for mask, box in zip(shares, boxes, strict=True)]
    categories = on_host["labels"].long().numpy() - 1
    return Detections(boxes.astype(np.float64), categories, on_host["scores"].double().numpy(), masks)


def truth_of(objects: Objects, size: tuple[int, int]) -> TrueObjects:
    """Return the objects of an image of `size` (height, width), with clipped boxes and without empty ones."""
    boxes = objects.boxes[:, :4].copy()
    boxes[:, 0::2] = boxes[:, 0::2].clip(0, size[1])
    boxes[:, 1::2] = boxes[:, 1::2].clip(0, size[0])
    inside = np.flatnonzero((boxes[:, 2:] > boxes[:, :2]).all(1))
    masks = None if objects.masks is None else [objects.masks[i] for i in inside]
    categories = objects.boxes[inside, 4].astype(np.int64)
    return TrueObjects(boxes[inside], categories, objects.crowd[inside], objects.areas[inside], masks)


def difference(one: DetectionReport, other: DetectionReport, name: str = "ap50") -> tuple[float, float, float]:
    """Return the difference of a metric on the same images and its paired bootstrap interval."""
    if len(one.truths) != len(other.truths):
        raise UsageError(f"reports on {len(one.truths)} and {len(other.truths)} images; expected the same images")
    first, second = one.resampled(name), other.resampled(name)
    once = np.ones(len(one.truths))
    low, high = bootstrap(lambda counts: first(counts) - second(counts), len(one.truths))
    return first(once) - second(once), low, high


def box_iou(detected: np.ndarray, truth: np.ndarray, crowd: np.ndarray) -> np.ndarray:
    """Return IoU (D, G) of boxes (D, 4) and (G, 4); with a crowd, the share of the detection inside it."""
    top_left = np.maximum(detected[:, None, :2], truth[None, :, :2])
    shared = (np.minimum(detected[:, None, 2:], truth[None, :, 2:]) - top_left).clip(0).prod(2)
    areas, others = _box_areas(detected)[:, None], _box_areas(truth)[None]
    return shared / np.maximum(np.where(crowd[None], areas, areas + others - shared), 1e-12)


def mask_iou(detected: Sequence[ObjectMask], truth: Sequence[ObjectMask], crowd: np.ndarray) -> np.ndarray:
    """Return IoU (D, G) of masks; with a crowd, the share of the detection inside it."""
    areas, others = [mask.area for mask in detected], [mask.area for mask in truth]
    iou = np.zeros((len(detected), len(truth)))
    for d, one in enumerate(detected):
        for g, other in enumerate(truth):
            if shared := one.overlap(other):
                iou[d, g] = shared / (areas[d] if crowd[g] else areas[d] + others[g] - shared)
    return iou


def _box_areas(boxes: np.ndarray) -> np.ndarray:
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])


def _matches(report: DetectionReport, category: int, kind: Kind) -> Matches:
    """Match the detections of a class in all images, by decreasing score; ties stay in the order of the images."""
    parts = [
        (image, *_match_image(truth, detections, category, kind))
        for image, (truth, detections) in enumerate(zip(report.truths, report.detections, strict=True))
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
    truth: TrueObjects, detections: Detections, category: int, kind: Kind
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return scores (D,), right and wrong (A, T, D) and the number of objects (A,) of one image and class."""
    own = np.flatnonzero(detections.categories == category)
    own = own[np.argsort(-detections.scores[own], kind="stable")[:MOST_DETECTIONS]]
    there = np.flatnonzero(truth.categories == category)
    detections, crowd = detections.rows(own), truth.crowd[there]
    ranges = np.array(list(AREAS.values()))[:, :, None]  # (A, 2, 1)
    ignored = crowd | (truth.areas[there] < ranges[:, 0]) | (truth.areas[there] > ranges[:, 1])  # (A, G)
    if kind == "mask":
        assert detections.masks is not None
        assert truth.masks is not None
        areas = np.array([mask.area for mask in detections.masks], np.float64)
        iou = mask_iou(detections.masks, [truth.masks[i] for i in there.tolist()], crowd)
    else:
        areas, iou = _box_areas(detections.boxes), box_iou(detections.boxes, truth.boxes[there], crowd)
    matched, excused = _assign(iou, crowd, ignored)
    excused |= ~matched & ((areas < ranges[:, 0]) | (areas > ranges[:, 1]))[:, None]
    return detections.scores, matched & ~excused, ~matched & ~excused, (~ignored).sum(1)


def _assign(iou: np.ndarray, crowd: np.ndarray, ignored: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which detections match an object, and which match one that does not count, (A, T, D) each.

    In the order of their scores, each takes the free object of highest IoU, preferably one that counts; of equal ones
    the last. A crowd can be matched repeatedly.
    """
    thresholds = np.minimum(THRESHOLDS, _CERTAIN)[None, :, None]
    shape = (len(AREAS), len(THRESHOLDS))
    matched, excused = np.zeros((2, *shape, len(iou)), bool)
    taken = np.zeros((*shape, iou.shape[1]), bool)
    counts = ~ignored[:, None]  # (A, 1, G)
    # Most low-scoring detections touch nothing.
    for d in np.flatnonzero((iou >= THRESHOLDS[0]).any(1)):
        near = (iou[d] >= thresholds) & (~taken | crowd)  # (A, T, G)
        counted = near & counts
        chosen = np.where(counted.any(2, keepdims=True), counted, near)
        best = iou.shape[1] - 1 - np.where(chosen, iou[d], -1)[:, :, ::-1].argmax(2)
        matches = chosen.any(2)
        matched[:, :, d] = matches
        excused[:, :, d] = matches & np.take_along_axis(ignored, best, 1)
        np.put_along_axis(
            taken, best[:, :, None], matches[:, :, None] | np.take_along_axis(taken, best[:, :, None], 2), 2
        )
    return matched, excused


def _precision(matches: Matches, counts: np.ndarray | None = None) -> np.ndarray:
    """Return precision (A, T, 101) at each recall; `counts` are the image weights of a bootstrap."""
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
