"""`patchloom convert`: weights that others trained as a run, and a run's weights for their code."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchloom.cli.verb import completed

if TYPE_CHECKING:
    from patchloom.runs.convert import ConversionSummary


def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE|RUN",
            help="A .safetensors, .pth or .npz file of weights; with --to, a run.",
            autocompletion=completed("run"),
        ),
    ],
    out: Annotated[str, typer.Option(help="The run's folder; with --to the file, .safetensors, .pth or .npz.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="The network of the file: a name, timm:NAME or torchvision:NAME.", autocompletion=completed("model")
        ),
    ] = None,
    labels: Annotated[
        str | None,
        typer.Option(help="File of class names, one per line; by default ImageNet's for 1,000 classes, else numbers."),
    ] = None,
    to: Annotated[str | None, typer.Option(help="Whose names the weights get: timm, authors or torchvision.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Turn a file of weights, in anybody's layout, into a run; with --to, a run into a file for timm or the authors.

    patchloom convert deit_small.pth --model deit_s --out runs/deit

    patchloom convert runs/photos --to timm --out photos.safetensors
    """
    from pathlib import Path

    from patchloom.cli.output import print_json
    from patchloom.runs.config import is_run
    from patchloom.runs.convert import file_to_run, read_names, run_to_file
    from patchloom_runtime.errors import UsageError

    if to is not None:
        if model is not None or labels is not None:
            raise UsageError("--model and --labels are for a file that becomes a run; --to is for a run")
        made = run_to_file(source, to, Path(out))
    elif is_run(source):
        raise UsageError(f"{source} is a run already; --to timm or --to authors makes a file of its weights")
    elif model is None:
        raise UsageError(f"say which network {source} is of: --model NAME; `patchloom models` lists them")
    else:
        made = file_to_run(source, model, Path(out), read_names(labels) if labels else None)
    if as_json:
        print_json(_told(made, out))
    else:
        _print(made, out, to)


def _told(made: "ConversionSummary", out: str) -> dict[str, Any]:
    import dataclasses

    config = made.network.config
    return {
        "out": out,
        "model": config.name,
        "image_size": config.image_size,
        "classes": config.num_classes,
        "preprocessing": dataclasses.asdict(made.preprocessing),
        "use": made.use or None,
        "notes": made.notes,
    }


def _print(made: "ConversionSummary", out: str, to: str | None) -> None:
    import shlex

    from patchloom.cli.output import print_result
    from patchloom_runtime.printable import printable

    config, shown = made.network.config, made.preprocessing
    height, width = config.image_size
    some = f"{', '.join(made.labels[:3])}{' …' if len(made.labels) > 3 else ''}"
    classes = f"{config.num_classes:,} classes ({some})" if config.num_classes else "no classifier"
    print_result(printable(f"{out}: {config.name} at {height}×{width}, {classes}"))
    why = f"   (auto: as of {made.as_of})" if made.as_of else ""
    print(
        f"images     mean {_numbers(shown.mean)}, std {_numbers(shown.std)}, a crop of {shown.crop_ratio:g}, "
        f"{shown.interpolation}{why}"
    )
    for note in made.notes:
        print(f"note: {note}")
    if to:
        print(f"use it as  {made.use}")
    elif config.num_classes:
        print(
            f"Next: patchloom predict {shlex.quote(out)} photo.jpg   |   patchloom train DATA --init {shlex.quote(out)}"
        )
    else:
        print(f"Next: patchloom index {shlex.quote(out)} photos/ --out photos.index")


def _numbers(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:g}" for value in values)
