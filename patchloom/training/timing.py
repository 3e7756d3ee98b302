"""Plan a run into a given time, and note before the first step that a run will take days."""

import time as clock
from math import ceil

from patchloom.engine.display import duration
from patchloom.engine.distribution import Processes, unwrap
from patchloom.engine.run import Run, SampledBatches
from patchloom.engine.time_budget import TimeBudget
from patchloom.recipes.choices import Choice, base_recipe
from patchloom.recipes.fit import A_DAY_S
from patchloom.tasks.plan import Plan
from patchloom.training.assemble import EVALUATIONS, Stores, make_run, release
from patchloom.training.measuring import REPORT_S, StepTimes, epochs_within, measure, seconds_per_image

# At this multiple of the budget a run stops, saves and reports even if its schedule is not at its end.
LATEST = 1.05
LONGEST_EPOCHS = 300  # that auto plans; published trainings from scratch are about as long
MEASURING_SHARE = 0.1  # of the budget
COMPILING_S = 60.0
FORWARD_SHARE = 1 / 3  # of a training step


def planned_into_time(plan: Plan, processes: Processes, stores: Stores, started: float) -> tuple[Plan, TimeBudget]:
    """Return the plan with as many epochs as fit into its time, and the budget that corrects them during the run.

    The steps are measured on a run that is then discarded; images that it decodes stay in `stores`. All processes plan
    what rank 0 does.
    """
    assert plan.time_s
    run, _, _ = make_run(plan, processes, _say_nothing, stores)
    try:
        measured = measure(run, most_s=max(1.0, MEASURING_SHARE * plan.time_s))
        compiling_s = COMPILING_S if unwrap(run.model) is not run.model else 0.0
        before_s = FORWARD_SHARE * plan.task.training.images_before(plan) / measured.images_per_s
        left_s = plan.time_s - (clock.perf_counter() - started) - compiling_s - before_s
        choice = chosen_epochs(plan, measured, run.loader.steps_per_epoch, left_s)
        budget = TimeBudget(
            plan.time_s,
            started,
            evaluation_s=measured.evaluation_s,
            report_s=REPORT_S,
            most_steps=longest_epochs(plan) * run.loader.steps_per_epoch,
            clock=clock.perf_counter,
        )
    finally:
        release(run)
        run.loader.close()
    return plan.task.training.with_epochs(plan, processes.from_main(choice), str(processes.device)), budget


def chosen_epochs(plan: Plan, measured: StepTimes, steps_per_epoch: int, left_s: float) -> Choice:
    """Return the epochs for what is left of the time, and why."""
    asked, longest = plan.settings.time, longest_epochs(plan)
    epochs = epochs_within(left_s, measured, steps_per_epoch, longest=longest, evaluations=EVALUATIONS)
    speed = f"{measured.speed} images/s, measured on {measured.on}"
    if not epochs:
        needed = measured.seconds(1, steps_per_epoch, 1)
        why = f"one epoch takes about {duration(ceil(needed))}, so {asked} is enough for a part of it ({speed})"
    elif epochs == longest:
        whose = "as many as auto plans" if is_automatic(plan) else "as the recipe says"
        why = f"{whose}; they take less than {asked} ({speed})"
    else:
        why = f"as many as fit into {asked} with evaluations and report ({speed})"
    return Choice("schedule.epochs", max(1, epochs), f"auto: {why}")


def longest_epochs(plan: Plan) -> int:
    """Return the epochs beyond which a run is not extended, however much time there is."""
    return LONGEST_EPOCHS if is_automatic(plan) else plan.recipe.schedule.epochs


def is_automatic(plan: Plan) -> bool:
    """Whether the recipe is `auto`."""
    return base_recipe(plan.settings.recipe, plan.settings.model) is None


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
