"""`patchloom evaluate RUN… DATA`: the numbers of trained models, alone and against each other."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchloom.cli.reading_options import reads_data
from patchloom.cli.verb import completed

if TYPE_CHECKING:
    from patchloom.data.reading import Reading
    from patchloom.inference.classifier import Classifier
    from patchloom.tasks.task import Scores, Task

MEASURED, IMAGES = "What is measured", "Which images, and how they are shown"  # panels of --help-all


@reads_data()
def evaluate(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN… [DATA]",
            help="Folders of runs, then data with their classes, matched by name. "
            "Without data: what the runs decided about their val images when they were trained.",
            autocompletion=completed("run"),
        ),
    ],
    reading: "Reading",
    split: Annotated[
        str | None,
        typer.Option(help="train, val, test or all; by default val, or what the run held out. Of text: any, by name."),
    ] = None,
    knn: Annotated[
        str | None,
        typer.Option(metavar="K,…", help="Judge the features by their K nearest neighbours: 10,20; alone: 20."),
    ] = None,
    levels: Annotated[
        bool, typer.Option("--levels", help="kNN and retrieval at every level of the data's taxonomy.")
    ] = False,
    agreement: Annotated[
        bool, typer.Option("--agreement", help="How often runs, heads and labels decide differently.")
    ] = False,
    seeds: Annotated[
        bool, typer.Option("--seeds", help="Mean, std, min and max over runs that differ only in their seed.")
    ] = False,
    costs: Annotated[bool, typer.Option("--cost", help="Also speed, multiply-adds, parameters, memory.")] = False,
    text: Annotated[
        str | None, typer.Option("--text", help="Parallel text for runs that translate: BLEU, chrF, loss.")
    ] = None,
    multi_scale: Annotated[
        bool,
        typer.Option(
            "--multi-scale",
            help="Runs that segment: average six scales, each mirrored too.",
            rich_help_panel=IMAGES,
        ),
    ] = False,
    mode: Annotated[
        str | None,
        typer.Option(
            metavar="whole|slide",
            help="Runs that segment: see images whole, or by windows; as in training when left out.",
            rich_help_panel=IMAGES,
        ),
    ] = None,
    batch: Annotated[int, typer.Option(help="Images at a time.")] = 64,
    device: Annotated[str, typer.Option(help="cpu, cuda …; auto takes a GPU if there is one.")] = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="For machines, with per-class accuracy and confusion.")
    ] = False,
    linear: Annotated[
        bool,
        typer.Option(
            "--linear",
            help="Judge the features by a linear probe; with --levels, separability.",
            rich_help_panel=MEASURED,
        ),
    ] = False,
    linear_sgd: Annotated[
        int | None,
        typer.Option(
            metavar="EPOCHS",
            help="The same as DINO does it: by SGD on augmented images; alone: 100 epochs.",
            rich_help_panel=MEASURED,
        ),
    ] = None,
    few_shot: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Judge the features by a probe learned from N images per class, such as 5.",
            rich_help_panel=MEASURED,
        ),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="crop|size",
            help="Top-1 at several crop ratios or image sizes; crop=0.8,0.9,1 says which.",
            rich_help_panel=MEASURED,
        ),
    ] = None,
    trunk: Annotated[
        bool,
        typer.Option(
            "--trunk",
            help="With --knn or --levels: by the vectors before the projector of a run that has one.",
            rich_help_panel=MEASURED,
        ),
    ] = False,
    level: Annotated[
        str | None,
        typer.Option(
            help="Label level to compare with; that of the model's classes by default.", rich_help_panel=IMAGES
        ),
    ] = None,
    size: Annotated[int | None, typer.Option(help="Test at another image size.", rich_help_panel=IMAGES)] = None,
    crop_ratio: Annotated[
        float | None, typer.Option(help="Share of the short side that is kept.", rich_help_panel=IMAGES)
    ] = None,
    real: Annotated[
        str | None, typer.Option(help="ImageNet-ReaL's real.json, for ImageNet's val.", rich_help_panel=IMAGES)
    ] = None,
    v2: Annotated[
        bool, typer.Option("--v2", help="Folder names are class numbers, as in ImageNet-V2.", rich_help_panel=IMAGES)
    ] = False,
    workers: Annotated[int, typer.Option(help="Processes that read images.", rich_help_panel=IMAGES)] = 0,
    strict: Annotated[
        bool, typer.Option(help="Classes the model does not know are an error.", rich_help_panel=IMAGES)
    ] = False,
) -> None:
    """Measure top-1 with its interval, top-5, loss, calibration and classes; compare several runs image by image."""
    from patchloom.runs.locate import names_run
    from patchloom.tasks.classification.several_runs import runs_by_name
    from patchloom_runtime.artifacts.metadata import is_artifact
    from patchloom_runtime.errors import UsageError

    probes = {"knn": knn, "linear": linear or None, "linear_sgd": linear_sgd, "few_shot": few_shot}
    asked = {"--knn": knn, "--linear": linear, "--linear-sgd": linear_sgd, "--few-shot": few_shot, "--sweep": sweep}
    asked |= {"--levels": levels, "--agreement": agreement, "--seeds": seeds, "--cost": costs}
    shown: dict[str, Any] = {"split": split, "size": size, "crop_ratio": crop_ratio, "real": real, "v2": v2}
    shown |= {"level": level} | reading.chosen()
    is_model = names_run(paths[-1]) or is_artifact(paths[-1])
    runs, data = (paths, text) if text is not None or is_model else (paths[:-1], paths[-1])
    if not runs:
        raise UsageError(f"{paths[-1]} is not the folder of a run: it has no config.json")
    task = _task_of(runs)
    if not task.whole_images:
        unread = _said(asked | {"--trunk": trunk} | {_option(name): value for name, value in shown.items()})
        mapping = {f"--{name}" for name in ("images", "masks", "boxes", "ignore", "names")}
        own: dict[str, Any] = {"multi_scale": multi_scale, "mode": mode}
        unread += [_option(name) for name, value in own.items() if value and name not in task.report.evaluation_options]
        if unread := [name for name in unread if name != "--split" and name not in mapping]:
            raise UsageError(f"{unread[0]} {task.refusal}")
        own = {name: value for name, value in own.items() if value}
        own |= {"reading": reading} if reading.chosen() else {}
        _show(task.report.evaluate(runs_by_name(runs), data, split=split, device=device, **own), as_json)
        return
    if multi_scale or mode:
        raise UsageError(f"{'--multi-scale' if multi_scale else '--mode'} is for runs that segment; {runs[0]} does not")
    if text is not None:
        raise UsageError(f"{runs[0]} was not trained to translate: leave --text out, and give images")
    _check_together(_said(asked), shown, runs, data)
    if trunk and knn is None and not levels:
        raise UsageError("--trunk says what images are compared by; give it with --knn or --levels")
    shown = {name: value for name, value in shown.items() if name not in reading.chosen()}
    shown |= {"reading": reading, "batch": batch, "workers": workers, "strict": strict}
    of_data = {name: value for name, value in shown.items() if name not in ("split", "real", "v2")}
    if levels:
        from patchloom.cli.level_tables import show_levels
        from patchloom.tasks.classification.levels import evaluate_levels

        del of_data["level"]  # every one is judged at
        found = evaluate_levels(runs, str(data), device=device, halves=linear, trunk=trunk, **of_data)
        show_levels(found, as_json=as_json)
    elif any(value is not None for value in probes.values()):
        _probe(_classifiers(runs, device, trunk=trunk), str(data), probes, of_data, as_json)
    elif sweep is not None:
        _sweep(runs, str(data), device, sweep, shown, as_json)
    else:
        from patchloom.cli.evaluation_tables import show
        from patchloom.data.checking.scan import scan_bar
        from patchloom.tasks.classification.several_runs import evaluate as evaluate_runs

        with scan_bar(what="evaluating") as progress:
            decided = evaluate_runs(runs, data, device=device, heads=agreement, progress=progress, **shown)
        show(decided, agreement=agreement, seeds=seeds, costs=costs, device=device, as_json=as_json)


def _task_of(runs: list[str]) -> "Task":
    """The task of runs, which must be of one kind."""
    from pathlib import Path

    from patchloom.runs.config import is_run
    from patchloom.tasks.table import task_named, task_of_method, task_of_run
    from patchloom_runtime.artifacts.metadata import is_artifact, read_about
    from patchloom_runtime.errors import UsageError

    tasks = {run: task_of_run(Path(run)) for run in runs if is_run(run)}
    tasks |= {run: task_named(read_about(Path(run)).task) for run in runs if is_artifact(run)}
    if not tasks:  # they are fetched, and what is wrong with them is said, where they are opened
        return task_of_method(None)
    first, *others = tasks.items()
    for run, task in others:
        if task.whole_images != first[1].whole_images:
            of = f"{first[0]} is of the task {first[1].name}, {run} of {task.name}"
            raise UsageError(f"{of}: evaluate them one by one")
    return first[1]


def _show(scores: "Scores", as_json: bool) -> None:
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


def _said(options: dict[str, Any]) -> list[str]:
    """The options that were given; 0 is one."""
    return [name for name, value in options.items() if value is not None and value is not False]


def _option(name: str) -> str:
    """crop_ratio → --crop-ratio."""
    return f"--{name.replace('_', '-')}"


def _check_together(asked: list[str], shown: dict[str, Any], runs: list[str], data: str | None) -> None:
    """One line for options that do not go together, rather than one of them left unread."""
    from patchloom_runtime.errors import UsageError

    leveled = "--levels" in asked
    if leveled:
        asked = [name for name in asked if name not in ("--levels", "--linear")]  # --linear adds separability
    probes = ["--levels"] if leveled else []
    probes += [name for name in asked if name in ("--knn", "--linear", "--linear-sgd", "--few-shot")]
    alone = [*probes[: 2 if leveled else 1], *(["--sweep"] if "--sweep" in asked else [])]
    others = [name for name in asked if name not in (*probes, "--sweep")]
    given = [_option(name) for name in _said(shown)]
    if len(alone) > 1 or (alone and others):
        raise UsageError(f"{alone[0]} does not go with {(alone[1:] + others)[0]}: ask for them one after the other")
    if data is None and (alone or given):
        raise UsageError(f"{(alone + given)[0]} needs images: patchloom evaluate {runs[0]} DATA {(alone + given)[0]}")
    unread = [name for name in given if name in ("--split", "--real", "--v2")] if probes else []
    if unread:
        raise UsageError(f"{unread[0]} does not go with {probes[0]}: probes learn from train and are judged on val")
    if leveled and "--level" in given:
        raise UsageError("--level does not go with --levels, which judges at every level")
    if len(runs) < 2 and "--seeds" in asked:
        raise UsageError(f"--seeds compares runs with each other; give at least two, given {runs[0]}")


def _classifiers(runs: list[str], device: str, *, trunk: bool = False) -> "Iterator[tuple[str, Classifier]]":
    """One after the other: many networks need not fit on the device together."""
    from patchloom.inference.classifier import load
    from patchloom.tasks.classification.several_runs import runs_by_name

    for name, folder in runs_by_name(runs).items():
        yield name, load(folder, device=device, trunk=trunk)


def _probe(
    classifiers: "Iterator[tuple[str, Classifier]]",
    data: str,
    probes: dict[str, Any],
    shown: dict[str, Any],
    as_json: bool,
) -> None:
    from patchloom.cli.output import print_json
    from patchloom.cli.table import print_table, whole_numbers

    neighbours = whole_numbers("--knn", probes["knn"], "20 or 10,20") if probes["knn"] is not None else ()
    found = {
        name: classifier.probe(
            data,
            knn=neighbours,
            linear=bool(probes["linear"]),
            linear_sgd=probes["linear_sgd"],
            few_shot=probes["few_shot"],
            **shown,
        )
        for name, classifier in classifiers
    }
    if as_json:
        print_json({name: {**dict(each), "notes": each.notes} for name, each in found.items()})
        return
    for note in next(iter(found.values())).notes:
        print(f"note: {note}")
    names = [name for name, _ in next(iter(found.values()))]
    rows = [
        (run, *(f"{value:.2g}" if name in ("linear_l2", "linear_sgd_rate") else f"{value:.2f}" for name, value in each))
        for run, each in found.items()
    ]
    print_table(
        ["run", *(f"#{name}" for name in names)], rows, title="frozen features, learned from train, judged on val"
    )


def _sweep(runs: list[str], data: str, device: str, sweep: str, shown: dict[str, Any], as_json: bool) -> None:
    from patchloom.cli.output import print_json
    from patchloom.cli.table import print_table

    over, values = _sweep_values(sweep)
    found = {name: each.sweep(data, over, values, **shown) for name, each in _classifiers(runs, device)}
    if as_json:
        answer = {run: [{over: p.value, **p.evaluation.values()} for p in points] for run, points in found.items()}
        print_json(answer)
        return
    top1 = {run: {p.value: p.evaluation.report.top(1) for p in points} for run, points in found.items()}
    every = sorted({value for of in top1.values() for value in of})
    rows = [(f"{value:g}", *(f"{of[value]:.2f}" if value in of else "–" for of in top1.values())) for value in every]
    title = f"top-1 by {'crop ratio' if over == 'crop' else 'image size'}"
    print_table([f"#{over}", *(f"#{run}" for run in found)], rows, title=title)


def _sweep_values(text: str) -> tuple[Any, list[float] | None]:
    """'crop' or 'size=160,224' → what is changed, and to which values."""
    from patchloom_runtime.errors import UsageError

    over, equals, given = text.partition("=")
    try:
        values = [float(part) for part in given.split(",")] if equals else None
    except ValueError:
        values = []
    if over not in ("crop", "size") or values == []:
        raise UsageError(f"--sweep takes crop, size, or one with values such as crop=0.8,0.9,1; given {text!r}")
    return over, values
