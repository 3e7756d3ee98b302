"""A recipe for a folder of images nobody has published numbers for, with the reason for each choice.

These are rules of thumb, not results: a small set is seen often and altered a lot, a small picture is cut
into small patches, and without a GPU the network is small and the run short. What the user gives is a fact like
the number of images: the rest follows from it. The thresholds stand in tables, so that a measurement changes a line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from patchloom.recipes.parts import GROUPS, ModelPart, OptimPart, SchedulePart, fields_of
from patchloom.recipes.schema import Recipe, override
from patchloom.recipes.small_images import fit_to_32_pixels
from patchloom.recipes.values import read_value
from patchloom_runtime.errors import UsageError
from patchloom_runtime.printable import plural

# Families whose patch can be chosen; the others reduce the image in their own way, by up to 32.
PATCHED = ("resmlp", "mixer", "deit", "deit3", "cait")
TRAINED_PIXELS = 224  # of most published weights
LONG_EPOCHS = 100
SHORT_EPOCHS = 20  # below: warm-up counts steps, and no branch is dropped
SHORT_WARMUP = 0.1  # of the steps of a short run
LONG_STEPS = 10_000
NARROW_DIM = 192  # up to here networks learn faster
TINY_PIXELS = 32  # below: often digits and letters, which mirroring and colours change
SMALL_PIXELS = 64  # below: too few pixels for crops at random scales


class Reason(NamedTuple):
    """One automatic choice: the field's dotted key, its value, and why in a few words."""

    field: str
    value: Any
    why: str


class Budget(NamedTuple):
    """What a machine is asked to do where nothing else is said."""

    pictures: int  # to be seen in a run
    epochs: tuple[int, int]  # least and most
    largest_batch: int
    largest_size: int  # pixels


SCRATCH = {
    "cpu": Budget(450_000, (15, LONG_EPOCHS), 128, 64),
    "cuda": Budget(10_000_000, (60, 300), 512, 224),
}
FINE_TUNE = {"cpu": Budget(20_000, (3, 20), 32, 224), "cuda": Budget(100_000, (5, 30), 256, 224)}
FINE_TUNE_LR = 3e-4
# What the rate is multiplied by from one layer to the one before it: layers of a convnet of another package are its
# few stages, those of a column its many blocks.
STAGES_DECAY, BLOCKS_DECAY = 0.7, 0.85
# How names of columns of other packages begin.
COLUMNS = ("vit", "deit", "beit", "eva", "flexivit", "cait", "xcit", "mixer", "gmixer", "gmlp", "resmlp")


class Strength(NamedTuple):
    """How much training images are altered in a run of at least so many epochs."""

    epochs: int
    name: str
    mixup: float
    cutmix: float
    policy: bool  # one random change of colours or shape an image


# The first that the run is long enough for. A network that sees each image a few times only has nothing to gain from
# seeing it altered: it does not learn the images by heart.
STRENGTHS = (
    Strength(LONG_EPOCHS, "strong", mixup=0.8, cutmix=1.0, policy=True),
    Strength(SHORT_EPOCHS, "mild", mixup=0.2, cutmix=0.0, policy=True),
    Strength(0, "off", mixup=0.0, cutmix=0.0, policy=False),
)
# What the rest is derived from where the user gives it.
BASES = ("model.image_size", "model.options.patch_size", "model.options.dim", "schedule.epochs", "optim.batch_size")


def strength_for(epochs: int) -> Strength:
    """The row of `STRENGTHS` for a run of so many epochs."""
    return next(row for row in STRENGTHS if epochs >= row.epochs)


