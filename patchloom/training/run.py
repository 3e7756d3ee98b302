"""What `patchloom.train` and the command of that name do: plan it, say it, do it, report it. One path for all tasks."""

import time as clock
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from patchloom.disk import Lock, disk_errors, locked
from patchloom.engine.display import duration
from patchloom.engine.distribution import Processes
from patchloom.engine.loop import TrainResult
from patchloom.engine.loop import train as run_loop
from patchloom.engine.run import Run
from patchloom.engine.state import Progress
from patchloom.machine import device_kind, resolve_device
from patchloom.report.notebook import html_card, number_texts, numbers_line
from patchloom.runs.checkpoints import (
    CheckpointFolder,
    LatestCheckpoint,
    checkpoints_of,
    find_checkpoint,
    read_checkpoint,
)
from patchloom.runs.metrics import open_records
from patchloom.runs.provenance import LEFT_OUT, write_left_out
from patchloom.runs.run_metadata import FILE as RUN_METADATA
from patchloom.runs.weights import read_weights, save_weights
from patchloom.tasks.plan import Plan, TrainingExamples, TrainingSettings, seconds_of
from patchloom.tasks.provenance import OtherRunError
from patchloom.tasks.table import task_of_run
from patchloom.tasks.task import Judge
from patchloom.tasks.task_choice import choose_task
from patchloom.training.assemble import EVALUATIONS, Stores, make_run, release
from patchloom.training.dry_run import planned
from patchloom.training.machine import machine_of
from patchloom.training.measuring import measure, times_text
from patchloom.training.report import best_network, keep_and_report
from patchloom.training.timing import LATEST, estimated_s, planned_into_time, takes_days
from patchloom_runtime.errors import CheckpointError, DataError, NumericalError
from patchloom_runtime.printable import plural, printable

FILES_SHOWN = 4


@dataclass(frozen=True)
class TrainingResult:
    """What a finished command leaves: the folder, the numbers, the classifier or translator."""

    folder: Path
    outcome: TrainResult | None
    metrics: dict[str, float]
    left_out: int = 0  # files that cannot be read
    plan: dict[str, Any] = field(default_factory=dict)  # of a dry run
    metric: str = ""  # of `metrics`: what the best weights were chosen by
    lower_is_better: bool = False

    @property
    def model(self) -> Any:
        """The trained model as it is used: a classifier, a translator."""
        return task_of_run(self.folder).model.load(self.folder)

    classifier = translator = model  # as it is called where one knows

    def summary(self) -> dict[str, Any]:
        """For machines."""
        ended = self.outcome.ended if self.outcome else None
        return {"folder": str(self.folder), "ended": ended, "left_out": self.left_out, **self.plan, **self.metrics}

    def __repr__(self) -> str:
        ended = self.outcome.ended if self.outcome else "nothing was trained"
        return f"Trained({self.folder}, {ended}{': ' * bool(self.metrics)}{numbers_line(self.metrics)})"

    def _repr_html_(self) -> str:
        lost = [("files left out", f"{self.left_out:,}")] if self.left_out else []
        ended = self.outcome.ended if self.outcome else "nothing was trained"
        facts = [*number_texts(self.metrics).items(), *lost]
        return html_card(str(self.folder), detail=ended, facts=facts, notes=[f"report: {self.folder / 'report.html'}"])


