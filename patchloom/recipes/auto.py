"""An automatic recipe for any folder of images, with the reason for each choice.

These are rules of thumb, not results: a small dataset is seen often and augmented strongly, small images are cut into
small patches, and without a GPU the network is small and the run short. A field that the user sets is a fact like the
number of images: the other choices follow from it. Thresholds are kept in tables, so that a measurement changes a line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from patchloom.recipes.methods import method_of
from patchloom.recipes.parts import GROUPS, ModelPart, OptimPart, SchedulePart, fields_of
from patchloom.recipes.schema import Recipe, override
from patchloom.recipes.small_images import fit_to_32_pixels
from patchloom.recipes.values import read_value
from patchloom_runtime.errors import UsageError
from patchloom_runtime.printable import plural

# Families with a configurable patch size; the others downsample in their own way, by up to 32.
PATCHED = ("resmlp", "mixer", "deit", "deit3", "cait")
TRAINED_PIXELS = 224  # of most published weights
LONG_EPOCHS = 100
SHORT_EPOCHS = 20  # below: warm-up is counted in steps, and no branch is dropped
MILD_EPOCHS = 60  # below: no change of color, no mixing. Weak augmentation was better in 26 and 60 epochs (LOG.md).
SMALLEST_BATCH = {"cpu": 16, "cuda": 64}  # a GPU takes as long for fewer images
DEVICE_NAMES = {"cpu": "CPU", "cuda": "GPU"}
SHORT_WARMUP = 0.1  # share of the steps of a short run
LONG_STEPS = 10_000
NARROW_DIM = 192  # networks up to this width learn faster
# The best for images of 64 pixels and more, on a CPU and on a GPU (benchmarks/candidates.py; benchmarks/LOG.md).
NARROW_SMLPNET: dict[str, Any] = {"dim": 32, "depths": (1, 2, 2, 1)}
SHALLOW_SMLPNET: dict[str, Any] = {"dim": 64, "depths": (1, 2, 4, 1)}
SHALLOW_IMAGES = 50_000  # on a GPU: more images than that are for the published network
LARGE_IMAGES = 200_000
TINY_PIXELS = 32  # below: often digits and letters, which flips and color changes alter
SMALL_PIXELS = 64  # below: too few pixels for crops at random scales
IMBALANCED_FROM = 10  # ratio of the largest to the smallest class from which a dataset counts as imbalanced


class Reason(NamedTuple):
    """One automatic choice: the field's dotted key, its value, and a short reason."""

    field: str
    value: Any
    why: str


class Budget(NamedTuple):
    """Default limits of a run on one kind of machine."""

    images: int  # seen in a run, repetitions included
    epochs: tuple[int, int]  # least and most
    largest_batch: int
    largest_size: int  # pixels


SCRATCH = {
    "cpu": Budget(450_000, (15, LONG_EPOCHS), 128, 64),
    "cuda": Budget(10_000_000, (60, 300), 512, 224),
}
FINE_TUNE = {"cpu": Budget(20_000, (3, 20), 32, 224), "cuda": Budget(100_000, (5, 30), 256, 224)}
FINE_TUNE_LR = 3e-4
# Learning-rate factor from one layer to the previous one: layers are the few stages of a third-party convnet, or the
# many blocks of a columnar network.
STAGES_DECAY, BLOCKS_DECAY = 0.7, 0.85
# Name prefixes of third-party columnar networks.
COLUMNS = ("vit", "deit", "beit", "eva", "flexivit", "cait", "xcit", "mixer", "gmixer", "gmlp", "resmlp")


class Strength(NamedTuple):
    """Augmentation strength for runs of at least `epochs` epochs."""

    epochs: int
    name: str
    mixup: float
    cutmix: float
    policy: bool  # one random change of color or shape per image


