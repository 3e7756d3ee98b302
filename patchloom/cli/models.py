"""`patchloom models [NAME…]`: the networks, their cost and their options."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from patchloom.cli.options import Json
from patchloom.options import Argument, Option

if TYPE_CHECKING:
    from patchloom.models.pretrained.table import Weights


@dataclass(frozen=True, kw_only=True)
class ModelsOptions:
    names: Annotated[list[str] | None, Argument("Names or patterns, such as 'cait_*'.", complete="model")] = None
    pretrained: Annotated[bool, Option("List published weights instead of networks.")] = False
    size: Annotated[int, Option("Image size in pixels.")] = 224
    svg: Annotated[str | None, Option("Draw one network, part by part, into this file.", metavar="FILE")] = None
    as_json: Json = False


def models(options: ModelsOptions) -> None:
    """List the networks; with names, also their multiply-adds, options and published weights.

    patchloom models resmlp_s12 'cait_*'
    """
    names, size = options.names, options.size
    if options.svg is not None:
        _draw(matching(names), size, options.svg)
        return
    if options.pretrained:
        _list_weights(matching(names), as_json=options.as_json)
        return
    from patchloom.cli.output import print_json, print_result
    from patchloom.cli.table import print_table
    from patchloom.models.catalog import TRANSLATION, VOCABULARY, human

    rows = [_row(name, size, with_cost=bool(names)) for name in matching(names)]
    single = rows[0]["model"] if len(rows) == 1 else None
    if options.as_json:
        if single:
            from patchloom.models.pretrained.table import published
            from patchloom.models.registry import default_options

            rows[0]["options"] = default_options(single)
            rows[0]["weights"] = [_weights_as_json(weights) for weights in published(single)]
        print_json(rows)
        return
    columns = ["model", "family", "#parameters"] + (["#multiply-adds"] if names else [])
    print_table(
        columns,
        [
            (r["model"], r["family"], human(r["parameters"]), *([human(r["multiply_adds"])] if names else []))
            for r in rows
        ],
        title=f"{len(rows)} networks at {size}×{size}, 1,000 classes" if not single else None,
    )
    if single:
        _print_options(single)
        _print_weights(single)
        print_result(f"patchloom.create_model({single!r}, num_classes=10, image_size={size})")
    elif not names:
        sizes = ", ".join(f"{name} ({human(parameters)})" for name, parameters in TRANSLATION.items())
        print_result(f"To translate, with a vocabulary of {VOCABULARY:,}: {sizes}; docs/translation.md")
        print("Next: patchloom models resmlp_s12   (its multiply-adds, options and published weights)")


def _draw(names: list[str], size: int, file: str) -> None:
    """Write the drawing of one network."""
    from pathlib import Path

    import torch

    from patchloom.cli.output import print_result
    from patchloom.disk import atomic_write
    from patchloom.models.registry import create_model
    from patchloom.report.charts.diagram import network_diagram
    from patchloom.report.charts.svg import svg_file
    from patchloom_runtime.errors import UsageError

    if len(names) != 1:
        raise UsageError(f"--svg draws one network, and these names match {len(names)}. Name one of them.")
    with torch.device("meta"):
        network = create_model(names[0], image_size=size)
    atomic_write(Path(file), svg_file(network_diagram(network)).encode())
    print_result(file)


def _row(name: str, size: int, *, with_cost: bool) -> dict[str, Any]:
    """Return the row of a network from the catalog, or counted if the size is another."""
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


def _weights_as_json(weights: "Weights") -> dict[str, Any]:
    """Return the JSON form of a row of published weights."""
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

    rows = [weights for name in names for weights in published(name)]
    if as_json:
        print_json([_weights_as_json(weights) for weights in rows])
        return
    _print_table(rows)
    print("Next: patchloom predict resmlp_s12:in1k photo.jpg   |   patchloom train DATA --init resmlp_s12:in1k")


def _print_weights(name: str) -> None:
    from patchloom.cli.output import print_result
    from patchloom.models.pretrained.table import published

    rows = published(name)
    if not rows:
        print_result(f"There are no published weights of {name}.")
        return
    _print_table(rows)
    for weights in rows:
        places = "  ".join(filter(None, (weights.url, weights.hub and f"huggingface.co/{weights.hub}")))
        print_result(f"{weights.name}  {weights.trained_on}, crop {weights.crop_ratio:g}  {places}")


def _print_table(rows: "list[Weights]") -> None:
    from patchloom.cli.table import print_table

    print_table(
        ["weights", "px", "top-1", "about", "license"],  # few columns, so that names fit into 80 characters
        [(w.name, str(w.image_size), w.score or "–", w.size, w.licence or "–") for w in rows],
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
    """Return the networks that names or patterns match. One that matches none is an error with the nearest names."""
    import fnmatch

    from patchloom.models.catalog import CATALOG
    from patchloom.models.pretrained.table import unknown_network

    chosen: list[str] = []
    for name in names or ["*"]:
        matches = [known for known in CATALOG if fnmatch.fnmatchcase(known, name)]
        if not matches:
            raise unknown_network(name)
        chosen += [match for match in matches if match not in chosen]
    return chosen
