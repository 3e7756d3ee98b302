"""A recipe for a folder of images nobody has published numbers for, with the reason for each choice.

These are rules of thumb, not results: a small set is seen often and altered a lot, a small picture is cut
into small patches, and without a GPU the network is small and the run short.
"""

from __future__ import annotations

import math
import re
from typing import Any, Literal, NamedTuple

from patchloom.errors import UsageError
from patchloom.recipes.parts import ModelPart, OptimPart, SchedulePart
from patchloom.recipes.schema import Recipe, override
from patchloom.recipes.small_images import fit_to_32_pixels

# Families whose patch can be chosen; the others reduce the image in their own way, by up to 32.
PATCHED = ("resmlp", "mixer", "deit", "deit3", "cait")
LONG_EPOCHS = 100
LONG_STEPS = 10_000
TINY_PIXELS = 32  # below: often digits and letters, which mirroring and colours change
SMALL_PIXELS = 64  # below: too few pixels for crops at random scales


class Reason(NamedTuple):
    """One automatic choice: the field's dotted key, its value, and why in a few words."""

    field: str
    value: Any
    why: str


class _Budget(NamedTuple):
    pictures: int  # to be seen in a run
    epochs: tuple[int, int]  # least and most
    largest_batch: int
    largest_size: int  # pixels


SCRATCH = {
    "cpu": _Budget(450_000, (15, LONG_EPOCHS), 128, 64),
    "cuda": _Budget(10_000_000, (60, 300), 512, 224),
}
FINE_TUNE = {"cpu": _Budget(20_000, (3, 20), 32, 224), "cuda": _Budget(100_000, (5, 50), 256, 224)}


def auto_recipe(
    *,
    images: int,
    classes: int,
    image_size_median: int,
    model: str | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
    pretrained: bool = False,
    trained_size: int | None = None,
) -> tuple[Recipe, list[Reason]]:
    """A recipe for `images` pictures in `classes` classes, about `image_size_median` pixels a side.

    `trained_size` is the image size of the weights it starts from, where it is known.
    """
    if images < 1 or classes < 2 or image_size_median < 1:
        raise UsageError(
            f"{images} images of {image_size_median} pixels in {classes} classes cannot be trained on; "
            "expected at least 1 image, 1 pixel and 2 classes. Check the folder."
        )
    if device not in SCRATCH:
        raise UsageError(f"device is {device!r}, expected cpu or cuda.")
    budget = (FINE_TUNE if pretrained else SCRATCH)[device]
    reasons = _network(images, image_size_median, model, device, pretrained, budget, trained_size)
    chosen = {reason.field: reason.value for reason in reasons}
    peak_lr = 1e-4 if pretrained else 3e-3 if "model.options.dim" in chosen else 1e-3
    reasons += _run(images, device, pretrained, budget, peak_lr)
    chosen |= {reason.field: reason.value for reason in reasons}
    reasons += _augmentation(images, chosen["model.image_size"], chosen["schedule.epochs"], pretrained)
    start = Recipe(
        name="auto",
        source=f"Rules of thumb for {_thousands(images)} images in {classes} classes.",
        model=ModelPart(name="resmlp_s12"),
        optim=OptimPart(lr=1e-3, batch_size=1),
        schedule=SchedulePart(epochs=1),
    )
    return override(start, {reason.field: reason.value for reason in reasons}), reasons


def _network(
    images: int,
    median: int,
    model: str | None,
    device: str,
    pretrained: bool,
    budget: _Budget,
    trained_size: int | None,
) -> list[Reason]:
    if model:
        reasons = [Reason("model.name", model, "as asked")]
    elif device == "cuda" and (pretrained or images >= 200_000):
        why = "starts from trained weights" if pretrained else f"{_thousands(images)} images carry 24 layers"
        reasons = [Reason("model.name", "resmlp_s24", why)]
    else:
        reasons = [Reason("model.name", "resmlp_s12", "the smallest ResMLP: fast, and enough for a small set")]
    name = reasons[0].value

    if pretrained:
        return [*reasons, Reason("model.image_size", trained_size or 224, "the size the weights were trained at")]
    side = min(median, budget.largest_size)
    limit = f", at most {side} on {device}" if side < median else ""
    about = f"pictures are about {median} pixels{limit}"
    if name.partition("_")[0] not in PATCHED:
        size = max(32, _multiple(side, 32))
        reasons.append(Reason("model.image_size", size, f"{about}; multiples of 32"))
        if size < SMALL_PIXELS:
            why = f"so that {size} pixels are not reduced to one or two patches"
            reasons += [Reason(f"model.options.{key}", value, why) for key, value in fit_to_32_pixels(name).items()]
        return reasons
    published = _published_patch(name)
    patch = next(p for p in (published, 16, 8, 4, 2, 1) if p <= published and (side >= 7 * p or p == 1))
    size = _multiple(side, patch)
    reasons.append(Reason("model.image_size", size, about))
    if patch != published:
        reasons.append(Reason("model.options.patch_size", patch, f"{(size // patch) ** 2} patches an image"))
    if model is None:
        reasons += _width(size, device)
    return reasons


