"""`patchloom models [NAME…]`: which networks there are, what they cost, which options they take."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchloom.cli.verb import completed

if TYPE_CHECKING:
    from patchloom.models.pretrained.table import Weights


def models(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Names or patterns, such as 'cait_*'.", autocompletion=completed("model")),
    ] = None,
    pretrained: Annotated[
        bool, typer.Option("--pretrained", help="List the weights that were published, instead of the networks.")
    ] = False,
    size: Annotated[int, typer.Option(help="Image size in pixels.")] = 224,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """List the networks; with names, their multiply-adds, options and published weights too."""
    if pretrained:
        _list_weights(matching(names), as_json=as_json)
        return
    from patchloom.cli.output import print_json, print_result
    from patchloom.cli.table import print_table
    from patchloom.models.catalog import TRANSLATION, VOCABULARY, human

    rows = [_row(name, size, with_cost=bool(names)) for name in matching(names)]
    single = rows[0]["model"] if len(rows) == 1 else None
    if as_json:
        if single:
            from patchloom.models.pretrained.table import published
            from patchloom.models.registry import default_options

            rows[0]["options"] = default_options(single)
            rows[0]["weights"] = [_told(weights) for weights in published(single)]
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
        _print_weights(single)
        print_result(f"patchloom.create_model({single!r}, num_classes=10, image_size={size})")
    elif not names:
        sizes = ", ".join(f"{name} ({human(parameters)})" for name, parameters in TRANSLATION.items())
        print_result(f"To translate, with a vocabulary of {VOCABULARY:,}: {sizes}; docs/translation.md")
        print("Next: patchloom models resmlp_s12   (its multiply-adds, options and published weights)")


def _row(name: str, size: int, *, with_cost: bool) -> dict[str, Any]:
    """What is known of a network, counted where the size is not that of the catalogue."""
    from patchloom.models.catalog import CATALOG, IMAGE_SIZE

    family, parameters, multiply_adds = CATALOG[name]
    if size != IMAGE_SIZE:
        import torch

        from patchloom.models.cost import cost
        from patchloom.models.registry import create_model

        with torch.device("meta"):
            counted = cost(create_model(name, image_size=size))
        parameters, multiply_adds = counted.parameters, counted.multiply_adds
    row = {"model": name, "family": family, "parameters": parameters}
    return row | ({"multiply_adds": multiply_adds} if with_cost else {})


def _told(weights: "Weights") -> dict[str, Any]:
    """A row of the table of published weights for machines."""
    return {
        "name": weights.name,
        "model": weights.variant,
        "tag": weights.tag,
        "trained_on": weights.trained_on,
        "image_size": weights.image_size,
        "classes": weights.classes,
        "top1": weights.top1,
        "knn": weights.knn,
        "parameters": weights.parameters,
        "licence": weights.licence or None,
        "hub": weights.hub or None,
        "url": weights.url or None,
        "sha256_begins": weights.digits or None,
        "mean": weights.mean,
        "std": weights.std,
        "crop_ratio": weights.crop_ratio,
        "interpolation": weights.interpolation,
        "options": weights.options,
    }


def _list_weights(names: list[str], *, as_json: bool) -> None:
    from patchloom.cli.output import print_json
    from patchloom.models.pretrained.table import published

    found = [weights for name in names for weights in published(name)]
    if as_json:
        print_json([_told(weights) for weights in found])
        return
    _print_table(found)
    print("Next: patchloom predict resmlp_s12:in1k photo.jpg   |   patchloom train DATA --init resmlp_s12:in1k")


def _print_weights(name: str) -> None:
    from patchloom.cli.output import print_result
    from patchloom.models.pretrained.table import published

    found = published(name)
    if not found:
        print_result(f"Nobody has published weights of {name}.")
        return
    _print_table(found)
    for weights in found:
        places = "  ".join(filter(None, (weights.url, weights.hub and f"huggingface.co/{weights.hub}")))
        print_result(f"{weights.name}  {weights.trained_on}, crop {weights.crop_ratio:g}  {places}")


def _print_table(found: "list[Weights]") -> None:
    from patchloom.cli.table import print_table

    print_table(
        ["weights", "px", "top-1", "about", "licence"],  # no more, so that names are whole at 80 columns
        [(w.name, str(w.image_size), w.score or "–", w.size, w.licence or "–") for w in found],
    )


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

    from patchloom.models.catalog import CATALOG
    from patchloom.models.pretrained.table import unknown_network

    chosen: list[str] = []
    for name in names or ["*"]:
        found = [known for known in CATALOG if fnmatch.fnmatchcase(known, name)]
        if not found:
            raise unknown_network(name)
        chosen += [other for other in found if other not in chosen]
    return chosen
