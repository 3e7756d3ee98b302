"""Augmentation policies: changes of color and shape of a cropped image, drawn from the image's own random numbers.

3-Augment is the thesis's (6.2.2). RandAugment (arXiv 1909.13719) and AutoAugment (1805.09501) use timm's operations and
tables, TrivialAugment (2103.10158) torchvision's; here they neither change nor read the global random state.
"""

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from patchloom.recipes.parts import AugmentPart
from patchloom_runtime.images.geometry import Size

Jitters = tuple[float, float, float, float]  # of brightness, contrast, saturation, hue
Policy = Callable[[Image.Image, random.Random], Image.Image]

# Fills what a shifted or rotated image leaves empty.
FILL_COLOR = (124, 116, 104)  # 255 · IMAGENET_MEAN
BLUR_RADII = (0.1, 2.0)  # pixels
SOLARIZE_FROM = 128
PHOTOMETRIC_BRIGHTNESS, PHOTOMETRIC_RANGE = 32.0, (0.5, 1.5)  # added; factors of contrast and saturation
PHOTOMETRIC_HUE = 0.1  # of the color circle: 18 of OpenCV's 180 steps
HUE_TURN = 255  # torchvision's steps for a full turn; Pillow's circle has 256


def make_policy(augment: AugmentPart, image_size: Size) -> Policy | None:
    """Return the policy by its name, for images of (H, W), or None for "none"."""
    if augment.policy == "none":
        return None
    if augment.policy == "three_augment":
        return partial(three_augment, augment.policy_choices)
    if augment.policy == "photometric":
        return photometric
    if augment.policy == "trivial":
        from torchvision.transforms.autoaugment import TrivialAugmentWide

        return partial(_trivial_augment, list(TrivialAugmentWide()._augmentation_space(31).items()))
    import timm.data.auto_augment as timm_augment

    hparams = {
        "translate_const": int(min(image_size) * 0.45),
        "img_mean": FILL_COLOR,
        "interpolation": Image.Resampling.BICUBIC,
    }
    if augment.policy == "autoaugment":
        chains = timm_augment.auto_augment_policy("original", hparams)
        return partial(_auto_augment, [[_mended(op) for op in chain] for chain in chains])
    hparams["magnitude_std"] = augment.policy_magnitude_std
    names = timm_augment.rand_augment_choices("", increasing=True)
    ops = timm_augment.rand_augment_ops(augment.policy_magnitude, hparams=hparams, transforms=names)
    return partial(_rand_augment, [_mended(op) for op in ops], augment.policy_layers)


def three_augment(choices: Sequence[str], image: Image.Image, rng: random.Random) -> Image.Image:
    """Apply DeiT III's 3-Augment: one of gray, solarize and blur (or fewer, table 6.2), equally likely."""
    return {"grey": gray, "solarise": solarize, "blur": blur}[rng.choice(choices)](image, rng)


def photometric(image: Image.Image, rng: random.Random) -> Image.Image:
    """Apply photometric distortion (SSD, mmsegmentation): brightness, contrast, saturation and hue, each half the time.

    Contrast is changed before or after saturation and hue.
    """
    pixels = np.asarray(image, np.float32)
    if rng.random() < 0.5:
        pixels = pixels + rng.uniform(-PHOTOMETRIC_BRIGHTNESS, PHOTOMETRIC_BRIGHTNESS)
    contrast = rng.uniform(*PHOTOMETRIC_RANGE) if rng.random() < 0.5 else 1.0
    first = rng.random() < 0.5
    pixels = np.clip(pixels * (contrast if first else 1.0), 0, 255)
    saturation = rng.uniform(*PHOTOMETRIC_RANGE) if rng.random() < 0.5 else 1.0
    turn = rng.uniform(-PHOTOMETRIC_HUE, PHOTOMETRIC_HUE) if rng.random() < 0.5 else 0.0
    if saturation != 1 or turn:
        hue, strength, value = Image.fromarray(pixels.astype(np.uint8)).convert("HSV").split()
        hue = hue.point([(step + round(turn * 256)) % 256 for step in range(256)])
        strength = strength.point([min(255, round(step * saturation)) for step in range(256)])
        pixels = np.asarray(Image.merge("HSV", (hue, strength, value)).convert("RGB"), np.float32)
    pixels = np.clip(pixels * (1.0 if first else contrast), 0, 255)
    return Image.fromarray(pixels.astype(np.uint8))


def gray(image: Image.Image, rng: random.Random) -> Image.Image:  # noqa: ARG001
    """Remove the colors."""
    return image.convert("L").convert("RGB")


def solarize(image: Image.Image, rng: random.Random) -> Image.Image:  # noqa: ARG001
    """Invert the light half of all values."""
    return ImageOps.solarize(image, SOLARIZE_FROM)


def blur(image: Image.Image, rng: random.Random) -> Image.Image:
    """Apply a Gaussian blur."""
    return image.filter(ImageFilter.GaussianBlur(rng.uniform(*BLUR_RADII)))


