"""A run is planned into a given time, and one that takes days on this machine says so before it begins."""

import time as clock
from math import ceil

from patchloom.engine.display import duration
from patchloom.engine.distribution import Processes, unwrap
from patchloom.engine.run import Run, SampledBatches
from patchloom.recipes.choices import Choice, base_recipe
from patchloom.recipes.fit import A_DAY_S
from patchloom.tasks.plan import Plan
from patchloom.training.assemble import EVALUATIONS, Stores, make_run, release
from patchloom.training.measuring import PLANNED_SHARE, Measured, epochs_within, measure, seconds_per_image

# Beyond this many times the planned time a run stops, saves and reports: the machine has slowed down a lot. Up to
# there it goes on, since the last epochs, at the smallest rates, are worth the most.
LATEST = 1.15
LONGEST_EPOCHS = 300  # that auto plans; published trainings from scratch are about as long
MEASURING_SHARE = 0.05  # of the planned time
COMPILING_S = 60.0
FORWARD_SHARE = 1 / 3  # of a training step


def planned_into_time(plan: Plan, processes: Processes, stores: Stores, started: float) -> Plan:
    """The plan with as many epochs as fit into its time, by steps measured on a run that is then thrown away.

    Images it decodes stay in `stores`. All processes plan what rank 0 does.
    """
    assert plan.time_s
    run, _, _ = make_run(plan, processes, _say_nothing, stores)
    try:
        measured = measure(run, most_s=max(1.0, MEASURING_SHARE * plan.time_s))
        compiling_s = COMPILING_S if unwrap(run.model) is not run.model else 0.0
        before_s = FORWARD_SHARE * plan.task.shown_before(plan) / measured.images_per_s
        left_s = plan.time_s * PLANNED_SHARE - (clock.perf_counter() - started) - compiling_s - before_s
        choice = chosen_epochs(plan, measured, run.loader.steps_per_epoch, left_s)
    finally:
        release(run)
        run.loader.close()
    return plan.task.planned_for(plan, processes.from_main(choice), str(processes.device))


def chosen_epochs(plan: Plan, measured: Measured, steps_per_epoch: int, left_s: float) -> Choice:
    """The epochs for what is left of the time, and why."""
    asked, named = plan.settings.time, base_recipe(plan.settings.recipe, plan.settings.model)
    longest = LONGEST_EPOCHS if named is None else plan.recipe.schedule.epochs
    epochs = epochs_within(left_s, measured, steps_per_epoch, longest=longest, evaluations=EVALUATIONS)
    speed = f"{measured.speed} images/s, measured on {measured.on}"
    if not epochs:
        needed = measured.seconds(1, steps_per_epoch, 1)
        why = f"one epoch takes about {duration(ceil(needed))}, more than is left of {asked} ({speed})"
    elif epochs == longest:
        whose = "as many as auto plans" if named is None else "as the recipe says"
        why = f"{whose}; they take less than {asked} ({speed})"
    else:
        why = f"as many as fit into {asked} with evaluations and report ({speed})"
    return Choice("schedule.epochs", max(1, epochs), f"auto: {why}")


def takes_days(plan: Plan, seconds: float) -> list[str]:
    """A note on a run that takes more than a day; nothing where it does not."""
    if seconds < A_DAY_S:
        return []
    fit = "" if plan.settings.fit or plan.recipe.name == "auto" else "--fit fits the recipe to this machine, "
    told = f"this takes about {seconds / A_DAY_S:,.1f} days here; {fit}--time 8h plans a run into a night"
    return [f"           note: {told}"]


def estimated_s(run: Run) -> float:
    """Seconds of all steps by those of a few images; 0 on a GPU, where runs of days are no surprise, and of text."""
    if run.processes.device.type != "cpu" or not isinstance(run.loader, SampledBatches):
        return 0.0
    images = run.schedule.optim.batch_size / run.processes.world
    return seconds_per_image(run) * images * run.schedule.total_steps


def _say_nothing(line: str) -> None:
    del line
