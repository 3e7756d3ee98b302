"""A sheet of training images before the first step: the boxes of a few crops, and augmented views (thesis 6.1-6.3)."""

import io
import os
import random
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw

from patchloom.data.augmentation.augment import TrainTransform
from patchloom.disk import atomic_write
from patchloom.recipes.parts import AugmentPart
from patchloom.report.charts.svg import LIGHT_COLORS
from patchloom.report.pictures.pictures import Picture
from patchloom.report.pictures.sheets import SheetCell, SheetRow, sheet
from patchloom_runtime.images.geometry import Geometry
from patchloom_runtime.images.inputs import read_image
from patchloom_runtime.images.samples import Sample

FILE = Path("pictures") / "augmentation.png"
VIEWS = 6  # per image
SIDE = 160  # longest side of an image on the sheet, in pixels


def write_preview(run: Path, images: Sequence[Image.Image], augment: AugmentPart, size: int, *, seed: int) -> None:
    """Write the sheet of some training images into a run folder."""
    if not images:
        return
    file = io.BytesIO()
    augmentation_sheet(images, augment, size, seed=seed).save(file, "PNG")
    atomic_write(run / FILE, file.getvalue())


def read_preview(run: Path) -> list[Picture]:
    """Return the sheet of a run for its report, if it has one."""
    if not os.path.lexists(run / FILE):
        return []
    caption = "Boxes of the crops, each in the color of its view's number, and the views; mixing follows on the batch."
    return [Picture("Augmented training images", read_image(run / FILE), caption)]


def augmentation_sheet(images: Sequence[Image.Image], augment: AugmentPart, size: int, *, seed: int) -> Image.Image:
    """Draw every image with the boxes of its crops, followed by the views of these crops."""
    transform, rows = TrainTransform(augment, (size, size)), []
    for number, image in enumerate(images):
        rng, sample = random.Random(f"{seed} {number}"), Sample(image)
        whole, factor = image.copy(), SIDE / max(image.size)
        whole = whole.resize((max(1, round(image.width * factor)), max(1, round(image.height * factor))))
        draw, cells = ImageDraw.Draw(whole), []
        for view in range(VIEWS):
            geometry = transform.geometry(sample, rng)
            left, top, right, bottom = (round(factor * side) for side in crop_box(geometry))
            edges = (left, top, max(left, right - 1), max(top, bottom - 1))
            draw.rectangle(edges, outline=LIGHT_COLORS[view], width=2)
            pixels = transform.applied(geometry, sample, rng)["image"]
            cells.append(SheetCell(Image.fromarray(pixels).resize((SIDE, SIDE)), f"view {view + 1}"))
        rows.append(SheetRow("", [SheetCell(whole, f"{image.width}×{image.height}"), *cells]))
    return sheet(rows)


def crop_box(geometry: Geometry) -> tuple[float, float, float, float]:
    """Return left, top, right and bottom of the window that a view shows, in pixels of the image."""
    left, top, right, bottom = geometry.box
    down, across = (bottom - top) / geometry.scaled[0], (right - left) / geometry.scaled[1]
    first, start = geometry.start
    if geometry.flip:  # the window is cut from the mirrored box
        start = geometry.scaled[1] - start - geometry.size[1]
    x, y = left + start * across, top + first * down
    return x, y, x + geometry.size[1] * across, y + geometry.size[0] * down