def jitter_colors(jitters: Jitters, image: Image.Image, rng: random.Random) -> Image.Image:
    """Change brightness, contrast, saturation and hue, each by an amount from its range, in random order."""
    changes: list[Any] = [ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color, Hue]
    turns = list(zip(changes, jitter_ranges(jitters), strict=False))
    rng.shuffle(turns)
    for change, (low, high) in turns:
        image = change(image).enhance(rng.uniform(low, high))
    return image


def jitter_ranges(jitters: Jitters) -> list[tuple[float, float]]:
    """Return (least, most) factors of brightness, contrast and saturation, and rotations of hue, if any."""
    *factors, hue = jitters
    ranges = [(max(0.0, 1 - jitter), 1 + jitter) for jitter in factors]
    return [*ranges, (-hue, hue)] if hue else ranges


class Hue:
    """An enhancer that Pillow lacks: `enhance` rotates the hue by a share of the color circle, −0.5…0.5."""

    def __init__(self, image: Image.Image) -> None:
        self._hue, *self._others = image.convert("HSV").split()

    def enhance(self, share: float) -> Image.Image:
        """Return RGB as torchvision's `adjust_hue` does."""
        turned = self._hue.point([(step + int(share * HUE_TURN)) % 256 for step in range(256)])
        return Image.merge("HSV", (turned, *self._others)).convert("RGB")


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
    """Apply timm's operations, which draw from the `random` module: seed it for this image, then restore it."""
    state = random.getstate()
    random.seed(rng.getrandbits(64))
    try:
        for op in ops:
            image = op(image)
    finally:
        random.setstate(state)
    return image


def _mended(op: Any) -> Any:
    """Replace the pixel function of timm's operation where ours is faster or works with every Pillow version."""
    op.aug_fn = _PIXEL_FUNCTIONS.get(op.name, op.aug_fn)
    return op


def posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """Keep the highest bits. 0 bits give black, as before Pillow refused that."""
    mask = 256 - 2 ** (8 - bits)
    return image.point([value & mask for value in range(256)] * 3)


def shear(image: Image.Image, factor: float, *, vertical: bool, fillcolor: tuple[int, ...], **_: Any) -> Image.Image:
    """Shift each row (or column) in proportion to its distance from the first."""
    lines = image.width if vertical else image.height
    return _slide(image, factor * (np.arange(lines) + 0.5), vertical, fillcolor)


def translate(image: Image.Image, share: float, *, vertical: bool, fillcolor: tuple[int, ...], **_: Any) -> Image.Image:
    """Shift all rows (or columns) by a share of their length."""
    lines, length = (image.width, image.height) if vertical else (image.height, image.width)
    return _slide(image, np.full(lines, share * length), vertical, fillcolor)


def _slide(image: Image.Image, shifts: np.ndarray, vertical: bool, fill: tuple[int, ...]) -> Image.Image:
    """Move what was at x + shifts[y] of row y to x, bicubically: Pillow's affine transform in a third of its time.

    Within a row the distance to the next pixel is constant, so the 4×4 taps of the general case become 4 with one
    weight per row. Pillow's cubic (a = −1) and its rounding are kept; float32 instead of float64 changes about one
    value in 10,000 by 1.
    """
    if vertical:
        turn = Image.Transpose.TRANSPOSE
        return _slide(image.transpose(turn), shifts, False, fill).transpose(turn)
    width, height = image.size
    whole = np.floor(shifts).clip(-width, width).astype(np.int64)
    part = (shifts - whole).astype(np.float32)[:, None, None]
    margin = int(abs(whole).max()) + 2
    pixels = np.frombuffer(image.tobytes("raw", "RGBX"), np.uint32).reshape(height, width)  # 4 bytes per pixel
    padded = np.empty((height, width + 2 * margin), np.uint32)
    padded[:, margin:-margin], padded[:, :margin], padded[:, -margin:] = pixels, pixels[:, :1], pixels[:, -1:]
    starts = np.arange(height) * padded.shape[1] + margin + whole - 1
    rows = np.lib.stride_tricks.sliding_window_view(padded.reshape(-1), width + 3)[starts]  # (H, W + 3)
    taps = rows.view(np.uint8).reshape(height, width + 3, 4).astype(np.int16)
    a, b, c, d = (taps[:, k : k + width] for k in range(4))  # (H, W, 4) each
    ab, cd = a - b, c - d
    value = (ab + cd) * -part
    value += 2 * ab + cd
    value *= part
    value += c - a
    value *= part
    value += b
    moved = value.clip(0, 255, out=value).astype(np.uint8).view(np.uint32)[..., 0]  # (H, W)
    source = np.arange(width) + 0.5 + shifts[:, None]
    moved[(source < 0) | (source >= width)] = np.frombuffer(bytes((*fill, 0)), np.uint32)
    return Image.frombytes("RGB", image.size, moved.tobytes(), "raw", "RGBX")


_PIXEL_FUNCTIONS: dict[str, Callable[..., Image.Image]] = {
    "Posterize": posterize,
    "PosterizeIncreasing": posterize,
    "PosterizeOriginal": posterize,
    "ShearX": partial(shear, vertical=False),
    "ShearY": partial(shear, vertical=True),
    "TranslateXRel": partial(translate, vertical=False),
    "TranslateYRel": partial(translate, vertical=True),
}
