"""`patchloom demo`: the old name of `patchloom train digits`."""

import sys
from dataclasses import dataclass
from typing import Annotated

from patchloom.cli.old_spellings import hint
from patchloom.cli.options import Json
from patchloom.cli.train import TrainOptions, train
from patchloom.options import Option


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    out: Annotated[str, Option("Run folder.")] = "runs/demo"
    epochs: Annotated[int, Option("Passes over the 1,437 training images.")] = 30
    as_json: Json = False


def demo(options: DemoOptions) -> None:
    """Train a small network on handwritten digits and write its report."""
    print(hint("demo", f"train digits --out {options.out}"), file=sys.stderr)
    # Digits of 8 pixels fill their frame: shifting and mixing them only slows a run of a minute.
    changes = {"augment.crop": "resize", "augment.mixup": 0, "optim.lr": 3e-3}
    train(
        TrainOptions(data=("digits",), out=options.out, epochs=options.epochs, changes=changes, as_json=options.as_json)
    )
