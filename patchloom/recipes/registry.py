"""Recipes by name. A recipe is a function of the network's name that states its differences from another recipe."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any, ParamSpec

from patchloom.recipes.schema import Recipe
from patchloom_runtime.errors import UsageError, nearest

P = ParamSpec("P")
# Importing one registers its recipes; the order is that of `list_recipes`.
_FAMILIES = (
    *("deit", "resmlp", "mixer", "smlpnet", "cait", "patchconvnet", "deit3", "transfer"),
    *("grafit", "dino", "distillation", "small_images", "segmentation", "detection", "translation"),
)
_RECIPES: dict[str, Callable[..., Recipe]] = {}


def recipe(function: Callable[P, Recipe]) -> Callable[P, Recipe]:
    """Register a recipe function. Its results carry the function's name."""

    @functools.wraps(function)
    def named(*args: P.args, **kwargs: P.kwargs) -> Recipe:
        return dataclasses.replace(function(*args, **kwargs), name=function.__name__)

    _RECIPES[function.__name__] = named
    return named


def based_on(base: Recipe, *, source: str, **changes: Any) -> Recipe:
    """Return `base` with another source and, per group, the fields that differ: `optim={"lr": 1e-3}`."""
    for group, fields in changes.items():
        if isinstance(fields, Mapping):
            changes[group] = dataclasses.replace(getattr(base, group), **fields)
    return dataclasses.replace(base, source=source, **changes)


def get_recipe(name: str, model: str | None = None) -> Recipe:
    """Return the recipe `name` with its published values for `model` (default: the recipe's own network).

    Hyphens are read as underscores.
    """
    name, known = name.replace("-", "_"), _all()
    if name not in known:
        hint = nearest(name, list(known)) or " List them with `patchloom recipes`."
        raise UsageError(f'There is no recipe "{name}".{hint}')
    return known[name](model) if model else known[name]()


def list_recipes(pattern: str = "*") -> list[str]:
    """Return the names of recipes that match a shell pattern, family by family."""
    return [name for name in _all() if fnmatchcase(name, pattern)]


def _all() -> dict[str, Callable[..., Recipe]]:
    for family in _FAMILIES:
        import_module(f"patchloom.recipes.{family}")
    return _RECIPES
