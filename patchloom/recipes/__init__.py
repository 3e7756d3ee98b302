"""Recipes: what is run. `get_recipe("deit3", "deit3_l")`, changed with `override`, kept as YAML."""

# Importing a family registers its recipes; the order is that of `list_recipes`.
from patchloom.recipes import (
    cait,
    deit,
    deit3,
    dino,
    grafit,
    mixer,
    patchconvnet,
    resmlp,
    small_images,
    smlpnet,
    transfer,
)
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