def auto_recipe(
    *,
    images: int,
    classes: int,
    image_size_median: int,
    model: str | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
    pretrained: bool = False,
    given: Mapping[str, Any] | None = None,
) -> tuple[Recipe, list[Reason]]:
    """A recipe for `images` pictures in `classes` classes, about `image_size_median` pixels a side.

    `given` are the fields the user sets: they stay as they are, and the other choices follow from them.
    """
    if images < 1 or classes < 2 or image_size_median < 1:
        raise UsageError(
            f"{images} images of {image_size_median} pixels in {classes} classes cannot be trained on; "
            "expected at least 1 image, 1 pixel and 2 classes. Check the folder."
        )
    if device not in SCRATCH:
        raise UsageError(f"device is {device!r}, expected cpu or cuda.")
    given = given or {}
    known = read_overrides(given)
    model = given.get("model.name", model)
    budget = (FINE_TUNE if pretrained else SCRATCH)[device]
    reasons = _network(images, image_size_median, model, device, pretrained, budget, known)
    chosen = {reason.field: reason.value for reason in reasons} | known
    narrow = chosen.get("model.options.dim", NARROW_DIM + 1) <= NARROW_DIM
    peak_lr = FINE_TUNE_LR if pretrained else 3e-3 if narrow else 1e-3
    reasons += _run(images, device, pretrained, budget, peak_lr, known)
    if pretrained:
        reasons += _trained_network(reasons[0].value)
    chosen |= {reason.field: reason.value for reason in reasons} | known
    reasons += _augmentation(images, chosen["model.image_size"], chosen["schedule.epochs"], pretrained)
    start = Recipe(
        name="auto",
        source=f"Rules of thumb for {plural(images, 'image')} in {plural(classes, 'class')}.",
        model=ModelPart(name="resmlp_s12"),
        optim=OptimPart(lr=1e-3, batch_size=1),
        schedule=SchedulePart(epochs=1),
    )
    warmups = {"schedule.warmup_epochs", "schedule.warmup_steps"}
    left_to_user = given.keys() | (warmups if warmups & given.keys() else set())
    reasons = [reason for reason in reasons if reason.field not in left_to_user]
    return override(start, known | {reason.field: reason.value for reason in reasons}), reasons