def _width(size: int, device: str) -> list[Reason]:
    if device == "cuda":
        return [Reason("model.options.dim", 192, "half the width for tiny pictures")] if size < TINY_PIXELS else []
    dim = 64 if size < 16 else 128 if size <= TINY_PIXELS else 192
    return [
        Reason("model.options.depth", 6, "half the layers without a GPU"),
        Reason("model.options.dim", dim, f"narrow without a GPU, for {size} pixels"),
    ]


def _run(images: int, device: str, pretrained: bool, budget: _Budget, peak_lr: float) -> list[Reason]:
    epochs = _within(round(budget.pictures / images), *budget.epochs)
    batch = _within(2 ** int(math.log2(max(1, images / 32))), 16, budget.largest_batch)
    lr = float(f"{peak_lr * min(1.0, math.sqrt(batch / 64)):.1e}")
    steps = epochs * math.ceil(images / batch)
    warmup = _within(round(epochs / 20), 1, 5)
    drop_path = 0.05 if device == "cuda" and not pretrained else 0.0
    return [
        Reason(
            "schedule.epochs",
            epochs,
            f"{_thousands(images)} images: {epochs} epochs (about {_short(epochs * images)} pictures seen)",
        ),
        Reason("schedule.warmup_epochs", warmup, f"a twentieth of {epochs} epochs, from 1 to 5"),
        Reason("optim.batch_size", batch, f"{_thousands(math.ceil(images / batch))} steps an epoch"),
        Reason(
            "optim.lr",
            lr,
            f"AdamW, {peak_lr:g} for this network, less for batches below 64; cosine to 0",
        ),
        Reason("optim.weight_decay", 0.05, "as in DeiT"),
        Reason("objective.smoothing", 0.1, "as in DeiT"),
        Reason(
            "model.drop_path",
            drop_path,
            "as published for ResMLP-S12" if drop_path else "the run is too short to need it",
        ),
        Reason(
            "optim.ema_decay",
            0.999 if steps >= LONG_STEPS else None,
            f"{_thousands(steps)} steps: {'enough' if steps >= LONG_STEPS else 'too few'} for an average",
        ),
    ]


def _augmentation(images: int, size: int, epochs: int, pretrained: bool) -> list[Reason]:
    small, tiny = size < SMALL_PIXELS, size < TINY_PIXELS
    long = epochs >= LONG_EPOCHS and not tiny and not pretrained
    if small:
        crop = [
            Reason("augment.crop", "pad", f"{size} pixels are too few to cut a part of"),
            Reason("augment.crop_padding", max(1, size // 8), "an eighth of the side"),
        ]
    else:
        scale = 0.08 if images >= 100_000 else 0.35
        crop = [
            Reason("augment.crop", "random_resized", "parts of the picture, at random scales"),
            Reason("augment.crop_min_scale", scale, "smaller parts only where images are many"),
        ]
    return [
        *crop,
        Reason("augment.flip", 0.0 if tiny else 0.5, "digits and letters have sides" if tiny else "mirrored"),
        Reason(
            "augment.policy",
            "none" if tiny else "trivial" if small else "three_augment",
            "too few pixels to alter" if tiny else "one random change an image",
        ),
        Reason("augment.mixup", 0.8 if long else 0.2, f"{'strong' if long else 'mild'}, for {epochs} epochs"),
        Reason("augment.cutmix", 1.0 if long else 0.0, "long runs only"),
        Reason("test.crop_ratio", 1.0 if small else 0.9, "the whole picture" if small else "as ResMLP is tested"),
    ]


def _published_patch(model: str) -> int:
    if model.startswith("deit3_h"):
        return 14
    named = re.search(r"(?<!\d)(8|14|16|32)$", model)
    return int(named[1]) if named else 16


def _multiple(value: int, unit: int) -> int:
    return max(1, round(value / unit)) * unit


def _within(value: int, low: int, high: int) -> int:
    return max(low, min(high, value))


def _thousands(value: int) -> str:
    return f"{value:,}".replace(",", " ")


def _short(value: int) -> str:
    return f"{value / 1e6:.1f} M" if value >= 1e6 else f"{value / 1e3:.0f} k"
