"""Pictures of any shape on canvases of one size, for tasks that need the whole of them: in shape, at the top left.

    judged   as large as the canvas and the limits on its sides allow
    trained  × a random factor (large-scale jitter: less shows it small, more a part of it), or by a random short side

Beside the picture goes its extent: how much of the canvas it fills, and its own size, so that what is found on the
canvas can be told in pixels of the picture. The rest of the canvas is black.
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

SHORT_SIDE_STEP = 32  # between the short sides that are drawn
EXTENT_VALUES = 4


@dataclass(frozen=True)
class CanvasView(ImageTransform):
    """The whole picture, as large as it fits; nothing random."""

    image_size: Size
    short: int | None = None
    long: int | None = None

    def geometry(self, sample: Sample, rng: random.Random) -> Geometry:  # noqa: ARG002
        """All of it, at the top left."""
        size = sample.image.size
        return Geometry((0, 0, *size), fitting_size(size, self.image_size, self.short, self.long), self.image_size)

    def arrays(self, sample: Sample, rng: random.Random) -> dict[str, np.ndarray]:
        """The view with its parts and its extent."""
        geometry = self.geometry(sample, rng)
        return self.applied(geometry, sample, rng) | {EXTENT: _extent(geometry, sample)}

    def shapes(self, parts: Collection[str]) -> dict[str, tuple[int, ...]]:
        """Of fixed size."""
        return super().shapes(parts) | {EXTENT: (EXTENT_VALUES,)}


@dataclass(frozen=True)
class JitteredCanvas(TrainTransform):
    """A random scale, a random part where it is larger than the canvas, and a flip; then colours."""

    part: DetectPart

    def geometry(self, sample: Sample, rng: random.Random) -> Geometry:
        """One draw for picture, masks and boxes."""
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
        """The view with its parts and its extent."""
        geometry = self.geometry(sample, rng)
        made = self.applied(geometry, sample, rng) | {EXTENT: _extent(geometry, sample)}
        if sample.boxes is not None and self.part.min_visible:
            made["boxes"] = _visible(made["boxes"], sample.boxes, geometry, self.part.min_visible)
        return made

    def shapes(self, parts: Collection[str]) -> dict[str, tuple[int, ...]]:
        """Of fixed size."""
        return super().shapes(parts) | {EXTENT: (EXTENT_VALUES,)}


def _extent(geometry: Geometry, sample: Sample) -> np.ndarray:
    """Height and width of what is seen on the canvas, and of the picture."""
    seen = [min(scaled, side) for scaled, side in zip(geometry.scaled, geometry.size, strict=True)]
    width, height = sample.image.size
    return np.array([*seen, height, width], np.int32)


def _visible(seen: np.ndarray, boxes: np.ndarray, geometry: Geometry, share: float) -> np.ndarray:
    """Those of the boxes in a view of which it shows at least a share."""
    left, top, right, bottom = geometry.box
    scale = geometry.scaled[0] / (bottom - top) * geometry.scaled[1] / (right - left)
    whole = {number: scale * area for number, area in zip(boxes[:, 5].tolist(), _areas(boxes).tolist(), strict=True)}
    kept = [
        area >= share * whole[number] for number, area in zip(seen[:, 5].tolist(), _areas(seen).tolist(), strict=True)
    ]
    return seen[np.array(kept, bool)]


def _areas(boxes: np.ndarray) -> np.ndarray:
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])


def on_canvas(picture: Image.Image, view: CanvasView) -> dict[str, np.ndarray]:
    """One picture as it is judged: its pixels on the canvas, and its extent."""
    return view.arrays(Sample(picture), random.Random(0))
