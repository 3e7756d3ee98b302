"""The augmentation of `augment.py` for a whole batch, in a few tensor operations on its device.

Each image has its own random numbers (`draw` creates `Draws`), and every operation takes one parameter per image, with
a neutral value if it was not drawn for that image: no loop over images, and the host never waits for the device.

    b images, (H, W) their size; pixels are whole numbers 0…255 in float32, (b, 3, H, W)

Differences from Pillow: resized crops are not antialiased, shapes are changed with bilinear interpolation (Pillow:
bicubic), and the blur is a true Gaussian. Colors are equal, value for value (tested).
"""

import math
from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from patchloom.data.augmentation.augment import ERASED_AREAS, ERASED_ASPECTS
from patchloom.data.augmentation.crops import BOX_TRIES, Crops, Draws, draw_crops, first_box, uniform
from patchloom.data.augmentation.policies import BLUR_RADII, FILL_COLOR, HUE_TURN, SOLARIZE_FROM, jitter_ranges
from patchloom.data.images.image_batch import IMAGENET_MEAN, IMAGENET_STD
from patchloom.recipes.parts import AugmentPart
from patchloom_runtime.images.geometry import Size

THREE = ("grey", "solarise", "blur")  # in the order of `three_augment`'s choices
BATCHED_POLICIES = ("none", "randaugment", "three_augment")
# Random numbers per image: crop 23, 3-Augment 2, jitter 6, erasing 25; per layer of RandAugment; and for hue, gray,
# blur and solarize, which are drawn last so that older runs resume unchanged.
FIXED_DRAWS, LAYER_DRAWS, LATER_DRAWS = 56, 4, 7
# timm's list for RandAugment; an operation's number is its position here.
OPERATIONS = (
    *(
        "AutoContrast",
        "Equalize",
        "Invert",
        "Rotate",
        "PosterizeIncreasing",
        "SolarizeIncreasing",
        "SolarizeAdd",
    ),
    *("ColorIncreasing", "ContrastIncreasing", "BrightnessIncreasing", "SharpnessIncreasing"),
    *("ShearX", "ShearY", "TranslateXRel", "TranslateYRel"),
)
NO_OPERATION = -1
HUE = 3  # its index among the color jitters


def draw(
    images: int,
    augment: AugmentPart,
    size: Size,
    seeds: Sequence[int],
    device: torch.device,
    rows: Tensor | None = None,
) -> Draws:
    """Draw the random numbers of a batch of all processes, of which `rows` belong to this one.

    With several seeds, one per view, each has its own numbers: all images with those of the first, then of the second.
    """
    generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def numbers(count: int) -> Tensor:
        views = [torch.rand(images, count, generator=g, device=device) for g in generators]
        return torch.cat(views if rows is None else [view[rows] for view in views])

    first = numbers(FIXED_DRAWS + LAYER_DRAWS * augment.policy_layers)
    shape = (2 * size[0], 2 * size[1], 3) if augment.erasing else (0,)
    field = torch.randn(shape, generator=generators[0], device=device)
    return Draws(torch.cat([first, numbers(LATER_DRAWS)], 1), field)


def augment_batch(
    store: Tensor, index: Tensor, augment: AugmentPart, size: Size, draws: Draws, sizes: Tensor | None = None
) -> tuple[Tensor, Crops]:
    """Augment the images at `index` (b,) of `store` (N, h, w, 3) uint8; return (b, 3, H, W) uint8 and their crops.

    `sizes` (b, 2) are the heights and widths of images that do not fill (h, w).
    """
    if sizes is None:
        height, width = store.shape[1:3]
        sizes = torch.stack([torch.full_like(index, height), torch.full_like(index, width)], 1)
    crops = draw_crops(sizes, augment, size, draws)
    pixels = crops.images(store, index)
    if augment.policy == "randaugment":
        for _ in range(augment.policy_layers):
            operation = (draws.one() * len(OPERATIONS)).long()
            operation = operation.where(draws.one() < 0.5, NO_OPERATION)
            noise = torch.special.ndtri(draws.one().clamp(1e-6, 1 - 1e-6)) * augment.policy_magnitude_std
            level = (augment.policy_magnitude + noise).clamp(0, 10) / 10
            pixels = operate(pixels, operation, level, (draws.one() < 0.5) * 2.0 - 1)
    elif augment.policy == "three_augment":
        drawn = (draws.one() * len(augment.policy_choices)).long()
        # Sums instead of a lookup table, which a CUDA graph could not copy to the device.
        choice = sum(((drawn == i) * THREE.index(name) for i, name in enumerate(augment.policy_choices)), drawn * 0)
        pixels = three_augment(pixels, choice, uniform(draws.one(), *BLUR_RADII))
    if any(augment.jitters) and augment.jitter_probability:
        pixels = _where_drawn(augment.jitter_probability, draws, _jittered(pixels, augment, draws), pixels)
    if augment.grey:
        pixels = _where_drawn(augment.grey, draws, _gray(pixels), pixels)
    if augment.blur:
        pixels = _where_drawn(augment.blur, draws, blur(pixels, uniform(draws.one(), *BLUR_RADII)), pixels)
    if augment.solarise:
        pixels = _where_drawn(augment.solarise, draws, solarize(pixels), pixels)
    if augment.erasing:
        pixels = erase(pixels, augment.erasing, draws)
    return pixels.to(torch.uint8, memory_format=torch.channels_last), crops


