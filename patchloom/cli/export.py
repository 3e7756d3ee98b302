"""`patchloom export RUN --out PATH`: a run as something that answers without patchloom, compared with the run."""

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from patchloom.cli.verb import completed

if TYPE_CHECKING:
    from patchloom.exporters.artifact import Exported
    from patchloom.exporters.single_page.page import Page

COMPARED = "How it is compared"


def export(
    run: Annotated[
        str,
        typer.Argument(help="A run: classes, vectors, masks, objects, translations.", autocompletion=completed("run")),
    ],
    out: Annotated[str, typer.Option(help="Artifact folder, such as photos-onnx; or a page, such as page.html.")],
    to: Annotated[
        str | None, typer.Option(help="onnx (by default), torch, openvino; or html, one page that runs by itself.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Images to compare on; by default those of the run.")] = None,
    size: Annotated[int | None, typer.Option(help="Image size in pixels (default: the run's).")] = None,
    half: Annotated[bool, typer.Option("--half", help="float16 weights and sums.")] = False,
    int8: Annotated[
        bool,
        typer.Option("--int8", help="Calibrate on images; keep it if it is faster here and loses little."),
    ] = False,
    allowed_loss: Annotated[float | None, typer.Option(help="Points of accuracy that int8 may lose; 1.")] = None,
    packed: Annotated[
        bool, typer.Option("--packed", help="Compressed without loss: zeros that prune left take no room.")
    ] = False,
    split: Annotated[
        str | None,
        typer.Option(
            help="train, val, test or all; by default val, or what the run held out.", rich_help_panel=COMPARED
        ),
    ] = None,
    images: Annotated[
        int | None, typer.Option(help="Most that are compared; 1000, of a detector 100.", rich_help_panel=COMPARED)
    ] = None,
    calibration: Annotated[
        int | None, typer.Option(help="Images of train that --int8 is calibrated on; 128.", rich_help_panel=COMPARED)
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Largest difference from the run, as a share of its largest output; 1e-4, with --half 3e-2.",
            rich_help_panel=COMPARED,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Write a run as a folder that answers without patchloom, and compare both on real images; or as one HTML page.

    patchloom export runs/photos --out photos-onnx

    patchloom export runs/photos --int8 --out photos.int8 --data photos/

    patchloom export runs/photos --out page.html
    """
    from patchloom.cli.output import print_json
    from patchloom.exporters.artifact import Exported
    from patchloom.tasks.export import export as write

    done = write(
        run,
        out,
        to=to,
        data=data,
        split=split,
        size=size,
        half=half,
        int8=int8,
        allowed_loss=allowed_loss,
        tolerance=tolerance,
        images=images,
        calibration=calibration,
        packed=packed,
    )
    if as_json:
        print_json(done.to_dict())
    elif isinstance(done, Exported):
        _show(done)
    else:
        _show_page(done)


def _show(done: "Exported") -> None:
    from patchloom.cli.output import print_result
    from patchloom.cli.table import print_table
    from patchloom.exporters.parity import columns
    from patchloom_runtime.printable import printable

    for note in done.notes:
        print(printable(f"note: {note}"))
    rows = [row.cells() for row in done.rows]
    print_table(
        columns(done.measure, done.compared), rows, title=f"on {done.images:,} {done.compared}, on this machine"
    )
    print_result(printable(str(done.folder)))
    place = printable(repr(str(done.folder)))
    print(f"Next: patchloom predict {shlex.quote(str(done.folder))} IMAGE…   |   in Python: patchloom.load({place})")


def _show_page(page: "Page") -> None:
    from patchloom.cli.output import print_result
    from patchloom_runtime.printable import printable

    shows = "classes and a map of what speaks for each" if page.map else "classes"
    draws = ", and paper to draw on" if page.draws else ""
    print(f"{page.size / 1e6:.1f} MB, weights in {page.weights}; it shows {shows}{draws}")
    print_result(printable(str(page.path)))
