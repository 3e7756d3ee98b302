"""Object detection with an artifact: two or three graphs, and the selection of boxes between them in numpy.

    model     pixels and sizes of the images on their canvases → feature maps; objectness and offsets of all anchors
    regions   feature maps and proposals → class scores and a box per class
    masks     feature maps, boxes and their classes → masks of 28×28 probabilities, if the run learned masks

The selection follows torchvision's Faster R-CNN. It is in no graph because the number of boxes depends on the image:

    maps → proposals    the most likely boxes of every map, without those that overlap a likelier one of the same map
    regions → objects   boxes with classes, without those that overlap a likelier one of the same class

Regions are passed in lists, one per feature map that they are pooled from, so that each is pooled once. A run resizes
images with torch, an artifact with Pillow: bytes differ by at most 1.

Letters: B images, A anchors, R regions, K classes and the background, n objects. Boxes are x0, y0, x1, y1 in pixels of
the canvas, float32.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from patchloom_runtime.artifacts.artifact import Artifact
from patchloom_runtime.engines.engine import MODEL, Graph
from patchloom_runtime.errors import UsageError, with_near_options
from patchloom_runtime.images.geometry import Geometry, Size, fitting_size
from patchloom_runtime.images.inputs import ImagesLike, is_single_image, iterate_images
from patchloom_runtime.images.object_masks import ObjectMask, paste_mask

REGIONS, MASKS = "regions", "masks"
LEVELS = 4  # feature maps that regions are pooled from
MOST_BOXES = 1 << 20
DEFAULT_MIN_SCORE = 0.5  # of the objects that `predict` returns
BATCH = 8  # images
CANVAS_STEP = 32  # pixels: sides of cropped canvases are multiples of it
FILLERS = 2  # empty regions appended to each list: some engines accept no list of length 0 or 1
MOST_LOG_SCALE = math.log(1000 / 16)  # of an anchor's side
COMPARED_AT_ONCE = 128  # boxes compared with all others together
MIN_PROPOSAL_SIDE, MIN_OBJECT_SIDE = 1e-3, 1e-2  # pixels
USUAL_SIDE, USUAL_LEVEL, FIRST_LEVEL = 224, 4, 2  # a region of 224² pixels is pooled from the map with stride 2⁴


@dataclass(frozen=True)
class BoxLimits:
    """How a detector selects boxes: thresholds and counts of the exported network."""

    anchors: tuple[tuple[tuple[float, ...], ...], ...]  # per feature map, centered on (0, 0)
    before: int  # proposals per map before overlapping ones are removed
    proposals: int  # per image
    proposal_overlap: float  # IoU above which the less likely of two proposals is removed
    min_score: float
    overlap: float  # the same for objects of one class
    most: int  # objects per image
    cut: bool  # whether the canvas is cropped to its largest image
    short: int = 0  # limit on the short side of an image in pixels; 0: only the canvas limits it
    long: int = 0


@dataclass(frozen=True)
class DetectedObject:
    """One object in an image."""

    name: str
    score: float
    box: tuple[float, float, float, float]  # x0, y0, x1, y1 in pixels
    outline: ObjectMask | None = None

    def mask(self, size: tuple[int, int]) -> np.ndarray | None:
        """Return the mask (H, W) bool for an image of `size` (height, width), or None if masks were not learned."""
        return None if self.outline is None else self.outline.whole(size)


@dataclass(frozen=True)
class RegionBoxes:
    """The objects on one canvas."""

    boxes: np.ndarray  # (n, 4)
    labels: np.ndarray  # (n,) from 1
    scores: np.ndarray  # (n,)
    shares: np.ndarray | None = None  # (n, 28, 28) mask probabilities


class ArtifactDetector(Artifact):
    """An exported detector."""

    required_parts: ClassVar[tuple[str, ...]] = (MODEL, REGIONS)
    settings_shape: ClassVar[Mapping[str, Any]] = {
        "detection": {
            "anchors": list[list[list[float]]],
            "before": int,
            "proposals": int,
            "proposal_overlap": float,
            "min_score": float,
            "overlap": float,
            "most": int,
            "cut": bool,
            "short": int,
            "long": int,
        }
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits: BoxLimits = self.about.settings
        self._detector = GraphDetector(self._graphs, self._limits)

    @classmethod
    def read_settings(cls, values: Mapping[str, Any]) -> BoxLimits:
        settings = {name: values["detection"][name] for name in BoxLimits.__dataclass_fields__}
        anchors = settings.pop("anchors")
        shares = [settings[name] for name in ("proposal_overlap", "min_score", "overlap")]
        counts = [settings[name] for name in ("before", "proposals", "most", "short", "long")]
        boxes = [box for around in anchors for box in around]
        fits = len(anchors) == LEVELS + 1 and all(anchors) and all(len(box) == 4 for box in boxes)
        if not fits or not all(0 <= share <= 1 for share in shares) or not all(0 <= n <= MOST_BOXES for n in counts):
            raise ValueError(f"detection has anchors for {len(anchors)} maps and the settings {settings}")
        return BoxLimits(tuple(tuple(tuple(map(float, box)) for box in around) for around in anchors), **settings)

    @with_near_options
    def predict(self, images: ImagesLike, *, min_score: float = DEFAULT_MIN_SCORE) -> Any:
        """Return the objects of an image, most certain first; for several images, one list per image.

        Images are passed as to `ArtifactClassifier.predict`.
        """
        if not 0 <= min_score <= 1:
            raise UsageError(f"min_score is {min_score}, expected a number from 0 to 1")
        decoded = (each.read() for each in iterate_images(images))
        objects: list[list[DetectedObject]] = []
        while batch := list(islice(decoded, BATCH)):
            objects += self._detect(batch, min_score)
        return objects[0] if is_single_image(images) else objects

    def _detect(self, images: Sequence[Image.Image], min_score: float) -> list[list[DetectedObject]]:
        canvas, limits = self.about.transform.image_size, (self._limits.short or None, self._limits.long or None)
        sizes = [fitting_size(image.size, canvas, *limits) for image in images]
        pixels = [
            Geometry((0, 0, *image.size), size, canvas).apply_image(image, _resized)
            for image, size in zip(images, sizes, strict=True)
        ]
        results = self._detector(np.stack(pixels), np.array(sizes, np.int64))
        return [
            surest_first(*to_image_pixels(regions, (*size, image.height, image.width)), self.labels, min_score)
            for regions, size, image in zip(results, sizes, images, strict=True)
        ]


class GraphDetector:
    """The graphs of a detector and the selection of boxes, as one function."""

    def __init__(self, graphs: Mapping[str, Graph], limits: BoxLimits) -> None:
        self._graphs, self._limits = graphs, limits

    def __call__(self, pixels: np.ndarray, sizes: np.ndarray) -> list[RegionBoxes]:
        """Detect objects on canvases (B, H, W, 3) uint8 with images of `sizes` (B, 2) at their top left."""
        if self._limits.cut:
            height, width = (-(-int(side) // CANVAS_STEP) * CANVAS_STEP for side in sizes.max(0))
            pixels = np.ascontiguousarray(pixels[:, :height, :width])
        features = self._graphs[MODEL](pixels, sizes)
        maps = [features[f"map{number}"] for number in range(LEVELS)]
        coarsest = tuple((side + 1) // 2 for side in maps[-1].shape[2:])  # every second position
        grids = [*(each.shape[2:] for each in maps), coarsest]
        proposals = [
            proposals_of(objectness, offsets, grids, pixels.shape[1:3], size, self._limits)
            for objectness, offsets, size in zip(features["objectness"], features["offsets"], sizes, strict=True)
        ]
        scores, boxes = self._run_on_regions(REGIONS, ("scores", "boxes"), maps, proposals)
        results = [objects_of(*each, self._limits) for each in zip(scores, boxes, sizes, strict=True)]
        if MASKS not in self._graphs:
            return results
        (shares,) = self._run_on_regions(
            MASKS, ("shares",), maps, [each.boxes for each in results], [each.labels for each in results]
        )
        return [RegionBoxes(one.boxes, one.labels, one.scores, own) for one, own in zip(results, shares, strict=True)]

    def _run_on_regions(
        self,
        part: str,
        outputs: Sequence[str],
        maps: Sequence[np.ndarray],
        boxes: Sequence[np.ndarray],
        labels: Sequence[np.ndarray] | None = None,
    ) -> list[list[np.ndarray]]:
        """Run a graph on the boxes of each image. Returns one list per output with one array per image."""
        image = np.repeat(np.arange(len(boxes)), [len(own) for own in boxes])
        regions = np.concatenate([image[:, None].astype(np.float32), np.concatenate(boxes)], 1)
        levels = levels_of(regions[:, 1:])
        by_level = [np.flatnonzero(levels == level) for level in range(LEVELS)]
        fillers = np.array([[0, 0, 0, 1, 1]] * FILLERS, np.float32)
        lists = [np.concatenate([regions[rows], fillers]) for rows in by_level]
        inputs: list[np.ndarray] = [*maps, *lists]
        if labels is not None:
            numbers, nothing = np.concatenate(labels), np.zeros(FILLERS, np.int64)
            inputs.append(np.concatenate([each for rows in by_level for each in (numbers[rows], nothing)]))
        results = self._graphs[part](*inputs)
        offsets = np.cumsum([0, *(len(each) for each in lists)])
        position = np.empty(len(regions), np.int64)
        for rows, offset in zip(by_level, offsets, strict=False):
            position[rows] = offset + np.arange(len(rows))
        ends = np.cumsum([len(each) for each in boxes])[:-1]
        return [np.split(results[name][position], ends) for name in outputs]


def to_image_pixels(
    regions: RegionBoxes, extent: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[ObjectMask] | None]:
    """Return boxes, class numbers from 0, scores and masks in pixels of the original image.

    `extent` is the height and width of the image on its canvas, then of the original.
    """
    canvas_height, canvas_width, height, width = extent
    boxes = regions.boxes * np.array([width / canvas_width, height / canvas_height] * 2, np.float32)
    masks = None
    if regions.shares is not None:
        masks = [paste_mask(mask, box, (height, width)) for mask, box in zip(regions.shares, boxes, strict=True)]
    return boxes.astype(np.float64), regions.labels - 1, regions.scores.astype(np.float64), masks


def surest_first(
    boxes: np.ndarray,
    categories: np.ndarray,
    scores: np.ndarray,
    masks: Sequence[ObjectMask] | None,
    labels: Sequence[str],
    min_score: float,
) -> list[DetectedObject]:
    """Return the objects with a score of at least `min_score`, most certain first."""
    return [
        DetectedObject(
            labels[categories[i]],
            float(scores[i]),
            tuple(map(float, boxes[i])),  # type: ignore[arg-type]
            None if masks is None else masks[i],
        )
        for i in np.argsort(-scores, kind="stable")
        if scores[i] >= min_score
    ]


def _resized(image: Image.Image, size: Size) -> np.ndarray:
    return np.asarray(image.resize((size[1], size[0]), Image.Resampling.BICUBIC))


# Selection of boxes -------------------------------------------------------------------------------------------------


def proposals_of(
    objectness: np.ndarray, offsets: np.ndarray, grids: Sequence[tuple[int, int]], canvas: Sequence[int],
    size: np.ndarray, limits: BoxLimits,
) -> np.ndarray:  # fmt: skip
    """Return proposals (R, 4), most likely first, from objectness (A,) and offsets (A, 4) of all maps in sequence."""
    boxes, scores, maps, start = [], [], [], 0
    for number, (grid, around) in enumerate(zip(grids, limits.anchors, strict=True)):
        count = grid[0] * grid[1] * len(around)
        own = objectness[start : start + count]
        best = np.argsort(-own, kind="stable")[: limits.before]
        boxes.append(decode_boxes(anchors_at(best, grid, canvas, np.array(around, np.float32)), offsets[start + best]))
        scores.append(1 / (1 + np.exp(-own[best])))
        maps.append(np.full(len(best), number))
        start += count
    candidates, likely, map_of = clip_boxes(np.concatenate(boxes), size), np.concatenate(scores), np.concatenate(maps)
    large = ((candidates[:, 2:] - candidates[:, :2]) >= MIN_PROPOSAL_SIDE).all(1)
    candidates, likely, map_of = candidates[large], likely[large], map_of[large]
    return candidates[suppress_overlaps(candidates, likely, map_of, limits.proposal_overlap, limits.proposals)]


def objects_of(scores: np.ndarray, boxes: np.ndarray, size: np.ndarray, limits: BoxLimits) -> RegionBoxes:
    """Return the objects of an image, most likely first, from scores (R, K) and boxes (R, K, 4) of its regions."""
    region, label = np.nonzero(scores[:, 1:] > limits.min_score)
    label += 1  # 0 is the background
    candidates, likely = clip_boxes(boxes[region, label], size), scores[region, label]
    large = ((candidates[:, 2:] - candidates[:, :2]) >= MIN_OBJECT_SIDE).all(1)
    candidates, likely, label = candidates[large], likely[large], label[large]
    chosen = suppress_overlaps(candidates, likely, label, limits.overlap, limits.most)
    return RegionBoxes(candidates[chosen], label[chosen], likely[chosen])


def anchors_at(numbers: np.ndarray, grid: tuple[int, int], canvas: Sequence[int], around: np.ndarray) -> np.ndarray:
    """Return the anchors (n, 4) with these numbers, which count the anchors of each grid point, row by row."""
    point, which = np.divmod(numbers, len(around))
    y, x = np.divmod(point, grid[1])
    steps = canvas[0] // grid[0], canvas[1] // grid[1]
    return np.stack([x * steps[1], y * steps[0]] * 2, 1).astype(np.float32) + around[which]


def decode_boxes(anchors: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Shift anchors (n, 4) by fractions of their sides, and scale them."""
    sides = anchors[:, 2:] - anchors[:, :2]
    centers = anchors[:, :2] + np.float32(0.5) * sides + offsets[:, :2] * sides
    half = np.float32(0.5) * np.exp(np.minimum(offsets[:, 2:], np.float32(MOST_LOG_SCALE))) * sides
    return np.concatenate([centers - half, centers + half], 1)


