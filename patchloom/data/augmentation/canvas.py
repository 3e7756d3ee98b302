"""Images of any shape on canvases of one size, for tasks that need them whole: aspect ratio kept, at the top left.

    evaluation  as large as the canvas and the limits on its sides allow
    training    × a random factor (large-scale jitter: smaller, or cropped if larger), or with a random short side

Each image has an extent: the part of the canvas that it fills and its original size, so that detections on the canvas
can be converted to pixels of the image. The rest of the canvas is black.
"""

import random
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from PIL import Image

from patchloom.data.augmentation.augment import TrainTransform
from patchloom.recipes.parts import DetectPart
from patchloom_runtime.images.evaluation_transform import ImageTransform
from patchloom_runtime.images.geometry import Geometry, Size, fitting_size, scaled_size
from patchloom_runtime.images.samples import EXTENT, Sample

SHORT_SIDE_STEP = 32  # pixels between the possible short sides
EXTENT_VALUES = 4


@dataclass(frozen=True)
class CanvasView(ImageTransform):
    """The whole image as large as it fits; nothing random."""

    image_size: Size
    short: int | None = None
    long: int | None = None

    def geometry(self, sample: Sample, rng: random.Random) -> Geometry:  # noqa: ARG002
        """Place all of it at the top left."""
        size = sample.image.size
        return Geometry((0, 0, *size), fitting_size(size, self.image_size, self.short, self.long), self.image_size)

    def arrays(self, sample: Sample, rng: random.Random) -> dict[str, np.ndarray]:
        """Return the view with its parts and its extent."""
        geometry = self.geometry(sample, rng)
        return self.applied(geometry, sample, rng) | {EXTENT: _extent(geometry, sample)}

    def shapes(self, parts: Collection[str]) -> dict[str, tuple[int, ...]]:
        return super().shapes(parts) | {EXTENT: (EXTENT_VALUES,)}


@dataclass(frozen=True)
class JitteredCanvas(TrainTransform):
    """A random scale, a random crop if it is larger than the canvas, and a flip; then color changes."""

    part: DetectPart

    def geometry(self, sample: Sample, rng: random.Random) -> Geometry:
        """Draw once for image, masks and boxes."""
        part, canvas, size = self.part, self.image_size, sample.image.size
        if part.resize == "short_side":
            sides = range(part.short_min, part.short_max + 1, SHORT_SIDE_STEP)
            scaled = fitting_size(size, canvas, rng.choice(sides), part.long_max)
        else:
            factor = rng.uniform(self.augment.scale_min, self.augment.scale_max)
            scaled = scaled_size(size, factor * min(canvas[0] / size[1], canvas[1] / size[0]))
        start = rng.randint(0, max(0, scaled[0] - canvas[0])), rng.randint(0, max(0, scaled[1] - canvas[1]))
        return Geometry((0, 0, *size), scaled, canvas, start, flip=rng.random() < self.augment.flip)

    def arrays(self, sample: Sample, rng: random.Random) -> dict[str, np.ndarray]:
        """Return the view with its parts and its extent."""
        geometry = self.geometry(sample, rng)
        arrays = self.applied(geometry, sample, rng) | {EXTENT: _extent(geometry, sample)}
        if sample.boxes is not None and self.part.min_visible:
            arrays["boxes"] = _visible(arrays["boxes"], sample.boxes, geometry, self.part.min_visible)
        return arrays

    def shapes(self, parts: Collection[str]) -> dict[str, tuple[int, ...]]:
        return super().shapes(parts) | {EXTENT: (EXTENT_VALUES,)}


def _extent(geometry: Geometry, sample: Sample) -> np.ndarray:
    """Return height and width of the visible part on the canvas, and of the image."""
    visible = [min(scaled, side) for scaled, side in zip(geometry.scaled, geometry.size, strict=True)]
    width, height = sample.image.size
    return np.array([*visible, height, width], np.int32)


def _visible(clipped: np.ndarray, boxes: np.ndarray, geometry: Geometry, share: float) -> np.ndarray:
    """Return the boxes of a view of which at least a share is visible."""
    left, top, right, bottom = geometry.box
    scale = geometry.scaled[0] / (bottom - top) * geometry.scaled[1] / (right - left)
    whole = {number: scale * area for number, area in zip(boxes[:, 5].tolist(), _areas(boxes).tolist(), strict=True)}
    numbers, areas = clipped[:, 5].tolist(), _areas(clipped).tolist()
    enough = [area >= share * whole[number] for number, area in zip(numbers, areas, strict=True)]
    return clipped[np.array(enough, bool)]


def _areas(boxes: np.ndarray) -> np.ndarray:
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])


def on_canvas(image: Image.Image, view: CanvasView) -> dict[str, np.ndarray]:
    """Return one image as in evaluation: its pixels on the canvas, and its extent."""
    return view.arrays(Sample(image), random.Random(0))
