"""One picture on its way into a batch: decoded RGB → uint8 (H, W, 3), in a worker.

Training:   crop → flip → policy → colour jitter → erasing
Evaluation: resize the short side → centre crop

Every random choice is drawn from the `random.Random` that comes with the picture, so a picture depends on nothing
but its seed. Mixing is done later, on the batch. The same augmentation for a whole batch at once is in `batched.py`.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from patchloom.recipes.schema import AugmentPart

Size = tuple[int, int]  # height, width
Policy = Callable[[Image.Image, random.Random], Image.Image]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
CROP_ASPECTS = (3 / 4, 4 / 3)
ERASED_AREAS = (0.02, 1 / 3)  # of the picture
ERASED_ASPECTS = (0.3, 1 / 0.3)
BLUR_RADII = (0.1, 2.0)  # pixels
SOLARISE_FROM = 128


def as_size(image_size: int | Size) -> Size:
    """(height, width) from one number or two."""
    return (image_size, image_size) if isinstance(image_size, int) else (image_size[0], image_size[1])


@dataclass(frozen=True)
class TrainTransform:
    """Random augmentation of one picture, as a recipe's `augment` part says.

    `color_jitter` is applied wherever it is above 0, after the policy; timm leaves it out next to RandAugment and
    AutoAugment, and so should a recipe that follows it.
    """

    augment: AugmentPart
    image_size: Size

    @cached_property
    def policy(self) -> Policy | None:
        """What changes colours and shapes after the crop."""
        return make_policy(self.augment, self.image_size)

    def __call__(self, image: Image.Image, rng: random.Random) -> np.ndarray:
        """RGB picture of any size → (H, W, 3) uint8."""
        augment = self.augment
        pixels = self._cropped(image, rng)
        if self.policy or augment.color_jitter:
            view = Image.fromarray(pixels)
            if self.policy:
                view = self.policy(view, rng)
            if augment.color_jitter:
                view = jitter_colours(view, augment.color_jitter, rng)
            pixels = np.asarray(view)
        if augment.erasing and rng.random() < augment.erasing:
            pixels = erase(pixels, rng)
        return pixels

    def _cropped(self, image: Image.Image, rng: random.Random) -> np.ndarray:
        """(H, W, 3): the crop, flipped or not. The flip comes before the resizing, where there are fewer pixels."""
        crop, padding = self.augment.crop, self.augment.crop_padding
        if crop == "random_resized":
            image = image.crop(random_crop_box(image.size, self.augment.crop_min_scale, rng))
        if rng.random() < self.augment.flip:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if crop == "simple_random":
            pixels = resize(image, _covering(image, self.image_size))
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
        height, width = _covering(image, target)
        image = image.resize((width, height), Image.Resampling[self.interpolation.upper()])
        top, left = round((height - self.image_size[0]) / 2), round((width - self.image_size[1]) / 2)
        return np.asarray(image.crop((left, top, left + self.image_size[1], top + self.image_size[0])))


def train_transform(augment: AugmentPart, image_size: int | Size) -> TrainTransform:
    """The training augmentation of a recipe: call it with a picture and its `random.Random`."""
    return TrainTransform(augment, as_size(image_size))


def test_transform(image_size: int | Size, crop_ratio: float = 1.0, interpolation: str = "bicubic") -> EvaluationTransform:
    """The evaluation of pictures: resize the short side to image_size / crop_ratio, centre crop."""
    return EvaluationTransform(as_size(image_size), crop_ratio, interpolation)


test_transform.__test__ = False  # type: ignore[attr-defined]  # or pytest takes it for a test where it is imported


def random_crop_box(size: tuple[int, int], min_scale: float, rng: random.Random) -> tuple[int, int, int, int]:
    """Random Resized Crop: (left, top, right, bottom) of 10 tries, or the largest centred box of a fair shape."""
    width, height = size
    for _ in range(10):
        area = rng.uniform(min_scale, 1.0) * width * height
        aspect = math.exp(rng.uniform(math.log(CROP_ASPECTS[0]), math.log(CROP_ASPECTS[1])))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            top, left = rng.randint(0, height - h), rng.randint(0, width - w)
            return left, top, left + w, top + h
    w, h = min(width, round(height * CROP_ASPECTS[1])), min(height, round(width / CROP_ASPECTS[0]))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def resize(image: Image.Image, size: Size) -> np.ndarray:
    """Bicubic with antialiasing → (H, W, 3). torch's kernel is several times as fast as Pillow's, within ±3 of it."""
    if image.size == (size[1], size[0]):
        return np.asarray(image)
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    pixels = pixels.view(1, image.height, image.width, 3).permute(0, 3, 1, 2)  # (1, 3, h, w), channels last
    return F.interpolate(pixels, size, mode="bicubic", antialias=True)[0].permute(1, 2, 0).numpy()


def shifted_crop(pixels: np.ndarray, size: Size, padding: int, rng: random.Random, *, reflect: bool) -> np.ndarray:
    """Crop anywhere in a picture padded by its own reflection (Simple Random Crop) or by black (CIFAR's crop)."""
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


def jitter_colours(image: Image.Image, strength: float, rng: random.Random) -> Image.Image:
    """Brightness, contrast and saturation, each by U(1 − strength, 1 + strength), in random order."""
    enhancers: list[Any] = [ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color]
    rng.shuffle(enhancers)
    for enhancer in enhancers:
        image = enhancer(image).enhance(rng.uniform(max(0.0, 1 - strength), 1 + strength))
    return image


def erase(pixels: np.ndarray, rng: random.Random) -> np.ndarray:
    """Random erasing: a box of (H, W, 3) becomes noise, N(0, 1) per value once normalised, clipped to 0…255."""
    height, width = pixels.shape[:2]
    for _ in range(10):
        area = rng.uniform(*ERASED_AREAS) * height * width
        aspect = math.exp(rng.uniform(math.log(ERASED_ASPECTS[0]), math.log(ERASED_ASPECTS[1])))
        h, w = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if h < height and w < width:
            top, left = rng.randint(0, height - h), rng.randint(0, width - w)
            noise = np.random.default_rng(rng.getrandbits(64)).standard_normal((h, w, 3), np.float32)
            noise = (noise * np.float32(IMAGENET_STD) + np.float32(IMAGENET_MEAN)) * 255
            pixels = pixels.copy()
            pixels[top : top + h, left : left + w] = noise.clip(0, 255).round()
            break
    return pixels


def three_augment(image: Image.Image, rng: random.Random) -> Image.Image:
    """3-Augment of DeiT III: grayscale, solarisation or blur, each as likely as the others."""
    choice = rng.randrange(3)
    if choice == 0:
        return image.convert("L").convert("RGB")
    if choice == 1:
        return ImageOps.solarize(image, SOLARISE_FROM)
    return image.filter(ImageFilter.GaussianBlur(rng.uniform(*BLUR_RADII)))


def make_policy(augment: AugmentPart, image_size: Size) -> Policy | None:
    """The policy by its name. The tables of the learned ones are timm's, that of TrivialAugment torchvision's."""
    if augment.policy == "none":
        return None
    if augment.policy == "three_augment":
        return three_augment
    if augment.policy == "trivial":
        from torchvision.transforms.autoaugment import TrivialAugmentWide

        return partial(_trivial_augment, list(TrivialAugmentWide()._augmentation_space(31).items()))
    import timm.data.auto_augment as timm_augment

    hparams = {
        "translate_const": int(min(image_size) * 0.45),
        "img_mean": tuple(round(255 * value) for value in IMAGENET_MEAN),
        "interpolation": Image.Resampling.BICUBIC,
        "magnitude_std": augment.policy_magnitude_std if augment.policy == "randaugment" else 0,
    }
    if augment.policy == "autoaugment":
        chains = timm_augment.auto_augment_policy("original", hparams)
        return partial(_auto_augment, [[_mended(op) for op in chain] for chain in chains])
    names = timm_augment.rand_augment_choices("", increasing=True)
    ops = timm_augment.rand_augment_ops(augment.policy_magnitude, hparams=hparams, transforms=names)
    return partial(_rand_augment, [_mended(op) for op in ops], augment.policy_layers)


def _rand_augment(ops: list[Any], layers: int, image: Image.Image, rng: random.Random) -> Image.Image:
    return _apply(rng.choices(ops, k=layers), image, rng)


def _auto_augment(chains: list[list[Any]], image: Image.Image, rng: random.Random) -> Image.Image:
    return _apply(rng.choice(chains), image, rng)


def _trivial_augment(table: list[Any], image: Image.Image, rng: random.Random) -> Image.Image:
    from torchvision.transforms.autoaugment import InterpolationMode, _apply_op

    name, (magnitudes, signed) = rng.choice(table)
    magnitude = float(rng.choice(magnitudes)) if magnitudes.ndim else 0.0
    if signed and rng.random() < 0.5:
        magnitude = -magnitude
    return _apply_op(image, name, magnitude, InterpolationMode.NEAREST, None)


def _apply(ops: list[Any], image: Image.Image, rng: random.Random) -> Image.Image:
    """Call timm's operations, which draw from the `random` module: lend it the picture's numbers, then restore it."""
    state = random.getstate()
    random.seed(rng.getrandbits(64))
    try:
        for op in ops:
            image = op(image)
    finally:
        random.setstate(state)
    return image


def _mended(op: Any) -> Any:
    """timm's operation, with what its own function cannot do on every Pillow."""
    if op.name.startswith("Posterize"):
        op.aug_fn = posterize
    return op


def posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """Keep the highest bits. 0 bits is black, as Pillow had it before it refused what RandAugment asks for."""
    mask = 256 - 2 ** (8 - bits)
    return image.point([value & mask for value in range(256)] * 3)


def _covering(image: Image.Image, size: Size) -> Size:
    """The smallest size of the picture's own shape that holds `size`."""
    height, width = size
    if height * image.width >= width * image.height:
        return height, int(height * image.width / image.height)
    return int(width * image.height / image.width), width
