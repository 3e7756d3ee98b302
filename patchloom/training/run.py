"""One training run from settings to report, for all tasks: plan, print the plan, train, write the results."""

import time as clock
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from patchloom.data.buckets.mirror import Mirror
from patchloom.data.sources.python_objects import PythonData
from patchloom.data.sources.specs import is_url
from patchloom.disk import Lock, disk_errors, locked
from patchloom.engine.callbacks import Callbacks
from patchloom.engine.display import duration
from patchloom.engine.distribution import Processes
from patchloom.engine.loop import TrainResult
from patchloom.engine.loop import train as run_loop
from patchloom.engine.records import ENDED
from patchloom.engine.run import Run
from patchloom.engine.state import Progress
from patchloom.engine.trackers import check_trackers
from patchloom.layers.low_rank import merge_low_rank
from patchloom.machine import resolve_device, why_device
from patchloom.models.pretrained.table import weights_named
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
from patchloom.runs.race import discard_race
from patchloom.runs.run_metadata import FILE as RUN_METADATA
from patchloom.runs.weights import WEIGHTS, read_weights, save_weights
from patchloom.tasks.plan import Plan, TrainingExamples, TrainingSettings, check_parts, seconds_of
from patchloom.tasks.provenance import OtherRunError
from patchloom.tasks.table import task_of_run
from patchloom.tasks.task import Judge
from patchloom.tasks.task_choice import choose_task
from patchloom.training.assemble import Stores, make_run, release, silent
from patchloom.training.race import candidates_of, run_race
from patchloom.training.report import best_network, machine_of, plan_facts, write_results
from patchloom.training.timing import (
    LATEST,
    StepTimes,
    chosen_compilation,
    estimated_s,
    length_lines,
    measure,
    plan_within_time,
    takes_days,
    times_text,
)
from patchloom_runtime.errors import CheckpointError, DataError, NumericalError
from patchloom_runtime.printable import plural, printable

FILES_NAMED = 4


@dataclass(frozen=True)
class TrainingResult:
    """The result of a training run: its folder, the metrics and the model."""

    folder: Path
    outcome: TrainResult | None
    metrics: dict[str, float]
    left_out: int = 0  # number of unreadable files
    plan: dict[str, Any] = field(default_factory=dict)  # only of a dry run
    metric: str = ""  # the one of `metrics` that selects the best weights
    lower_is_better: bool = False

    @property
    def model(self) -> Any:
        """The trained model, as `patchloom.load` returns it."""
        return task_of_run(self.folder).model.load(self.folder)

    classifier = translator = model

    def summary(self) -> dict[str, Any]:
        """Return the result for `--json`."""
        ended = self.outcome.ended if self.outcome else None
        return {"folder": str(self.folder), "ended": ended, "left_out": self.left_out, **self.plan, **self.metrics}

    def __repr__(self) -> str:
        ended = self.outcome.ended if self.outcome else "nothing was trained"
        return f"Trained({self.folder}, {ended}{': ' * bool(self.metrics)}{numbers_line(self.metrics)})"

    def _repr_html_(self) -> str:
        left_out = [("files left out", f"{self.left_out:,}")] if self.left_out else []
        ended = self.outcome.ended if self.outcome else "nothing was trained"
        facts = [*number_texts(self.metrics).items(), *left_out]
        return html_card(str(self.folder), detail=ended, facts=facts, notes=[f"report: {self.folder / 'report.html'}"])


