"""How long a run will take, measured on a few steps, and how many epochs fit into a given time.

Whole steps are measured if they are short. If one takes long, as with a published batch on a CPU, a few images are
measured and extrapolated, so that the estimate is there within seconds for every recipe.
"""

import time as clock
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from math import ceil
from typing import Any

import torch
from torch import nn

from patchloom.engine.batches import len_of, split
from patchloom.engine.display import duration
from patchloom.engine.distribution import Processes, unwrap
from patchloom.engine.run import Run, SampledBatches
from patchloom.engine.time_budget import TimeBudget
from patchloom.machine import cores
from patchloom.recipes.choices import Choice, base_recipe
from patchloom.recipes.fit import A_DAY_S
from patchloom.tasks.plan import Plan
from patchloom.tasks.task import Judge
from patchloom.training.assemble import EVALUATIONS, Stores, is_captured, make_run, release, silent
from patchloom.training.memory import left_as_it_was
from patchloom_runtime.printable import plural

MEASURING_S = 12.0  # for all steps together
MEASURED_STEPS = 5
STEPS_AT_ONCE = 5  # on a GPU, which is not waited for after every step
FEW_IMAGES = 4
MOST_IMAGES = 64  # that are extrapolated to a batch
GROWTH = 4
REPORT_S = 4.0  # writing weights, metrics and the report at the end of a run, without the last evaluation

A_MINUTE_S = 60.0
LATEST = 1.05  # share of the time budget at which a run stops, saves and reports even if its schedule is not complete
LONGEST_EPOCHS = 300  # that auto plans; published trainings from scratch are about as long
MEASURING_SHARE = 0.1  # of the time budget
# Shorter runs on a GPU are not compiled. Compiling took 33 seconds, and a fifth of that again from torch's cache on
# disk; it saves about a third of the time of the steps (benchmarks/LOG.md).
COMPILED_FROM_S = 240.0
CACHED_SHARE = 0.25  # of the time of compiling that it takes again, from torch's cache
# The same for several processes, which are not measured.
COMPILED_FROM_STEPS, COMPILED_FROM_TIME_S = 1500, 600.0
FORWARD_SHARE = 1 / 3  # of a training step


@dataclass(frozen=True)
class StepTimes:
    """Seconds per step and per evaluation, and what they were measured on."""

    step_s: float
    evaluation_s: float
    decoding_s: float  # of val, once, if it then stays in memory
    on: str
    images_per_s: float

    @property
    def speed(self) -> str:
        """Images per second as text."""
        return f"{self.images_per_s:,.0f}" if self.images_per_s >= 10 else f"{self.images_per_s:.2g}"

    def seconds(self, epochs: int, steps_per_epoch: int, evaluations: int) -> float:
        """Return the seconds of a whole run, with its evaluations and its report."""
        evaluating = self.decoding_s + (evaluations + 1) * self.evaluation_s
        return epochs * steps_per_epoch * self.step_s + evaluating + REPORT_S

    def total_s(self, run: Run) -> float:
        """Return the seconds of this run."""
        return self.seconds(run.epochs, run.loader.steps_per_epoch, evaluations_of(run.epochs))


# Measuring ------------------------------------------------------------------------------------------------------------


