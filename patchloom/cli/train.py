"""`patchloom train DATA`: from images, or sentence pairs, to a trained model, its numbers and a report."""

from typing import Annotated

import typer

LEARNED, DATA, RUN, MACHINE = "What is learned", "The data", "The run", "The machine"  # panels of the help


def train(
    data: Annotated[
        list[str],
        typer.Argument(help="Folders of class folders, zip, tar, parquet, a labels file, 'digits', 'hf:user/name' …"),
    ],
    model: Annotated[
        str | None,
        typer.Option(help="Network (`patchloom models`); chosen by the data when left out.", rich_help_panel=LEARNED),
    ] = None,
    recipe: Annotated[
        str,
        typer.Option(help="A published recipe (`patchloom recipes`), a recipe.yaml, or auto.", rich_help_panel=LEARNED),
    ] = "auto",
    out: Annotated[
        str | None, typer.Option(help="Folder of the run; runs/NAME-OF-DATA when left out.", rich_help_panel=RUN)
    ] = None,
    teacher: Annotated[
        str | None, typer.Option(help="Distil from a run, timm:NAME, torchvision:NAME …", rich_help_panel=LEARNED)
    ] = None,
    init: Annotated[
        str | None, typer.Option(help="Start from a run's or a published file's weights.", rich_help_panel=LEARNED)
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.", rich_help_panel=LEARNED)] = None,
    size: Annotated[int | None, typer.Option(help="Image size in pixels.", rich_help_panel=LEARNED)] = None,
    batch: Annotated[
        int | None, typer.Option(help="Images, of text tokens, an update, over all devices.", rich_help_panel=LEARNED)
    ] = None,
    micro_batches: Annotated[
        int | None,
        typer.Option(
            help="Split each batch into N micro-batches; chosen to fit the memory when left out.",
            rich_help_panel=MACHINE,
        ),
    ] = None,
    fit: Annotated[
        bool,
        typer.Option("--fit", help="Fit a named recipe to the data and this machine.", rich_help_panel=LEARNED),
    ] = False,
    time: Annotated[
        str | None,
        typer.Option(help="Plan the whole run into 90s, 30m, 2h …, by measured steps.", rich_help_panel=LEARNED),
    ] = None,
    stop_after: Annotated[
        str | None,
        typer.Option(help="Stop and save after 30m, 2h …; the same command goes on.", rich_help_panel=RUN),
    ] = None,
    patience: Annotated[
        int | None, typer.Option(help="Evaluations without a better one before stopping.", rich_help_panel=RUN)
    ] = None,
    pictures: Annotated[
        int | None, typer.Option(help="Draw the network into RUN/pictures every so many epochs.", rich_help_panel=RUN)
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Change a recipe field: augment.mixup=0", rich_help_panel=LEARNED)
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu, cuda, cuda:1; auto takes a GPU if there is one.", rich_help_panel=MACHINE)
    ] = "auto",
    workers: Annotated[int | None, typer.Option(help="Processes that prepare images.", rich_help_panel=MACHINE)] = None,
    worker_timeout: Annotated[
        float, typer.Option(help="Seconds after which a silent one counts as hung.", rich_help_panel=MACHINE)
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
    labels: Annotated[
        str | None, typer.Option(help="CSV with path,label for a folder of images.", rich_help_panel=DATA)
    ] = None,
    label_column: Annotated[
        str | None, typer.Option(help="The column of that file that holds the classes.", rich_help_panel=DATA)
    ] = None,
    label_pattern: Annotated[
        str | None,
        typer.Option(help="The class as a part of the file's name: '{label}_*.jpg'.", rich_help_panel=DATA),
    ] = None,
    taxonomy: Annotated[
        str | None,
        typer.Option(help="File of levels above the classes: class,coarse … (csv, json, yaml).", rich_help_panel=DATA),
    ] = None,
    classes: Annotated[
        str | None,
        typer.Option(
            metavar="innermost|outermost", help="Which of nested folders are the classes.", rich_help_panel=DATA
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option(help="Unreadable images and stray classes are errors.", rich_help_panel=DATA)
    ] = False,
    log: Annotated[
        list[str] | None, typer.Option(help="Also log to tensorboard or wandb.", rich_help_panel=RUN)
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Plan, memory and time from a few measured steps; trains nothing.", rich_help_panel=RUN
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result for machines.", rich_help_panel=RUN)
    ] = False,
) -> None:
    """Train a classifier, or a translator (--recipe translation-small); the same command again resumes."""
    from patchloom.data.source import in_one
    from patchloom.training.plan import TrainingSettings
    from patchloom.training.run import run_training, silent

    settings = TrainingSettings(
        data=in_one(data), model=model, recipe=recipe, out=out, teacher=teacher, init=init, epochs=epochs, size=size,
        batch=batch, micro_batches=micro_batches, fit=fit, time=time, stop_after=stop_after,
        patience=patience, pictures=pictures, changes=pairs(changes or []), device=device,
        workers=workers, worker_timeout=worker_timeout, compiled=compiled, shard=shard, level=level, labels=labels,
        label_column=label_column, label_pattern=label_pattern, taxonomy=taxonomy,
        classes=classes,  # type: ignore[arg-type]
        strict=strict,
        trackers=tuple(log or ()),
    )  # fmt: skip
    result = run_training(settings, dry_run=dry_run, say=silent if as_json else print)
    if as_json:
        import json

        print(json.dumps(result.summary(), indent=2))


def pairs(texts: list[str]) -> dict[str, str]:
    """'augment.mixup=0' → {'augment.mixup': '0'}."""
    from patchloom.errors import UsageError

    out = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UsageError(f"--set takes field=value, such as augment.mixup=0; given {text!r}")
        out[key.strip()] = value.strip()
    return out
