"""Semantic segmentation with an artifact: windows slide over images of any size, as `patchloom predict` does it.

Letters: K classes, H×W pixels. The graph returns the logits of a window at a quarter of its resolution. The logits of
pixels are interpolated bilinearly and averaged over the windows that contain the pixel; they are computed for some rows
at a time. A run that resizes images (`short_side`) does so with torch, an artifact with Pillow: bytes differ by at
most 1.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from patchloom_runtime.artifacts.artifact import Artifact
from patchloom_runtime.artifacts.metadata import MOST_PIXELS
from patchloom_runtime.errors import with_near_options
from patchloom_runtime.images.geometry import Size, resized_rows, short_side_factor
from patchloom_runtime.images.inputs import ImagesLike, is_single_image, iterate_images

MAPS = "maps"
MOST_IN_TILE = 16 << 20  # values per tile of logits: 64 MiB
MOST_IN_BATCH = 1 << 20  # pixels of windows per call of the graph


@dataclass(frozen=True)
class WindowSettings:
    """How a graph with a fixed input size is applied to images of any size."""

    stride: tuple[int, int] = (1, 1)  # pixels between windows, down and right
    short_side: int = 0  # to which images are resized; 0: not resized


class ArtifactSegmenter(Artifact):
    """An exported segmentation model."""

    settings_shape: ClassVar[Mapping[str, Any]] = {"windows?": {"stride": list[int], "short_side": int}}

    @classmethod
    def read_settings(cls, values: Mapping[str, Any]) -> WindowSettings:
        if "windows" not in values:
            return WindowSettings()
        stride, side = values["windows"]["stride"], values["windows"]["short_side"]
        if len(stride) != 2 or not all(0 < step <= MOST_PIXELS for step in stride) or not 0 <= side <= MOST_PIXELS:
            raise ValueError(
                f"windows: stride is {stride} and short_side {side}, expected two numbers from 1 and one from 0, "
                f"all up to {MOST_PIXELS}"
            )
        return WindowSettings((stride[0], stride[1]), side)

    @with_near_options
    def predict(self, images: ImagesLike) -> Any:
        """Return the class number of every pixel, (H, W) int16; for several images, a list."""
        predictions = [self.numbers(each.read()) for each in iterate_images(images)]
        return predictions[0] if is_single_image(images) else predictions

    def numbers(self, image: Image.Image) -> np.ndarray:
        """Return the class numbers (H, W) of an RGB image."""
        original = (image.height, image.width)
        size = self._input_size(original)
        classes = np.empty(original, np.int16)
        if size == original:
            for rows, logits in self._tiles(np.asarray(image)):
                classes[rows] = logits.argmax(0)
            return classes
        resized = np.asarray(image.resize((size[1], size[0]), Image.Resampling.BICUBIC))
        logits = np.concatenate([tile for _, tile in self._tiles(resized)], axis=1)  # (K, h, w)
        rows_at_once = max(1, MOST_IN_TILE // (len(logits) * original[1]))
        for top in range(0, original[0], rows_at_once):
            rows = slice(top, min(original[0], top + rows_at_once))
            classes[rows] = resized_rows(logits, original, rows).argmax(0)
        return classes

    def _input_size(self, original: Size) -> Size:
        """Return the height and width to resize an image to: at least those of a window."""
        window = self.about.transform.image_size
        factor = short_side_factor((original[1], original[0]), self.about.settings.short_side)
        factor = max(factor, window[0] / original[0], window[1] / original[1])
        return max(1, round(original[0] * factor)), max(1, round(original[1] * factor))

    def _tiles(self, pixels: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield rows of an image (H, W, 3) with their logits (K, rows, W), from top to bottom."""
        (height, width), (window, across) = pixels.shape[:2], self.about.transform.image_size
        down, right = self.about.settings.stride
        tops, lefts = starts(height, window, down), starts(width, across, right)
        columns = np.zeros(width, np.float32)  # number of windows in a row of windows that contain each column
        for left in lefts:
            columns[left : left + across] += 1
        cache: dict[int, np.ndarray] = {}  # row of windows → logits, while tiles need them
        for rows in stretches(tops, window, max(1, MOST_IN_TILE // (len(self.labels) * width))):
            over = [i for i, top in enumerate(tops) if top <= rows.start and rows.stop <= top + window]
            cache = {i: cache[i] if i in cache else self._row(pixels, tops[i], lefts) for i in over}
            total = np.zeros((len(self.labels), rows.stop - rows.start, width), np.float32)
            for i in over:
                inside = slice(rows.start - tops[i], rows.stop - tops[i])
                for left, logits in zip(lefts, cache[i], strict=True):
                    total[..., left : left + across] += resized_rows(logits, (window, across), inside)
            yield rows, total / (columns * len(over))

    def _row(self, pixels: np.ndarray, top: int, lefts: list[int]) -> np.ndarray:
        """Return the logits of one row of windows, (windows, K, h, w)."""
        height, width = self.about.transform.image_size
        windows = np.stack([pixels[top : top + height, left : left + width] for left in lefts])
        batch = max(1, MOST_IN_BATCH // (height * width))
        return np.concatenate([self.outputs(windows[i : i + batch])[MAPS] for i in range(0, len(windows), batch)])


def starts(length: int, window: int, stride: int) -> list[int]:
    """Return where windows begin along a side. They are a stride apart; the last one is shifted back inside."""
    count = max(0, -(-(length - window) // stride)) + 1
    return sorted({max(0, min(i * stride, length - window)) for i in range(count)})


def stretches(begins: list[int], window: int, most: int) -> Iterator[slice]:
    """Split a side into stretches that are covered by the same windows and at most `most` long."""
    edges = sorted({edge for begin in begins for edge in (begin, begin + window)})
    for start, stop in pairwise(edges):
        for first in range(start, stop, most):
            yield slice(first, min(stop, first + most))
