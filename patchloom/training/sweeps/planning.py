"""The plan of a sweep: the settings of each run and its estimated time.

Shares of the training set are compared at equal numbers of updates (Mixer, figure 2): all of them follow the recipe
for the whole set, with proportionally more epochs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from patchloom.data.batches.sampler import epoch_length
from patchloom.recipes.schema import Recipe, flatten
from patchloom.tasks.classification import TASK as CLASSIFICATION
from patchloom.tasks.images.plan import ImagePlan
from patchloom.tasks.settings import TrainingSettings
from patchloom.training.assemble import silent
from patchloom.training.run import make_plan, run_training
from patchloom.training.sweeps.grid import SHARE, Setting, run_folder, with_setting
from patchloom.training.sweeps.record import RunResult
from patchloom_runtime.errors import UsageError

# Recipe fields that do not change how long an update takes.
_NO_SLOWER = ("name", "source", "seed", SHARE, "schedule.", "optim.lr", "optim.weight_decay", "optim.betas")


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep: its folder and settings."""

    data: str  # as the user wrote it
    setting: Setting
    name: str  # of its folder below that of the sweep
    settings: TrainingSettings
    recipe: Recipe
    updates: int

    @property
    def speed_of(self) -> tuple[Any, ...]:
        """A key that is equal for runs whose updates take the same time."""
        fields = {key: value for key, value in flatten(self.recipe).items() if not key.startswith(_NO_SLOWER)}
        return (self.data, *(f"{key}={value}" for key, value in fields.items()))


def plan_runs(
    bases: Sequence[TrainingSettings], settings: Sequence[Setting], out: Path, device: str, *, test: bool
) -> list[SweepRun]:
    """Plan all runs, dataset by dataset; errors are raised here, before any work."""
    runs = []
    for base in bases:
        for number, setting in enumerate(settings):
            run_settings = with_setting(base, setting)
            folder = run_folder(out, run_settings, setting)
            run_settings, plan = _plan_run(replace(run_settings, out=str(folder)), setting, device)
            if test and not number:
                _refuse_untested(plan)
            updates = updates_of(plan)
            name = folder.relative_to(out).as_posix()
            runs.append(SweepRun(base.data_text, setting, name, run_settings, plan.recipe, updates))
    return runs


def _plan_run(settings: TrainingSettings, setting: Setting, device: str) -> tuple[TrainingSettings, Any]:
    """Return the settings for `train` and the plan."""
    if SHARE not in setting:
        return settings, make_plan(settings, device)
    if {"epochs", "schedule.epochs", "schedule.steps"} & setting.keys():
        raise UsageError(f"{SHARE} is swept at equal numbers of updates; leave epochs out of the grid")
    whole = make_plan(replace(settings, changes={**settings.changes, SHARE: 1.0}), device)
    if not isinstance(whole, ImagePlan):
        raise UsageError(f"{SHARE} is of training images, and {settings.data_text} is learned as {whole.task.name}")
    part = replace(
        settings, recipe=whole.recipe, changes={SHARE: setting[SHARE]}, epochs=None, size=None, batch=None, model=None
    )
    plan = make_plan(part, device)
    images, batch = len(plan.splits.train), plan.recipe.optim.batch_size
    if images < batch:
        raise UsageError(
            f"{SHARE} {setting[SHARE]:g} leaves {images:,} images of {settings.data_text}, fewer than a batch of "
            f"{batch}; pass --batch {images} or less, or larger shares"
        )
    part = replace(part, changes={**part.changes, **_at_equal_updates(whole, plan)})
    return part, make_plan(part, device)


def _at_equal_updates(whole: ImagePlan, part: ImagePlan) -> dict[str, Any]:
    """Return the schedule fields for as many updates on fewer images."""
    schedule, per_epoch = whole.recipe.schedule, _updates_per_epoch(whole)
    epochs = max(1, round(schedule.epochs * per_epoch / _updates_per_epoch(part)))
    dropping = tuple(max(1, round(epoch * epochs / schedule.epochs)) for epoch in schedule.step_epochs)
    return {
        "schedule.epochs": epochs,
        "schedule.warmup_epochs": 0,
        "schedule.warmup_steps": schedule.warmup_steps or schedule.warmup_epochs * per_epoch,
        "schedule.step_epochs": dropping,
    }


def updates_of(plan: Any) -> int:
    """Return the updates of a whole run."""
    return int(plan.recipe.schedule.epochs) * _updates_per_epoch(plan)


def _updates_per_epoch(plan: Any) -> int:
    """Return the updates per epoch; 1 for text."""
    if not isinstance(plan, ImagePlan):
        return 1
    return max(1, epoch_length(len(plan.splits.train), plan.recipe.augment.repeats) // plan.recipe.optim.batch_size)


def _refuse_untested(plan: Any) -> None:
    """Raise UsageError if --test has no test images with classes."""
    if plan.task is not CLASSIFICATION:
        raise UsageError(
            f"--test is of runs that name classes, and {plan.settings.data_text} is learned as {plan.task.name}"
        )
    if plan.splits.test is None:
        raise UsageError(
            f"{plan.settings.data_text} has no test split, and its val images choose the setting; leave --test out"
        )


def estimated_s(
    runs: Sequence[SweepRun], done: Mapping[str, RunResult], say: Callable[[str], None]
) -> dict[str, float]:
    """Estimate the seconds per run; runs with equally long updates are measured once."""
    measured: dict[tuple[Any, ...], float] = {}  # seconds per update, evaluations included
    left = [run for run in runs if run.name not in done or done[run.name].failed]
    for run in left:
        if run.speed_of not in measured:
            say(f"measuring a few updates of {run.name}")
            measurement = run_training(run.settings, dry_run=True, say=silent).plan
            measured[run.speed_of] = measurement["seconds"] / max(1, measurement["steps"])
    return {run.name: measured[run.speed_of] * run.updates for run in left}