# The first row that the run is long enough for. A network that sees each image only a few times gains nothing from
# augmentation: it cannot memorize the images.
OFF = Strength(0, "off", mixup=0.0, cutmix=0.0, policy=False)
STRENGTHS = {
    "cpu": (
        Strength(LONG_EPOCHS, "strong", mixup=0.8, cutmix=1.0, policy=True),
        Strength(MILD_EPOCHS, "mild", mixup=0.2, cutmix=0.0, policy=True),
        OFF,
    ),
    "cuda": (
        Strength(LONG_EPOCHS, "mild", mixup=0.2, cutmix=0.0, policy=True),
        Strength(MILD_EPOCHS, "weak", mixup=0.0, cutmix=0.0, policy=True),
        OFF,
    ),
}
# Fields from which the other choices are derived.
BASES = ("model.image_size", "model.options.patch_size", "model.options.dim", "schedule.epochs", "optim.batch_size")


def pretrained_network(device: str) -> str:
    """Return the network whose published weights are fine-tuned by default."""
    return "resmlp_s24" if device == "cuda" else "resmlp_s12"


def strength_for(epochs: int, device: str = "cpu") -> Strength:
    """Return the row of `STRENGTHS` for a run of `epochs` epochs."""
    return next(row for row in STRENGTHS[device] if epochs >= row.epochs)


def auto_recipe(
    *,
    images: int,
    classes: int,
    image_size_median: int,
    model: str | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
    pretrained: bool = False,
    imbalance: float = 1.0,
    overrides: Mapping[str, Any] | None = None,
) -> tuple[Recipe, list[Reason]]:
    """Choose a recipe for `images` images in `classes` classes with sides of about `image_size_median` pixels.

    The largest class has `imbalance` times the images of the smallest. `overrides` are fields set by the user: they are
    kept, and the other choices follow from them.
    """
    if images < 1 or classes < 1 or image_size_median < 1:
        raise UsageError(
            f"{images} images of {image_size_median} pixels in {classes} classes cannot be trained on; "
            "expected at least one of each. Check the folder."
        )
    if device not in SCRATCH:
        raise UsageError(f"device is {device!r}, expected cpu or cuda.")
    overrides = overrides or {}
    known = read_overrides(overrides)
    model = overrides.get("model.name", model)
    budget = (FINE_TUNE if pretrained else SCRATCH)[device]
    has_options = any(key.startswith("model.options.") for key in overrides)
    reasons = _network(images, image_size_median, model, device, pretrained, budget, known, has_options=has_options)
    chosen = {reason.field: reason.value for reason in reasons} | known
    narrow = chosen.get("model.options.dim", NARROW_DIM + 1) <= NARROW_DIM
    peak_lr = FINE_TUNE_LR if pretrained else 3e-3 if narrow else 1e-3
    reasons += _run(images, device, pretrained, budget, peak_lr, known)
    if pretrained:
        reasons += _trained_network(reasons[0].value)
    chosen |= {reason.field: reason.value for reason in reasons} | known
    reasons += _augmentation(images, chosen["model.image_size"], chosen["schedule.epochs"], device, pretrained)
    reasons += balance_reasons(imbalance, overrides)
    start = Recipe(
        name="auto",
        source=f"Rules of thumb for {plural(images, 'image')} in {plural(classes, 'class')}.",
        model=ModelPart(name="resmlp_s12"),
        optim=OptimPart(lr=1e-3, batch_size=1),
        schedule=SchedulePart(epochs=1),
    )
    reasons = drop_overridden(reasons, overrides)
    return override(start, known | {reason.field: reason.value for reason in reasons}), reasons


def drop_overridden(reasons: list[Reason], overrides: Mapping[str, Any]) -> list[Reason]:
    """Drop choices of fields that the user has set. Setting either kind of warm-up sets both."""
    warmups = {"schedule.warmup_epochs", "schedule.warmup_steps"}
    fixed = overrides.keys() | (warmups if warmups & overrides.keys() else set())
    return [reason for reason in reasons if reason.field not in fixed]


