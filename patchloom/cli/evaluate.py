"""`patchloom evaluate RUN DATA`: the numbers of a trained model on any data with its classes."""

import json
from typing import Annotated

import typer


def evaluate(
    run: Annotated[str, typer.Argument(help="Folder of a run.")],
    data: Annotated[str, typer.Argument(help="Data with the run's classes; matched by name.")],
    split: Annotated[str | None, typer.Option(help="train, val or all; val where the data have one.")] = None,
    size: Annotated[int | None, typer.Option(help="Test at another image size.")] = None,
    crop_ratio: Annotated[float | None, typer.Option(help="Share of the short side that is kept.")] = None,
    real: Annotated[str | None, typer.Option(help="ImageNet-ReaL's real.json, for ImageNet's val.")] = None,
    v2: Annotated[bool, typer.Option("--v2", help="Folder names are class numbers, as in ImageNet-V2.")] = False,
    batch: Annotated[int, typer.Option(help="Images at a time.")] = 64,
    device: Annotated[str, typer.Option(help="cpu, cuda …; auto takes a GPU if there is one.")] = "auto",
    workers: Annotated[int, typer.Option(help="Processes that read images.")] = 0,
    strict: Annotated[bool, typer.Option(help="Classes the model does not know are an error.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="For machines, with per-class accuracy and confusion.")
    ] = False,
) -> None:
    """Top-1, top-5, loss, calibration and per-class accuracy."""
    from patchloom.cli.table import print_table
    from patchloom.deployment.classifier import load

    classifier = load(run, device=device)
    result = classifier.evaluate(
        data,
        split=split,
        size=size,
        crop_ratio=crop_ratio,
        real=real,
        v2=v2,
        batch=batch,
        workers=workers,
        strict=strict,
    )
    report, numbers, notes = result.report, result.values(), result.notes
    per_class = dict(zip(report.classes, report.class_accuracy.tolist(), strict=True))
    if as_json:
        confusion = report.confusion.tolist()
        print(json.dumps({**numbers, "per_class": per_class, "confusion": confusion, "notes": notes}, indent=2))
        return
    for note in notes:
        print(f"note: {note}")
    print_table(["measure", "#value"], [(name, f"{value:.2f}") for name, value in numbers.items()])
    worst = sorted((value, name) for name, value in per_class.items() if value == value)[:10]
    print_table(["worst classes", "#top-1"], [(name, f"{value:.1f}") for value, name in worst])
