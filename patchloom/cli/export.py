"""`patchloom export RUN --out page.html`: a trained model as something that answers without patchloom."""

from typing import Annotated

import typer

from patchloom.cli.verb import completed


def export(
    run: Annotated[str, typer.Argument(help="A run that names classes.", autocompletion=completed("run"))],
    out: Annotated[str, typer.Option(help="The file to write, such as page.html.")],
    weights: Annotated[str, typer.Option(help="fp16, or int8 for half the size and nearly the same answers.")] = "fp16",
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Write a classifier as one HTML page that answers by itself: opened from disk, without a server or a network.

    patchloom export runs/photos --out page.html
    """
    from dataclasses import asdict

    from patchloom.cli.output import print_json, print_result
    from patchloom.deployment.single_page.page import export_page
    from patchloom.printable import printable

    page = export_page(run, out, weights=weights)
    if as_json:
        print_json(asdict(page) | {"path": str(page.path)})
        return
    shows = "classes and a map of what speaks for each" if page.map else "classes"
    draws = ", and paper to draw on" if page.draws else ""
    print(f"{page.size / 1e6:.1f} MB, weights in {page.weights}; it shows {shows}{draws}")
    print_result(printable(str(page.path)))
