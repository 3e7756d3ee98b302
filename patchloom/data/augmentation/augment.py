"""Transforms of one decoded RGB image to uint8 (H, W, 3) in a worker, together with its mask and boxes.

Training:   crop → flip │ policy → color jitter → gray → blur → solarize → erasing
Evaluation: resize the short side → center crop │

The steps before the bar are geometry (`geometry.py`): drawn once and applied to image, mask and boxes. The others
change the image alone. Every random choice is drawn from the `random.Random` that comes with the image, so the result
depends only on its seed. Mixing follows later, on the batch. `batch_augment.py` has the same augmentation for whole
batches.
"""

import math
import random
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from PIL import Image

from patchloom.data.augmentation.policies import Policy, blur, gray, jitter_colors, make_policy, solarize
from patchloom.data.images.image_batch import IMAGENET_MEAN, IMAGENET_STD
from patchloom.recipes.parts import AugmentPart
from patchloom_runtime.errors import UsageError
from patchloom_runtime.images.evaluation_transform import (
    ImageTransform,
    as_size,
    covering_size,
    enlarged,
    middle_start,
)
from patchloom_runtime.images.geometry import PIXELS_LEFT, Geometry, Size, short_side_factor
from patchloom_runtime.images.samples import Sample

# Policies that move no pixel, so that masks and boxes stay valid.
COLOR_POLICIES = ("none", "three_augment", "photometric")
CROP_ASPECTS = (3 / 4, 4 / 3)
WINDOWS_TRIED = 10
ERASED_AREAS = (0.02, 1 / 3)  # share of the image
ERASED_ASPECTS = (0.3, 1 / 0.3)
_MEAN, _STD = np.array(IMAGENET_MEAN, np.float32), np.array(IMAGENET_STD, np.float32)


@dataclass(frozen=True)
class TrainTransform(ImageTransform):
    """Random augmentation of one image, as defined by a recipe's `augment` part.

    `color_jitter` above 0 is applied after any policy. timm omits it together with RandAugment and AutoAugment; recipes
    that follow timm should do so too.
    """

    augment: AugmentPart
    image_size: Size

    @cached_property
    def _after_crop(self) -> list[tuple[Policy, float]]:
        """Return the changes of color and shape after the crop, in order, with their probabilities."""
        augment = self.augment
        changes: list[tuple[Policy, float]] = [
            (partial(jitter_colors, augment.jitters), augment.jitter_probability if any(augment.jitters) else 0.0),
            (gray, augment.grey),
            (blur, augment.blur),
            (solarize, augment.solarise),
        ]
        if policy := make_policy(augment, self.image_size):
            changes.insert(0, (policy, 1.0))
        return [(change, probability) for change, probability in changes if probability]

    def geometry(self, sample: Sample, rng: random.Random) -> Geometry:
        """Draw crop and flip."""
        if self.augment.crop == "scaled":
            return scaled_window(sample, self.augment, self.image_size, rng)
        return self._crop(sample.size, rng)

    def reduction(self, size: tuple[int, int]) -> int:
        """Return the reduction that all crops of an image allow, so that it needs to be decoded only once.

        The whole image keeps `PIXELS_LEFT` pixels per pixel of the view, the smallest crop one.
        """
        augment = self.augment
        if augment.crop == "scaled":
            return 1
        share = math.sqrt(augment.crop_min_scale) if augment.crop == "random_resized" else 1.0
        width, height = (int(side * min(1.0, PIXELS_LEFT * share)) for side in size)
        scaled = size_before_window(size, augment.crop, self.image_size, augment.crop_ratio)
        return Geometry((0, 0, width, height), scaled, self.image_size).reduction

    def _crop(self, size: tuple[int, int], rng: random.Random) -> Geometry:
        augment, view_size = self.augment, self.image_size
        box, start = (0, 0, *size), (0, 0)
        if augment.crop == "random_resized":
            box = random_crop_box(size, (augment.crop_min_scale, augment.crop_max_scale), rng)
        flip = rng.random() < augment.flip
        scaled = size_before_window(size, augment.crop, view_size, augment.crop_ratio)
        if augment.crop in ("simple_random", "pad", "square_random"):
            start = random_start(scaled, view_size, padding_of(augment), rng)
        elif augment.crop == "centre":
            start = middle_start(scaled, view_size)
        return Geometry(box, scaled, view_size, start, flip, reflect=augment.crop == "simple_random")

    def colored(self, pixels: np.ndarray, rng: random.Random) -> np.ndarray:
        """Apply policy, color changes and erasing."""
        if self._after_crop:
            view = Image.fromarray(pixels)
            for change, probability in self._after_crop:
                # Certain changes draw nothing, so that recipes without probabilities keep their random numbers.
                if probability == 1 or rng.random() < probability:
                    view = change(view, rng)
            pixels = np.asarray(view)
        if self.augment.erasing and rng.random() < self.augment.erasing:
            pixels = erase(pixels, rng)
        return pixels

    def shapes(self, parts: Collection[str]) -> dict[str, tuple[int, ...]]:
        """Return the fixed shapes. Raise UsageError for a policy that the parts cannot follow."""
        check_policy(self.augment, parts)
        return super().shapes(parts)