def run_training(
    settings: TrainingSettings,
    *,
    dry_run: bool = False,
    say: Callable[[str], None] = print,
    started: float | None = None,
    ask: Callable[[str], bool] | None = None,
) -> TrainingResult:
    """Plan a run, print the plan, train and report. A time budget counts from `started` (default: now).

    `ask` answers a question of `--init auto`: whether to download weights. Without it nothing is downloaded.
    """
    device = resolve_device(settings.device)
    why = f"device {device}: {why_device(device)}" if settings.device == "auto" else ""
    check_trackers(settings.trackers)
    started = clock.perf_counter() if started is None else started
    if settings.out and is_url(settings.out):
        Mirror(settings.out).pull()
    try:
        plan = make_plan(settings, device)
    except OtherRunError as error:
        if not dry_run:
            raise
        say(f"note: {error}")
        plan = make_plan(replace(settings, out=None), device)
    if plan.offer and ask and not dry_run:
        weights, since = weights_named(plan.offer), clock.perf_counter()
        accepted = ask(f"Fine-tune published weights ({weights.name}) instead? {weights.size} download")
        started += clock.perf_counter() - since  # a time budget does not include the user's
        plan = plan.task.training.with_start(plan, weights.name) if accepted else plan
    processes = Processes(plan.recipe.precision, device=device)
    say = printer(say) if processes.is_main else silent
    with ExitStack() as stack:
        stack.callback(processes.close)
        plan = plan.task.training.prepare(plan, processes)
        _same_on_all(plan, processes)
        lock = stack.enter_context(locked(plan.folder)) if not dry_run and processes.is_main else None
        plan = _raced(plan, processes, started, say, dry_run=dry_run)
        stores: Stores = {}
        budget, measured = None, None
        if plan.time_s:
            say(f"time       measuring a few steps, to plan the whole run into {settings.time}")
            plan, budget, measured = plan_within_time(plan, processes, stores, started)
        for line in plan.lines(dry_run=dry_run):
            say(line)
        checkpoint = None if dry_run else find_checkpoint(plan.folder, read_checkpoint)
        if checkpoint and settings.compiled is None:  # resuming is exact only with the same code
            compiled = checkpoint.snapshot.values.get("compiled", False)
        else:
            compiled = chosen_compilation(plan, processes, stores, measured)
        begins = not dry_run and not checkpoints_of(plan.folder)
        run, network, note = make_run(plan, processes, say, stores, begins=begins, compiled=compiled)
        if not dry_run and processes.is_main and isinstance(run.saver, CheckpointFolder) and run.saver.uploader:
            stack.callback(run.saver.uploader.finish)  # also if the run is stopped
        stack.callback(release, run)
        stack.callback(run.loader.close)
        say(f"machine    {'; '.join(filter(None, (machine_of(processes), why, note)))}")
        if dry_run:
            return _dry_result(plan, run, measured or measure(run), say)
        for line in length_lines(plan, estimated_s(run)) if checkpoint is None else ():
            say(line)
        run.time_budget = budget
        return _train_and_report(plan, run, network, checkpoint, lock, _time_limit_s(settings, started), say)


def _dry_result(plan: Plan, run: Run, measured: StepTimes, say: Callable[[str], None]) -> TrainingResult:
    """Print the times of a dry run and return its result."""
    seconds = measured.total_s(run)
    for line in (times_text(run, measured, plan.task.training.batch_unit), *takes_days(plan, seconds)):
        say(line)
    say("Nothing was trained.   Next: the same command without --dry-run")
    return TrainingResult(plan.folder, None, {}, len(plan.left_out), plan_facts(plan, run, measured, seconds))


def _raced(plan: Plan, processes: Processes, started: float, say: Callable[[str], None], *, dry_run: bool) -> Plan:
    """Return the plan of a new run with the choices of its race, if it has one."""
    if processes.from_main((plan.folder / "recipe.yaml").exists()):  # it has begun
        return plan
    candidates = candidates_of(plan)
    if dry_run:
        if candidates:
            say(f"race       would compare {', '.join(row.name for row in candidates)} on held-out training images")
        return plan
    if not candidates:
        if processes.is_main:
            discard_race(plan.folder)  # of another command
        return plan
    return run_race(plan, candidates, processes, started, say)


def make_plan(settings: TrainingSettings, device: str) -> Any:
    """Plan a run of the task that the recipe, --task or the data imply."""
    task, settings = choose_task(settings)
    check_parts(settings, task)
    return task.training.plan(settings, device)


