"""`patchloom convert`: third-party weights as a run, and a run's weights for other libraries."""

import dataclasses
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from patchloom.cli.options import Json
from patchloom.options import Argument, Option

if TYPE_CHECKING:
    from patchloom.runs.convert import ConversionSummary


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    source: Annotated[
        str,
        Argument("Weights file (.safetensors, .pth or .npz); with --to, a run.", metavar="FILE|RUN", complete="run"),
    ]
    out: Annotated[str, Option("Run folder to write; with --to, the file (.safetensors, .pth or .npz).")]
    model: Annotated[
        str | None, Option("Network of the file: a name, timm:NAME or torchvision:NAME.", complete="model")
    ] = None
    labels: Annotated[
        str | None,
        Option("File of class names, one per line. Default: ImageNet's for 1,000 classes, else numbers."),
    ] = None
    to: Annotated[str | None, Option("Target layout: timm, authors or torchvision.")] = None
    as_json: Json = False


def convert(options: ConvertOptions) -> None:
    """Turn a weights file, in any known layout, into a run; with --to, a run into a file for timm or the authors.

    patchloom convert deit_small.pth --model deit_s --out runs/deit

    patchloom convert runs/photos --to timm --out photos.safetensors
    """
    from patchloom.cli.output import print_json
    from patchloom.runs.convert import convert as convert_weights

    summary = convert_weights(options.source, options.out, model=options.model, labels=options.labels, to=options.to)
    if options.as_json:
        print_json(_as_json(summary, options.out))
    else:
        _print(summary, options)


def _as_json(summary: "ConversionSummary", out: str) -> dict[str, Any]:
    config = summary.network.config
    return {
        "out": out,
        "model": config.name,
        "image_size": config.image_size,
        "classes": config.num_classes,
        "preprocessing": dataclasses.asdict(summary.preprocessing),
        "use": summary.use or None,
        "notes": summary.notes,
    }


def _print(summary: "ConversionSummary", options: ConvertOptions) -> None:
    from patchloom.cli.output import print_result
    from patchloom_runtime.printable import printable

    config, preprocessing = summary.network.config, summary.preprocessing
    height, width = config.image_size
    some = f"{', '.join(summary.labels[:3])}{' …' if len(summary.labels) > 3 else ''}"
    classes = f"{config.num_classes:,} classes ({some})" if config.num_classes else "no classifier"
    print_result(printable(f"{options.out}: {config.name} at {height}×{width}, {classes}"))
    why = f"   (auto: as of {summary.as_of})" if summary.as_of else ""
    print(
        f"images     mean {_numbers(preprocessing.mean)}, std {_numbers(preprocessing.std)}, "
        f"crop {preprocessing.crop_ratio:g}, {preprocessing.interpolation}{why}"
    )
    for note in summary.notes:
        print(f"note: {note}")
    out = shlex.quote(options.out)
    if options.to:
        print(f"use it as  {summary.use}")
    elif config.num_classes:
        print(f"Next: patchloom predict {out} photo.jpg   |   patchloom train DATA --init {out}")
    else:
        print(f"Next: patchloom index {out} photos/ --out photos.index")


def _numbers(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:g}" for value in values)
