"""Datasets that need no download: `digits` (real handwriting) and `shapes` (drawn, with masks and boxes).

`shapes` has sixteen classes in four coarse families. The label is that of the largest object, which is surrounded by
smaller ones, strokes and specks. Color, size, position and rotation do not depend on the class. An image depends only
on the seed and its number.
"""

import colorsys
import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from patchloom.data.datasets import Listing, Source
from patchloom.data.images.image_store import ArrayImages, ImageStore, Mask
from patchloom_runtime.errors import UsageError, nearest

FAMILIES: dict[str, tuple[str, ...]] = {
    "polygon": ("triangle", "square", "pentagon", "hexagon"),
    "round": ("circle", "ellipse", "ring", "half-disc"),
    "star": ("star-4", "star-5", "star-6", "star-8"),
    "line": ("cross", "arrow", "zigzag", "spiral"),
}
SHAPES = tuple(shape for family in FAMILIES.values() for shape in family)
MOST_SHAPES = 10_000_000  # the row numbers of a listing are in memory
_CACHED_PIXELS = 1 << 24  # at 5 bytes each: 4,096 images of 64×64
_FINE = 4  # factor by which images are drawn larger, then averaged to smooth edges
_INNER_RADIUS = {4: 0.36, 5: 0.42, 6: 0.55, 8: 0.68}  # of a star, by its number of points


def open_digits() -> Source:
    """Open 1,797 handwritten digits of 8×8 pixels with a fixed split: 1,437 for train and 360 for val."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UsageError("digits needs scikit-learn; pip install 'patchloom[digits]'") from None
    digits = load_digits()
    images = ArrayImages(np.round(digits.images * (255 / 16)).astype(np.uint8), "digits")
    labels = digits.target.astype(np.int64)
    by_class = np.argsort(labels, kind="stable")
    val = np.sort(by_class[::5])  # every fifth image of each class
    train = np.setdiff1d(np.arange(len(labels)), val)
    names = tuple(str(digit) for digit in range(10))
    return Source(
        "digits (built in)",
        train=Listing(images, train, labels[train], names),
        val=Listing(images, val, labels[val], names),
    )


def open_shapes(options: str = "") -> Source:
    """Open drawn shapes. `options` are like 'count=2000,size=64,seed=0'; val has a fifth of `count` in addition."""
    values = {"count": 2000, "size": 64, "seed": 0}
    for option in filter(None, options.split(",")):
        name, _, value = option.partition("=")
        if name not in values or not re.fullmatch("[0-9]{1,18}", value):
            hint = nearest(name, list(values))
            raise UsageError(f"shapes:{option} is not an option; expected count=, size= or seed= a number.{hint}")
        values[name] = int(value)
    count, size = values["count"], values["size"]
    if not len(SHAPES) <= count <= MOST_SHAPES or not 16 <= size <= 1024:
        counts = f"count {len(SHAPES)}…{MOST_SHAPES:,}"
        raise UsageError(f"shapes of count={count}, size={size}; expected {counts}, size 16…1024")
    held_out = max(count // 5, len(SHAPES))
    images = ShapeImages(count + held_out, size, values["seed"])
    levels = {"coarse": {shape: family for family, members in FAMILIES.items() for shape in members}}
    train, val = np.arange(count), np.arange(count, count + held_out)
    return Source(
        f"shapes of {size}×{size} (built in)",
        train=Listing(images, train, train % len(SHAPES), SHAPES, levels),
        val=Listing(images, val, val % len(SHAPES), SHAPES, levels),
    )


@dataclass(frozen=True)
class _Scene:
    image: Image.Image
    mask: Mask
    boxes: np.ndarray


class ShapeImages(ImageStore):
    """Images that are drawn when first read. Number i shows shape i modulo 16.

    Image, mask and boxes are one drawing. Drawing takes longer than augmentation, so drawings are cached.
    """

    is_scanned = False
    object_names = SHAPES
    mask_names = ("background", *SHAPES)  # the mask holds box class + 1
    tells_objects_apart = True

    def __init__(self, count: int, size: int, seed: int) -> None:
        self._count = count
        self._size = size
        self._seed = seed
        self._cache: dict[int, _Scene] = {}
        self._last: tuple[int, _Scene] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Exclude the drawings, which another process makes itself."""
        return vars(self) | {"_cache": {}, "_last": None}

    def __len__(self) -> int:
        return self._count

    def read(self, index: int) -> Image.Image:
        """Return the image, mode RGB."""
        return self._scene(index).image.copy()

    def where(self, index: int) -> str:
        """Return seed and number."""
        return f"shapes of seed {self._seed}, image {index}"

    def key(self, index: int) -> str:
        """Return seed and number, in the words that runs have recorded and held-out splits depend on."""
        return f"shapes of seed {self._seed}, picture {index}"

    def mask(self, index: int) -> Mask:
        """Return classes and instances. The covered pixels of an object belong to the object that covers it."""
        mask = self._scene(index).mask
        return Mask(mask.classes.copy(), mask.instances.copy())  # type: ignore[union-attr]

    def boxes(self, index: int) -> np.ndarray:
        """Return boxes around the visible parts of objects, the labeled one first."""
        return self._scene(index).boxes.copy()

    def _scene(self, index: int) -> _Scene:
        last, scene = self._last, self._cache.get(index)
        if scene is None and last is not None and last[0] == index:  # the parts of one sample, if the cache is full
            scene = last[1]
        if scene is None:
            scene = _draw_scene(np.random.default_rng((self._seed, index)), index % len(SHAPES), self._size)
            self._last = index, scene
            if len(self._cache) < _CACHED_PIXELS // self._size**2:
                self._cache[index] = scene
        return scene