def measure(run: Run, *, most_s: float | None = None) -> StepTimes:
    """Time a few steps. They change the weights, so the run cannot be trained afterwards."""
    budget_s = MEASURING_S if most_s is None else min(MEASURING_S, most_s)
    on_gpu = run.processes.device.type == "cuda"
    # A GPU takes as long for a few images as for many, so they say nothing about a step.
    per_image, update_s, count, largest = (0.0, 0.0, 0, 0) if on_gpu else _of_few(run, budget_s / 2)
    images = max(1, run.schedule.optim.batch_size // run.processes.world)
    step_s, on = per_image * images + update_s, f"{count} images at a time"
    # The loader starts workers and prepares a first batch, so three steps are the least to measure. One is enough if
    # there was no time for as many images as a step has.
    if not per_image or (3 if count == largest else 1) * step_s <= budget_s:
        seconds = list(_whole_steps(run, budget_s))
        step_s = sorted(seconds)[len(seconds) // 2]
        kind = "uncompiled step" if _measured_model(run) is not run.model else "step"
        on = plural(len(seconds) * (STEPS_AT_ONCE if on_gpu else 1), kind)
    step_s = max(run.processes.gather(step_s))
    judges = [judge for judge in run.evaluators if isinstance(judge, Judge)]
    evaluation_s, decoding_s = judges[0].seconds(run) if judges else (0.0, 0.0)
    return StepTimes(step_s, evaluation_s, decoding_s, on, run.schedule.optim.batch_size / step_s)


def _measured_model(run: Run) -> nn.Module:
    """Return the model as it is trained; on a CPU without torch.compile, which would take longer than the steps."""
    return run.model if run.processes.device.type == "cuda" else unwrap(run.model)


def seconds_per_image(run: Run) -> float:
    """Time forward and backward passes of a few images; weights and random state stay as they were."""
    with left_as_it_was(run):
        batch = run.loader.sample(FEW_IMAGES).to(run.processes.device)  # type: ignore[attr-defined]
        return min(_gradients_s(run, batch) for _ in range(2)) / len_of(batch)


def _of_few(run: Run, budget_s: float) -> tuple[float, float, int, int]:
    """Return the seconds per image and per update, the number of images measured, and the most to measure.

    All are 0 for a loader without samples.
    """
    if not isinstance(run.loader, SampledBatches):
        return 0.0, 0.0, 0, 0
    largest = min(MOST_IMAGES, max(1, run.schedule.optim.batch_size // run.processes.world // run.accumulate))
    count, deadline = min(FEW_IMAGES, largest), clock.perf_counter() + budget_s
    device = run.processes.device
    _gradients_s(run, run.loader.sample(count).to(device))  # warm-up
    helpers = max(1, min(cores(), run.loader.workers))
    while True:
        begun = clock.perf_counter()
        batch = run.loader.sample(count).to(device)
        made_s = clock.perf_counter() - begun
        # The faster of two, as other programs may interrupt one.
        gradients_s = min(_gradients_s(run, batch) for _ in range(2))
        begun = clock.perf_counter()
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.processes.synchronize()
        update_s = clock.perf_counter() - begun
        # A small network takes as long for 4 images as for 16, so larger counts are more accurate.
        more_s = GROWTH * (made_s + 2 * gradients_s)
        if count >= largest or clock.perf_counter() + more_s > deadline:
            return (gradients_s + made_s / helpers) / len_of(batch), update_s, count, largest
        count = min(GROWTH * count, largest)


def _whole_steps(run: Run, budget_s: float) -> Iterator[float]:
    """Yield seconds per step; those of the first, which starts workers and captures, only if there is no other."""
    network = _measured_model(run).train()
    batches = chain.from_iterable(run.loader.epoch(number) for number in range(MEASURED_STEPS + 1))
    on_gpu = run.processes.device.type == "cuda"
    deadline, first = clock.perf_counter() + budget_s, None
    for number in range(MEASURED_STEPS + 1):
        begun, steps = clock.perf_counter(), STEPS_AT_ONCE if on_gpu and number else 1
        for batch in islice(batches, steps):
            _whole_step(run, network, batch.to(run.processes.device))
        run.processes.synchronize()
        taken = (clock.perf_counter() - begun) / steps
        if number:
            yield taken
        else:
            first = taken
        # On a GPU the first step says nothing: it may compile for half a minute.
        if clock.perf_counter() > deadline and (number or not on_gpu):
            break
    if first is not None and number == 0:
        yield first


def _whole_step(run: Run, network: nn.Module, batch: Any) -> None:
    for part in split(batch, run.accumulate):
        with run.processes.autocast():
            loss = run.objective(network, part, epoch=0, step=0)["loss"]
        (loss * len_of(part) / len_of(batch)).backward()
    run.optimizer.step()
    run.optimizer.zero_grad()


def _gradients_s(run: Run, batch: object) -> float:
    network = unwrap(run.model).train()
    begun = clock.perf_counter()
    with run.processes.autocast():
        run.objective(network, batch, epoch=0, step=0)["loss"].backward()
    run.processes.synchronize()
    return clock.perf_counter() - begun


# Estimating -----------------------------------------------------------------------------------------------------------


def evaluations_of(epochs: int, most: int = EVALUATIONS) -> int:
    """Return the number of evaluations of a run: about `most`, and one at its end (see `Run.evaluate_every`)."""
    every = max(1, epochs // most)
    return epochs // every + (epochs % every > 0)


def epochs_within(seconds: float, measured: StepTimes, steps_per_epoch: int, *, longest: int, evaluations: int) -> int:
    """Return the most epochs, from 0 to `longest`, that fit into the time with evaluations and report."""
    low, high = 0, longest
    while low < high:
        middle = (low + high + 1) // 2
        taken = measured.seconds(middle, steps_per_epoch, evaluations_of(middle, evaluations))
        low, high = (middle, high) if taken <= seconds else (low, middle - 1)
    return low


def estimated_s(run: Run) -> float:
    """Estimate the training time in seconds from a few images. Returns 0 on a GPU and for text."""
    if run.processes.device.type != "cpu" or not isinstance(run.loader, SampledBatches):
        return 0.0
    images = run.schedule.optim.batch_size / run.processes.world
    return seconds_per_image(run) * images * run.schedule.total_steps


def times_text(run: Run, measured: StepTimes, unit: str = "images") -> str:
    """Return the time of the run in one line."""
    device, steps = run.processes.device, run.schedule.total_steps
    memory = f", {torch.cuda.max_memory_allocated(device) / 2**20:,.0f} MiB" if device.type == "cuda" else ""
    evaluating = " and evaluations" if measured.evaluation_s else ""
    return (
        f"time       about {duration(measured.total_s(run))} for {steps:,} steps{evaluating} "
        f"(measured on {measured.on}: {measured.speed} {unit}/s{memory})"
    )


def length_lines(plan: Plan, seconds: float) -> list[str]:
    """Return what a run without `--time` will take, if that is more than a minute."""
    if plan.time_s or not A_MINUTE_S <= seconds < A_DAY_S:
        return takes_days(plan, seconds)
    return [f"time       about {duration(seconds)} and evaluations; --time 10m fits the run into ten minutes"]


def takes_days(plan: Plan, seconds: float) -> list[str]:
    """Return a note if a run takes more than a day."""
    if seconds < A_DAY_S:
        return []
    fit = "" if plan.settings.fit or plan.recipe.name == "auto" else "--fit fits the recipe to this machine, "
    days = f"{seconds / A_DAY_S:,.1f} days"
    return [f"           note: this takes about {days} here; {fit}--time 8h plans a run into a night"]


# Planning into a time -------------------------------------------------------------------------------------------------


def plan_within_time(
    plan: Plan, processes: Processes, stores: Stores, started: float
) -> tuple[Plan, TimeBudget, StepTimes]:
    """Return the plan with as many epochs as fit into its time, the budget that corrects them, and the measured times.

    The steps are measured on a run that is then discarded; images that it decodes stay in `stores`. All processes plan
    what rank 0 does.
    """
    assert plan.time_s
    run, _, _ = make_run(plan, processes, silent, stores)
    try:
        measured = measure(run, most_s=max(1.0, MEASURING_SHARE * plan.time_s))
        before_s = FORWARD_SHARE * plan.task.training.images_before(plan) / measured.images_per_s
        left_s = plan.time_s - (clock.perf_counter() - started) - before_s
        choice = chosen_epochs(plan, measured, run.loader.steps_per_epoch, left_s)
        budget = TimeBudget(
            plan.time_s,
            started,
            evaluation_s=measured.evaluation_s,
            step_s=measured.step_s,
            report_s=REPORT_S,
            most_steps=longest_epochs(plan) * run.loader.steps_per_epoch,
            clock=clock.perf_counter,
        )
    finally:
        release(run)
        run.loader.close()
    plan = plan.task.training.with_epochs(plan, processes.from_main(choice), str(processes.device))
    return plan, budget, measured


def chosen_compilation(plan: Plan, processes: Processes, stores: Stores, measured: StepTimes | None) -> bool:
    """Return whether to compile a new run: as the user says, else on a GPU if it is measured to save time."""
    settings, task = plan.settings, plan.task.training
    if settings.compiled is not None or processes.device.type != "cuda" or not task.compiles_by_default:
        return bool(settings.compiled)
    if plan.time_s and plan.time_s < COMPILED_FROM_S:
        return False
    run, _, _ = make_run(plan, processes, silent, stores)
    try:
        steps = run.schedule.total_steps
        if processes.world > 1:
            return steps >= COMPILED_FROM_STEPS and (plan.time_s or COMPILED_FROM_TIME_S) >= COMPILED_FROM_TIME_S
        if not is_captured(plan, run):
            return False
        captured_s = (measured or measure(run, most_s=MEASURING_S / 4)).step_s
    finally:
        release(run)
        run.loader.close()
    is_long = steps * captured_s >= COMPILED_FROM_S
    return is_long and _saves_time(plan, processes, stores, steps, captured_s)


def _saves_time(plan: Plan, processes: Processes, stores: Stores, steps: int, captured_s: float) -> bool:
    """Compile a run that is then discarded; torch keeps the code on disk for the one that is trained."""
    begun = clock.perf_counter()
    run, _, _ = make_run(plan, processes, silent, stores, compiled=True)
    try:
        measured = measure(run, most_s=1.0)
        compiling_s = clock.perf_counter() - begun - measured.step_s * STEPS_AT_ONCE
        return (captured_s - measured.step_s) * steps > CACHED_SHARE * compiling_s  # the rest is spent
    finally:
        release(run)
        run.loader.close()


def chosen_epochs(plan: Plan, measured: StepTimes, steps_per_epoch: int, left_s: float) -> Choice:
    """Return the epochs for the remaining time, and why."""
    time, longest = plan.settings.time, longest_epochs(plan)
    epochs = epochs_within(left_s, measured, steps_per_epoch, longest=longest, evaluations=EVALUATIONS)
    speed = f"{measured.speed} images/s, measured on {measured.on}"
    if not epochs:
        needed = measured.seconds(1, steps_per_epoch, 1)
        why = f"one epoch takes about {duration(ceil(needed))}, so {time} is enough for a part of it ({speed})"
    elif epochs == longest:
        limit = "as many as auto plans" if is_automatic(plan) else "as the recipe says"
        why = f"{limit}; they take less than {time} ({speed})"
    else:
        why = f"as many as fit into {time} with evaluations and report ({speed})"
    return Choice("schedule.epochs", max(1, epochs), f"auto: {why}")


def longest_epochs(plan: Plan) -> int:
    """Return the epochs beyond which a run is not extended, however much time there is."""
    return LONGEST_EPOCHS if is_automatic(plan) else plan.recipe.schedule.epochs


def is_automatic(plan: Plan) -> bool:
    """Return whether the recipe is `auto`."""
    return base_recipe(plan.settings.recipe, plan.settings.model) is None
