"""`patchloom.sweep`: train every point of a grid on every dataset and choose the best on val."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from patchloom.data.sources.specs import Data, split_specs
from patchloom.disk import locked
from patchloom.engine.display import duration
from patchloom.engine.rendezvous import place_from
from patchloom.engine.signals import Stopped
from patchloom.machine import resolve_device
from patchloom.options import renamed
from patchloom.recipes.schema import Recipe
from patchloom.runs.run_metadata import read_run_metadata
from patchloom.tasks.classification.several_runs import evaluate
from patchloom.tasks.plan import folder_name
from patchloom.tasks.settings import TrainingSettings
from patchloom.training.assemble import silent
from patchloom.training.run import printer, run_training
from patchloom.training.sweeps.grid import drop_seed, in_words, settings_of, value_text
from patchloom.training.sweeps.page import write_sweep_page
from patchloom.training.sweeps.planning import SweepRun, estimated_s, plan_runs
from patchloom.training.sweeps.record import RunResult, read_results, write_results
from patchloom.training.sweeps.table import Sweep, metric_of, rows_of
from patchloom_runtime.errors import PatchloomError, UsageError, is_device_failure, with_near_options
from patchloom_runtime.printable import printable


@renamed(changes="set", without="exclude")
@with_near_options
def sweep(
    data: Data,
    grid: Mapping[str, Sequence[Any]],
    *,
    model: str | None = None,
    recipe: str | Recipe = "auto",
    init: str | None = None,
    epochs: int | None = None,
    size: int | None = None,
    batch: int | None = None,
    set: Mapping[str, Any] | None = None,  # noqa: A002
    exclude: str | None = None,
    out: str | None = None,
    device: str = "auto",
    workers: int | None = None,
    test: bool = False,
    dry_run: bool = False,
    say: Callable[[str], None] = print,
) -> Sweep:
    """Train every combination of the grid's values on every dataset, as `patchloom sweep` does.

    The same call again resumes: finished runs are not repeated, failed ones are retried.
    The best setting is that with the highest mean over datasets on val images. Where data do not have both a val and
    a test split, val images are held out of train, so that what they have stays unseen.

    data     Datasets, each trained on separately. A list if there are several.
    grid     Recipe field, seed, train_share, model, recipe, init, teacher, level, epochs, size or batch, and its
             values. All combinations are trained. As a dict: {"optim.lr": (1e-3, 2e-3)}. Seeds are averaged over;
             shares of the training set have equal numbers of updates.
    model    Network. Default: chosen for the data.
    recipe   Published recipe, a recipe.yaml, or 'auto'. Also a `Recipe`.
    init     Start from a run, published weights or a file.
    epochs   Passes over the data.
    size     Image size in pixels.
    batch    Images per update.
    set      Recipe fields to change for all runs: augment.mixup=0. As a dict: {"augment.mixup": 0}.
    exclude  List of training images to exclude.
    out      Sweep folder. Default: runs/sweep-NAME.
    device   'cpu', 'cuda', 'cuda:1' or 'mps'; 'auto' uses a GPU if there is one.
    workers  Processes that read images.
    test     Evaluate the chosen setting, and no other, on the test images.
    dry_run  Print the number of runs and the time they take; train nothing.
    say      Called with each line of progress.
    """
    sets = _each_once([data] if isinstance(data, str | os.PathLike) else split_specs(data))
    if place_from(os.environ).world > 1:
        raise UsageError(
            "a sweep trains its runs one after the other in one process; start it without torchrun or srun"
        )
    if not grid:
        raise UsageError("there is nothing to sweep; pass fields with values: --grid optim.lr=1e-3,3e-4")
    options: dict[str, Any] = {"model": model, "recipe": recipe, "init": init, "epochs": epochs, "size": size}
    options |= {"batch": batch, "changes": dict(set or {}), "exclude": exclude, "workers": workers, "val": "held-out"}
    options["race"] = False  # the runs of a sweep differ in the fields of its grid alone
    device = resolve_device(device)
    bases = [TrainingSettings(data=tuple(split_specs(one)), device=device, **options) for one in sets]
    settings = settings_of(grid)
    folder = Path(out) if out else Path("runs") / f"sweep-{'-'.join(folder_name(base.data) for base in bases)[:80]}"
    say = printer(say)
    say(f"planning   {len(settings)} setting{'s' * (len(settings) > 1)} on {len(sets)} dataset{'s' * (len(sets) > 1)}")
    runs = plan_runs(bases, settings, folder, device, test=test)
    done, note = read_results(folder)
    done = {run.name: done[run.name] for run in runs if run.name in done}
    state = SweepState(folder, settings, runs, done, [note] if note else [])
    _say_plan(state, say)
    if dry_run:
        return _dry_result(state, say)
    with locked(folder):
        train_runs(state, say)
        if test:
            _test_best(state, say)
        result: Sweep = state.write()
        return result


def _each_once(data: Sequence[Any]) -> list[str]:
    """Return the names of datasets. Raise UsageError if there are none or one is repeated."""
    sets = [os.fspath(one) for one in data]
    if not sets or len(set(sets)) < len(sets):
        raise UsageError(f"The datasets are {', '.join(sets) or 'missing'}; pass one or more, each once")
    return sets


def _dry_result(state: "SweepState", say: Callable[[str], None]) -> Sweep:
    """Print the time that the runs of a sweep take, and return it without results."""
    seconds = estimated_s(state.runs, state.done, say)
    say(f"time       about {duration(sum(seconds.values()))} for the {len(seconds)} runs that are left")
    say("Nothing was trained.   Next: the same command without --dry-run")
    return replace(state.sweep(), seconds=seconds)


class SweepState:
    """State of a running sweep, saved in its folder."""

    def __init__(
        self, folder: Path, settings: list[dict[str, Any]], runs: list[SweepRun], done: dict[str, RunResult],
        notes: list[str],
    ) -> None:  # fmt: skip
        self.folder, self.settings, self.runs, self.done, self.notes = folder, settings, runs, done, notes

    def counts(self) -> str:
        """Return the number of runs and of those that were trained before, as text."""
        finished = sum(not run.failed for run in self.done.values())
        failed = len(self.done) - finished
        counts = [f"{finished} finished already"] * bool(finished)
        counts += [f"{failed} failed before and are retried"] * bool(failed)
        return ", ".join([f"{len(self.runs)} runs in {self.folder}", *counts])

    def sweep(self) -> Sweep:
        """Return the sweep with the results so far."""
        waiting = {run.name: RunResult(data=run.data, setting=run.setting) for run in self.runs}
        runs = {name: self.done.get(name, run) for name, run in waiting.items()}
        results = list(runs.values())
        return Sweep(self.folder, rows_of(self.settings, results), runs, metric_of(results), list(self.notes))

    def keep(self, name: str, run: RunResult) -> None:
        """Record the result of a run and update the page."""
        self.done[name] = run
        others, _ = read_results(self.folder)  # of other grids in this folder
        write_results(self.folder, others | self.done)
        self.write()

    def write(self) -> Any:
        """Write the page and return the sweep with the results so far."""
        result = self.sweep()
        write_sweep_page(result)
        return result


def _say_plan(state: SweepState, say: Callable[[str], None]) -> None:
    say(f"sweep      {state.counts()}")
    say("choice     by the mean over datasets on val images that no run trains on; test images are not looked at")
    for note in state.notes:
        say(f"note: {note}")


def train_runs(state: SweepState, say: Callable[[str], None]) -> None:
    """Train the remaining runs one after the other; a failure is recorded and does not stop the others."""
    announced: set[str] = set()  # datasets whose plan was printed
    for number, run in enumerate(state.runs, 1):
        before = state.done.get(run.name)
        if before and not before.failed:
            continue
        about = f"{run.data}, {in_words(run.setting)}"
        say(f"run {number} of {len(state.runs)}   {about}")
        try:
            trained = run_training(run.settings, say=silent if run.data in announced else say)
            announced.add(run.data)
        except Stopped:
            raise
        except (PatchloomError, RuntimeError, OSError, MemoryError) as error:
            if is_device_failure(error):
                raise  # all that follow would fail too
            reason = " ".join(printable(str(error)).split())
            say(f"failed     {about}: {reason}")
            state.keep(run.name, RunResult(data=run.data, setting=run.setting, failed=reason or type(error).__name__))
            continue
        record = read_run_metadata(trained.folder)
        result = RunResult(
            data=run.data,
            setting=run.setting,
            metric=trained.metric,
            lower_is_better=trained.lower_is_better,
            metrics={name: value for name, value in trained.metrics.items() if math.isfinite(value)},
            seconds=record.seconds if record else 0.0,
        )
        state.keep(run.name, result)
        if result.score is not None:
            say(f"done       {about}: {result.metric} {result.score:.4g}")


def _test_best(state: SweepState, say: Callable[[str], None]) -> None:
    """Evaluate the runs of the best setting, and no others, once on the test images."""
    best = state.sweep().best
    if best is None:
        state.notes.append("no setting has all its runs finished, so none is tested")
        return
    if ties := state.sweep().ties:
        state.notes.append(f"{ties} settings tie on val; the first of them is tested")
    earlier = [run for run in state.done.values() if run.test and drop_seed(run.setting) != best.setting]
    if earlier:
        state.notes.append(
            f"test images were looked at before for another setting ({in_words(drop_seed(earlier[0].setting))}): "
            "choosing between the two by them would be choosing by test"
        )
    for run in state.runs:
        result = state.done[run.name]
        if drop_seed(run.setting) == best.setting and not result.test:
            judged = evaluate(
                state.folder / run.name, run.data, split="test", device=run.settings.device,
                reading=run.settings.reading, level=run.settings.level,
            )  # fmt: skip
            values = next(iter(judged.evaluations.values())).values()
            state.keep(run.name, replace(result, test={k: v for k, v in values.items() if math.isfinite(v)}))
            say(f"test       {run.data}, {in_words(run.setting)}: top-1 {value_text(round(values['top1'], 2))} %")
