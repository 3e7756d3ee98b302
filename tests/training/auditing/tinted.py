"""Images of a tint per class, which a tiny network learns in seconds, with wrong labels among them."""

import colorsys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

GIVEN: dict[str, Any] = {"recipe": "small_images", "epochs": 6, "batch": 8, "size": 16, "device": "cpu", "init": "none"}
GIVEN |= {"set": {"model.options.depth": 1, "model.options.dim": 16, "model.options.patch_size": 8}}


def tinted(place: Path, tint: int, of: int, number: int) -> None:
    """Write noise of one of several hues."""
    color = np.array(colorsys.hsv_to_rgb(tint / of, 1, 1)) * 180
    noise = np.random.default_rng(1000 * tint + number).integers(0, 76, (16, 16, 3))
    place.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((color + noise).astype(np.uint8)).save(place)


def tinted_folders(root: Path, classes: Sequence[str], images: int, wrong: int = 0, first: int = 0) -> dict[str, str]:
    """Write class folders and return the true class of each of the `wrong` images that lie in the next folder.

    Images are numbered from `first`; those of equal numbers are equal.
    """
    truth = {}
    for tint, name in enumerate(classes):
        for number in range(first, first + images):
            other = classes[(tint + 1) % len(classes)]
            is_wrong = tint < wrong and number == first
            key = f"{other if is_wrong else name}/{name}-{number}.png"
            tinted(root / key, tint, len(classes), number)
            if is_wrong:
                truth[key] = name
    return truth