def operate(pixels: Tensor, operation: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    """Apply one RandAugment operation per image: indices of `OPERATIONS` (b,), level 0…1 (b,), sign ±1 (b,)."""

    def chosen(name: str) -> Tensor:
        return operation == OPERATIONS.index(name)

    factor = (1 + 0.9 * level * sign).clamp(min=0.1)
    table = _tables(pixels, level, factor, operation)  # (b, 3, 256)
    pixels = table.gather(2, pixels.flatten(2).long()).view_as(pixels)
    pixels = _blend(_gray(pixels), pixels, factor.where(chosen("ColorIncreasing"), 1.0))
    pixels = _blend(_smooth(pixels), pixels, factor.where(chosen("SharpnessIncreasing"), 1.0))

    none = torch.zeros_like(level)
    angle = (math.radians(30) * level * sign).where(chosen("Rotate"), none)
    slope_x, slope_y = ((0.3 * level * sign).where(chosen(name), none) for name in ("ShearX", "ShearY"))
    move_x, move_y = ((0.45 * level * sign).where(chosen(name), none) for name in ("TranslateXRel", "TranslateYRel"))
    return _reshape(pixels, angle, slope_x, slope_y, move_x, move_y)


def three_augment(pixels: Tensor, choice: Tensor, radius: Tensor) -> Tensor:
    """Apply choice 0: gray, 1: solarize, 2: Gaussian blur of `radius` pixels."""
    choice = choice[:, None, None, None]
    pixels = torch.where(choice == 1, solarize(pixels), torch.where(choice == 2, blur(pixels, radius), pixels))
    return torch.where(choice == 0, _gray(pixels), pixels)


def jitter_colors(pixels: Tensor, order: Tensor, amounts: Tensor) -> Tensor:
    """Apply brightness (0), contrast (1), saturation (2) and, if four, hue (3), per image in `order` by `amounts`.

    Both are (b, 3 or 4).
    """
    if order.shape[1] == 3:
        return _blend_in_turn(pixels, order, amounts)
    # Hue is the most expensive: it is changed once, after what precedes it in each image and before the rest.
    turns, at = torch.arange(4, device=order.device), (order == HUE).int().argmax(1, keepdim=True)
    pixels = _blend_in_turn(pixels, order[:, :3], amounts.where(turns < at, 1.0)[:, :3])
    pixels = turn_hue(pixels, amounts.gather(1, at)[:, 0])
    return _blend_in_turn(pixels, order[:, 1:], amounts.where(turns > at, 1.0)[:, 1:])


def turn_hue(pixels: Tensor, share: Tensor) -> Tensor:
    """Rotate each image's hue by a `share` (b,) of the color circle, with Pillow's 256 hues and saturations."""
    value = pixels.amax(1, keepdim=True)
    span = value - pixels.amin(1, keepdim=True)
    # Distance of each channel from the largest; float64 as in Pillow, or one color in 500 gets another hue.
    red, green, blue = (value - pixels).div_(span.clamp(min=1)).double().split(1, 1)
    sixths = torch.where(red == 0, blue - green, torch.where(green == 0, 2 + red - blue, 4 + green - red)).float()
    hue = ((sixths.double() / 6 + 1) % 1).float().mul(255).floor()
    saturation = (span / value.clamp(min=1) * 255).floor()
    hue = (hue + (share * HUE_TURN).trunc()[:, None, None, None]) % 256
    # Red is lowest from 2 to 4 sixths of the circle, green is highest from 1 to 3, blue from 3 to 5.
    lowered = (hue * 6 / 255 - _constant((3, 2, 4), pixels.device)[:, None, None]).abs_().sub_(1).clamp_(0, 1)
    lowered[:, 0] = 1 - lowered[:, 0]
    return lowered.mul_(saturation / -255).add_(1).mul_(value).add_(0.5).floor_()


def solarize(pixels: Tensor) -> Tensor:
    """Invert the light half of all values."""
    return torch.where(pixels < SOLARIZE_FROM, pixels, 255 - pixels)


def erase(pixels: Tensor, probability: float, draws: Draws) -> Tensor:
    """Apply random erasing: a box becomes noise that is N(0, 1) after normalization, clipped to 0…255."""
    _, _, height, width = pixels.shape
    erased = draws.one() < probability
    area = uniform(draws.several(BOX_TRIES), *ERASED_AREAS) * height * width
    h, w, fits = first_box(area, draws, ERASED_ASPECTS, height - 1, width - 1)
    top, left = (draws.one() * (height - h + 1)).floor(), (draws.one() * (width - w + 1)).floor()
    y = torch.arange(height, device=pixels.device)
    x = torch.arange(width, device=pixels.device)
    rows = (y >= top[:, None]) & (y < (top + h)[:, None])  # (b, H)
    columns = (x >= left[:, None]) & (x < (left + w)[:, None])  # (b, W)
    box = (rows & (erased & fits)[:, None])[:, :, None] & columns[:, None, :]  # (b, H, W)
    # Each image takes its own window of one noise field, so that no process draws noise for others' images.
    field = draws.field * _constant(IMAGENET_STD, y.device)
    field = ((field + _constant(IMAGENET_MEAN, y.device)) * 255).clamp(0, 255).round()
    rows, columns = ((draws.one() * side.numel()).long()[:, None] + side for side in (y, x))
    noise = field[rows[:, :, None], columns[:, None, :]]  # (b, H, W, 3)
    return torch.where(box[:, None], noise.permute(0, 3, 1, 2), pixels)


def _where_drawn(probability: float, draws: Draws, changed: Tensor, pixels: Tensor) -> Tensor:
    """Return the changed images where drawn and the others unchanged. A certain change draws nothing."""
    if probability == 1:
        return changed.expand_as(pixels)
    return torch.where((draws.one() < probability)[:, None, None, None], changed, pixels)


def _jittered(pixels: Tensor, augment: AugmentPart, draws: Draws) -> Tensor:
    ranges = jitter_ranges(augment.jitters)
    lows = _constant(tuple(low for low, _ in ranges), pixels.device)
    spans = _constant(tuple(high - low for low, high in ranges), pixels.device)
    shares, order = draws.several(len(ranges)), draws.several(len(ranges)).argsort(1)
    return jitter_colors(pixels, order, lows[order] + spans[order] * shares)


def _blend_in_turn(pixels: Tensor, order: Tensor, factors: Tensor) -> Tensor:
    """Apply brightness (0), contrast (1) and saturation (2) in each image's `order` (b, 3).

    Factors of 1 are neutral.
    """
    for turn in range(order.shape[1]):
        kind = order[:, turn, None, None, None]
        gray = _gray(pixels)
        base = torch.where(kind == 2, gray, torch.where(kind == 1, _mean_gray(gray), torch.zeros_like(gray)))
        pixels = _blend(base, pixels, factors[:, turn])
    return pixels


def _tables(pixels: Tensor, level: Tensor, factor: Tensor, operation: Tensor) -> Tensor:
    """Return the lookup tables (b, 3, 256) of the operations on single values."""
    value = torch.arange(256.0, device=pixels.device).expand(len(pixels), 3, 256)
    level, factor = level[:, None, None], factor[:, None, None]
    counts = torch.zeros(value.shape, dtype=torch.int32, device=pixels.device)
    flat = pixels.flatten(2)
    counts.scatter_add_(2, flat.long(), torch.ones_like(flat, dtype=torch.int32))

    low, high = flat.amin(2, keepdim=True).double(), flat.amax(2, keepdim=True).double()
    stretch = 255 / (high - low)
    stretched = ((value * stretch - low * stretch).floor().clamp(0, 255).float()).where(high > low, value)
    last = counts.gather(2, high.long())
    step = (flat.shape[2] - last) // 255
    spread = (step // 2 + counts.cumsum(2) - counts) // step.clamp(min=1)
    equalized = spread.clamp(0, 255).float().where(step > 0, value)

    bits = 2 ** (4 + (level * 4).floor())  # of 8, 4 − ⌊4·level⌋ are kept
    threshold = 256 - (level * 256).floor()
    added = (level * 110).floor().clamp(max=128)
    by_name = {
        "AutoContrast": stretched,
        "Equalize": equalized,
        "Invert": 255 - value,
        "PosterizeIncreasing": (value / bits).floor() * bits,
        "SolarizeIncreasing": torch.where(value < threshold, value, 255 - value),
        "SolarizeAdd": torch.where(value < 128, (value + added).clamp(max=255), value),
        "ContrastIncreasing": _blend(_mean_gray(_gray(pixels))[:, :, 0], value, factor),
        "BrightnessIncreasing": _blend(torch.zeros_like(value), value, factor),
    }
    table = value
    for name, changed in by_name.items():
        table = torch.where((operation == OPERATIONS.index(name))[:, None, None], changed, table)
    return table


def _reshape(pixels: Tensor, angle: Tensor, slope_x: Tensor, slope_y: Tensor, move_x: Tensor, move_y: Tensor) -> Tensor:
    """Rotate, shear or shift each image (at most one of the numbers is not 0), filling with `FILL_COLOR`."""
    _, _, height, width = pixels.shape
    sin, cos, slope_x, slope_y, move_x, move_y = (
        number[:, None, None] for number in (angle.sin(), angle.cos(), slope_x, slope_y, move_x, move_y)
    )
    # Coordinates −1…1 from edge to edge. Not by affine_grid: its matrix product would blur at TF32 precision.
    y = ((torch.arange(height, device=pixels.device) + 0.5) / height * 2 - 1)[:, None]
    x = (torch.arange(width, device=pixels.device) + 0.5) / width * 2 - 1
    # Pillow's shears keep the first row or column in place, hence + 1.
    source_x = cos * x - sin * height / width * y + slope_x * height / width * (y + 1) + 2 * move_x
    source_y = cos * y + sin * width / height * x + slope_y * width / height * (x + 1) + 2 * move_y
    grid = torch.stack([source_x, source_y], -1)  # (b, H, W, 2)
    fill = _constant(FILL_COLOR, pixels.device)[:, None, None]
    return (F.grid_sample(pixels - fill, grid, padding_mode="zeros", align_corners=False) + fill).round()


def blur(pixels: Tensor, radius: Tensor) -> Tensor:
    """Apply a Gaussian blur of `radius` (b,) pixels, truncated at three times the largest radius."""
    b, c, height, width = pixels.shape
    reach = math.ceil(3 * BLUR_RADII[1])
    offsets = torch.arange(-reach, reach + 1, device=pixels.device)
    weights = torch.exp(-0.5 * (offsets / radius[:, None]) ** 2)
    weights = (weights / weights.sum(1, keepdim=True)).repeat_interleave(c, 0)[:, None]  # (b·3, 1, taps)
    padded = F.pad(pixels.reshape(1, b * c, height, width), (reach,) * 4, mode="replicate")
    blurred = F.conv2d(padded, weights[:, :, None, :], groups=b * c)
    return F.conv2d(blurred, weights[..., None], groups=b * c).view_as(pixels).round()


def _blend(base: Tensor, pixels: Tensor, factor: Tensor) -> Tensor:
    """Return base + factor·(pixels − base), rounded down as in Pillow, with one factor per image."""
    factor = factor.view(-1, *[1] * (pixels.ndim - 1))
    return (pixels - base).mul_(factor).add_(base).clamp_(0, 255).floor_()


def _gray(pixels: Tensor) -> Tensor:
    """Convert (b, 3, H, W) to (b, 1, H, W) as Pillow's mode L."""
    red, green, blue = pixels.split(1, 1)
    return (red * 19595).add_(green * 38470).add_(blue * 7471).add_(32768).div_(65536).floor_()


def _mean_gray(gray: Tensor) -> Tensor:  # (b, 1, H, W) → (b, 1, 1, 1)
    return (gray.mean((2, 3), keepdim=True) + 0.5).floor()


def _smooth(pixels: Tensor) -> Tensor:
    """Apply Pillow's SMOOTH: a 3×3 mean whose center counts five times; the border is unchanged."""
    total = F.avg_pool2d(pixels, 3, stride=1) * 9 + pixels[:, :, 1:-1, 1:-1] * 4
    smooth = pixels.clone()
    smooth[:, :, 1:-1, 1:-1] = (total / 13 + 0.5).floor()
    return smooth


@cache
def _constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return a cached constant: transferring it each time would make the host wait."""
    return torch.tensor(values, dtype=torch.float32, device=device)