def run_training(
    settings: TrainingSettings,
    *,
    dry_run: bool = False,
    say: Callable[[str], None] = print,
    started: float | None = None,
) -> TrainingResult:
    """Plan a run, print the plan, train and report. A time budget counts from `started` (default: now)."""
    device = resolve_device(settings.device)
    device_kind(device)  # raises before the data are scanned
    started = clock.perf_counter() if started is None else started
    try:
        plan = make_plan(settings, device)
    except OtherRunError as error:
        if not dry_run:
            raise
        say(f"note: {error}")
        plan = make_plan(replace(settings, out=None), device)
    processes = Processes(plan.recipe.precision, device=device)
    say = printer(say) if processes.is_main else silent
    with ExitStack() as stack:
        stack.callback(processes.close)
        plan = plan.task.training.prepare(plan, processes)
        _same_on_all(plan, processes)
        stores: Stores = {}
        budget = None
        if plan.time_s:
            say(f"time       measuring a few steps, to plan the whole run into {settings.time}")
            plan, budget = planned_into_time(plan, processes, stores, started)
        for line in plan.lines(dry_run=dry_run):
            say(line)
        lock = stack.enter_context(locked(plan.folder)) if not dry_run and processes.is_main else None
        run, network, note = make_run(
            plan, processes, say, stores, begins=not dry_run and not checkpoints_of(plan.folder)
        )
        stack.callback(release, run)
        stack.callback(run.loader.close)
        say(f"machine    {'; '.join(filter(None, (machine_of(processes), note)))}")
        if dry_run:
            measured = measure(run)
            seconds = measured.total_s(run, EVALUATIONS)
            for line in (
                times_text(run, measured, EVALUATIONS, plan.task.training.batch_unit),
                *takes_days(plan, seconds),
            ):
                say(line)
            say("Nothing was trained.   Next: the same command without --dry-run")
            return TrainingResult(plan.folder, None, {}, len(plan.left_out), planned(plan, run, measured, seconds))
        for line in takes_days(plan, estimated_s(run)):
            say(line)
        run.time_budget = budget
        return _train_and_report(plan, run, network, lock, _time_limit_s(settings, started), say)


def make_plan(settings: TrainingSettings, device: str) -> Any:
    """What will be run: the plan of the task that recipe, user or data ask for."""
    task, settings = choose_task(settings)
    return task.training.plan(settings, device)


def _time_limit_s(settings: TrainingSettings, started: float) -> float | None:
    """Seconds after which the loop evaluates and saves: as asked for, and where a planned time was much too short."""
    limits = []
    if stop_s := seconds_of(settings.stop_after, "--stop-after"):
        limits.append(stop_s)
    if time_s := seconds_of(settings.time):
        limits.append(max(1.0, time_s * LATEST - (clock.perf_counter() - started)))
    return min(limits, default=None)


def _same_on_all(plan: Plan, processes: Processes) -> None:
    """Every rank finds the data by itself; where one of them sees others, no rank may begin."""
    assert plan.record is not None
    records = [replace(record, place=None) for record in processes.gather(plan.record)]  # it may be mounted elsewhere
    others = [rank for rank, record in enumerate(records) if record != records[0]]
    if others:
        raise DataError(f"rank {others[0]} of {len(records)} sees other data in {plan.settings.data_text} than rank 0")


def _train_and_report(
    plan: Plan,
    run: Run,
    network: nn.Module,
    lock: Lock | None,
    time_limit_s: float | None,
    say: Callable[[str], None],
) -> TrainingResult:
    task, folder, processes = plan.task, plan.folder, run.processes
    found = find_checkpoint(folder, read_checkpoint)
    if found:
        found = with_best_weights(found, folder, processes)
        for note in found.notes:
            say(f"note: {note}")
        if not has_ended(found, run):
            say(f"resuming {folder} at step {found.snapshot.step} of {run.schedule.total_steps}")
    restore = guarded(run, lock, lambda: task.training.write_files(plan, network))
    run.records = open_records(folder, is_main=processes.is_main, trackers=plan.settings.trackers, restore=restore)
    started = clock.perf_counter()
    try:
        with processes.ranks_watched():
            outcome = run_loop(replace(run, time_limit_s=time_limit_s), found.snapshot if found else None)
    except NumericalError as error:
        raise with_files(error, plan.examples) from error
    seconds = clock.perf_counter() - started
    metrics: dict[str, float] = {}
    if processes.is_main:
        for line in [*filter(None, [restore()]), *_lost_since(run, plan)]:
            say(line)
        best = best_network(plan, run, outcome.progress)
        judged = task.training.evaluate_best(plan, run, best, outcome.best_reports)
        metrics = dict(judged or ())
        weights = {"model": "", "": "", "ema": "EMA "}.get(outcome.progress.best_weights, "averaged ")
        which = f"(best {weights}weights, from step {outcome.progress.best_step})"
        done = found is not None and has_ended(found, run)
        how = already_ended(outcome) if done else f"{outcome.ended} after {duration(seconds)}"
        said = f"val {task.report.metrics_text(metrics)}" if metrics else "not evaluated"
        say(f"{how}: {said} {which}")
        for line in task.report.result_lines(plan, judged) if metrics else ():
            say(line)
        if not done or not (folder / RUN_METADATA).is_file():  # what it says of time and machine stays true
            with disk_errors(folder / "report.html"):
                keep_and_report(plan, best, judged, outcome, seconds=seconds, machine=machine_of(processes))
        say(f"{folder / 'report.html'}")
        say(f"Next: {'   |   '.join(task.report.next_commands(plan))}")
    lower = run.lower_is_better
    return TrainingResult(folder, outcome, metrics, len(plan.left_out), metric=run.metric or "", lower_is_better=lower)


