"""What the first layer looks for, as pictures: Mixer's figure 6, for any network that begins with patches or pixels.

A unit of the patch projection has one weight per pixel and channel of a patch, so with three channels it is a small
colour image: grey is zero, and a colour is what the unit answers to. Inputs are normalised, so grey is the mean colour.
"""

import numpy as np
from PIL import Image, ImageOps
from torch import Tensor, nn

from patchloom.layers.patches import PatchProjection
from patchloom.report.pictures.sheets import MARGIN, PAPER, colored, joined, numbers
from patchloom_runtime.errors import UsageError

COLUMNS = 16
FILTER, SPACE = 48, 6  # pixels a filter is brought to, by a whole factor, and between filters


def filter_picture(network: nn.Module, *, units: int = 128) -> Image.Image:
    """The `units` filters with the largest weights, smooth ones first, each on its own scale."""
    filters = numbers(_first_weight(network))  # (C, channels, h, w)
    strongest = np.argsort(-np.square(filters).sum(axis=(1, 2, 3)), kind="stable")[:units]
    chosen = filters[strongest]
    chosen = chosen[np.argsort(mean_frequency(chosen), kind="stable")]
    tiles = np.stack([_as_colors(unit) for unit in chosen])  # (units, h, w, 3)
    columns = min(COLUMNS, len(tiles))
    lines = len(tiles) // columns
    tiles = tiles[: lines * columns].reshape(lines, columns, *tiles.shape[1:])
    return ImageOps.expand(joined(tiles, FILTER, gap=SPACE, seam=PAPER), MARGIN, PAPER)


def has_filters(network: nn.Module) -> bool:
    """Whether it begins with a layer over pixels."""
    return _first_layer(network) is not None


def mean_frequency(images: np.ndarray) -> np.ndarray:
    """(U, ..., h, w) → (U,): the mean distance from zero frequency, weighted by power; 0 where nothing changes."""
    power = np.abs(np.fft.fft2(images)) ** 2
    radius = np.hypot(*np.meshgrid(*map(np.fft.fftfreq, images.shape[-2:]), indexing="ij"))
    axes = tuple(range(1, images.ndim))
    return np.asarray((power * radius).sum(axis=axes) / np.maximum(power.sum(axis=axes), 1e-30))


def _as_colors(unit: np.ndarray) -> np.ndarray:
    """(channels, h, w) → (h, w, 3) bytes: colours where there are three channels, otherwise the sign of their sum."""
    if len(unit) != 3:
        return colored(unit.sum(axis=0))
    level = 0.5 + 0.5 * unit / (np.abs(unit).max() or 1.0)
    return np.rint(255 * level.transpose(1, 2, 0)).astype(np.uint8)


def _first_weight(network: nn.Module) -> Tensor:
    layer = _first_layer(network)
    if layer is None:
        raise UsageError(f"{type(network).__name__} has no layer over pixels, so it has no filters. Give it a network.")
    return layer.weight


def _first_layer(network: nn.Module) -> PatchProjection | nn.Conv2d | None:
    """The patch projection or, of a stem of convolutions, the first of them."""
    for module in network.modules():
        if isinstance(module, PatchProjection | nn.Conv2d):
            return module
    return None
