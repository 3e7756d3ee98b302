"""Recipes: the settings of a training run. `get_recipe("deit3", "deit3_l")`, changed with `override`, saved as YAML."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from patchloom.recipes.auto import Reason as Reason
    from patchloom.recipes.auto import auto_recipe as auto_recipe
    from patchloom.recipes.registry import get_recipe as get_recipe
    from patchloom.recipes.registry import list_recipes as list_recipes
    from patchloom.recipes.schema import Recipe as Recipe
    from patchloom.recipes.schema import difference as difference
    from patchloom.recipes.schema import field_names as field_names
    from patchloom.recipes.schema import flatten as flatten
    from patchloom.recipes.schema import override as override
    from patchloom.recipes.table import RecipeTableRow as RecipeTableRow
    from patchloom.recipes.table import recipe_table as recipe_table

# Names are imported on first use: prediction needs none of them.
_MODULES = {
    "Reason": "auto",
    "Recipe": "schema",
    "RecipeTableRow": "table",
    "auto_recipe": "auto",
    "difference": "schema",
    "field_names": "schema",
    "flatten": "schema",
    "get_recipe": "registry",
    "list_recipes": "registry",
    "override": "schema",
    "recipe_table": "table",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'patchloom.recipes' has no attribute {name!r}")
    return getattr(import_module(f"patchloom.recipes.{_MODULES[name]}"), name)
