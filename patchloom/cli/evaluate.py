"""`patchloom evaluate RUN [DATA]`: the numbers of a trained model."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from patchloom.cli.old_spellings import hint
from patchloom.cli.options import Batch, Device, Json, Level, ReadingOptions, Split, Workers, changed, spelled
from patchloom.data.reading_options import AS_IT_IS
from patchloom.options import IMAGES, Argument, Option
from patchloom_runtime.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from patchloom.tasks.classification.several_runs import RunEvaluations
    from patchloom.tasks.task import Scores, Task

READING_OF_EVERY_TASK = ("images", "masks", "boxes", "ignore", "names", "corrections")  # fields of Reading


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """Options that `evaluate` and `compare` share."""

    paths: Annotated[
        list[str],
        Argument(
            "Runs, then data with their classes, matched by name. Without data: the predictions on the val images "
            "that were saved in training.",
            metavar="RUN… [DATA]",
            complete="run",
        ),
    ]
    split: Split = None
    text: Annotated[str | None, Option("Parallel text, for translation runs: BLEU, chrF, loss.")] = None
    cost: Annotated[bool, Option("Also measure speed, multiply-adds, parameters and memory.")] = False
    device: Device = "auto"
    multi_scale: Annotated[
        bool,
        Option("For segmentation: average the predictions at six scales and of their mirror images.", panel=IMAGES),
    ] = False
    mode: Annotated[
        str | None,
        Option(
            "Segmentation runs: predict whole images, or windows. Default: as in training.",
            metavar="whole|slide",
            panel=IMAGES,
        ),
    ] = None
    level: Level = None
    size: Annotated[int | None, Option("Image size in pixels. Default: the run's.", panel=IMAGES)] = None
    crop_ratio: Annotated[
        float | None, Option("Share of the short side that is kept. Default: the run's.", panel=IMAGES)
    ] = None
    real: Annotated[str | None, Option("ImageNet-ReaL's real.json, for ImageNet's val.", panel=IMAGES)] = None
    v2: Annotated[bool, Option("Folder names are class numbers, as in ImageNet-V2.", panel=IMAGES)] = False
    tta: Annotated[bool, Option("Average the probabilities of each image and its mirror image.", panel=IMAGES)] = False
    strict: Annotated[bool, Option("Fail if the data have classes that the model does not know.", panel=IMAGES)] = False
    reading: ReadingOptions = AS_IT_IS
    batch: Batch = 64
    workers: Workers = 0
    as_json: Json = False

    def changed_image_options(self) -> list[str]:
        """Return the options in use that choose or change images, as they are typed."""
        names = changed(self, "split", "size", "crop_ratio", "real", "v2", "level", "tta")
        return names + [spelled(name) for name in self.reading.chosen()]

    def image_keywords(self) -> dict[str, Any]:
        """Return the options that the Python functions take as keywords."""
        names = ("split", "size", "crop_ratio", "real", "v2", "batch", "workers", "strict", "reading", "level", "tta")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(EvaluationOptions):
    sweep: Annotated[
        str | None,
        Option("Top-1 at several crop ratios or image sizes; crop=0.8,0.9,1 lists them.", metavar="crop|size"),
    ] = None


def evaluate(options: EvaluateOptions) -> None:
    """Measure a run on labeled data: top-1 with its interval, loss and calibration; or mIoU, mAP, BLEU …

    patchloom evaluate runs/photos photos/

    `patchloom compare` measures several runs on the same images, `patchloom probe` the features of a run.
    """
    from patchloom.tasks.evaluate import task_of_runs

    runs, data = runs_and_data(options)
    if len(runs) > 1:
        print(hint("evaluate RUN RUN …", "compare RUN RUN …"), file=sys.stderr)
    task = task_of_runs(runs)
    if not task.whole_images:
        evaluate_task(task, runs, data, options, changed(options, "sweep"), cost=options.cost)
        return
    check_image_options(options, runs, data, changed(options, "sweep"))
    if options.sweep is not None:
        if options.cost:
            raise UsageError("--sweep cannot be used with --cost; run one after the other")
        _sweep(runs, str(data), options)
        return
    from patchloom.cli.evaluation_tables import print_evaluations

    print_evaluations(
        evaluate_images(runs, data, options), cost=options.cost, device=options.device, as_json=options.as_json
    )


def runs_and_data(options: EvaluationOptions) -> tuple[list[str], str | None]:
    """Split the arguments into runs and data."""
    from patchloom.runs.locate import local_copy, names_run
    from patchloom_runtime.artifacts.metadata import is_artifact

    paths = options.paths
    is_model = names_run(paths[-1]) or is_artifact(paths[-1])
    runs, data = (paths, options.text) if options.text is not None or is_model else (paths[:-1], paths[-1])
    if not runs:
        raise UsageError(f"{paths[-1]} is not a run folder: it has no config.json")
    return [local_copy(run) for run in runs], data


def evaluate_images(
    runs: list[str], data: str | None, options: EvaluationOptions, *, heads: bool = False
) -> "RunEvaluations":
    """Evaluate classifiers on images, with a progress bar."""
    from patchloom.data.checking.scan import scan_bar
    from patchloom.tasks.classification.several_runs import evaluate as evaluate_runs

    with scan_bar(what="evaluating") as progress:
        return evaluate_runs(
            runs, data, device=options.device, heads=heads, progress=progress, **options.image_keywords()
        )


def evaluate_task(
    task: "Task", runs: list[str], data: str | None, options: EvaluationOptions, more: list[str], *, cost: bool = False
) -> None:
    """Evaluate runs of a task that has its own numbers. `more` are options in use that such tasks do not read."""
    from patchloom.tasks.classification.several_runs import runs_by_name

    own = {name: value for name in ("multi_scale", "mode") if (value := getattr(options, name))}
    read = ("--split", *map(spelled, (*READING_OF_EVERY_TASK, *task.report.reading_options)))
    unread = more + [option for option in options.changed_image_options() if option not in read]
    unread += [spelled(name) for name in own if name not in task.report.evaluation_options]
    unread += ["--cost"] if cost and "cost" not in task.report.evaluation_options else []
    if unread:
        raise UsageError(f"{unread[0]} {task.refusal}")
    if options.reading.chosen():
        own["reading"] = options.reading
    scores = task.report.evaluate(runs_by_name(runs), data, split=options.split, device=options.device, **own)
    _print_scores(_with_cost(scores, task, runs_by_name(runs)) if cost else scores, options.as_json)


def _with_cost(scores: "Scores", task: "Task", runs: "Mapping[str, Path]") -> "Scores":
    """Add the parameters and multiply-adds of dense networks, at the size of their images in training."""
    from dataclasses import replace

    from patchloom.models.cost import cost, human

    values, lines = {name: dict(of) for name, of in scores.values.items()}, list(scores.lines)
    for name, folder in runs.items():
        network: Any = task.model.load_network(folder)
        counted, (height, width) = cost(network.one_pass(), network.image_size), network.image_size
        values[name] |= {"parameters": counted.parameters, "multiply_adds": counted.multiply_adds}
        adds = f"{human(counted.multiply_adds)} multiply-adds at {height}×{width}"
        lines.append(f"{name}: {human(counted.parameters)} parameters, {adds}")
    return replace(scores, values=values, lines=lines)


def check_image_options(options: EvaluationOptions, runs: list[str], data: str | None, alone: list[str]) -> None:
    """Refuse options that classifiers do not read, and options that need data if there is none."""

    if others := changed(options, "multi_scale", "mode"):
        raise UsageError(f"{others[0]} is for runs that segment; {runs[0]} does not")
    if options.text is not None:
        raise UsageError(f"{runs[0]} was not trained to translate: leave --text out, and give images")
    if data is None and (need := alone + options.changed_image_options()):
        raise UsageError(f"{need[0]} needs images: patchloom evaluate {runs[0]} DATA {need[0]}")


def _print_scores(scores: "Scores", as_json: bool) -> None:
    from patchloom.cli.output import print_json, print_result
    from patchloom.cli.table import print_table

    if as_json:
        print_json(scores.values)
        return
    for note in scores.notes:
        print(f"note: {note}")
    print_table(scores.columns, scores.rows)
    if scores.lines:
        print_result("\n".join(scores.lines))


def _sweep(runs: list[str], data: str, options: EvaluateOptions) -> None:
    from patchloom.cli.output import print_json
    from patchloom.cli.table import print_table
    from patchloom.inference.classifier import load
    from patchloom.tasks.classification.several_runs import runs_by_name

    over, values = _sweep_values(str(options.sweep))
    points_of = {  # one classifier at a time, so that they need not fit on the device together
        name: load(folder, device=options.device).sweep(data, over, values, **options.image_keywords())
        for name, folder in runs_by_name(runs).items()
    }
    if options.as_json:
        print_json(
            {run: [{over: p.value, **p.evaluation.values()} for p in points] for run, points in points_of.items()}
        )
        return
    top1 = {run: {p.value: p.evaluation.report.top(1) for p in points} for run, points in points_of.items()}
    every = sorted({value for of in top1.values() for value in of})
    rows = [(f"{value:g}", *(f"{of[value]:.2f}" if value in of else "–" for of in top1.values())) for value in every]
    title = f"top-1 by {'crop ratio' if over == 'crop' else 'image size'}"
    print_table([f"#{over}", *(f"#{run}" for run in points_of)], rows, title=title)


def _sweep_values(text: str) -> tuple[Any, list[float] | None]:
    """Parse 'crop' or 'size=160,224' into what is changed and its values."""

    over, equals, listed = text.partition("=")
    try:
        values = [float(part) for part in listed.split(",")] if equals else None
    except ValueError:
        values = []
    if over not in ("crop", "size") or values == []:
        raise UsageError(f"--sweep is {text!r}, expected crop or size, with or without values: crop=0.8,0.9,1")
    return over, values