def _draw_scene(rng: np.random.Generator, label: int, size: int) -> _Scene:
    ground_is_dark = rng.random() < 0.5
    canvas = _draw_ground(rng, size, ground_is_dark)
    radius = rng.uniform(0.26, 0.4)
    objects = [(label, radius, rng.uniform(radius, 1 - radius, 2))]
    for _ in range(rng.integers(0, 4)):
        small = rng.uniform(0.09, 0.14)
        place = rng.uniform(small, 1 - small, 2)
        if all(math.dist(place, center) > 0.85 * radius + small for _, radius, center in objects):
            objects.append((int(rng.integers(len(SHAPES))), small, place))
    classes, instances = np.zeros((2, size, size), dtype=np.uint8)
    boxes = []
    for number, (shape, radius, center) in enumerate(objects, start=1):
        cover = _draw_object(rng, SHAPES[shape], radius, center, size)
        paint = _blotches(rng, size, _color(rng, not ground_is_dark), spread=25)
        canvas.paste(paint, mask=cover)
        visible = np.asarray(cover) >= 128
        classes[visible], instances[visible] = shape + 1, number
    for number, (shape, _, _) in enumerate(objects, start=1):
        rows, columns = np.nonzero(instances == number)
        if len(rows):
            boxes.append((columns.min(), rows.min(), columns.max() + 1, rows.max() + 1, shape))
            instances[rows, columns] = len(boxes)  # earlier objects may be covered or too small to be visible
    noisy = np.asarray(canvas) + rng.normal(0, 6, (size, size, 3))
    image = Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8))
    return _Scene(image, Mask(classes, instances), np.array(boxes, dtype=np.int64))


def _draw_object(rng: np.random.Generator, shape: str, radius: float, center: np.ndarray, size: int) -> Image.Image:
    """Return the coverage of one object, 0…255: rotated and slightly squeezed at random, drawn larger and averaged."""
    angle = rng.uniform(0, 2 * math.pi)
    turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    squeeze = np.array([1, rng.uniform(0.86, 1)])
    cover = Image.new("L", (size * _FINE, size * _FINE))
    draw = ImageDraw.Draw(cover)

    def placed(points: np.ndarray) -> list[tuple[float, float]]:
        return [(x, y) for x, y in ((points * radius) @ turn * squeeze + center) * size * _FINE]

    filled, strokes = _outline(shape)
    for brightness, points in filled:
        draw.polygon(placed(points), fill=brightness)
    width = round(0.24 * radius * size * _FINE)
    for points in strokes:
        draw.line(placed(points), fill=255, width=width, joint="curve")
    return cover.resize((size, size), Image.Resampling.BOX)


