"""Whether people can draw what a model classifies, and how its pictures are drawn: as digits on a small grey frame."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from patchloom.data.sources.source import find_source
from patchloom.runs.run_metadata import read_run_metadata
from patchloom_runtime.errors import PatchloomError

LARGEST_SIDE = 32  # pixels that a network sees; larger pictures are no drawings of a stroke or two
_LOOKED_AT = 64
_INK = 64  # of 255: what differs so much from the ground was drawn


@dataclass(frozen=True)
class Drawing:
    """How drawings look in the data of a run."""

    ink: str  # "white" or "black"
    fills: float  # share of the frame's side that the longer side of a drawing takes, on average


def drawing_of(folder: Path, image_size: tuple[int, int]) -> Drawing | None:
    """Of a run that sees at most 32×32 pixels, where its data can be read here and are grey without exception."""
    if max(image_size) > LARGEST_SIDE:
        return None
    try:
        record = read_run_metadata(folder)
        if record is None:
            return None
        listing = find_source(record.data, reading=record.reading).train
        chosen = np.linspace(0, len(listing) - 1, min(_LOOKED_AT, len(listing))).astype(int)
        return how_drawn([listing.images.read(int(listing.rows[i])) for i in chosen])
    except PatchloomError:  # without data the page shows pictures all the same
        return None


def how_drawn(pictures: list[Image.Image]) -> Drawing | None:
    """Ink and size of the drawings; None where a picture has colours or shows nothing."""
    pixels = [np.asarray(picture.convert("RGB"), np.int64) for picture in pictures]
    if not pixels or any((one != one[..., :1]).any() for one in pixels):
        return None
    dark_ground = float(np.mean([np.median(one) for one in pixels])) < 128
    fills = [_filled(one[..., 0], dark_ground=dark_ground) for one in pixels]
    return Drawing("white" if dark_ground else "black", float(np.mean(fills))) if all(fills) else None


def _filled(grey: np.ndarray, *, dark_ground: bool) -> float:
    drawn = grey > _INK if dark_ground else grey < 255 - _INK
    rows, columns = (np.flatnonzero(drawn.any(axis=axis)) for axis in (1, 0))
    if not rows.size:
        return 0.0
    return max((rows[-1] - rows[0] + 1) / grey.shape[0], (columns[-1] - columns[0] + 1) / grey.shape[1])