def read_overrides(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `BASES` among the overrides, parsed by their types."""
    known: dict[str, Any] = {}
    for key in BASES:
        group, _, name = key.partition(".")
        if key in overrides and name in fields_of(GROUPS[group]):
            known[key] = read_value(key, overrides[key], fields_of(GROUPS[group])[name])
        elif key in overrides and str(overrides[key]).isdecimal():  # a network's option may also be a list
            known[key] = int(overrides[key])
    return known


def _network(
    images: int,
    median: int,
    model: str | None,
    device: str,
    pretrained: bool,
    budget: Budget,
    known: Mapping[str, Any],
    *,
    has_options: bool,
) -> list[Reason]:
    """Choose network and image size. Network options of the user (`has_options`) are those of ResMLP by default."""
    if model:
        reasons = [Reason("model.name", model, "as requested")]
    elif pretrained:
        reasons = [Reason("model.name", pretrained_network(device), "starts from trained weights")]
    elif device == "cuda" and images >= LARGE_IMAGES:
        reasons = [Reason("model.name", "resmlp_s24", f"{images:,} images are enough for 24 layers")]
    elif min(median, budget.largest_size) >= (SMALL_PIXELS if device == "cpu" else TINY_PIXELS) and not has_options:
        reasons = [Reason("model.name", "smlpnet_t", f"learned most in a given time on a {DEVICE_NAMES[device]}")]
    else:
        reasons = [Reason("model.name", "resmlp_s12", "the smallest ResMLP: fast, and sufficient for small datasets")]
    name = reasons[0].value

    if pretrained:
        size = known.get("model.image_size", TRAINED_PIXELS)
        return [*reasons, Reason("model.image_size", size, "the size the weights were trained at")]
    side = known.get("model.image_size", min(median, budget.largest_size))
    limit = f", at most {side} on {device}" if side < median else ""
    reasons += fitted_size(name, side, f"images are about {median} pixels{limit}", known)
    if model is None:
        size = next(reason.value for reason in reasons if reason.field == "model.image_size")
        reasons += fitted_width(name, size, device, images)
    return reasons


def fitted_size(name: str, side: int, about: str, known: Mapping[str, Any]) -> list[Reason]:
    """Choose an image size of about `side` pixels, and options that give the network enough patches."""
    requested = known.get("model.image_size")
    if name.partition("_")[0] not in PATCHED:
        size = requested or max(32, _multiple(side, 32))
        reasons = [Reason("model.image_size", size, f"{about}; multiples of 32")]
        if size < SMALL_PIXELS:
            why = f"so that {size} pixels are not reduced to one or two patches"
            reasons += [Reason(f"model.options.{key}", value, why) for key, value in fit_to_32_pixels(name).items()]
        return reasons
    published = _published_patch(name)
    fits = [p for p in (published, 16, 8, 4, 2, 1) if p <= published and side >= 7 * p and not (requested or p) % p]
    patch = known.get("model.options.patch_size") or next(iter(fits), 1)
    size = requested or _multiple(side, patch)
    reasons = [Reason("model.image_size", size, about)]
    if patch != published:
        reasons.append(Reason("model.options.patch_size", patch, f"{(size // patch) ** 2} patches per image"))
    return reasons


def fitted_width(name: str, size: int, device: str, images: int) -> list[Reason]:
    """Choose width and depth of a network for `images` images of `size` pixels."""
    if name.startswith("smlpnet"):
        if device == "cpu":
            return [
                Reason(f"model.options.{key}", value, "narrow without a GPU") for key, value in NARROW_SMLPNET.items()
            ]
        if size < SMALL_PIXELS or images > SHALLOW_IMAGES:
            return []
        return [
            Reason(f"model.options.{key}", value, "three times as fast as the published network")
            for key, value in SHALLOW_SMLPNET.items()
        ]
    if device == "cuda":
        return [Reason("model.options.dim", 192, "half the width for tiny images")] if size < TINY_PIXELS else []
    dim = 64 if size < 16 else 128 if size <= TINY_PIXELS else 192
    return [
        Reason("model.options.depth", 6, "half the layers without a GPU"),
        Reason("model.options.dim", dim, f"narrow without a GPU, for {size} pixels"),
    ]


def _run(
    images: int, device: str, pretrained: bool, budget: Budget, peak_lr: float, known: Mapping[str, Any]
) -> list[Reason]:
    epochs = known.get("schedule.epochs") or _within(round(budget.images / images), *budget.epochs)
    batch = known.get("optim.batch_size") or fitted_batch(images, budget.largest_batch, device)
    lr = float(f"{peak_lr * min(1.0, math.sqrt(batch / 64)):.1e}")
    steps = epochs * math.ceil(images / batch)
    drop_path = 0.05 if device == "cuda" and not pretrained and epochs >= SHORT_EPOCHS else 0.0
    return [
        Reason(
            "schedule.epochs",
            epochs,
            f"{plural(images, 'image')}: {plural(epochs, 'epoch')} (about {_short(epochs * images)} images seen)",
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
    """Choose settings that change a trained network as little as necessary (docs/results.md, "Fine-tuning")."""
    _, other, name = model.rpartition(":")
    decay = STAGES_DECAY if other and not name.startswith(COLUMNS) else BLOCKS_DECAY
    return [
        Reason("model.fit_head", True, "the new classifier is fitted before the trained weights change"),
        Reason("model.eval_mode", True, "batch statistics stay those of its training"),
        Reason("optim.layer_decay", decay, "the first layers change least"),
    ]


def fitted_batch(images: int, largest: int, device: str = "cpu") -> int:
    """Return a power of two with 32 or more updates per epoch, from `SMALLEST_BATCH` to `largest` and all images."""
    batch = _within(2 ** int(math.log2(max(1, images / 32))), SMALLEST_BATCH[device], largest)
    return min(batch, 2 ** int(math.log2(images)))


def fitted_warmup(images: int, batch: int, epochs: int) -> Reason:
    """Choose a twentieth of a long run, in epochs, or a tenth of a short one, in steps."""
    if epochs >= SHORT_EPOCHS:
        warmup = _within(round(epochs / 20), 1, 5)
        return Reason("schedule.warmup_epochs", warmup, f"a twentieth of {epochs} epochs, from 1 to 5")
    steps = max(1, images // batch) * epochs
    why = f"a tenth of {plural(steps, 'step')}" if steps > 1 else "the run has one step"
    return Reason("schedule.warmup_steps", max(1, round(SHORT_WARMUP * steps)), why)


def _augmentation(images: int, size: int, epochs: int, device: str, pretrained: bool) -> list[Reason]:
    small, tiny = size < SMALL_PIXELS, size < TINY_PIXELS
    # Fine-tuning is short, whatever its epochs; strongly mixed digits and letters are unrecognizable.
    strength = OFF if pretrained else strength_for(min(epochs, LONG_EPOCHS - 1) if tiny else epochs, device)
    by_hand = "trivial" if small else "three_augment"
    if small:
        crop = [
            Reason("augment.crop", "pad", f"{size} pixels are too few to cut a part of"),
            Reason("augment.crop_padding", max(1, size // 8), "an eighth of the side"),
        ]
    else:
        scale = 0.08 if images >= 100_000 and epochs >= SHORT_EPOCHS else 0.35
        crop = [
            Reason("augment.crop", "random_resized", "parts of the image, at random scales"),
            Reason("augment.crop_min_scale", scale, "smaller parts only for many images and long runs"),
        ]
    augmented = strength.policy and not tiny
    length = "fine-tuning" if pretrained else plural(epochs, "epoch")
    why = "too few pixels to alter" if tiny else "one random change per image" if augmented else length
    return [
        *crop,
        Reason("augment.flip", 0.0 if tiny else 0.5, "digits and letters have an orientation" if tiny else "mirrored"),
        Reason("augment.policy", "none" if not augmented else "randaugment" if device == "cuda" else by_hand, why),
        Reason("augment.mixup", strength.mixup, f"{strength.name}, for {length}"),
        Reason("augment.cutmix", strength.cutmix, "long runs only"),
        Reason("test.crop_ratio", 1.0 if small else 0.9, "the whole image" if small else "as in ResMLP's tests"),
    ]


def balance_reasons(imbalance: float, overrides: Mapping[str, Any]) -> list[Reason]:
    """Choose the remedy for uneven classes (docs/imbalance.md, "Measured"), unless the user set one."""
    method = method_of(overrides.get("objective.method", "classification"))
    is_set = any(key.startswith("balance.") for key in overrides)
    if imbalance < IMBALANCED_FROM or is_set or not method.reads_field("balance"):
        return []
    why = f"uneven classes: the largest has {imbalance:.0f} times the images of the smallest"
    return [Reason("balance.sampling", "sqrt", why)]


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