def _outline(shape: str) -> tuple[list[tuple[int, np.ndarray]], list[np.ndarray]]:
    """Return a shape in the unit circle: areas with their brightness (0 cuts a hole), and strokes."""
    if shape.startswith("star-"):
        points = int(shape[5:])
        star = _circle(2 * points)
        star[1::2] *= _INNER_RADIUS[points]
        return [(255, star)], []
    corners = {"triangle": 3, "square": 4, "pentagon": 5, "hexagon": 6, "circle": 64}
    if shape in corners:
        return [(255, _circle(corners[shape]))], []
    spiral = np.linspace(0, 1, 60)[:, None]
    areas = {
        "ellipse": [(255, _circle(64) * [1, 0.5])],
        "ring": [(255, _circle(64)), (0, _circle(64) * 0.55)],
        "half-disc": [(255, _circle(64, turns=0.5) - [0, 0.4])],
    }
    strokes = {
        "cross": [np.array([[-0.9, 0], [0.9, 0]]), np.array([[0, -0.9], [0, 0.9]])],
        "arrow": [np.array([[-0.9, 0], [0.8, 0]]), np.array([[0.25, -0.55], [0.85, 0], [0.25, 0.55]])],
        "zigzag": [np.array([[-0.95, 0.35], [-0.45, -0.4], [0, 0.4], [0.45, -0.4], [0.95, 0.35]])],
        "spiral": [_circle(60, turns=1.75) * (0.12 + 0.78 * spiral)],
    }
    return areas.get(shape, []), strokes.get(shape, [])


def _circle(points: int, turns: float = 1) -> np.ndarray:
    """Return (points, 2) on the unit circle."""
    angles = np.linspace(0, 2 * math.pi * turns, points, endpoint=turns != 1)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def _draw_ground(rng: np.random.Generator, size: int, dark: bool) -> Image.Image:
    """Draw blotches of one color, with strokes and specks of other colors that are equally dark or light."""
    ground = _blotches(rng, size, _color(rng, dark), spread=40)
    fine = ground.resize((size * _FINE, size * _FINE), Image.Resampling.BILINEAR)
    draw = ImageDraw.Draw(fine)
    for _ in range(rng.integers(3, 8)):
        ends = [(x, y) for x, y in rng.uniform(0, size * _FINE, (2, 2))]
        draw.line(ends, fill=_color(rng, dark), width=int(rng.integers(1, 2 + size * _FINE // 50)))
    for x, y, speck in rng.uniform([0, 0, 0.005], [1, 1, 0.025], (int(rng.integers(4, 14)), 3)) * size * _FINE:
        draw.ellipse((x - speck, y - speck, x + speck, y + speck), fill=_color(rng, dark))
    return fine.resize((size, size), Image.Resampling.BOX)


def _blotches(rng: np.random.Generator, size: int, color: tuple[int, ...], spread: float) -> Image.Image:
    coarse = np.clip(np.array(color) + rng.normal(0, spread, (4, 4, 3)), 0, 255).astype(np.uint8)
    return Image.fromarray(coarse).resize((size, size), Image.Resampling.BICUBIC)


def _color(rng: np.random.Generator, dark: bool) -> tuple[int, ...]:
    lightness = rng.uniform(0.15, 0.4) if dark else rng.uniform(0.7, 0.95)
    rgb = colorsys.hls_to_rgb(rng.random(), lightness * (0.9 if dark else 0.8), rng.uniform(0.4, 0.95))
    return tuple(round(255 * channel) for channel in rgb)
