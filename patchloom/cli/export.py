"""`patchloom export RUN --out PATH`: a run in a form that needs no patchloom, compared with the run."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from patchloom.cli.options import DryRun, Json, keywords
from patchloom.options import Argument, Option

if TYPE_CHECKING:
    from patchloom.exporters.artifact import Exported
    from patchloom.exporters.single_page.page import Page

COMPARISON = "Comparison with the run"


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    run: Annotated[str, Argument("Run folder of any task, or published weights.", complete="run")]
    out: Annotated[str, Option("Artifact folder, such as photos-onnx; or a page, such as page.html.")]
    to: Annotated[str | None, Option("onnx (default), torch or openvino; or html, a self-contained page.")] = None
    data: Annotated[str | None, Option("Images to compare on. Default: those of the run.")] = None
    size: Annotated[int | None, Option("Image size in pixels. Default: the run's.")] = None
    half: Annotated[bool, Option("Use float16 weights and arithmetic.")] = False
    int8: Annotated[
        bool, Option("Quantize to int8 with calibration images, if that is faster here and loses little.")
    ] = False
    allowed_loss: Annotated[float | None, Option("Points of accuracy that int8 may lose. Default: 1.")] = None
    packed: Annotated[bool, Option("Compress the weights without loss: zeros left by `prune` take no space.")] = False
    dry_run: DryRun = False
    split: Annotated[
        str | None,
        Option("train, val, test or all. Default: val, or the images the run held out.", panel=COMPARISON),
    ] = None
    images: Annotated[
        int | None,
        Option(
            "Largest number of images to compare. Default: 1,000; detectors: 100; translators: 200 sentences.",
            panel=COMPARISON,
        ),
    ] = None
    calibration: Annotated[
        int | None, Option("Number of training images that --int8 is calibrated on. Default: 128.", panel=COMPARISON)
    ] = None
    tolerance: Annotated[
        float | None,
        Option(
            "Largest difference from the run, as a share of its largest output. Default: 1e-4, with --half 3e-2.",
            panel=COMPARISON,
        ),
    ] = None
    as_json: Json = False


def export(options: ExportOptions) -> None:
    """Write a run as an artifact that needs no patchloom, and compare both on real images; or as one HTML page.

    patchloom export runs/photos --out photos-onnx

    patchloom export runs/photos --int8 --out photos.int8 --data photos/

    patchloom export runs/photos --out page.html
    """
    from patchloom.cli.output import print_json
    from patchloom.exporters.artifact import Exported
    from patchloom.tasks.export import export as export_run

    if options.dry_run:
        _print_plan(options)
        return
    exported = export_run(**keywords(options, "dry_run"))
    if options.as_json:
        print_json(exported.to_dict())
    elif isinstance(exported, Exported):
        _print(exported)
    else:
        _print_page(exported)


def _print_plan(options: ExportOptions) -> None:
    from patchloom.cli.output import print_json, print_result
    from patchloom.exporters.artifact import artifact_folder
    from patchloom.exporters.formats import PageFormat, format_for, format_named
    from patchloom.runs.config import read_config
    from patchloom.runs.folders import refuse_taken
    from patchloom.runs.locate import run_folder

    form = format_named(options.to or format_for(options.out))
    form.check_installed()
    is_page = isinstance(form, PageFormat)
    out = options.out if is_page else artifact_folder(options.out)
    if not is_page:
        refuse_taken(Path(out))
    network = read_config(run_folder(options.run)).get("model", {}).get("name", "network")
    precision = "float16" if options.half else "int8" if options.int8 else "float32"
    if options.as_json:
        print_json({"folder": out, "to": form.name, "precision": precision})
        return
    print_result(f"{options.run} ({network}) would be written as {form.name}, {precision}, to {out}")
    print("Nothing was written.   Next: the same command without --dry-run")


def _print(exported: "Exported") -> None:
    from patchloom.cli.output import print_result
    from patchloom.cli.table import print_table
    from patchloom.exporters.parity import columns
    from patchloom_runtime.printable import printable

    for note in exported.notes:
        print(printable(f"note: {note}"))
    rows = [row.cells() for row in exported.rows]
    title = f"on {exported.images:,} {exported.compared}, on this machine"
    print_table(columns(exported.measure, exported.compared), rows, title=title)
    print_result(printable(str(exported.folder)))
    place = printable(repr(str(exported.folder)))
    folder = shlex.quote(str(exported.folder))
    print(f"Next: patchloom predict {folder} IMAGE…   |   in Python: patchloom.load({place})")


def _print_page(page: "Page") -> None:
    from patchloom.cli.output import print_result
    from patchloom_runtime.printable import printable

    content = "classes" if page.unit == "class" else f"{page.unit}s"
    content += " and a map of the evidence for each" * bool(page.map)
    canvas = ", and a canvas to draw on" if page.draws else ""
    print(f"{page.size / 1e6:.1f} MB, weights in {page.weights}; it shows {content}{canvas}")
    print_result(printable(str(page.path)))