def _time_limit_s(settings: TrainingSettings, started: float) -> float | None:
    """Return the seconds after which the loop evaluates and saves: --stop-after, or shortly after the end of --time."""
    limits = []
    if stop_s := seconds_of(settings.stop_after, "--stop-after"):
        limits.append(stop_s)
    if time_s := seconds_of(settings.time):
        limits.append(max(1.0, time_s * LATEST - (clock.perf_counter() - started)))
    return min(limits, default=None)


def _same_on_all(plan: Plan, processes: Processes) -> None:
    """Raise DataError if the ranks, each of which opens the data itself, do not see the same data."""
    assert plan.record is not None
    records = [
        replace(record, place=None) for record in processes.gather(plan.record)
    ]  # it may be mounted under another path
    others = [rank for rank, record in enumerate(records) if record != records[0]]
    if others:
        raise DataError(f"rank {others[0]} of {len(records)} sees other data in {plan.settings.data_text} than rank 0")


def _train_and_report(
    plan: Plan,
    run: Run,
    network: nn.Module,
    checkpoint: LatestCheckpoint | None,
    lock: Lock | None,
    time_limit_s: float | None,
    say: Callable[[str], None],
) -> TrainingResult:
    folder, processes, had_ended = plan.folder, run.processes, False
    if checkpoint:
        checkpoint = with_best_weights(checkpoint, folder, processes)
        for note in checkpoint.notes:
            say(f"note: {note}")
        had_ended = Progress(**checkpoint.snapshot.values["progress"]).has_ended(run.epochs)
        if not had_ended:
            say(f"resuming {folder} at step {checkpoint.snapshot.step} of {run.schedule.total_steps}")
    restore = guarded(run, lock, lambda: plan.task.training.write_files(plan, network))
    run.records = open_records(folder, is_main=processes.is_main, trackers=plan.settings.trackers, restore=restore)
    run.callbacks = Callbacks(plan.settings.callbacks)  # not in runs that are measured or raced
    started = clock.perf_counter()
    try:
        with processes.ranks_watched():
            outcome = run_loop(replace(run, time_limit_s=time_limit_s), checkpoint.snapshot if checkpoint else None)
    except NumericalError as error:
        raise with_files(error, plan.examples) from error
    if not had_ended:
        run.callbacks.call("on_end", run, outcome.progress)
    seconds = clock.perf_counter() - started
    metrics: dict[str, float] = {}
    if processes.is_main:
        for line in [*filter(None, [restore()]), *_unreadable_since(run, plan)]:
            say(line)
        if not had_ended:
            run.records.doing("writing the report")
        metrics = _report(plan, run, outcome, None if had_ended else seconds, say)
        if not had_ended:
            run.records.doing(ENDED)
    return TrainingResult(
        folder,
        outcome,
        metrics,
        len(plan.left_out),
        metric=run.metric or "",
        lower_is_better=run.lower_is_better,
    )


def _report(
    plan: Plan, run: Run, outcome: TrainResult, seconds: float | None, say: Callable[[str], None]
) -> dict[str, float]:
    """Evaluate the best weights, print and write the results, and return the metrics.

    `seconds` are those of the training; None if the run had ended before and nothing was trained.
    """
    task, folder = plan.task, plan.folder
    best = best_network(plan, run, outcome.progress)
    val_report = task.training.evaluate_best(plan, run, best, outcome.best_reports)
    metrics = dict(val_report or ())
    weights = {"model": "", "": "", "ema": "EMA "}.get(outcome.progress.best_weights, "averaged ")
    which = f"(best {weights}weights, from step {outcome.progress.best_step})"
    how = already_ended(outcome) if seconds is None else f"{outcome.ended} after {duration(seconds)}"
    values = f"val {task.report.headline(val_report)}" if metrics else "not evaluated"
    say(f"{how}: {values} {which}")
    if seconds is not None or not (folder / RUN_METADATA).is_file():  # an ended run keeps its time and machine
        with disk_errors(folder / "report.html"):
            write_results(plan, run, best, val_report, outcome, seconds=seconds or 0.0)
    for line in task.report.result_lines(plan, val_report) if metrics else ():
        say(line)
    say(f"{folder / 'report.html'}")
    commands = task.report.next_commands(plan)
    if isinstance(plan.settings.data[0], PythonData):  # a command cannot name the data
        commands = (f"patchloom.load({str(folder)!r}).predict(images)", f"patchloom.evaluate({str(folder)!r}, data)")
    say(f"Next: {'   |   '.join(commands)}")
    return metrics


