"""A table that compares recipes, with the rows of thesis table 6.1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from patchloom.recipes.methods import method_of
from patchloom.recipes.schema import Recipe

ABSENT = "×"


class RecipeTableRow(NamedTuple):
    """One row of the table: a printable value per recipe."""

    group: str
    key: str  # the recipe field that it shows, or the first of several
    label: str
    values: tuple[str, ...]


class _Line(NamedTuple):
    key: str
    label: str
    text: Callable[[Recipe], str]


def recipe_table(recipes: Sequence[Recipe]) -> list[RecipeTableRow]:
    """Return a row per line of table 6.1 and for what it omits (network, size, epochs), grouped as there."""
    return [
        RecipeTableRow(group, line.key, line.label, tuple(line.text(recipe) for recipe in recipes))
        for group, lines in LINES.items()
        for line in lines
    ]


def _number(value: float | None) -> str:
    return f"{value:g}" if value else ABSENT


def _tick(value: bool) -> str:
    return "✓" if value else ABSENT


def _reads(recipe: Recipe, key: str) -> bool:
    group, _, name = key.partition(".")
    return method_of(recipe.objective.method).reads_field(group, name)


def _tokens(recipe: Recipe) -> str:
    counts = method_of(recipe.objective.method).counts
    return "" if counts == "images" else f" {counts}"


def _has_loss(recipe: Recipe) -> bool:
    """Return whether only a classifier is trained, so that its loss can be chosen."""
    method = method_of(recipe.objective.method)
    return method.head != "none" and not method.views


def _warmup(recipe: Recipe) -> str:
    steps = recipe.schedule.warmup_steps
    return f"{steps:,} steps" if steps else _number(recipe.schedule.warmup_epochs)


def _weight_decay(recipe: Recipe) -> str:
    start, end = recipe.optim.weight_decay, recipe.optim.weight_decay_end
    return _number(start) if end is None else f"{start:g} → {end:g}"


def _views(recipe: Recipe) -> str:
    views = recipe.views
    if not _reads(recipe, "augment"):
        return ABSENT
    return f"{views.number} + {views.local} of {views.local_size}" if views.local else str(views.number)


def _rand_augment(recipe: Recipe) -> str:
    augment = recipe.augment
    if augment.policy != "randaugment":
        return ABSENT
    return f"{augment.policy_magnitude:g}/{augment.policy_magnitude_std:g}"


def _other_policy(recipe: Recipe) -> str:
    policy = recipe.augment.policy
    return ABSENT if policy in ("none", "randaugment", "three_augment") else policy


def _gray_blur_solarize(recipe: Recipe) -> str:
    augment = recipe.augment
    probabilities = augment.grey, augment.blur, augment.solarise
    return " / ".join(f"{probability:g}" for probability in probabilities) if any(probabilities) else ABSENT


def _layer_scale(recipe: Recipe) -> str:
    start = recipe.model.options.get("scale_init")
    return f"{start:g}" if isinstance(start, int | float) else ABSENT


LINES: dict[str, tuple[_Line, ...]] = {
    "run": (
        _Line("model.name", "Network", lambda r: r.model.name),
        _Line(
            "model.image_size",
            "Image size",
            lambda r: str(r.model.image_size) if _reads(r, "model.image_size") else ABSENT,
        ),
        _Line("schedule.epochs", "Epochs", lambda r: str(r.schedule.epochs)),
    ),
    "optimization": (
        _Line("optim.batch_size", "Batch size", lambda r: f"{r.optim.batch_size:,}{_tokens(r)}"),
        _Line("optim.name", "Optimizer", lambda r: r.optim.name),
        _Line("optim.lr", "LR", lambda r: _number(r.optim.peak_lr)),
        _Line("schedule.decay", "LR decay", lambda r: r.schedule.decay),
        _Line("optim.weight_decay", "Weight decay", _weight_decay),
        _Line("schedule.warmup_epochs", "Warm-up epochs", _warmup),
    ),
    "regularization": (
        _Line("objective.smoothing", "Label smoothing", lambda r: _number(r.objective.smoothing)),
        _Line("model.dropout", "Dropout", lambda r: _number(r.model.dropout)),
        _Line("model.drop_path", "Stochastic depth", lambda r: _number(r.model.drop_path)),
        _Line("augment.repeats", "Repeated augmentation", lambda r: _tick(r.augment.repeats > 1)),
        _Line("optim.clip_norm", "Gradient clipping", lambda r: _number(r.optim.clip_norm or r.optim.clip_each)),
        _Line("optim.ema_decay", "EMA", lambda r: _number(r.optim.ema_decay)),
    ),
    "augmentation": (
        _Line("views.number", "Views", _views),
        _Line("augment.flip", "Horizontal flip", lambda r: _tick(r.augment.flip > 0 and _reads(r, "augment"))),
        _Line(
            "augment.crop",
            "Random resized crop",
            lambda r: _tick(r.augment.crop == "random_resized" and _reads(r, "augment")),
        ),
        _Line("augment.policy_magnitude", "RandAugment", _rand_augment),
        _Line("augment.policy_choices", "3-Augment", lambda r: _tick(r.augment.policy == "three_augment")),
        _Line("augment.policy", "Other policy", _other_policy),
        _Line("model.options", "LayerScale", _layer_scale),
        _Line("augment.mixup", "Mixup α", lambda r: _number(r.augment.mixup)),
        _Line("augment.cutmix", "CutMix α", lambda r: _number(r.augment.cutmix)),
        _Line("augment.erasing", "Erasing", lambda r: _number(r.augment.erasing)),
        _Line("augment.color_jitter", "Color jitter", lambda r: _number(r.augment.color_jitter)),
        _Line("augment.hue", "Hue jitter", lambda r: _number(r.augment.hue)),
        _Line("augment.grey", "Grey / blur / solarise", _gray_blur_solarize),
    ),
    "test and loss": (
        _Line(
            "test.crop_ratio", "Test crop ratio", lambda r: _number(r.test.crop_ratio) if _reads(r, "test") else ABSENT
        ),
        _Line("objective.method", "Method", lambda r: r.objective.method),
        _Line("objective.loss", "Loss", lambda r: r.objective.loss if _has_loss(r) else ABSENT),
        _Line(
            "objective.distillation",
            "Distillation",
            lambda r: ABSENT if r.objective.distillation == "none" else r.objective.distillation,
        ),
        _Line("text.vocabulary", "Vocabulary", lambda r: f"{r.text.vocabulary:,}" if _reads(r, "text") else ABSENT),
        _Line(
            "text.averaged_epochs",
            "Averaged epochs",
            lambda r: str(r.text.averaged_epochs) if _reads(r, "text") else ABSENT,
        ),
        _Line("text.beams", "Beams", lambda r: str(r.text.beams) if _reads(r, "text") else ABSENT),
    ),
}