def clip_boxes(boxes: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Clip boxes to an image of `size` (height, width)."""
    height, width = size.tolist()
    return np.clip(boxes, 0, np.array([width, height] * 2, np.float32))


def suppress_overlaps(
    boxes: np.ndarray, scores: np.ndarray, groups: np.ndarray, overlap: float, most: int
) -> np.ndarray:
    """Non-maximum suppression per group: return the rows of the `most` likeliest boxes that remain."""
    by_group = [np.flatnonzero(groups == group) for group in np.unique(groups)]
    remaining = [rows[_suppress(boxes[rows], scores[rows], overlap, most)] for rows in by_group]
    chosen = np.concatenate(remaining) if remaining else np.empty(0, np.int64)
    return chosen[np.argsort(-scores[chosen], kind="stable")][:most]


def _suppress(boxes: np.ndarray, scores: np.ndarray, overlap: float, most: int) -> np.ndarray:
    order = np.argsort(-scores, kind="stable")
    boxes = boxes[order]
    sides = boxes[:, 2:] - boxes[:, :2]
    areas, left = sides[:, 0] * sides[:, 1], np.ones(len(order), bool)
    chosen: list[int] = []
    for start in range(0, len(order), COMPARED_AT_ONCE):
        if len(chosen) >= most:
            break
        rows = np.arange(start, min(start + COMPARED_AT_ONCE, len(order)))
        rows = rows[left[rows]]
        low, high = (np.ascontiguousarray(each.T) for each in (boxes[:, :2], boxes[:, 2:]))
        width, height = (
            np.minimum(high[axis, rows, None], high[axis, None, start:])
            - np.maximum(low[axis, rows, None], low[axis, None, start:])
            for axis in (0, 1)
        )
        both = np.maximum(width, 0) * np.maximum(height, 0)  # (rows, boxes from `start` on)
        over = both > np.float32(overlap) * (areas[rows, None] + areas[None, start:] - both)
        for row, suppresses in zip(rows.tolist(), over, strict=True):
            if left[row]:
                chosen.append(row)
                left[start:] &= ~suppresses
    return order[chosen[:most]]


def levels_of(boxes: np.ndarray) -> np.ndarray:
    """Return the feature map that each region is pooled from: larger regions from coarser maps."""
    sides = np.sqrt((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]))
    with np.errstate(divide="ignore"):
        level = np.floor(USUAL_LEVEL + np.log2(sides / np.float32(USUAL_SIDE)) + np.float32(1e-6))
    return (np.clip(level, FIRST_LEVEL, FIRST_LEVEL + LEVELS - 1) - FIRST_LEVEL).astype(np.int64)
