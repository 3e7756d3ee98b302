"""`patchloom models [NAME…]`: which networks there are, what they cost, which options they take."""

import json
from typing import Annotated, Any

import typer

TRANSLATION_WORDS = 32_768


def models(
    names: Annotated[list[str] | None, typer.Argument(help="Names or patterns, such as 'cait_*'.")] = None,
    size: Annotated[int, typer.Option(help="Image size in pixels.")] = 224,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """List the networks; with names, their multiply-adds and options too."""
    import torch

    from patchloom.cli.table import print_table
    from patchloom.inspection.cost import cost, human
    from patchloom.models.registry import choices_of, create_model, default_options, family_of

    chosen = matching(names)
    rows: list[dict[str, Any]] = []
    for name in chosen:
        with torch.device("meta"):
            network = create_model(name, image_size=size)
        parameters = sum(parameter.numel() for parameter in network.parameters())
        row = {"model": name, "family": family_of(name).__name__, "parameters": parameters}
        if names:
            row["multiply_adds"] = cost(network).multiply_adds
        rows.append(row)
    single = chosen[0] if len(chosen) == 1 else None
    if as_json:
        if single:
            rows[0]["options"] = default_options(single)
        print(json.dumps(rows, indent=2))
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
        options = default_options(single)
        known = choices_of(single)
        print_table(
            ["option", "published value", "choices"],
            [(key, str(value), known.get(key, "")) for key, value in options.items() if key != "name"],
        )
        print(f"patchloom.create_model({single!r}, num_classes=10, image_size={size})")
    elif not names:
        print(f"To translate, at {TRANSLATION_WORDS:,} words: {_translation_networks()}; docs/translation.md")
        print("Next: patchloom models resmlp_s12   (its multiply-adds and options)")


def _translation_networks() -> str:
    import torch

    from patchloom.inspection.cost import human
    from patchloom.models.seq2seq import VARIANTS, create_seq2seq

    with torch.device("meta"):
        networks = {name: create_seq2seq(name, vocabulary=TRANSLATION_WORDS) for name in VARIANTS}
    sizes = {name: sum(p.numel() for p in network.parameters()) for name, network in networks.items()}
    return ", ".join(f"{name} ({human(size)})" for name, size in sizes.items())


def matching(names: list[str] | None) -> list[str]:
    """The networks that names or patterns mean; one that means none is an error that says what is near."""
    from patchloom.models.registry import family_of, list_models

    chosen: list[str] = []
    for name in names or ["*"]:
        found = list_models(name)
        if not found:
            family_of(name)
        chosen += [other for other in found if other not in chosen]
    return chosen
