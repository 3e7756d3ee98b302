"""Objects of pictures, from an artefact: two or three graphs, and what chooses between them (`object_choice.py`).

    model     pixels and sizes of the pictures on their canvases → maps; objectness and offsets of all anchors
    regions   maps and proposals → scores of the classes, and a box of each
    masks     maps, boxes and their classes → shares of 28×28 places; where the run learned masks

Regions come to a graph in lists, one per map they are read from: so each is read once, and lists may be of any length.
A run resizes pictures with torch, here Pillow does: bytes differ by 1 at most.
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
from PIL import Image

from patchloom_runtime.artifacts.artifact import Artifact
from patchloom_runtime.artifacts.box_selection import (
    LEVELS,
    BoxLimits,
    RegionBoxes,
    levels_of,
    objects_of,
    proposals_of,
)
from patchloom_runtime.artifacts.detected_object import SURE, DetectedObject, surest_first
from patchloom_runtime.engines.formats import MODEL, Graph
from patchloom_runtime.errors import UsageError, with_near_options
from patchloom_runtime.images.geometry import Geometry, Size, fitting_size
from patchloom_runtime.images.inputs import ImagesLike, is_single_image, iterate_images
from patchloom_runtime.images.pasted_masks import pasted

REGIONS, MASKS = "regions", "masks"
AT_ONCE = 8  # pictures
CUT_TO = 32  # pixels: canvases that are cut are multiples of it
FILLED = 2  # regions of nothing in each list: some runtimes know no list of none or one


class ArtifactDetector(Artifact):
    """An exported detector."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        choice = self.about.choice
        assert choice is not None
        self._choice, self._finder = choice, Finder(self._graphs, choice)

    @with_near_options
    def predict(self, pictures: ImagesLike, *, min_score: float = SURE) -> Any:
        """The objects of one picture, surest first, or a list for many; pictures as `Classifier.predict` takes them."""
        if not 0 <= min_score <= 1:
            raise UsageError(f"min_score is {min_score}, expected a number from 0 to 1")
        read = (each.read() for each in iterate_images(pictures))
        found: list[list[DetectedObject]] = []
        while some := list(islice(read, AT_ONCE)):
            found += self._found(some, min_score)
        return found[0] if is_single_image(pictures) else found

    def _found(self, pictures: Sequence[Image.Image], min_score: float) -> list[list[DetectedObject]]:
        canvas, limits = self.about.transform.image_size, (self._choice.short or None, self._choice.long or None)
        sizes = [fitting_size(picture.size, canvas, *limits) for picture in pictures]
        pixels = [
            Geometry((0, 0, *picture.size), size, canvas).apply_picture(picture, _resized)
            for picture, size in zip(pictures, sizes, strict=True)
        ]
        found = self._finder(np.stack(pixels), np.array(sizes, np.int64))
        return [
            surest_first(*in_picture(one, (*size, picture.height, picture.width)), self.labels, min_score)
            for one, size, picture in zip(found, sizes, pictures, strict=True)
        ]


class Finder:
    """The graphs of a detector as one function."""

    def __init__(self, graphs: Mapping[str, Graph], choice: BoxLimits) -> None:
        self._graphs, self._choice = graphs, choice

    def __call__(self, pixels: np.ndarray, sizes: np.ndarray) -> list[RegionBoxes]:
        """(B, H, W, 3) uint8 and (B, 2) → what is found on each canvas."""
        if self._choice.cut:
            height, width = (-(-int(side) // CUT_TO) * CUT_TO for side in sizes.max(0))
            pixels = np.ascontiguousarray(pixels[:, :height, :width])
        seen = self._graphs[MODEL](pixels, sizes)
        maps = [seen[f"map{number}"] for number in range(LEVELS)]
        last = maps[-1].shape[2:]
        grids = [*(each.shape[2:] for each in maps), tuple((side + 1) // 2 for side in last)]  # every second place
        proposed = [
            proposals_of(objectness, offsets, grids, pixels.shape[1:3], size, self._choice)
            for objectness, offsets, size in zip(seen["objectness"], seen["offsets"], sizes, strict=True)
        ]
        scores, boxes = self._of_regions(REGIONS, ("scores", "boxes"), maps, proposed)
        found = [objects_of(*one, self._choice) for one in zip(scores, boxes, sizes, strict=True)]
        if MASKS not in self._graphs:
            return found
        (shares,) = self._of_regions(MASKS, ("shares",), maps, [one.boxes for one in found], [o.labels for o in found])
        return [RegionBoxes(one.boxes, one.labels, one.scores, own) for one, own in zip(found, shares, strict=True)]

    def _of_regions(
        self,
        part: str,
        outputs: Sequence[str],
        maps: Sequence[np.ndarray],
        boxes: Sequence[np.ndarray],
        labels: Sequence[np.ndarray] | None = None,
    ) -> list[list[np.ndarray]]:
        """What a graph says of the boxes of each picture: per output one array per picture."""
        whose = np.repeat(np.arange(len(boxes)), [len(own) for own in boxes])
        every = np.concatenate([whose[:, None].astype(np.float32), np.concatenate(boxes)], 1)
        levels = levels_of(every[:, 1:])
        own = [np.flatnonzero(levels == level) for level in range(LEVELS)]
        empty = np.array([[0, 0, 0, 1, 1]] * FILLED, np.float32)
        lists = [np.concatenate([every[places], empty]) for places in own]
        given: list[np.ndarray] = [*maps, *lists]
        if labels is not None:
            numbers, nothing = np.concatenate(labels), np.zeros(FILLED, np.int64)
            given.append(np.concatenate([each for places in own for each in (numbers[places], nothing)]))
        said = self._graphs[part](*given)
        starts = np.cumsum([0, *(len(each) for each in lists)])
        at = np.empty(len(every), np.int64)
        for places, start in zip(own, starts, strict=False):
            at[places] = start + np.arange(len(places))
        ends = np.cumsum([len(each) for each in boxes])[:-1]
        return [np.split(said[name][at], ends) for name in outputs]


def in_picture(
    found: RegionBoxes, extent: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[Any] | None]:
    """Boxes, numbers of classes, scores and masks in pixels of the picture.

    `extent` is height and width of the picture on its canvas, and of itself.
    """
    seen_height, seen_width, height, width = extent
    boxes = found.boxes * np.array([width / seen_width, height / seen_height] * 2, np.float32)
    masks = None
    if found.shares is not None:
        masks = [pasted(mask, box, (height, width)) for mask, box in zip(found.shares, boxes, strict=True)]
    return boxes.astype(np.float64), found.labels - 1, found.scores.astype(np.float64), masks


def _resized(picture: Image.Image, size: Size) -> np.ndarray:
    return np.asarray(picture.resize((size[1], size[0]), Image.Resampling.BICUBIC))