def read_overrides(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `BASES` among those given, read by their types."""
    known: dict[str, Any] = {}
    for key in BASES:
        group, _, name = key.partition(".")
        if key in given and name in fields_of(GROUPS[group]):
            known[key] = read_value(key, given[key], fields_of(GROUPS[group])[name])
        elif key in given and str(given[key]).isdecimal():  # a network's option may also be a list
            known[key] = int(given[key])
    return known


def _network(
    images: int,
    median: int,
    model: str | None,
    device: str,
    pretrained: bool,
    budget: Budget,
    known: Mapping[str, Any],
) -> list[Reason]:
    if model:
        reasons = [Reason("model.name", model, "as asked")]
    elif device == "cuda" and (pretrained or images >= 200_000):
        why = "starts from trained weights" if pretrained else f"{images:,} images carry 24 layers"
        reasons = [Reason("model.name", "resmlp_s24", why)]
    else:
        reasons = [Reason("model.name", "resmlp_s12", "the smallest ResMLP: fast, and enough for a small set")]
    name = reasons[0].value

    if pretrained:
        size = known.get("model.image_size", TRAINED_PIXELS)
        return [*reasons, Reason("model.image_size", size, "the size the weights were trained at")]
    side = known.get("model.image_size", min(median, budget.largest_size))
    limit = f", at most {side} on {device}" if side < median else ""
    reasons += fitted_size(name, side, f"pictures are about {median} pixels{limit}", known)
    if model is None:
        size = next(reason.value for reason in reasons if reason.field == "model.image_size")
        reasons += fitted_width(size, device)
    return reasons


def fitted_size(name: str, side: int, about: str, known: Mapping[str, Any]) -> list[Reason]:
    """Image size of about `side` pixels and what the network named needs to see it in enough patches."""
    given = known.get("model.image_size")
    if name.partition("_")[0] not in PATCHED:
        size = given or max(32, _multiple(side, 32))
        reasons = [Reason("model.image_size", size, f"{about}; multiples of 32")]
        if size < SMALL_PIXELS:
            why = f"so that {size} pixels are not reduced to one or two patches"
            reasons += [Reason(f"model.options.{key}", value, why) for key, value in fit_to_32_pixels(name).items()]
        return reasons
    published = _published_patch(name)
    fits = [p for p in (published, 16, 8, 4, 2, 1) if p <= published and side >= 7 * p and not (given or p) % p]
    patch = known.get("model.options.patch_size") or next(iter(fits), 1)
    size = given or _multiple(side, patch)
    reasons = [Reason("model.image_size", size, about)]
    if patch != published:
        reasons.append(Reason("model.options.patch_size", patch, f"{(size // patch) ** 2} patches per image"))
    return reasons


def fitted_width(size: int, device: str) -> list[Reason]:
    """Width and depth of a ResMLP for images of `size` pixels."""
    if device == "cuda":
        return [Reason("model.options.dim", 192, "half the width for tiny pictures")] if size < TINY_PIXELS else []
    dim = 64 if size < 16 else 128 if size <= TINY_PIXELS else 192
    return [
        Reason("model.options.depth", 6, "half the layers without a GPU"),
        Reason("model.options.dim", dim, f"narrow without a GPU, for {size} pixels"),
    ]


def _run(
    images: int, device: str, pretrained: bool, budget: Budget, peak_lr: float, known: Mapping[str, Any]
) -> list[Reason]:
    epochs = known.get("schedule.epochs") or _within(round(budget.pictures / images), *budget.epochs)
    batch = known.get("optim.batch_size") or fitted_batch(images, budget.largest_batch)
    lr = float(f"{peak_lr * min(1.0, math.sqrt(batch / 64)):.1e}")
    steps = epochs * math.ceil(images / batch)
    drop_path = 0.05 if device == "cuda" and not pretrained and epochs >= SHORT_EPOCHS else 0.0
    return [
        Reason(
            "schedule.epochs",
            epochs,
            f"{plural(images, 'image')}: {plural(epochs, 'epoch')} (about {_short(epochs * images)} pictures seen)",
        ),
        fitted_warmup(images, batch, epochs),
        Reason("optim.batch_size", batch, f"{plural(math.ceil(images / batch), 'step')} per epoch"),
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
            f"{plural(steps, 'step')}: {'enough' if steps >= LONG_STEPS else 'too few'} for an average",
        ),
    ]


def _trained_network(model: str) -> list[Reason]:
    """How a trained network is changed as little as it takes; measured in docs/results.md, "Fine-tuning"."""
    _, other, name = model.rpartition(":")
    decay = STAGES_DECAY if other and not name.startswith(COLUMNS) else BLOCKS_DECAY
    return [
        Reason("model.fit_head", True, "the new classifier is fitted before the trained weights move"),
        Reason("model.eval_mode", True, "batch statistics stay those it was trained with"),
        Reason("optim.layer_decay", decay, "the first layers change least"),
    ]


def fitted_batch(images: int, largest: int) -> int:
    """A power of two that gives an epoch 32 updates or more, from 16, or as many as there are images, to `largest`."""
    batch = _within(2 ** int(math.log2(max(1, images / 32))), 16, largest)
    return min(batch, 2 ** int(math.log2(images)))


def fitted_warmup(images: int, batch: int, epochs: int) -> Reason:
    """A twentieth of a long run, in epochs; a tenth of a short one, in steps, since an epoch may be most of it."""
    if epochs >= SHORT_EPOCHS:
        warmup = _within(round(epochs / 20), 1, 5)
        return Reason("schedule.warmup_epochs", warmup, f"a twentieth of {epochs} epochs, from 1 to 5")
    steps = max(1, images // batch) * epochs
    why = f"a tenth of {plural(steps, 'step')}" if steps > 1 else "the run has one step"
    return Reason("schedule.warmup_steps", max(1, round(SHORT_WARMUP * steps)), why)


def _augmentation(images: int, size: int, epochs: int, pretrained: bool) -> list[Reason]:
    small, tiny = size < SMALL_PIXELS, size < TINY_PIXELS
    # Fine-tuning is short, whatever its epochs; digits and letters mixed strongly are no longer any.
    strength = STRENGTHS[-1] if pretrained else strength_for(min(epochs, LONG_EPOCHS - 1) if tiny else epochs)
    if small:
        crop = [
            Reason("augment.crop", "pad", f"{size} pixels are too few to cut a part of"),
            Reason("augment.crop_padding", max(1, size // 8), "an eighth of the side"),
        ]
    else:
        scale = 0.08 if images >= 100_000 and epochs >= SHORT_EPOCHS else 0.35
        crop = [
            Reason("augment.crop", "random_resized", "parts of the picture, at random scales"),
            Reason("augment.crop_min_scale", scale, "smaller parts only where images are many and the run is long"),
        ]
    altered = strength.policy and not tiny
    length = "fine-tuning" if pretrained else plural(epochs, "epoch")
    why = "too few pixels to alter" if tiny else "one random change per image" if altered else length
    return [
        *crop,
        Reason("augment.flip", 0.0 if tiny else 0.5, "digits and letters have sides" if tiny else "mirrored"),
        Reason("augment.policy", "none" if not altered else "trivial" if small else "three_augment", why),
        Reason("augment.mixup", strength.mixup, f"{strength.name}, for {length}"),
        Reason("augment.cutmix", strength.cutmix, "long runs only"),
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


def _short(value: int) -> str:
    return f"{value / 1e6:.1f} M" if value >= 1e6 else f"{value / 1e3:.0f} k"
