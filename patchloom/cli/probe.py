"""`patchloom probe RUN… DATA`: what the features of a run can tell apart, measured by simple classifiers."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from patchloom.cli.options import (
    Batch,
    Device,
    Json,
    Level,
    ReadingOptions,
    Trunk,
    Workers,
    changed,
    keywords,
    parse_counts,
)
from patchloom.data.reading_options import AS_IT_IS
from patchloom.options import IMAGES, Argument, Option

if TYPE_CHECKING:
    from patchloom.inference.probes import Probes

PROBES = ("knn", "linear", "linear_sgd", "few_shot")


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    paths: Annotated[
        list[str],
        Argument("Runs, then data with a train and a val split, of any classes.", metavar="RUN… DATA", complete="run"),
    ]
    knn: Annotated[
        str | None,
        Option("k nearest neighbors: 10,20. The default probe. Without a value: 20.", metavar="K,…"),
    ] = None
    linear: Annotated[bool, Option("Linear probe. With --levels: separability.")] = False
    linear_sgd: Annotated[
        int | None,
        Option(
            "Epochs of a linear probe trained with SGD on augmented images, as in DINO. Without a value: 100.",
            metavar="EPOCHS",
        ),
    ] = None
    few_shot: Annotated[int | None, Option("Linear probe trained on N images per class, such as 5.", metavar="N")] = (
        None
    )
    levels: Annotated[bool, Option("k-NN and retrieval at every level of the data's taxonomy.")] = False
    trunk: Trunk = False
    device: Device = "auto"
    level: Level = None
    size: Annotated[int | None, Option("Image size in pixels. Default: the run's.", panel=IMAGES)] = None
    crop_ratio: Annotated[
        float | None, Option("Share of the short side that is kept. Default: the run's.", panel=IMAGES)
    ] = None
    strict: Annotated[bool, Option("Treat warnings about the data as errors: stray classes.", panel=IMAGES)] = False
    reading: ReadingOptions = AS_IT_IS
    batch: Batch = 64
    workers: Workers = 0
    as_json: Json = False


def probe(options: ProbeOptions) -> None:
    """Measure the frozen features of runs by simple classifiers, trained on train and evaluated on val.

    patchloom probe runs/dino photos/ --knn 10,20 --linear
    """
    from patchloom.tasks.classification.levels import evaluate_levels
    from patchloom.tasks.evaluate import task_of_runs
    from patchloom_runtime.errors import UsageError

    runs, data = _runs_and_data(options)
    chosen = changed(options, *PROBES)
    task = task_of_runs(runs)
    if not task.whole_images:
        raise UsageError(f"{(chosen or changed(options, 'levels') or ['probe'])[0]} {task.refusal}")
    if options.levels:
        _check_levels(options, chosen)
        from patchloom.cli.evaluation_tables import print_levels

        shared = keywords(options, "paths", "levels", "level", *PROBES)
        print_levels(
            evaluate_levels(runs, data, halves=options.linear, halves_level=options.level, **shared),
            as_json=options.as_json,
        )
        return
    if options.trunk and options.knn is None and chosen:
        raise UsageError("--trunk chooses the vectors that images are compared by; pass it with --knn or --levels")
    from patchloom.tasks.classification.several_runs import probe as probe_runs

    counts = parse_counts("--knn", options.knn, "20 or 10,20") if options.knn is not None else [20] * (not chosen)
    shared = keywords(options, "paths", "levels", "knn")
    _print_probes(probe_runs(runs, data, knn=counts, **shared), as_json=options.as_json)


def _runs_and_data(options: ProbeOptions) -> tuple[list[str], str]:
    from patchloom.runs.locate import names_run
    from patchloom_runtime.artifacts.metadata import is_artifact
    from patchloom_runtime.errors import UsageError

    *runs, data = options.paths
    chosen = (changed(options, "levels", *PROBES) or ["--knn"])[0]
    if names_run(data) or is_artifact(data):
        raise UsageError(f"{chosen} needs images: patchloom probe {data} DATA {chosen}")
    if not runs:
        raise UsageError(f"{data} is not a run folder: it has no config.json")
    return runs, data


def _check_levels(options: ProbeOptions, chosen: list[str]) -> None:
    from patchloom_runtime.errors import UsageError

    if others := [option for option in chosen if option != "--linear"]:  # --linear adds separability
        raise UsageError(f"--levels cannot be used with {others[0]}; run one after the other")
    if options.level is not None and not options.linear:
        raise UsageError(
            "--levels measures every level; drop --level, or pass --linear too to split the classes of that level"
        )


def _print_probes(probes: "dict[str, Probes]", *, as_json: bool) -> None:
    from patchloom.cli.output import print_json
    from patchloom.cli.table import print_table

    if as_json:
        print_json({name: {**dict(each), "notes": each.notes} for name, each in probes.items()})
        return
    first = next(iter(probes.values()))
    for note in first.notes:
        print(f"note: {note}")
    rows = [
        (run, *(f"{value:.2g}" if name in ("linear_l2", "linear_sgd_rate") else f"{value:.2f}" for name, value in each))
        for run, each in probes.items()
    ]
    columns = ["run", *(f"#{name}" for name, _ in first)]
    print_table(columns, rows, title="frozen features, learned from train, evaluated on val")
