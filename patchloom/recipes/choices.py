"""Resolving the user's options to the recipe of a run, with the reason for every field that is not published."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchloom.recipes import Reason, auto_recipe, get_recipe, override
from patchloom.recipes.fit import Facts, fitted, scaled_steps, smaller_network
from patchloom.recipes.methods import method_of
from patchloom.recipes.plain_yaml import MAX_CHARACTERS
from patchloom.recipes.schema import Recipe
from patchloom_runtime.errors import UsageError
from patchloom_runtime.printable import plural
from patchloom_runtime.untrusted import read_plain


@dataclass(frozen=True)
class Choice:
    """One field of the resolved recipe and its origin."""

    key: str
    value: Any
    why: str  # "auto: …", "given", or "recipe"


Automatic = Callable[[Facts, str | None, dict[str, Any]], tuple[Recipe, list[Reason]]]  # (facts, network, overrides)


def resolve_recipe(
    facts: Callable[[], Facts],
    *,
    classes: int,
    recipe: str | Recipe | None,
    model: str | None,
    changes: dict[str, Any],
    fit: bool = False,
    automatic: Automatic | None = None,
) -> tuple[Recipe, list[Choice]]:
    """Return the recipe of a run and the reason for every field that is not published.

    With `fit`, a named recipe is fitted to the data and the machine; `auto` always is. `facts` are only computed then.
    `automatic` replaces `auto_recipe` for tasks other than classification.
    """
    reasons: list[Reason] = []
    resolved = base_recipe(recipe, model)
    if resolved is None and automatic is not None:
        resolved, reasons = automatic(facts(), model, changes)
    elif resolved is None:
        known = facts()
        resolved, reasons = auto_recipe(
            images=known.images,
            classes=classes,
            image_size_median=known.image_size_median,
            model=model,
            device=known.device,
            pretrained=known.pretrained,
            imbalance=known.imbalance,
            overrides=changes,
        )
    elif fit:
        known = facts()
        requested = model or changes.get("model.name")
        smaller = [] if requested else smaller_network(resolved, known)
        network = {reason.field: reason.value for reason in smaller}
        if "model.name" in network:  # its documents may have other values for this network
            resolved = base_recipe(recipe, network["model.name"]) or resolved
        resolved, reasons = fitted(override(resolved, network), known, changes)
        reasons = smaller + reasons
    chosen = [Choice(reason.field, reason.value, f"auto: {reason.why}") for reason in reasons]
    resolved, user_choices = changed_recipe(resolved, changes)
    replaced = {choice.key for choice in user_choices}
    return resolved, [choice for choice in chosen if choice.key not in replaced] + user_choices


def changed_recipe(recipe: Recipe, changes: dict[str, Any]) -> tuple[Recipe, list[Choice]]:
    """Return the recipe with the user's changes and the fields that must follow them."""
    distills = _distillation(recipe, changes)
    follows = [*distills, *_following(recipe, changes | {choice.key: choice.value for choice in distills})]
    resolved = override(recipe, changes | {choice.key: choice.value for choice in follows})
    return resolved, [Choice(key, value, "given") for key, value in changes.items()] + follows


def _distillation(recipe: Recipe, changes: dict[str, Any]) -> list[Choice]:
    """Return the kind of distillation that a new teacher needs, if the recipe has none."""
    key = "objective.distillation"
    method = method_of(str(changes.get("objective.method", recipe.objective.method)))
    if not changes.get("objective.teacher") or key in changes or method.teacher != "classes":
        return []
    return [Choice(key, "hard", "auto: as in DeiT")] if recipe.objective.distillation == "none" else []


def with_steps(
    recipe: Recipe, choices: list[Choice], images: int, changes: dict[str, Any]
) -> tuple[Recipe, list[Choice]]:
    """Replace `schedule.steps` by the nearest number of epochs on `images` images, unless the user set the epochs."""
    steps, batch = recipe.schedule.steps, recipe.optim.batch_size
    if not steps or "schedule.epochs" in changes:
        return recipe, choices
    epochs = max(1, round(steps / max(1, images // batch)))
    why = f"auto: {steps:,} updates of {batch} images from {images:,}"
    others = [choice for choice in choices if choice.key != "schedule.epochs"]
    return override(recipe, {"schedule.epochs": epochs}), [*others, Choice("schedule.epochs", epochs, why)]


def base_recipe(recipe: str | Recipe | None, model: str | None) -> Recipe | None:
    """Return the unchanged recipe for a name, file or value; None for `auto`, which depends on the data."""
    if recipe is None or recipe == "auto":
        return None
    if isinstance(recipe, str) and not recipe.endswith((".yaml", ".yml")):
        return get_recipe(recipe, model)
    base = recipe if isinstance(recipe, Recipe) else Recipe.from_yaml(_text(Path(recipe)))
    return base if model is None else override(base, {"model.name": model})


def _following(recipe: Recipe, changes: dict[str, Any]) -> list[Choice]:
    """Return the fields that must follow a shorter run or a smaller batch, unless the user set them too."""
    follows: list[Choice] = []
    # Without its warm-up and final rate the recipe can be changed freely; their new values depend on the result.
    loose = {"schedule.warmup_epochs": 0, "schedule.warmup_steps": 0, "schedule.min_lr": 0.0}
    changed = override(recipe, loose | changes)
    longest = max(1, changed.schedule.epochs // 10)
    own_warmup = changes.keys() & {"schedule.warmup_epochs", "schedule.warmup_steps"}
    if not own_warmup and "schedule.epochs" in changes and recipe.schedule.warmup_epochs > longest:
        why = f"auto: a tenth of {plural(changed.schedule.epochs, 'epoch')}"
        follows.append(Choice("schedule.warmup_epochs", longest, why))
    if recipe.schedule.step_epochs and "schedule.epochs" in changes and "schedule.step_epochs" not in changes:
        drops = scaled_steps(recipe, changed.schedule.epochs)
        follows.append(Choice(drops.field, drops.value, f"auto: {drops.why}"))
    if recipe.schedule.steps and "schedule.epochs" in changes and "schedule.steps" not in changes:
        follows.append(Choice("schedule.steps", 0, "auto: epochs are given"))
    peak = changed.optim.peak_lr
    if "schedule.min_lr" not in changes and recipe.schedule.min_lr >= peak:
        follows.append(Choice("schedule.min_lr", peak / 100, f"auto: below the peak of {peak:.2g} at this batch"))
    return follows


def _text(path: Path) -> str:
    if not os.path.isfile(path):
        raise UsageError(f"{path}: no such recipe file. Use one written by a run, or a name from `patchloom recipes`")
    try:
        return read_plain(path, MAX_CHARACTERS).decode("utf-8")
    except OSError as error:
        raise UsageError(f"recipe {path} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not a recipe: it is not text ({error.reason} at byte {error.start})") from error
