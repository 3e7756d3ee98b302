"""Recipes side by side, with the rows of thesis table 6.1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from patchloom.recipes.methods import method_of
from patchloom.recipes.schema import Recipe

ABSENT = "×"


class RecipeTableRow(NamedTuple):
    """One line of the table: a printable value for each recipe."""

    group: str
    label: str
    values: tuple[str, ...]


def recipe_table(recipes: Sequence[Recipe]) -> list[RecipeTableRow]:
    """A row for each line of table 6.1 and those it leaves out (network, size, epochs), grouped as there."""
    return [
        RecipeTableRow(group, label, tuple(show(recipe) for recipe in recipes))
        for group, lines in LINES.items()
        for label, show in lines.items()
    ]


def _number(value: float | None) -> str:
    return f"{value:g}" if value else ABSENT


def _tick(value: bool) -> str:
    return "✓" if value else ABSENT


def _reads(recipe: Recipe, key: str) -> bool:
    """Whether the recipe's method reads a group or a field."""
    group, _, name = key.partition(".")
    return method_of(recipe.objective.method).reads_field(group, name)


def _tokens(recipe: Recipe) -> str:
    counts = method_of(recipe.objective.method).counts
    return "" if counts == "images" else f" {counts}"


def _decides(recipe: Recipe) -> bool:
    """Whether a classifier is all that is trained, so that there is a choice of its loss."""
    method = method_of(recipe.objective.method)
    return method.head != "none" and not method.views


def _warmup(recipe: Recipe) -> str:
    steps = recipe.schedule.warmup_steps
    return f"{steps} steps" if steps else _number(recipe.schedule.warmup_epochs)


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


def _grey_blur_solarise(recipe: Recipe) -> str:
    augment = recipe.augment
    probabilities = augment.grey, augment.blur, augment.solarise
    return " / ".join(f"{probability:g}" for probability in probabilities) if any(probabilities) else ABSENT


def _layer_scale(recipe: Recipe) -> str:
    start = recipe.model.options.get("scale_init")
    return f"{start:g}" if isinstance(start, int | float) else ABSENT


LINES: dict[str, dict[str, Callable[[Recipe], str]]] = {
    "run": {
        "Network": lambda r: r.model.name,
        "Image size": lambda r: str(r.model.image_size) if _reads(r, "model.image_size") else ABSENT,
        "Epochs": lambda r: str(r.schedule.epochs),
    },
    "optimisation": {
        "Batch size": lambda r: f"{r.optim.batch_size}{_tokens(r)}",
        "Optimizer": lambda r: r.optim.name,
        "LR": lambda r: _number(r.optim.peak_lr),
        "LR decay": lambda r: r.schedule.decay,
        "Weight decay": _weight_decay,
        "Warm-up epochs": _warmup,
    },
    "regularisation": {
        "Label smoothing": lambda r: _number(r.objective.smoothing),
        "Dropout": lambda r: _number(r.model.dropout),
        "Stochastic depth": lambda r: _number(r.model.drop_path),
        "Repeated augmentation": lambda r: _tick(r.augment.repeats > 1),
        "Gradient clipping": lambda r: _number(r.optim.clip_norm or r.optim.clip_each),
        "EMA": lambda r: _number(r.optim.ema_decay),
    },
    "augmentation": {
        "Views": _views,
        "Horizontal flip": lambda r: _tick(r.augment.flip > 0 and _reads(r, "augment")),
        "Random resized crop": lambda r: _tick(r.augment.crop == "random_resized" and _reads(r, "augment")),
        "RandAugment": _rand_augment,
        "3-Augment": lambda r: _tick(r.augment.policy == "three_augment"),
        "Other policy": _other_policy,
        "LayerScale": _layer_scale,
        "Mixup α": lambda r: _number(r.augment.mixup),
        "CutMix α": lambda r: _number(r.augment.cutmix),
        "Erasing": lambda r: _number(r.augment.erasing),
        "Color jitter": lambda r: _number(r.augment.color_jitter),
        "Hue jitter": lambda r: _number(r.augment.hue),
        "Grey / blur / solarise": _grey_blur_solarise,
    },
    "test and loss": {
        "Test crop ratio": lambda r: _number(r.test.crop_ratio) if _reads(r, "test") else ABSENT,
        "Method": lambda r: r.objective.method,
        "Loss": lambda r: r.objective.loss if _decides(r) else ABSENT,
        "Distillation": lambda r: ABSENT if r.objective.distillation == "none" else r.objective.distillation,
        "Vocabulary": lambda r: str(r.text.vocabulary) if _reads(r, "text") else ABSENT,
        "Averaged epochs": lambda r: str(r.text.averaged_epochs) if _reads(r, "text") else ABSENT,
        "Beams": lambda r: str(r.text.beams) if _reads(r, "text") else ABSENT,
    },
}