def scaled_window(sample: Sample, augment: AugmentPart, view_size: Size, rng: random.Random) -> Geometry:
    """Draw a window of the randomly scaled image. It may extend beyond the image at the bottom and right.

    The first of several tries is taken in which no class exceeds its share of the labeled pixels, else the last.
    """
    width, height = sample.image.size
    factor = rng.uniform(augment.scale_min, augment.scale_max) * short_side_factor((width, height), augment.short_side)
    scaled = max(1, round(height * factor)), max(1, round(width * factor))
    flip, mask = rng.random() < augment.flip, sample.layers.get("mask") if augment.largest_class < 1 else None
    for _ in range(WINDOWS_TRIED):
        start = rng.randint(0, max(0, scaled[0] - view_size[0])), rng.randint(0, max(0, scaled[1] - view_size[1]))
        window = Geometry((0, 0, width, height), scaled, view_size, start, flip)
        if mask is None or _mixes_classes(window.apply_mask(*mask), mask.outside, augment.largest_class):
            break
    return window


def _mixes_classes(labels: np.ndarray, ignored: int, largest: float) -> bool:
    """Return whether there are two classes or more, none with more than its share."""
    counts = np.bincount(labels[labels != ignored].ravel())
    return bool(np.count_nonzero(counts) > 1 and counts.max() < largest * counts.sum())


def check_policy(augment: AugmentPart, parts: Collection[str]) -> None:
    """Raise UsageError for a policy that moves pixels of the image alone, if there are masks or boxes."""
    if parts and augment.policy not in COLOR_POLICIES:
        raise UsageError(
            f"augment.policy {augment.policy} rotates and shifts images, which {' and '.join(parts)} cannot follow; "
            f"expected {' or '.join(COLOR_POLICIES)}"
        )


def train_transform(augment: AugmentPart, image_size: int | Size) -> TrainTransform:
    """Return the training transform of a recipe: call it with an image and its `random.Random`."""
    return TrainTransform(augment, as_size(image_size))


def random_crop_box(
    size: tuple[int, int], scales: tuple[float, float], rng: random.Random
) -> tuple[int, int, int, int]:
    """Draw a Random Resized Crop (left, top, right, bottom); after 10 tries, the largest centered box."""
    width, height = size
    for _ in range(10):
        area = rng.uniform(*scales) * width * height
        aspect = math.exp(rng.uniform(math.log(CROP_ASPECTS[0]), math.log(CROP_ASPECTS[1])))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            top, left = rng.randint(0, height - h), rng.randint(0, width - w)
            return left, top, left + w, top + h
    w, h = min(width, round(height * CROP_ASPECTS[1])), min(height, round(width / CROP_ASPECTS[0]))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def size_before_window(image: tuple[int, int], crop: str, view_size: Size, crop_ratio: float) -> Size:
    """Return the (height, width) to which an image of (width, height) is resized before a window is taken."""
    if crop == "square_random":
        return enlarged(view_size, crop_ratio)
    if crop == "centre":
        return covering_size(image, enlarged(view_size, crop_ratio))
    return covering_size(image, view_size) if crop == "simple_random" else view_size


def padding_of(augment: AugmentPart) -> int:
    """Return the number of pixels that are added on each side before a window is taken."""
    return augment.crop_padding if augment.crop in ("simple_random", "pad") else 0


def random_start(scaled: Size, size: Size, padding: int, rng: random.Random) -> tuple[int, int]:
    """Draw top and left of a window of `size` anywhere in an image of size `scaled`, padded on all sides."""
    top, left = (rng.randint(-padding, scaled[axis] + padding - size[axis]) for axis in (0, 1))
    return top, left


def erase(pixels: np.ndarray, rng: random.Random) -> np.ndarray:
    """Apply random erasing: a box of (H, W, 3) becomes noise, N(0, 1) after normalization, clipped to 0…255."""
    height, width = pixels.shape[:2]
    for _ in range(10):
        area = rng.uniform(*ERASED_AREAS) * height * width
        aspect = math.exp(rng.uniform(math.log(ERASED_ASPECTS[0]), math.log(ERASED_ASPECTS[1])))
        h, w = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if h < height and w < width:
            top, left = rng.randint(0, height - h), rng.randint(0, width - w)
            noise = np.random.default_rng(rng.getrandbits(64)).standard_normal((h, w, 3), np.float32)
            noise = (noise * _STD + _MEAN) * 255
            pixels = pixels.copy()
            pixels[top : top + h, left : left + w] = noise.clip(0, 255).round()
            break
    return pixels
