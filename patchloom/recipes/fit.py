"""Fitting a named recipe to other data and machines than it was made for.

Published recipes assume a million images and a machine with many GPUs. `misfits` reports where that matters; `fitted`
keeps the method and adapts its numbers by the rules of `auto` and of patchloom's recipes for small images: batch,
learning rate, image size, epochs, warm-up and, without a GPU, the network. The user's overrides are kept, and the rest
follows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from patchloom.recipes.auto import (
    BASES,
    FINE_TUNE,
    SCRATCH,
    SMALL_PIXELS,
    Budget,
    Reason,
    balance_reasons,
    drop_overridden,
    fitted_batch,
    fitted_size,
    fitted_warmup,
    fitted_width,
    read_overrides,
    strength_for,
)
from patchloom.recipes.methods import method_of
from patchloom.recipes.schema import Recipe, flatten, override

# Slow copies with DINO's and Grafit's published decay, 0.996, still contain 2 % of their random start after this many
# updates, and most of it after 120.
FEW_UPDATES = 1_000
# Share of the training images. Warm-up and schedule count epochs: with fewer than four updates per epoch they jump.
LARGEST_BATCH_SHARE = 0.25
FAR_SMALLER = 0.5  # images below this share of the recipe's size
A_DAY_S = 86_400
# Training images of the dataset a recipe was made for, by its name; fine-tuning recipes are for datasets of many sizes.
MADE_FOR = (
    ("*transfer*", None),
    ("*finetune*", None),
    ("*small_images", 50_000),
    ("*21k*", 14_197_122),
    ("*jft*", 300_000_000),
    ("*", 1_281_167),
)
# The smallest network of each family, for machines without a GPU.
SMALLEST = {
    "resmlp": "resmlp_s12",
    "mixer": "mixer_s16",
    "smlpnet": "smlpnet_t",
    "deit": "deit_ti",
    "deit3": "deit3_t",
    "cait": "cait_xxs24",
    "patchconvnet": "patchconvnet_s20",
    "timm:resnet50": "timm:resnet18",
}
# Each view costs as much as an image; without a GPU, two of full size and two small ones must suffice.
VIEWS_ON_CPU, LOCAL_ON_CPU = 2, 2
# Maximum updates → decay with which the slow copy of the network (DINO's teacher, Grafit's target) still follows.
FOLLOWING = ((3_000, 0.97), (20_000, 0.99))
FEW_IMAGES = 100_000


@dataclass(frozen=True)
class Facts:
    """Facts about data and machine that are known before a run."""

    images: int
    image_size_median: int
    device: Literal["cpu", "cuda"] = "cpu"
    pretrained: bool = False
    imbalance: float = 1.0  # training images of the largest class divided by those of the smallest


def misfits(recipe: Recipe, facts: Facts) -> list[str]:
    """Return what does not suit the data, with numbers; empty if everything does."""
    batch, epochs, images = recipe.optim.batch_size, recipe.schedule.epochs, facts.images
    updates = images // batch * epochs
    messages = []
    if updates < FEW_UPDATES:
        messages.append(f"{updates:,} updates of {batch:,} images are few (below {FEW_UPDATES:,}) for your {images:,}")
    elif batch > LARGEST_BATCH_SHARE * images:
        messages.append(f"its batch of {batch:,} is {batch / images:.0%} of your {images:,} images, above a quarter")
    size = recipe.model.image_size
    if facts.image_size_median < FAR_SMALLER * size and not facts.pretrained:
        messages.append(f"it uses images at {size} px and yours are about {facts.image_size_median}")
    return messages


def advice(recipe: Recipe, facts: Facts, overrides: Mapping[str, Any]) -> str:
    """Return one line on what does not suit and what the fitted recipe would do; "" if everything suits."""
    reasons = misfits(recipe, facts)
    if not reasons:
        return ""
    images = next((images for pattern, images in MADE_FOR if fnmatchcase(recipe.name, pattern)), None)
    made = f" was made for {_short(images)} images" if images else ""
    offered, _ = fitted(recipe, facts, overrides)
    batch = offered.optim.batch_size
    updates = max(1, facts.images // batch) * offered.schedule.epochs
    option = f"--fit ({updates:,} updates of {batch:,} images at {offered.model.image_size} px)"
    if misfits(offered, facts) == reasons:
        option = f"--fit, and omit {' or '.join(key for key in BASES if key in overrides)}, which it would keep"
    elif updates < FEW_UPDATES:
        option += ", and more epochs"
    return f"recipe {recipe.name}{made}: {', and '.join(reasons)}. Fit it: {option}"


def balance_advice(recipe: Recipe, facts: Facts, overrides: Mapping[str, Any]) -> str:
    """Return one line on uneven classes and the remedy that `auto` would use; "" if there is nothing to say."""
    if not method_of(recipe.objective.method).reads_field("balance") or recipe.balance.remedies:
        return ""
    return "".join(
        f"{reason.why}; --set {reason.field}={reason.value} helps the small ones (docs/imbalance.md)"
        for reason in balance_reasons(facts.imbalance, overrides)
    )


def smaller_network(recipe: Recipe, facts: Facts) -> list[Reason]:
    """Replace a network that is too slow for the machine; empty if it can stay."""
    name = recipe.model.name
    if facts.device == "cuda" or facts.pretrained or name.endswith("_distilled"):
        return []
    smaller = SMALLEST.get(name if name in SMALLEST else name.partition("_")[0], name)
    reasons = [Reason("model.name", smaller, "the smallest of its family without a GPU")] if smaller != name else []
    if smaller == SMALLEST["resmlp"]:
        largest = SCRATCH[facts.device].largest_size
        size = min(recipe.model.image_size, facts.image_size_median, largest)
        reasons += fitted_width(recipe.model.name, size, facts.device, facts.images)
    return reasons


def fitted(recipe: Recipe, facts: Facts, overrides: Mapping[str, Any]) -> tuple[Recipe, list[Reason]]:
    """Return the recipe for these data and this machine, and the reason for every changed field."""
    known = read_overrides(overrides)
    budget = (FINE_TUNE if facts.pretrained else SCRATCH)[facts.device]
    reasons = _size(recipe, facts, budget, known)
    reasons += _views(recipe, facts, reasons)
    reasons += _run(recipe, facts, budget, known, _view_images(override(recipe, _values(reasons))))
    reasons += _method(recipe, facts, {**_values(reasons), **known})
    before, method = flatten(recipe), method_of(recipe.objective.method)
    reasons = [r for r in drop_overridden(reasons, overrides) if method.reads_field(*r.field.split(".")[:2])]
    changed = [r for r in reasons if before.get(r.field) != r.value]
    return override(recipe, _values(changed)), changed


def _values(reasons: list[Reason]) -> dict[str, Any]:
    return {reason.field: reason.value for reason in reasons}


def _size(recipe: Recipe, facts: Facts, budget: Budget, known: Mapping[str, Any]) -> list[Reason]:
    """Use images no larger than they are and than the machine can afford."""
    size, median = recipe.model.image_size, facts.image_size_median
    side = known.get("model.image_size", min(size, median, budget.largest_size))
    if facts.pretrained or side >= size:
        return []
    limit = f", at most {budget.largest_size} on {facts.device}" if side < min(size, median) else ""
    # Options that the recipe sets for its network are kept.
    sized = fitted_size(recipe.model.name, side, f"images are about {median} pixels{limit}", known)
    return [r for r in sized if r.field.removeprefix("model.options.") not in recipe.model.options]


def _views(recipe: Recipe, facts: Facts, reasons: list[Reason]) -> list[Reason]:
    part, size = recipe.views, recipe.model.image_size
    chosen = _values(reasons).get("model.image_size", size)
    fitted_views = []
    if part.local and chosen != size:
        patch = _values(reasons).get("model.options.patch_size", 16)
        local = max(patch, round(part.local_size * chosen / size / patch) * patch)
        fitted_views.append(Reason("views.local_size", local, f"the same share of {chosen} pixels"))
    if facts.device == "cpu" and part.number > VIEWS_ON_CPU:
        fitted_views.append(Reason("views.number", VIEWS_ON_CPU, f"{part.number} cost as many images without a GPU"))
    if facts.device == "cpu" and part.local > LOCAL_ON_CPU:
        fitted_views.append(Reason("views.local", LOCAL_ON_CPU, f"{part.local} cost too much without a GPU"))
    return fitted_views


def _view_images(recipe: Recipe) -> float:
    """Return the cost of all views of one image, in images of full size."""
    views = recipe.views
    return views.number + views.local * (views.local_size / recipe.model.image_size) ** 2


def _run(recipe: Recipe, facts: Facts, budget: Budget, known: Mapping[str, Any], views: float) -> list[Reason]:
    optim, images = recipe.optim, facts.images
    batch = known.get("optim.batch_size") or min(optim.batch_size, fitted_batch(images, budget.largest_batch))
    affordable = max(budget.epochs[0], round(budget.images / images / views))
    steps = recipe.schedule.steps if "schedule.steps" not in known else 0
    wanted = max(1, round(steps * optim.batch_size / images)) if steps else recipe.schedule.epochs
    epochs = known.get("schedule.epochs") or min(wanted, affordable)
    updates = max(1, images // batch) * epochs
    why = f"{images // batch:,} updates per epoch instead of {images // optim.batch_size:,}"
    reasons = [Reason("optim.batch_size", batch, why)]
    if batch != optim.batch_size:
        # The rate of SGD scales with the batch; steps of Adam and LAMB are normalized, so it scales with the root.
        power = 1.0 if optim.name == "sgd" else 0.5
        rate = (batch / optim.batch_size) ** power
        why = f"{optim.peak_lr:.2g} at {optim.batch_size:,}, times {'batch' if power == 1 else 'root of batch'}"
        lr = float(f"{optim.peak_lr * rate:.2g}")
        reasons += [
            Reason("optim.lr", lr, why),
            Reason("optim.lr_reference_batch", None, "the rate is for this batch"),
            Reason(
                "schedule.min_lr",
                min(lr, float(f"{recipe.schedule.min_lr * rate:.2g}")),
                "in proportion to the peak",
            ),
        ]
    why = f"{updates:,} updates; about {_short(epochs * images)} images seen"
    reasons.append(Reason("schedule.epochs", epochs, why))
    if steps:
        share = min(1.0, updates / steps)
        warmup_steps = max(1, round(recipe.schedule.warmup_steps * share)) if recipe.schedule.warmup_steps else 0
        reasons.append(Reason("schedule.steps", 0, f"{updates:,} updates instead of {steps:,}"))
        reasons.append(Reason("schedule.warmup_steps", warmup_steps, "the same share of the updates"))
    if recipe.schedule.warmup_epochs:
        warmup = fitted_warmup(images, batch, epochs)
        if warmup.field == "schedule.warmup_steps":
            reasons.append(Reason("schedule.warmup_epochs", 0, "it is counted in steps"))
        if warmup.field == "schedule.warmup_steps" or warmup.value < recipe.schedule.warmup_epochs:
            reasons.append(warmup)
    if recipe.schedule.step_epochs and epochs != recipe.schedule.epochs:
        reasons.append(scaled_steps(recipe, epochs))
    return reasons


def scaled_steps(recipe: Recipe, epochs: int) -> Reason:
    """Scale the epochs at which the rate drops to a run of `epochs` epochs."""
    share = epochs / recipe.schedule.epochs
    steps = tuple(sorted({max(1, round(epoch * share)) for epoch in recipe.schedule.step_epochs}))
    return Reason("schedule.step_epochs", steps, f"at the same shares of {epochs} epochs")


def _method(recipe: Recipe, facts: Facts, chosen: Mapping[str, Any]) -> list[Reason]:
    epochs, batch = chosen["schedule.epochs"], chosen["optim.batch_size"]
    size = chosen.get("model.image_size", recipe.model.image_size)
    augment = recipe.augment
    compares = recipe.views.number > 1 or recipe.views.local > 0
    reasons = []
    if augment.repeats > 1:
        why = f"with {augment.repeats} copies an epoch contains only some of the images"
        reasons.append(Reason("augment.repeats", 1, why))
    strength = strength_for(epochs)
    reasons += [
        Reason(f"augment.{name}", most, f"{strength.name}, for {epochs} epochs")
        for name, most in (("mixup", strength.mixup), ("cutmix", strength.cutmix))
        if getattr(augment, name) > most
    ]
    if size < SMALL_PIXELS:
        reasons += _small_images(recipe, size, compares)
    if recipe.model.drop_path and (facts.device == "cpu" or epochs < recipe.schedule.epochs / 2):
        reasons.append(Reason("model.drop_path", 0.0, "the run is too short to need it"))
    if method_of(recipe.objective.method).learns_from == "clusters":
        clusters = min(recipe.grafit.clusters, max(2, facts.images // 20))
        reasons.append(Reason("grafit.clusters", clusters, "20 images per cluster or more"))
    if facts.images < FEW_IMAGES:
        reasons += _few_images(recipe, facts, max(1, facts.images // batch) * epochs)
    return reasons


def _small_images(recipe: Recipe, size: int, compares: bool) -> list[Reason]:
    """Adapt crops and views as in small_images, dino_small_images and grafit_small_images."""
    why = f"smaller parts of {size} pixels show too little"
    reasons = [Reason("test.crop_ratio", 1.0, "the whole image")]
    if not compares:
        return [
            *reasons,
            Reason("augment.crop", "pad", f"{size} pixels are too few to cut a part of"),
            Reason("augment.crop_padding", max(1, size // 8), "an eighth of the side"),
        ]
    reads = method_of(recipe.objective.method).reads
    least = 0.3 if "dino" in reads else 0.2
    if recipe.augment.crop_min_scale != least:
        reasons.append(Reason("augment.crop_min_scale", least, why))
    if recipe.views.local:
        reasons.append(Reason("views.local_min_scale", max(0.15, recipe.views.local_min_scale), why))
    if recipe.augment.blur:
        blurred = ("augment.blur", "views.local_blur", "views.second_blur")
        reasons += [Reason(key, 0.0, f"{size} pixels are too few to blur") for key in blurred]
    if "grafit" in reads and recipe.augment.policy != "none":
        reasons += [
            Reason("augment.policy", "none", "as measured for Grafit on small images"),
            Reason("augment.erasing", 0.0, "as measured for Grafit on small images"),
            Reason("augment.color_jitter", 0.4, "as measured for Grafit on small images"),
            Reason("augment.grey", 0.2, "as measured for Grafit on small images"),
        ]
    return reasons


def _few_images(recipe: Recipe, facts: Facts, updates: int) -> list[Reason]:
    """Adapt heads, slow copies and loss weights to a small dataset."""
    following = next((decay for most, decay in FOLLOWING if updates < most), None)
    method, reasons = method_of(recipe.objective.method), []
    if "dino" in method.reads:
        outputs = min(recipe.dino.outputs, max(256, 2 ** int(math.log2(facts.images / 10))))
        reasons += [
            Reason("dino.outputs", outputs, f"prototypes for {facts.images:,} images"),
            Reason("dino.batch_norm", True, "as dino_small_images: with few images it collapses sooner"),
        ]
        if recipe.optim.weight_decay_end:
            reasons.append(Reason("optim.weight_decay_end", 0.1, "as dino_small_images"))
        if following and following < recipe.dino.teacher_momentum:
            reasons.append(
                Reason("dino.teacher_momentum", following, f"the teacher follows within {updates:,} updates")
            )
    if method.projector != "none" and method.options["instance"] != "none":
        if recipe.grafit.instance_weight == 1.0:
            reasons.append(Reason("grafit.instance_weight", 2.0, "as grafit_small_images, for fine classes"))
        if following and following < recipe.grafit.target_decay:
            reasons.append(Reason("grafit.target_decay", following, f"the target follows within {updates:,} updates"))
    if recipe.optim.name == "sgd" and recipe.optim.weight_decay < 5e-4:
        reasons.append(Reason("optim.weight_decay", 5e-4, "as grafit_small_images, against overfitting"))
    return reasons


def _short(value: int) -> str:
    return f"{value / 1e6:.2f} M" if value >= 1e6 else f"{value:,}"
