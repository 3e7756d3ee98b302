"""`patchloom train DATA`: from images, or sentence pairs, to a trained model, its numbers and a report."""

from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchloom.cli.reading_options import reads_data
from patchloom.cli.verb import OUTPUT, completed

if TYPE_CHECKING:
    from patchloom.data.reading import Reading

LEARNED, DATA, RUN, MACHINE = "What is learned", "The data", "The run", "The machine"  # panels of --help-all


@reads_data(leave_out=["labels"])
def train(
    data: Annotated[
        list[str],
        typer.Argument(help="Folders of class folders, zip, tar, parquet, a labels file, 'digits', 'hf:user/name' …"),
    ],
    reading: "Reading",
    model: Annotated[
        str | None,
        typer.Option(
            help="Network (`patchloom models`); chosen to suit the data when left out.",
            autocompletion=completed("model"),
        ),
    ] = None,
    recipe: Annotated[
        str,
        typer.Option(
            help="A published recipe (`patchloom recipes`), a recipe.yaml, or auto.", autocompletion=completed("recipe")
        ),
    ] = "auto",
    task: Annotated[
        str | None,
        typer.Option(
            metavar="classify|segment|detect",
            help="What to learn, where the data leave a choice; as the recipe or the data say when left out.",
            rich_help_panel=LEARNED,
        ),
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.")] = None,
    time: Annotated[str | None, typer.Option(help="Plan the whole run into 90s, 30m, 2h …, by measured steps.")] = None,
    size: Annotated[int | None, typer.Option(help="Image size in pixels.")] = None,
    init: Annotated[
        str | None,
        typer.Option(
            help="Start from a run, from published weights (in1k, resmlp_s12:in1k) or from a file.",
            autocompletion=completed("run"),
        ),
    ] = None,
    labels: Annotated[
        str | None, typer.Option(help="A table of path,label in any form, for a folder of images.")
    ] = None,
    out: Annotated[str | None, typer.Option(help="Folder of the run; runs/NAME-OF-DATA when left out.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1; auto takes a GPU if there is one.")] = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan, memory and time from a few measured steps; train nothing.")
    ] = False,
    teacher: Annotated[
        str | None,
        typer.Option(
            help="Distil from a run, timm:NAME, torchvision:NAME …",
            autocompletion=completed("run"),
            rich_help_panel=LEARNED,
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(help="Images (of text: tokens) per update, over all devices.", rich_help_panel=LEARNED),
    ] = None,
    micro_batches: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Split each batch into N micro-batches; chosen to fit the memory when left out.",
            rich_help_panel=MACHINE,
        ),
    ] = None,
    fit: Annotated[
        bool,
        typer.Option("--fit", help="Fit a named recipe to the data and this machine.", rich_help_panel=LEARNED),
    ] = False,
    stop_after: Annotated[
        str | None,
        typer.Option(help="Stop and save after 30m, 2h …; the same command resumes.", rich_help_panel=RUN),
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Change a recipe field: augment.mixup=0", rich_help_panel=LEARNED)
    ] = None,
    patience: Annotated[
        int | None,
        typer.Option(metavar="N", help="Stop after N evaluations without improvement.", rich_help_panel=RUN),
    ] = None,
    pictures: Annotated[
        int | None,
        typer.Option(metavar="N", help="Draw the network into RUN/pictures every N epochs.", rich_help_panel=RUN),
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that prepare images.", rich_help_panel=MACHINE)] = None,
    worker_timeout: Annotated[
        float,
        typer.Option(help="Seconds after which a silent process counts as hung.", rich_help_panel=MACHINE),
    ] = 120,
    compiled: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile", help="torch.compile; by default where it pays.", rich_help_panel=MACHINE
        ),
    ] = None,
    shard: Annotated[
        bool, typer.Option(help="Split weights and optimiser over the processes (FSDP).", rich_help_panel=MACHINE)
    ] = False,
    level: Annotated[
        str | None, typer.Option(help="Label level to train on, where the data have several.", rich_help_panel=DATA)
    ] = None,
    strict: Annotated[
        bool, typer.Option(help="Unreadable images and stray classes are errors.", rich_help_panel=DATA)
    ] = False,
    log: Annotated[
        list[str] | None, typer.Option(help="Also log to tensorboard or wandb.", rich_help_panel=RUN)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result, or the plan, for machines.", rich_help_panel=OUTPUT)
    ] = False,
) -> None:
    """Train a classifier, or a translator (--recipe translation-small); the same command again resumes."""
    started = perf_counter()  # before torch is imported: --time includes that
    changed = pairs(changes or [])
    _announce(data)
    from patchloom.cli.output import is_quiet, print_json, print_result
    from patchloom.data.sources.specs import join_specs
    from patchloom.tasks.plan import TrainingSettings
    from patchloom.training.run import run_training

    settings = TrainingSettings(
        data=join_specs(data), model=model, recipe=recipe, task=task, out=out, teacher=teacher, init=init,
        epochs=epochs, size=size, batch=batch, micro_batches=micro_batches, fit=fit, time=time, stop_after=stop_after,
        patience=patience, pictures=pictures, changes=changed, device=device,
        workers=workers, worker_timeout=worker_timeout, compiled=compiled, shard=shard, level=level, labels=labels,
        strict=strict, trackers=tuple(log or ()),
        **reading.given(),  # type: ignore[arg-type]
    )  # fmt: skip
    result = run_training(settings, dry_run=dry_run, say=print, started=started)
    if as_json:
        print_json(result.summary())
    elif is_quiet():
        print_result(_in_a_line(result.summary()))


def _in_a_line(summary: dict[str, Any]) -> str:
    """What a quiet command says: where the run is and its numbers, or how long it would take."""
    told = {name: value for name, value in summary.items() if isinstance(value, float)}
    return "  ".join([summary["folder"], *(f"{name} {value:.4g}" for name, value in told.items())])


def _announce(data: list[str]) -> None:
    """A first line before torch is loaded, which takes seconds; of many processes the first says it."""
    import os

    from patchloom import __version__

    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        print(f"patchloom {__version__}: reading {' '.join(data)} …", flush=True)


def pairs(texts: list[str]) -> dict[str, str]:
    """'augment.mixup=0' → {'augment.mixup': '0'}."""
    from patchloom_runtime.errors import UsageError

    out = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UsageError(f"--set takes field=value, such as augment.mixup=0; given {text!r}")
        out[key.strip()] = value.strip()
    return out
