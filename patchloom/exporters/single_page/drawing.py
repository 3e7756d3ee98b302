"""Detection of datasets of drawings, such as digits, for pages on which one can draw."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from patchloom.data.sources.source import find_source
from patchloom.runs.run_metadata import read_run_metadata
from patchloom_runtime.errors import PatchloomError

LARGEST_SIDE = 32  # pixels; larger images are rarely drawings of a few strokes
_SAMPLES = 64
_INK = 64  # of 255: pixels that differ from the background by more belong to the drawing


@dataclass(frozen=True)
class Drawing:
    """Style of the drawings in a run's data."""

    ink: str  # "white" or "black"
    fills: float  # longer side of a drawing relative to the side of the image, on average


def drawing_of(folder: Path, image_size: tuple[int, int]) -> Drawing | None:
    """Return the style of a run's drawings, or None if images are larger than 32×32, colored or unreadable here."""
    if max(image_size) > LARGEST_SIDE:
        return None
    try:
        record = read_run_metadata(folder)
        if record is None:
            return None
        listing = find_source(record.data, reading=record.reading).train
        chosen = np.linspace(0, len(listing) - 1, min(_SAMPLES, len(listing))).astype(int)
        return drawing_style([listing.images.read(int(listing.rows[i])) for i in chosen])
    except PatchloomError:  # without data the page still accepts images
        return None


def drawing_style(images: list[Image.Image]) -> Drawing | None:
    """Return ink and size of drawings, or None if an image has colors or is empty."""
    pixels = [np.asarray(image.convert("RGB"), np.int64) for image in images]
    if not pixels or any((one != one[..., :1]).any() for one in pixels):
        return None
    dark_background = float(np.mean([np.median(one) for one in pixels])) < 128
    fills = [_filled(one[..., 0], dark_background=dark_background) for one in pixels]
    return Drawing("white" if dark_background else "black", float(np.mean(fills))) if all(fills) else None


def _filled(gray: np.ndarray, *, dark_background: bool) -> float:
    drawn = gray > _INK if dark_background else gray < 255 - _INK
    rows, columns = (np.flatnonzero(drawn.any(axis=axis)) for axis in (1, 0))
    if not rows.size:
        return 0.0
    return max((rows[-1] - rows[0] + 1) / gray.shape[0], (columns[-1] - columns[0] + 1) / gray.shape[1])
