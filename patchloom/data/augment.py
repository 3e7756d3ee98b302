"""One picture on its way into a batch: decoded RGB → uint8 (H, W, 3), in a worker.

Training:   crop → flip → policy → colour jitter → grey → blur → solarising → erasing
Evaluation: resize the short side → centre crop

Every random choice is drawn from the `random.Random` that comes with the picture, so a picture depends on
nothing but its seed. Mixing is done later, on the batch. The same augmentation for a whole batch at once is
in `batched.py`.
"""

import math
import random
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from patchloom.data.policies import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Policy,
    Size,
    blur,
    grey,
    jitter_colours,
    make_policy,
    solarise,
)
from patchloom.errors import UsageError
from patchloom.recipes.parts import AugmentPart

CROP_ASPECTS = (3 / 4, 4 / 3)
ERASED_AREAS = (0.02, 1 / 3)  # of the picture
ERASED_ASPECTS = (0.3, 1 / 0.3)
_MEAN, _STD = np.array(IMAGENET_MEAN, np.float32), np.array(IMAGENET_STD, np.float32)


def as_size(image_size: int | Size) -> Size:
    """(height, width) from one number or two."""
    return (image_size, image_size) if isinstance(image_size, int) else (image_size[0], image_size[1])


@dataclass(frozen=True)
class TrainTransform:
    """Random augmentation of one picture, as a recipe's `augment` part says.

    `color_jitter` is applied wherever it is above 0, after the policy; timm leaves it out next to
    RandAugment and AutoAugment, and so should a recipe that follows it.
    """

    augment: AugmentPart
    image_size: Size

    @cached_property
    def _after_crop(self) -> list[tuple[Policy, float]]:
        """What changes colours and shapes after the crop, in order, each with its probability."""
        augment = self.augment
        changes: list[tuple[Policy, float]] = [
            (partial(jitter_colours, augment.jitters), augment.jitter_probability if any(augment.jitters) else 0.0),
            (grey, augment.grey),
            (blur, augment.blur),
            (solarise, augment.solarise),
        ]
        if policy := make_policy(augment, self.image_size):
            changes.insert(0, (policy, 1.0))
        return [(change, probability) for change, probability in changes if probability]

    def __call__(self, image: Image.Image, rng: random.Random) -> np.ndarray:
        """RGB picture of any size → (H, W, 3) uint8."""
        augment = self.augment
        pixels = self._cropped(image, rng)
        if self._after_crop:
            view = Image.fromarray(pixels)
            for change, probability in self._after_crop:
                # What is certain draws nothing: a recipe without chances keeps its pictures.
                if probability == 1 or rng.random() < probability:
                    view = change(view, rng)
            pixels = np.asarray(view)
        if augment.erasing and rng.random() < augment.erasing:
            pixels = erase(pixels, rng)
        return pixels

    def _cropped(self, image: Image.Image, rng: random.Random) -> np.ndarray:
        """(H, W, 3): the crop, flipped or not; flipped before resizing, where there are fewer pixels."""
        crop, padding = self.augment.crop, self.augment.crop_padding
        if crop == "random_resized":
            scales = self.augment.crop_min_scale, self.augment.crop_max_scale
            image = image.crop(random_crop_box(image.size, scales, rng))
        if rng.random() < self.augment.flip:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if crop == "simple_random":
            pixels = resize(image, covering_size(image, self.image_size))
            return shifted_crop(pixels, self.image_size, padding, rng, reflect=True)
        pixels = resize(image, self.image_size)
        return shifted_crop(pixels, self.image_size, padding, rng, reflect=False) if crop == "pad" else pixels


@dataclass(frozen=True)
class EvaluationTransform:
    """Resize so that the centre crop is `crop_ratio` of the picture's short side; nothing random."""

    image_size: Size
    crop_ratio: float = 1.0
    interpolation: str = "bicubic"

    def __call__(self, image: Image.Image, rng: random.Random | None = None) -> np.ndarray:  # noqa: ARG002
        """RGB picture of any size → (H, W, 3) uint8."""
        target = (int(self.image_size[0] / self.crop_ratio), int(self.image_size[1] / self.crop_ratio))
        height, width = covering_size(image, target)
        image = image.resize((width, height), Image.Resampling[self.interpolation.upper()])
        top, left = round((height - self.image_size[0]) / 2), round((width - self.image_size[1]) / 2)
        return np.asarray(image.crop((left, top, left + self.image_size[1], top + self.image_size[0])))


def train_transform(augment: AugmentPart, image_size: int | Size) -> TrainTransform:
    """The training augmentation of a recipe: call it with a picture and its `random.Random`."""
    return TrainTransform(augment, as_size(image_size))


def test_transform(
    image_size: int | Size,
    crop_ratio: float = 1.0,  # noqa: PT028 - not a test
    interpolation: str = "bicubic",  # noqa: PT028
) -> EvaluationTransform:
    """The evaluation of pictures: resize the short side to image_size / crop_ratio, centre crop."""
    if not 0 < crop_ratio <= 1:
        raise UsageError(f"crop_ratio is {crop_ratio:g}; it is the share of the short side that is kept, 0…1.")
    return EvaluationTransform(as_size(image_size), crop_ratio, interpolation)


test_transform.__test__ = False  # type: ignore[attr-defined]  # or pytest takes it for a test where it is imported


def random_crop_box(
    size: tuple[int, int], scales: tuple[float, float], rng: random.Random
) -> tuple[int, int, int, int]:
    """Random Resized Crop: (left, top, right, bottom), after 10 tries the largest centred box."""
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


def resize(image: Image.Image, size: Size) -> np.ndarray:
    """Bicubic with antialiasing → (H, W, 3). torch takes a fifth of Pillow's time and stays within 1."""
    if image.size == (size[1], size[0]):
        return np.asarray(image)
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    pixels = pixels.view(1, image.height, image.width, 3).permute(0, 3, 1, 2)  # (1, 3, h, w), channels last
    return F.interpolate(pixels, size, mode="bicubic", antialias=True)[0].permute(1, 2, 0).numpy()


def shifted_crop(pixels: np.ndarray, size: Size, padding: int, rng: random.Random, *, reflect: bool) -> np.ndarray:
    """Crop anywhere in a picture padded by its reflection (Simple Random Crop) or by black (CIFAR's crop)."""
    sampled: list[np.ndarray] = []
    inside: list[np.ndarray] = []
    for axis in (0, 1):
        length = pixels.shape[axis]
        places = np.arange(size[axis]) + rng.randint(-padding, length + padding - size[axis])
        inside.append((places >= 0) & (places < length))
        sampled.append(length - 1 - abs(length - 1 - abs(places)) if reflect else places.clip(0, length - 1))
    cropped = pixels.take(sampled[0], axis=0).take(sampled[1], axis=1)
    if not reflect:
        cropped[~inside[0]] = 0
        cropped[:, ~inside[1]] = 0
    return cropped


def erase(pixels: np.ndarray, rng: random.Random) -> np.ndarray:
    """Random erasing: a box of (H, W, 3) becomes noise, N(0, 1) once normalised, clipped to 0…255."""
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


def covering_size(image: Image.Image, size: Size) -> Size:
    """The smallest size of the picture's own shape that holds `size`."""
    height, width = size
    if height * image.width >= width * image.height:
        return height, int(height * image.width / image.height)
    return int(width * image.height / image.width), width
