"""`patchloom demo`: the main job on embedded data, from nothing to a report."""

from typing import Annotated

import typer


def demo(
    out: Annotated[str, typer.Option(help="Folder of the run.")] = "runs/demo",
    epochs: Annotated[int, typer.Option(help="Passes over the 1,437 training images.")] = 30,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result for machines.")] = False,
) -> None:
    """Train a small ResMLP on handwritten digits, evaluate it, and write report.html with its patch interactions."""
    from patchloom.cli.evaluate import evaluate
    from patchloom.cli.output import print_json
    from patchloom.tasks.settings import TrainingSettings
    from patchloom.training.run import run_training

    # Digits of 8 pixels fill their frame: shifting and mixing them only slows a run of a minute.
    changes = {"augment.crop": "resize", "augment.mixup": 0, "optim.lr": 3e-3}
    result = run_training(TrainingSettings(data=("digits",), out=out, epochs=epochs, changes=changes))
    if as_json:
        print_json(result.summary() | {"page": f"{out}/report.html"})
        return
    evaluate([out, "digits"])
    print(f"Open {out}/report.html: curves, confusion matrix, worst mistakes, what the patches listen to, the recipe.")
