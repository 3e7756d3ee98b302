"""`patchloom recipes [NAME…]`: the published recipes side by side, as in table 6.1 of the thesis."""

from typing import Annotated

import typer

from patchloom.cli.verb import completed


def recipes(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Names or patterns, such as 'deit3*'.", autocompletion=completed("recipe")),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="With the values for this network.", autocompletion=completed("model"))
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
    as_yaml: Annotated[bool, typer.Option("--yaml", help="One recipe as the file `train --recipe` reads.")] = False,
) -> None:
    """List the recipes; with names, compare them field by field."""
    from patchloom.cli.output import print_json, print_result
    from patchloom.cli.table import print_table
    from patchloom.recipes import get_recipe, list_recipes, recipe_table
    from patchloom_runtime.errors import UsageError

    if not names:
        rows = [get_recipe(name) for name in list_recipes()]
        if as_json:
            print_json([recipe.to_dict() for recipe in rows])
            return
        print_table(["recipe", "network", "source"], [(r.name, r.model.name, r.source) for r in rows])
        print("Next: patchloom recipes deit deit3 wightman_a2   (side by side)")
        print("Thesis: the one of the authors of DeiT, CaiT and ResMLP (docs/papers.md)")
        return
    chosen = []
    for name in names:
        found = list_recipes(name) or [name]
        chosen += [get_recipe(other, model) for other in found]
    if as_yaml:
        if len(chosen) != 1:
            raise UsageError(f"--yaml prints one recipe, given {len(chosen)}")
        print_result(chosen[0].to_yaml().rstrip("\n"))
    elif as_json:
        print_json([recipe.to_dict() for recipe in chosen])
    else:
        columns = ["", *(recipe.name for recipe in chosen)]
        print_table(columns, [(row.label, *row.values) for row in recipe_table(chosen)])
        for recipe in chosen:
            print_result(f"{recipe.name}: {recipe.source}")
