"""`patchloom sweep DATA… --grid optim.lr=1e-3,3e-4`: a grid of settings over one or more data sets."""

from typing import TYPE_CHECKING, Annotated

import typer

from patchloom.cli.verb import OUTPUT, completed

if TYPE_CHECKING:
    from patchloom.training.sweeps.table import Sweep

LEARNED, MACHINE = "What is learned", "The machine"  # panels of --help-all


def sweep(
    data: Annotated[
        list[str],
        typer.Argument(metavar="DATA...", help="Data sets, each trained on by itself; one in several parts is quoted."),
    ],
    grid: Annotated[
        list[str],
        typer.Option(
            metavar="FIELD=A,B,…",
            help="A recipe field, seed, train_share, model, recipe, init, epochs, size or batch and its values; "
            "several --grid are combined.",
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(help="Network; chosen to suit the data when left out.", autocompletion=completed("model")),
    ] = None,
    recipe: Annotated[
        str,
        typer.Option(help="A published recipe, a recipe.yaml, or auto.", autocompletion=completed("recipe")),
    ] = "auto",
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.")] = None,
    init: Annotated[
        str | None,
        typer.Option(help="Start from a run, published weights or a file.", autocompletion=completed("run")),
    ] = None,
    out: Annotated[str | None, typer.Option(help="Folder of the sweep; runs/sweep-NAME when left out.")] = None,
    test: Annotated[
        bool, typer.Option("--test", help="Evaluate the chosen setting, and no other, on the test images.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show how many runs there are and how long they take; train nothing.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1; auto takes a GPU if there is one.")] = "auto",
    size: Annotated[int | None, typer.Option(help="Image size in pixels.", rich_help_panel=LEARNED)] = None,
    batch: Annotated[int | None, typer.Option(help="Images per update.", rich_help_panel=LEARNED)] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a recipe field for all runs: augment.mixup=0", rich_help_panel=LEARNED),
    ] = None,
    without: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Leave out the training images that a list names.", rich_help_panel=LEARNED),
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that prepare images.", rich_help_panel=MACHINE)] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print rows, runs and the best for machines.", rich_help_panel=OUTPUT)
    ] = False,
) -> None:
    """Train a grid of settings on one or more data sets and choose the best on val; the same command again resumes.

    patchloom sweep photos/ --grid optim.lr=1e-3,3e-4,1e-4 --grid seed=0,1,2 --test

    patchloom sweep pets/ flowers/ cars/ --init in1k --grid optim.lr=1e-3,1e-4

    patchloom sweep photos/ --grid train_share=0.03,0.1,0.3,1 --grid model=resmlp_s12,mixer_s16
    """
    from patchloom.cli.options import parse_pairs
    from patchloom.cli.output import print_json

    changed = parse_pairs(changes or [])
    from patchloom.training.sweeps.grid import read_grid
    from patchloom.training.sweeps.sweep import sweep as run_sweep

    found = run_sweep(
        data, read_grid(grid), model=model, recipe=recipe, init=init, epochs=epochs, size=size, batch=batch,
        set=changed, without=without, out=out, device=device, workers=workers, test=test, dry_run=dry_run,
    )  # fmt: skip
    if as_json:
        print_json(found.to_dict())
    elif not dry_run:
        _show(found)
    if not dry_run and all(run.failed for run in found.runs.values()):
        raise typer.Exit(1)


def _show(found: "Sweep") -> None:
    from patchloom.cli.output import print_result
    from patchloom.cli.table import print_table
    from patchloom.training.sweeps.grid import in_words
    from patchloom_runtime.printable import printable

    columns, rows = found.table()
    print_table(columns, rows, title=f"{found.metric or 'score'} on val images")
    if found.best_of_sets:
        each = [f"{data}: {setting}" for data, setting in found.best_of_sets_in_words]
        print_result(printable(f"best on each data set: {'; '.join(each)}"))
    for run in found.runs.values():
        if run.failed:
            print_result(printable(f"failed: {run.data}, {in_words(run.setting)}: {run.failed}"))
    for note in found.notes:
        print_result(printable(f"note: {note}"))
    print_result(f"{found.page}")
