"""`patchloom sweep DATA… --grid optim.lr=1e-3,3e-4`: a grid of settings over one or more datasets."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchloom.cli.options import Device, Json, keywords
from patchloom.options import HARDWARE, MODEL, Argument, Option

if TYPE_CHECKING:
    from patchloom.training.sweeps.table import Sweep


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    data: Annotated[
        list[str],
        Argument("Datasets, each trained on separately. Quote several parts of one: 'a/ b/'.", metavar="DATA"),
    ]
    grid: Annotated[
        list[str],
        Option(
            "Recipe field, seed, train_share, model, recipe, init, teacher, level, epochs, size or batch, and its "
            "values. All combinations are trained. Repeatable.",
            metavar="FIELD=A,B,…",
        ),
    ]
    model: Annotated[str | None, Option("Network. Default: chosen for the data.", complete="model")] = None
    recipe: Annotated[str, Option("Published recipe, a recipe.yaml, or auto.", complete="recipe")] = "auto"
    init: Annotated[str | None, Option("Start from a run, published weights or a file.", complete="run")] = None
    epochs: Annotated[int | None, Option("Passes over the data.")] = None
    size: Annotated[int | None, Option("Image size in pixels.", panel=MODEL)] = None
    batch: Annotated[int | None, Option("Images per update.", panel=MODEL)] = None
    changes: Annotated[
        dict[str, Any],
        Option(
            "Recipe fields to change for all runs: augment.mixup=0. Repeatable.",
            name="set",
            metavar="FIELD=VALUE",
            panel=MODEL,
        ),
    ] = field(default_factory=dict)
    exclude: Annotated[str | None, Option("List of training images to exclude.", metavar="LIST", panel=MODEL)] = None
    out: Annotated[str | None, Option("Sweep folder. Default: runs/sweep-NAME.")] = None
    device: Device = "auto"
    workers: Annotated[int | None, Option("Processes that read images.", panel=HARDWARE)] = None
    test: Annotated[bool, Option("Evaluate the chosen setting, and no other, on the test images.")] = False
    dry_run: Annotated[bool, Option("Print the number of runs and the time they take; train nothing.")] = False
    as_json: Json = False


def sweep(options: SweepOptions) -> None:
    """Train a grid of settings on one or more datasets and choose the best on val. The same command resumes.

    patchloom sweep photos/ --grid optim.lr=1e-3,3e-4,1e-4 --grid seed=0,1,2 --test

    patchloom sweep pets/ flowers/ cars/ --init in1k --grid optim.lr=1e-3,1e-4

    patchloom sweep photos/ --grid train_share=0.03,0.1,0.3,1 --grid model=resmlp_s12,mixer_s16
    """
    from patchloom.cli.output import print_json
    from patchloom.training.sweeps.grid import read_grid
    from patchloom.training.sweeps.sweep import sweep as run_sweep

    result = run_sweep(options.data, read_grid(options.grid), **keywords(options, "data", "grid"))
    if options.as_json:
        print_json(result.to_dict())
    elif not options.dry_run:
        _print(result)
    if not options.dry_run and all(run.failed for run in result.runs.values()):
        raise typer.Exit(1)


def _print(result: "Sweep") -> None:
    from patchloom.cli.output import print_result
    from patchloom.cli.table import print_table
    from patchloom.training.sweeps.grid import in_words
    from patchloom_runtime.printable import printable

    columns, rows = result.table()
    print_table(columns, rows, title=f"{result.metric or 'score'} on val images")
    if result.best_of_sets:
        best = [f"{data}: {setting}" for data, setting in result.best_of_sets_in_words]
        print_result(printable(f"best on each dataset: {'; '.join(best)}"))
    for run in result.runs.values():
        if run.failed:
            print_result(printable(f"failed: {run.data}, {in_words(run.setting)}: {run.failed}"))
    for note in result.notes:
        print_result(printable(f"note: {note}"))
    print_result(f"{result.page}")
