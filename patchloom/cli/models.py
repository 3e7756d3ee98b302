"""`patchloom models [NAME…]`: which networks there are, what they cost, which options they take."""

from typing import Annotated, Any

import typer

from patchloom.cli.verb import completed


def models(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Names or patterns, such as 'cait_*'.", autocompletion=completed("model")),
    ] = None,
    size: Annotated[int, typer.Option(help="Image size in pixels.")] = 224,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """List the networks; with names, their multiply-adds and options too."""
    from patchloom.cli.output import print_json, print_result
    from patchloom.cli.table import print_table
    from patchloom.models.catalogue import TRANSLATION, VOCABULARY, human

    rows = [_row(name, size, with_cost=bool(names)) for name in matching(names)]
    single = rows[0]["model"] if len(rows) == 1 else None
    if as_json:
        if single:
            from patchloom.models.registry import default_options

            rows[0]["options"] = default_options(single)
        print_json(rows)
        return
    columns = ["model", "family", "#parameters"] + (["#multiply-adds"] if names else [])
    print_table(
        columns,
        [
            (r["model"], r["family"], human(r["parameters"]), *([human(r["multiply_adds"])] if names else []))
            for r in rows
        ],
        title=f"{len(rows)} networks at {size}×{size}, 1000 classes" if not single else None,
    )
    if single:
        _print_options(single)
        print_result(f"patchloom.create_model({single!r}, num_classes=10, image_size={size})")
    elif not names:
        sizes = ", ".join(f"{name} ({human(parameters)})" for name, parameters in TRANSLATION.items())
        print_result(f"To translate, with a vocabulary of {VOCABULARY:,}: {sizes}; docs/translation.md")
        print("Next: patchloom models resmlp_s12   (its multiply-adds and options)")


def _row(name: str, size: int, *, with_cost: bool) -> dict[str, Any]:
    """What is known of a network, counted where the size is not that of the catalogue."""
    from patchloom.models.catalogue import CATALOGUE, IMAGE_SIZE

    family, parameters, multiply_adds = CATALOGUE[name]
    if size != IMAGE_SIZE:
        import torch

        from patchloom.inspection.cost import cost
        from patchloom.models.registry import create_model

        with torch.device("meta"):
            counted = cost(create_model(name, image_size=size))
        parameters, multiply_adds = counted.parameters, counted.multiply_adds
    row = {"model": name, "family": family, "parameters": parameters}
    return row | ({"multiply_adds": multiply_adds} if with_cost else {})


def _print_options(name: str) -> None:
    from patchloom.cli.table import print_table
    from patchloom.models.registry import choices_of, default_options

    known = choices_of(name)
    print_table(
        ["option", "published value", "choices"],
        [(key, str(value), known.get(key, "")) for key, value in default_options(name).items() if key != "name"],
    )


def matching(names: list[str] | None) -> list[str]:
    """The networks that names or patterns mean; one that means none is an error that says what is near."""
    import fnmatch

    from patchloom.models.catalogue import CATALOGUE

    chosen: list[str] = []
    for name in names or ["*"]:
        found = [known for known in CATALOGUE if fnmatch.fnmatchcase(known, name)]
        if not found:
            from patchloom.models.registry import family_of

            family_of(name)
        chosen += [other for other in found if other not in chosen]
    return chosen
