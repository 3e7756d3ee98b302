"""Maps of a network laid over the picture it saw."""

import numpy as np
from PIL import Image

from patchloom.report.pictures.sheets import NEGATIVE, POSITIVE, displayed, heat

SIDE = 192  # pixels of a picture on a sheet
STRONGEST = 0.75  # opacity of the largest evidence


def attention_overlay(seen: Image.Image, attention: np.ndarray, side: int = SIDE) -> Image.Image:
    """Half the grey picture, half the map (h, w) in cividis: yellow where it is strongest (thesis 3.7.2.5).

    The map is interpolated to the size of the picture and scaled to 0…1 by (x − min) / (max − min). The thesis
    multiplies grey and map, which leaves dark objects dark however much they are looked at.
    """
    grey = np.asarray(displayed(seen, side).convert("L"), np.float64)
    strength = _interpolated(attention, grey.shape)
    strength = (strength - strength.min()) / ((strength.max() - strength.min()) or 1.0)
    return Image.fromarray(np.rint((grey[..., None] + heat(strength)) / 2).astype(np.uint8))


def evidence_overlay(seen: Image.Image, evidence: np.ndarray, side: int = SIDE) -> Image.Image:
    """The pale grey picture under red where the map (h, w) is positive and blue where it is negative."""
    grey = np.asarray(displayed(seen, side).convert("L"), np.float64)
    strength = _interpolated(evidence / (np.abs(evidence).max() or 1.0), grey.shape)[..., None]
    opacity = STRONGEST * np.abs(strength)
    color = np.where(strength < 0, NEGATIVE, POSITIVE)
    pale = (128 + grey / 2)[..., None]
    return Image.fromarray(np.rint(pale * (1 - opacity) + color * opacity).astype(np.uint8))


def attention_tile(attention: np.ndarray, side: int) -> Image.Image:
    """The map (h, w) alone, a square a patch, from 0 to its largest weight; negative weights count as 0."""
    shares = np.clip(attention / (attention.max() or 1.0), 0, 1)
    size = (side, max(1, round(side * attention.shape[0] / attention.shape[1])))
    return Image.fromarray(heat(shares)).resize(size, Image.Resampling.NEAREST)


def _interpolated(values: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    image = Image.fromarray(values.astype(np.float32))
    return np.asarray(image.resize((size[1], size[0]), Image.Resampling.BILINEAR), np.float64)