def guarded(run: Run, lock: Lock | None, write_files: Callable[[], None]) -> Callable[[], str]:
    """Write a run's files, on the rank that has the folder, and watch over it; what `Folder.restore` does."""
    if lock is None or not isinstance(run.saver, CheckpointFolder):
        return lambda: ""  # another rank watches
    write_files()
    run.saver.guard(lock, write_files)
    return run.saver.restore


def has_ended(found: LatestCheckpoint, run: Run) -> bool:
    """Whether the checkpoint is of a run that has nothing left to do."""
    return Progress(**found.snapshot.values["progress"]).has_ended(run.epochs)


def already_ended(outcome: TrainResult) -> str:
    """What is said where nothing was trained."""
    ended = "finished" if outcome.ended == "finished" else f"ended ({outcome.ended})"
    epochs = plural(outcome.progress.epoch, "epoch")
    return f"already {ended} ({epochs}); nothing to do. Train longer with --epochs, or start afresh with --out"


def with_best_weights(found: LatestCheckpoint, folder: Path, processes: Processes) -> LatestCheckpoint:
    """Where the best weights are lost, the newest take their place, and the run looks for better ones again."""
    progress = found.snapshot.values["progress"]
    if not progress["best_weights"]:
        return found
    reason = ""
    if processes.is_main:
        try:
            read_weights(folder / "weights.safetensors")
        except CheckpointError as error:
            reason = str(error)
            about = {"weights": "model", "step": found.snapshot.step}
            save_weights(folder, found.snapshot.tensors["weights"], about)
    reason = processes.from_main(reason)
    if not reason:
        return found
    forgotten = progress | {"best": None, "best_tie": None, "best_weights": "model", "best_step": found.snapshot.step}
    snapshot = replace(found.snapshot, values=found.snapshot.values | {"progress": forgotten})
    return replace(found, snapshot=snapshot, notes=[*found.notes, f"{reason} The newest weights take their place."])


def with_files(error: NumericalError, examples: TrainingExamples) -> NumericalError:
    """The same error with the files of the batch that made it."""
    shown = [examples.where(int(i)) for i in list(getattr(error, "index", None) or [])[:FILES_SHOWN] if i >= 0]
    return NumericalError(f"{error} Files of that batch: {', '.join(shown)} …") if shown else error


def _lost_since(run: Run, plan: Plan) -> list[str]:
    """Lines on the pictures that could be read when the run began and could not later."""
    broken = [run.loader.broken, *(judge.broken for judge in run.evaluators if isinstance(judge, Judge))]
    reasons = list(dict.fromkeys(reason for each in broken for reason in each.values()))
    if not reasons:
        return []
    lost = [reason.partition(": ")[::2] for reason in reasons]
    write_left_out(plan.folder, [*plan.left_out, *lost])
    lines = [f"left out   {reason}" for reason in reasons[:FILES_SHOWN]]
    more = len(reasons) - FILES_SHOWN
    return [*lines, f"left out   {more} more; all in {plan.folder / LEFT_OUT}"] if more > 0 else lines


def printer(say: Callable[[str], None]) -> Callable[[str], None]:
    """`say`, but a closed terminal or pipe does not end the run."""

    def spoken(line: str) -> None:
        with suppress(OSError):
            say(printable(line))

    return spoken


def silent(line: str) -> None:
    """Say nothing."""
    del line