def guarded(run: Run, lock: Lock | None, write_files: Callable[[], None]) -> Callable[[], str]:
    """Write the files of a run, if this rank has the folder, and return a function that restores a deleted folder."""
    if lock is None or not isinstance(run.saver, CheckpointFolder):
        return lambda: ""  # another rank has the folder
    write_files()
    run.saver.guard(lock, write_files)
    return run.saver.restore


def already_ended(outcome: TrainResult) -> str:
    """Return the text for a run that had ended before this command."""
    ended = "finished" if outcome.ended == "finished" else f"ended ({outcome.ended})"
    epochs = plural(outcome.progress.epoch, "epoch")
    return f"already {ended} ({epochs}); nothing to do. Train longer with --epochs, or start afresh with --out"


def with_best_weights(checkpoint: LatestCheckpoint, folder: Path, processes: Processes) -> LatestCheckpoint:
    """Replace lost best weights by the newest ones, so that the run selects the best again."""
    progress = checkpoint.snapshot.values["progress"]
    if not progress["best_weights"]:
        return checkpoint
    step, reason = checkpoint.snapshot.step, ""
    if processes.is_main:
        try:
            read_weights(folder / WEIGHTS)
        except CheckpointError as error:
            reason = str(error)
            weights = merge_low_rank(checkpoint.snapshot.tensors["weights"])
            save_weights(folder, weights, {"weights": "model", "step": step})
    reason = processes.from_main(reason)
    if not reason:
        return checkpoint
    progress = progress | {"best": None, "best_tie": None, "best_weights": "model", "best_step": step}
    snapshot = replace(checkpoint.snapshot, values=checkpoint.snapshot.values | {"progress": progress})
    notes = [*checkpoint.notes, f"{reason} The newest weights take their place."]
    return replace(checkpoint, snapshot=snapshot, notes=notes)


def with_files(error: NumericalError, examples: TrainingExamples) -> NumericalError:
    """Return the error with the files of the batch that caused it."""
    indices = [int(i) for i in list(getattr(error, "index", None) or [])[:FILES_NAMED]]
    files = [examples.where(i) for i in indices if i >= 0]
    return NumericalError(f"{error} Files of that batch: {', '.join(files)} …") if files else error


def _unreadable_since(run: Run, plan: Plan) -> list[str]:
    """Report images that became unreadable during the run."""
    broken = [run.loader.broken, *(judge.broken for judge in run.evaluators if isinstance(judge, Judge))]
    reasons = list(dict.fromkeys(reason for each in broken for reason in each.values()))
    if not reasons:
        return []
    files = [reason.partition(": ")[::2] for reason in reasons]
    write_left_out(plan.folder, [*plan.left_out, *files])
    lines = [f"left out   {reason}" for reason in reasons[:FILES_NAMED]]
    more = len(reasons) - FILES_NAMED
    return [*lines, f"left out   {more} more; all in {plan.folder / LEFT_OUT}"] if more > 0 else lines


def printer(say: Callable[[str], None]) -> Callable[[str], None]:
    """Return `say` for a terminal or pipe that may be closed during the run."""

    def print_line(line: str) -> None:
        with suppress(OSError):
            say(printable(line))

    return print_line
