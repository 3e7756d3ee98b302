"""Recipes: what is run. `get_recipe("deit3", "deit3_l")`, changed with `override`, kept as YAML."""

# Importing a family registers its recipes; the order is that of `list_recipes`.
from patchloom.recipes import deit, resmlp, mixer, smlpnet, cait, patchconvnet, deit3, transfer  # noqa: F401, I001
from patchloom.recipes import grafit, dino, small_images, translation  # noqa: F401
from patchloom.recipes.auto import Reason, auto_recipe
from patchloom.recipes.registry import get_recipe, list_recipes
from patchloom.recipes.schema import Recipe, difference, field_names, flatten, override
from patchloom.recipes.table import Row, recipe_table

__all__ = [
    "Reason",
    "Recipe",
    "Row",
    "auto_recipe",
    "difference",
    "field_names",
    "flatten",
    "get_recipe",
    "list_recipes",
    "override",
    "recipe_table",
]
