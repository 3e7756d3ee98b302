"""`patchloom train DATA`: from images, or sentence pairs, to a trained model, its numbers and a report."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from time import perf_counter
from typing import Annotated, Any

import typer

from patchloom.cli.options import Json
from patchloom.options import Option
from patchloom.plugins import MODULE, registered_settings
from patchloom.tasks.settings import TrainingSettings
from patchloom_runtime.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class TrainOptions(TrainingSettings):
    dry_run: Annotated[bool, Option("Print the plan, the memory and the time from a few steps; train nothing.")] = False
    as_json: Json = False

    def settings(self) -> TrainingSettings:
        """Return the settings without the options of the command line."""
        values = {field.name: getattr(self, field.name) for field in fields(TrainingSettings)}
        plugged = registered_settings()
        if self.model and plugged.get("model") not in (None, self.model, f"{MODULE}{self.model}"):
            raise UsageError(
                f"--model is {self.model}, and a plug-in registers {plugged['model']}; drop one of the two"
            )
        return TrainingSettings(**values | plugged)


def train(options: TrainOptions) -> None:
    """Train a model on images, or a translator on text (--recipe translation-small). The same command resumes.

    patchloom train photos/ --init in1k

    patchloom train photos/ --time 10m --set augment.mixup=0

    photos/ has a folder of images per class. The run folder gets the weights, the metrics and report.html.
    """
    started = perf_counter()  # before torch is imported: --time includes that
    _announce(options.data_text)
    from patchloom.cli.output import is_quiet, print_json, print_result
    from patchloom.training.train import start_training

    ask = None if options.as_json or is_quiet() else _asker()
    result = start_training(options.settings(), dry_run=options.dry_run, say=print, started=started, ask=ask)
    if options.as_json:
        print_json(result.summary())
    elif is_quiet():
        print_result(_summary_line(result.summary()))
    if options.folds and not options.dry_run:
        _end_folds(result, as_json=options.as_json)


def _end_folds(result: Any, *, as_json: bool) -> None:
    """Print the table of a cross-validation; exit with 1 if a run failed."""
    from patchloom.cli.table import print_table

    if not as_json:
        print_table(*result.table(), title="Cross-validation")
    if result.failed:
        raise typer.Exit(1)


def _summary_line(summary: dict[str, Any]) -> str:
    """Return the line of a quiet command: the run folder and its numbers."""
    numbers = {name: value for name, value in summary.items() if isinstance(value, float)}
    return "  ".join([summary["folder"], *(f"{name} {value:.4g}" for name, value in numbers.items())])


def _asker() -> Callable[[str], bool] | None:
    """Return a function that asks a question on the terminal; None if nobody would answer."""
    is_one_of_several = "RANK" in os.environ or "SLURM_PROCID" in os.environ
    if is_one_of_several or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return None

    def ask(question: str) -> bool:
        try:
            return input(f"{question} [Y/n] ").strip().lower() in ("", "y", "yes")
        except EOFError:  # Ctrl-D
            return False

    return ask


def _announce(data: str) -> None:
    """Print a first line before torch is loaded, which takes seconds. Only the first process prints it."""
    from patchloom import __version__

    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        print(f"patchloom {__version__}: reading {data} …", flush=True)
