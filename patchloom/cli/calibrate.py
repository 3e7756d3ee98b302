"""`patchloom calibrate RUN [DATA]`: probabilities and abstentions that can be relied on."""

import shlex
from dataclasses import dataclass
from typing import Annotated

from patchloom.cli.options import Batch, Device, Json, ReadingOptions, Workers, keywords
from patchloom.data.reading_options import AS_IT_IS
from patchloom.options import Argument, Option


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    run: Annotated[str, Argument("Run of a classifier.", complete="run")]
    data: Annotated[
        str | None, Argument("Images with its classes that it was not trained on. Default: the data of the run.")
    ] = None
    max_error: Annotated[
        str | None,
        Option(
            "Abstain from unsure predictions, so that at most this share of the others is wrong: 5%, 0.05.",
            metavar="SHARE",
        ),
    ] = None
    confidence: Annotated[str, Option("Probability that --max-error holds for new images.", metavar="SHARE")] = "90%"
    max_rejected: Annotated[
        str,
        Option(
            "Reject images unlike the training images, and at most this share of the others; 0: reject none.",
            metavar="SHARE",
        ),
    ] = "1%"
    negatives: Annotated[tuple[str, ...], Option("Classes that mean none of these. Repeatable.", metavar="CLASS")] = ()
    split: Annotated[str | None, Option("val, test or all. Default: val, or the images the run held out.")] = None
    device: Device = "auto"
    reading: ReadingOptions = AS_IT_IS
    batch: Batch = 64
    workers: Workers = 0
    as_json: Json = False


def calibrate(options: CalibrateOptions) -> None:
    """Make the probabilities of a classifier reliable, and choose when it answers "none of these".

    patchloom calibrate runs/photos --max-error 5%

    The rules are stored in the run. They apply to predict, look, report, serve and app, and to what is exported next.
    """
    from patchloom.cli.output import print_json, print_result
    from patchloom.data.checking.scan import scan_bar
    from patchloom.tasks.classification.calibrate import calibrate as calibrate_run

    with scan_bar(what="evaluating") as progress:
        result = calibrate_run(**keywords(options), progress=progress)
    if options.as_json:
        print_json(result.to_dict())
        return
    for note in result.notes:
        print(f"note: {note}")
    for line in result.lines():
        print_result(line)
    run = shlex.quote(options.run)
    print(f"Next: patchloom predict {run} IMAGE…   |   patchloom report {run}")
