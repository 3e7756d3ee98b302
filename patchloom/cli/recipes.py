"""`patchloom recipes [NAME…]`: the published recipes side by side, as in table 6.1 of the thesis."""

from dataclasses import dataclass
from typing import Annotated

from patchloom.cli.options import Json
from patchloom.options import Argument, Option


@dataclass(frozen=True, kw_only=True)
class RecipesOptions:
    names: Annotated[list[str] | None, Argument("Names or patterns, such as 'deit3*'.", complete="recipe")] = None
    model: Annotated[str | None, Option("Network to show the values for.", complete="model")] = None
    as_yaml: Annotated[bool, Option("Print one recipe as the file that `train --recipe` reads.", name="yaml")] = False
    as_json: Json = False


def recipes(options: RecipesOptions) -> None:
    """List the recipes; with names, compare them field by field.

    patchloom recipes deit deit3
    """
    from patchloom.cli.output import print_json, print_result
    from patchloom.cli.table import print_table
    from patchloom.recipes import get_recipe, list_recipes, recipe_table
    from patchloom_runtime.errors import UsageError

    if not options.names:
        rows = [get_recipe(name) for name in list_recipes()]
        if options.as_json:
            print_json([recipe.to_dict() for recipe in rows])
            return
        print_table(["recipe", "network", "source"], [(r.name, r.model.name, r.source) for r in rows])
        print("Next: patchloom recipes deit deit3 wightman_a2   (side by side)")
        print("Thesis: by one of the authors of DeiT, CaiT and ResMLP (docs/papers/)")
        return
    chosen = [get_recipe(known, options.model) for name in options.names for known in list_recipes(name) or [name]]
    if options.as_yaml:
        if len(chosen) != 1:
            raise UsageError(f"--yaml prints one recipe, got {len(chosen)}")
        print_result(chosen[0].to_yaml().rstrip("\n"))
    elif options.as_json:
        print_json([recipe.to_dict() for recipe in chosen])
    else:
        columns = ["", *(recipe.name for recipe in chosen)]
        print_table(columns, [(row.label, *row.values) for row in recipe_table(chosen)])
        for recipe in chosen:
            print_result(f"{recipe.name}: {recipe.source}")
