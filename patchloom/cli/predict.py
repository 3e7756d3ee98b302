"""`patchloom predict RUN IMAGE…`: class names, masks or boxes of images."""

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchloom.cli.options import Device, Json, keywords
from patchloom.options import Argument, Option

if TYPE_CHECKING:
    from patchloom.tasks.predict import PredictionStream

SECONDS_BETWEEN_LINES = 10.0


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    run: Annotated[
        str, Argument("Run or artifact folder, or published weights such as resmlp_s12:in1k.", complete="run")
    ]
    images: Annotated[
        list[str], Argument("Image files, folders or videos; - reads paths or one image from standard input.")
    ]
    top: Annotated[int | None, Option("Classes per image. Default: 3; of several labels, all that apply.")] = None
    threshold: Annotated[
        float | None,
        Option(
            'Drop classes with a lower score; an image that keeps none is "none".', minimum=0, maximum=1, metavar="P"
        ),
    ] = None
    csv: Annotated[str | None, Option("Write the predictions to a CSV file.", metavar="FILE")] = None
    parquet: Annotated[str | None, Option("Write the predictions to a parquet file.", metavar="FILE")] = None
    sort_into: Annotated[
        str | None, Option("Copy images into folders by class in this new folder.", metavar="FOLDER")
    ] = None
    every: Annotated[
        int | None,
        Option("Use every N-th frame. Default: one per second of videos, all of animations.", minimum=1, metavar="N"),
    ] = None
    out: Annotated[str | None, Option("Folder for masks, boxes and overlays (segmentation and detection).")] = None
    index: Annotated[
        str | None, Option("Classify by the nearest files of this index of the run; needs no classifier.")
    ] = None
    level: Annotated[str | None, Option("Level of the index's labels, fine for the finest. Default: the index's.")] = (
        None
    )
    neighbors: Annotated[int | None, Option("Files of the index that vote on each image. Default: 20.", minimum=1)] = (
        None
    )
    tta: Annotated[bool, Option("Average the probabilities of each image and its mirror image (classifiers).")] = False
    device: Device = "auto"
    as_json: Json = False


def predict(options: PredictOptions) -> None:
    """Predict the class, the mask or the boxes of images. Unreadable files are reported, and the others predicted.

    patchloom predict runs/photos new.jpg

    patchloom predict runs/photos folder/ --csv predictions.csv

    A run without a classifier classifies by nearest neighbors: --index INDEX, made by `patchloom index`.
    """
    from patchloom.runs.checksums import reading_once
    from patchloom.tasks.predict import PredictionStream

    with reading_once():
        predictions = PredictionStream(**keywords(options))
    if options.csv or options.parquet or options.sort_into:
        _print_counts(predictions, options)
    elif options.as_json:
        _print_json(predictions, options)
    else:
        for prediction in predictions:
            _print_line(prediction)
    if predictions.counts.unreadable:
        raise typer.Exit(3)


def _print_line(prediction: Any) -> None:
    from patchloom.cli.output import print_result
    from patchloom_runtime.printable import printable

    words = f"unreadable: {prediction.error}" if prediction.error else prediction.in_words() or "none"
    print_result(printable(f"{prediction.path}  {words}"))


def _print_json(predictions: "PredictionStream", options: PredictOptions) -> None:
    from patchloom.cli.output import JsonList

    json_list = JsonList()
    for prediction in predictions:
        more = {"written": prediction.written} if options.out is not None else {}
        if predictions.has_votes:
            more |= {"level": prediction.level, "reason": prediction.reason}
        elif reason := getattr(prediction, "reason", ""):
            more |= {"reason": reason}
        if (grade := getattr(prediction, "grade", None)) is not None:
            more |= {"grade": grade}
        json_list.add({"path": prediction.path, "answers": prediction.answers, "error": prediction.error} | more)
    json_list.close()


def _print_counts(predictions: "PredictionStream", options: PredictOptions) -> None:
    """Print the errors, the progress and what was written."""
    from patchloom.cli.output import print_json, print_result
    from patchloom_runtime.printable import plural, printable

    counts, printed_at = predictions.counts, time.monotonic()
    for prediction in predictions:
        if prediction.error:
            print(printable(f"{prediction.path}  unreadable: {prediction.error}"), flush=True)
        if time.monotonic() - printed_at >= SECONDS_BETWEEN_LINES:
            printed_at = time.monotonic()
            print(f"{plural(counts.images, 'image')} predicted", flush=True)
    written = [path for path in (options.csv, options.parquet, options.sort_into) if path]
    if options.as_json:
        print_json({"written": written, **asdict(counts)})
        return
    for path in written:
        print_result(printable(path))
    faults = {"unreadable": counts.unreadable, "none": counts.none}
    parts = ", ".join(f"{count:,} {name}" for name, count in faults.items() if count)
    print(plural(counts.images, "image") + (f" ({parts})" if parts else ""))
    if counts.not_copied:
        print(f"note: {plural(counts.not_copied, 'frame')} not copied: only image files are sorted into folders")
