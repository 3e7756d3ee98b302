"""`patchloom.train` and the command of that name: plan it, say it, do it, report it."""

import time as clock
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from patchloom.checkpoint import find_checkpoint, locked, write_run_files
from patchloom.data.sets import ImageSet
from patchloom.deployment.classifier import Classifier, load
from patchloom.engine.disk import disk_errors
from patchloom.engine.display import duration
from patchloom.engine.distribution import Processes
from patchloom.engine.loop import Outcome
from patchloom.engine.loop import train as run_loop
from patchloom.engine.records import open_records
from patchloom.engine.run import Run
from patchloom.errors import NumericalError, UsageError, nearest
from patchloom.models.network import Network
from patchloom.training.assemble import make_run, measured, preprocessing_of
from patchloom.training.plan import Plan, TrainingSettings, make_plan, seconds_of
from patchloom.training.report import final_report, report_run

FILES_SHOWN = 4


@dataclass(frozen=True)
class Trained:
    """What a finished command leaves: the folder, the numbers, the classifier."""

    folder: Path
    outcome: Outcome | None
    metrics: dict[str, float]

    @property
    def classifier(self) -> Classifier:
        """The trained model with labels and preprocessing."""
        return load(self.folder)

    def summary(self) -> dict[str, Any]:
        """For machines."""
        return {"folder": str(self.folder), "ended": self.outcome.ended if self.outcome else None, **self.metrics}


def train(data: str, **settings: Any) -> Trained:
    """Train a classifier on `data`; the options are those of `patchloom train` (see `TrainingSettings`)."""
    known = set(TrainingSettings.__dataclass_fields__)
    for name in settings:
        if name not in known:
            raise UsageError(f"train has no option {name!r}.{nearest(name, sorted(known))}")
    return run_training(TrainingSettings(data=data, **settings))


def run_training(settings: TrainingSettings, *, dry_run: bool = False, say: Callable[[str], None] = print) -> Trained:
    """The whole of `patchloom train`: plan it, say it, do it, report it."""
    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    time_limit_s = seconds_of(settings.time)
    plan = make_plan(settings, device)
    processes = Processes(plan.recipe.precision, device=device)
    say = say if processes.is_main else silent
    for line in plan.lines():
        say(line)
    with ExitStack() as stack:
        stack.callback(processes.close)
        if not dry_run and processes.is_main:
            stack.enter_context(locked(plan.folder))
        run, network, note = make_run(plan, processes, say)
        stack.callback(run.loader.close)  # type: ignore[attr-defined]
        say(f"machine    {_machine(processes)}; {note}")
        if dry_run:
            say(measured(run, plan))
            say("Nothing was trained.   Next: the same command without --dry-run")
            return Trained(plan.folder, None, {})
        return _train_and_report(plan, run, network, time_limit_s, say)


def _train_and_report(
    plan: Plan, run: Run, network: Network, time_limit_s: float | None, say: Callable[[str], None]
) -> Trained:
    found = find_checkpoint(plan.folder)
    for note in found.notes if found else []:
        say(f"note: {note}")
    if found:
        say(f"going on with {plan.folder} from step {found.snapshot.step} of {run.schedule.total_steps}")
    if run.processes.is_main:
        shown = preprocessing_of(plan.recipe, network)
        write_run_files(plan.folder, network, shown, plan.recipe, plan.splits.classes.names)
    run.records = open_records(plan.folder, is_main=run.processes.is_main, trackers=plan.settings.trackers)
    started = clock.perf_counter()
    try:
        with run.processes.ranks_watched():
            outcome = run_loop(replace(run, time_limit_s=time_limit_s), found.snapshot if found else None)
    except NumericalError as error:
        raise _with_files(error, plan.splits.train) from error
    seconds = clock.perf_counter() - started
    metrics: dict[str, float] = {}
    for line in _unreadable(run):
        say(line)
    if run.processes.is_main:
        report = final_report(plan, run.processes)
        metrics = dict(report)
        say(
            f"{outcome.ended} after {duration(seconds)}: top-1 {metrics['top1']:.2f} % "
            f"({outcome.progress.best_weights or 'model'}, step {outcome.progress.best_step})"
        )
        with disk_errors(plan.folder / "report.html"):
            page = report_run(plan, report, outcome, seconds)
        say(f"{page}")
        say(f"Next: patchloom predict {plan.folder} IMAGE…   |   patchloom evaluate {plan.folder} {plan.settings.data}")
    return Trained(plan.folder, outcome, metrics)


def _with_files(error: NumericalError, pictures: ImageSet) -> NumericalError:
    """The same error with the files of the batch that made it."""
    shown = [pictures.where(int(i)) for i in list(getattr(error, "index", None) or [])[:FILES_SHOWN]]
    return NumericalError(f"{error} Files of that batch: {', '.join(shown)} …") if shown else error


def _unreadable(run: Run) -> list[str]:
    """One line a picture that could not be read and was replaced by the next one."""
    broken: dict[int, str] = getattr(run.loader, "broken", {})
    lines = [f"left out   {reason}" for reason in list(broken.values())[:FILES_SHOWN]]
    return [*lines, f"left out   {len(broken) - FILES_SHOWN} more"] if len(broken) > FILES_SHOWN else lines


def _machine(processes: Processes) -> str:
    device = processes.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return f"{processes.world} × {name}, {processes.precision}"


def silent(line: str) -> None:
    """Say nothing."""
    del line
