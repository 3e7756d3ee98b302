"""The class of every pixel of pictures of any size, from an artefact: windows slide over them as in `windows.py`.

Letters: K classes, H×W pixels. The graph gives logits of a window at a quarter of its sides; those of pixels are
bilinear between them, and the mean over the windows a pixel is in. Logits of pixels exist some rows at a time.
A run that resizes pictures (`short_side`) does so with torch, here Pillow does: bytes differ by 1 at most.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image

from patchloom_runtime.artifacts.artifact import Artifact
from patchloom_runtime.artifacts.window_positions import starts, stretches
from patchloom_runtime.errors import with_near_options
from patchloom_runtime.images.bilinear import resized_rows
from patchloom_runtime.images.geometry import Size, short_side_factor
from patchloom_runtime.images.inputs import ImagesLike, is_single_image, iterate_images

MAPS = "maps"
MOST_IN_TILE = 16 << 20  # numbers of a tile of logits: 64 MiB
MOST_SEEN = 1 << 20  # pixels of windows that the graph sees together


class ArtifactSegmenter(Artifact):
    """An exported segmentation model."""

    @with_near_options
    def predict(self, pictures: ImagesLike) -> Any:
        """Class numbers of all pixels, (H, W) int16: of one picture, or a list for many."""
        found = [self.numbers(each.read()) for each in iterate_images(pictures)]
        return found[0] if is_single_image(pictures) else found

    def numbers(self, picture: Image.Image) -> np.ndarray:
        """Class numbers (H, W) of an RGB picture."""
        own = (picture.height, picture.width)
        size = self._shown_size(own)
        found = np.empty(own, np.int16)
        if size == own:
            for rows, logits in self._tiles(np.asarray(picture)):
                found[rows] = logits.argmax(0)
            return found
        seen = np.asarray(picture.resize((size[1], size[0]), Image.Resampling.BICUBIC))
        logits = np.concatenate([tile for _, tile in self._tiles(seen)], axis=1)  # (K, h, w)
        at_once = max(1, MOST_IN_TILE // (len(logits) * own[1]))
        for top in range(0, own[0], at_once):
            rows = slice(top, min(own[0], top + at_once))
            found[rows] = resized_rows(logits, own, rows).argmax(0)
        return found

    def _shown_size(self, own: Size) -> Size:
        """Height and width at which a picture is shown: no side is less than that of a window."""
        window = self.about.transform.image_size
        factor = short_side_factor((own[1], own[0]), self.about.windows.short_side)
        factor = max(factor, window[0] / own[0], window[1] / own[1])
        return max(1, round(own[0] * factor)), max(1, round(own[1] * factor))

    def _tiles(self, pixels: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
        """Rows of a picture (H, W, 3) with their logits (K, rows, W), from top to bottom."""
        (height, width), (window, across) = pixels.shape[:2], self.about.transform.image_size
        down, right = self.about.windows.stride
        tops, lefts = starts(height, window, down), starts(width, across, right)
        columns = np.zeros(width, np.float32)  # how many windows of a row each column is in
        for left in lefts:
            columns[left : left + across] += 1
        kept: dict[int, np.ndarray] = {}  # row of windows → their logits, while tiles need them
        for rows in stretches(tops, window, max(1, MOST_IN_TILE // (len(self.labels) * width))):
            over = [i for i, top in enumerate(tops) if top <= rows.start and rows.stop <= top + window]
            kept = {i: kept[i] if i in kept else self._row(pixels, tops[i], lefts) for i in over}
            total = np.zeros((len(self.labels), rows.stop - rows.start, width), np.float32)
            for i in over:
                inside = slice(rows.start - tops[i], rows.stop - tops[i])
                for left, logits in zip(lefts, kept[i], strict=True):
                    total[..., left : left + across] += resized_rows(logits, (window, across), inside)
            yield rows, total / (columns * len(over))

    def _row(self, pixels: np.ndarray, top: int, lefts: list[int]) -> np.ndarray:
        """Logits of the windows of one row, (windows, K, h, w)."""
        height, width = self.about.transform.image_size
        cut = np.stack([pixels[top : top + height, left : left + width] for left in lefts])
        at_once = max(1, MOST_SEEN // (height * width))
        parts = [self.outputs(cut[i : i + at_once])[MAPS] for i in range(0, len(cut), at_once)]
        return np.concatenate(parts)
