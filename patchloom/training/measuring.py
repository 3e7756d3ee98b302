"""How long a run will take, from a few steps on this machine; and how many epochs fit into a given time.

Whole steps are measured where they are short. Where one takes long, as with a published batch on a CPU, a few images
are, and the rest is multiplication: so an answer is there within seconds whatever the recipe.
"""

import time as clock
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from patchloom.engine.batches import len_of, split
from patchloom.engine.display import duration
from patchloom.engine.distribution import unwrap
from patchloom.engine.run import Run, SampledBatches
from patchloom.machine import cores
from patchloom.tasks.task import Judge
from patchloom.training.memory import left_as_it_was

MEASURING_S = 12.0  # for all steps together
MEASURED_STEPS = 5
FEW_IMAGES = 4
MOST_IMAGES = 64  # of those that stand for a batch
GROWTH = 4
# The last evaluation aside, what a run writes at its end: weights, numbers, a page with pictures.
REPORT_S = 4.0


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step and of an evaluation, and what they were measured on."""

    step_s: float
    evaluation_s: float
    decoding_s: float  # of val, once, where it is then kept
    on: str
    images_per_s: float

    @property
    def speed(self) -> str:
        """Images a second, in words."""
        return f"{self.images_per_s:,.0f}" if self.images_per_s >= 10 else f"{self.images_per_s:.2g}"

    def seconds(self, epochs: int, steps_per_epoch: int, evaluations: int) -> float:
        """Of a whole run, its evaluations and its end."""
        evaluating = self.decoding_s + (evaluations + 1) * self.evaluation_s
        return epochs * steps_per_epoch * self.step_s + evaluating + REPORT_S

    def total_s(self, run: Run, evaluations: int) -> float:
        """Of this run, which is evaluated about so often."""
        return self.seconds(run.epochs, run.loader.steps_per_epoch, evaluations_of(run.epochs, evaluations))


def measure(run: Run, *, most_s: float | None = None) -> StepTimes:
    """Time a few steps, which change the weights: the run is thrown away, or made anew."""
    budget_s = MEASURING_S if most_s is None else min(MEASURING_S, most_s)
    per_image, update_s, count, largest = _of_few(run, budget_s / 2)
    images = max(1, run.schedule.optim.batch_size // run.processes.world)
    step_s, on = per_image * images + update_s, f"{count} images at a time"
    # The loader has workers to start and a first batch to prepare: about three steps are the least that tell. Where
    # there was no time for as many images as a step has, those few are no measure of it: a GPU hardly notices them.
    if not per_image or (3 if count == largest else 1) * step_s <= budget_s:
        seconds = list(_whole_steps(run, budget_s))
        step_s = sorted(seconds)[len(seconds) // 2]
        on = f"{len(seconds)} step{'s' * (len(seconds) > 1)}"
    step_s = max(run.processes.gather(step_s))
    judges = [judge for judge in run.evaluators if isinstance(judge, Judge)]
    evaluation_s, decoding_s = judges[0].seconds(run) if judges else (0.0, 0.0)
    if unwrap(run.model) is not run.model:
        on = on.replace(" step", " uncompiled step")
    return StepTimes(step_s, evaluation_s, decoding_s, on, run.schedule.optim.batch_size / step_s)


def evaluations_of(epochs: int, most: int) -> int:
    """How often a run of so many epochs is evaluated, about `most` times and at its end (`Run.evaluate_every`)."""
    every = max(1, epochs // most)
    return epochs // every + (epochs % every > 0)


def epochs_within(seconds: float, measured: StepTimes, steps_per_epoch: int, *, longest: int, evaluations: int) -> int:
    """The most epochs, from 0 to `longest`, that fit into so many seconds with evaluations and report."""
    low, high = 0, longest
    while low < high:
        middle = (low + high + 1) // 2
        taken = measured.seconds(middle, steps_per_epoch, evaluations_of(middle, evaluations))
        low, high = (middle, high) if taken <= seconds else (low, middle - 1)
    return low


def times_text(run: Run, measured: StepTimes, evaluations: int, unit: str = "images") -> str:
    """The time of the run in one line."""
    device, steps = run.processes.device, run.schedule.total_steps
    total = measured.total_s(run, evaluations)
    memory = f", {torch.cuda.max_memory_allocated(device) / 2**20:,.0f} MiB" if device.type == "cuda" else ""
    judging = " and evaluations" if measured.evaluation_s else ""
    return (
        f"time       about {duration(total)} for {steps:,} steps{judging} "
        f"(measured on {measured.on}: {measured.speed} {unit}/s{memory})"
    )


def seconds_per_image(run: Run) -> float:
    """Forward and backward of a few images, weights and random numbers left as they were."""
    with left_as_it_was(run):
        batch = run.loader.sample(FEW_IMAGES).to(run.processes.device)  # type: ignore[attr-defined]
        return min(_gradients_s(run, batch) for _ in range(2)) / len_of(batch)


def _of_few(run: Run, budget_s: float) -> tuple[float, float, int, int]:
    """Return seconds per image and per update, the images they were measured on, and the most that would be measured.

    All are 0 for a loader without samples.
    """
    if not isinstance(run.loader, SampledBatches):
        return 0.0, 0.0, 0, 0
    largest = min(MOST_IMAGES, max(1, run.schedule.optim.batch_size // run.processes.world // run.accumulate))
    count, deadline = min(FEW_IMAGES, largest), clock.perf_counter() + budget_s
    device = run.processes.device
    _gradients_s(run, run.loader.sample(count).to(device))  # the first prepares what the others find
    helpers = max(1, min(cores(), run.loader.workers))
    while True:
        begun = clock.perf_counter()
        batch = run.loader.sample(count).to(device)
        made_s = clock.perf_counter() - begun
        # The quicker of two: what comes between is not the run's.
        gradients_s = min(_gradients_s(run, batch) for _ in range(2))
        begun = clock.perf_counter()
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.processes.synchronize()
        update_s = clock.perf_counter() - begun
        # A small network takes as long for 4 images as for 16, so more of them tell more.
        more_s = GROWTH * (made_s + 2 * gradients_s)
        if count >= largest or clock.perf_counter() + more_s > deadline:
            return (gradients_s + made_s / helpers) / len_of(batch), update_s, count, largest
        count = min(GROWTH * count, largest)


def _whole_steps(run: Run, budget_s: float) -> Iterator[float]:
    """Seconds of each step, as training does them; the first, which starts the workers, only where it is alone."""
    network = unwrap(run.model).train()
    batches = iter(run.loader.epoch(0))
    deadline, first = clock.perf_counter() + budget_s, None
    for number in range(min(MEASURED_STEPS + 1, run.loader.steps_per_epoch)):
        begun = clock.perf_counter()
        batch = next(batches).to(run.processes.device)
        for part in split(batch, run.accumulate):
            with run.processes.autocast():
                (run.objective(network, part, epoch=0, step=0)["loss"] * len_of(part) / len_of(batch)).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.processes.synchronize()
        taken = clock.perf_counter() - begun
        if number:
            yield taken
        else:
            first = taken
        if clock.perf_counter() > deadline:
            break
    if first is not None and number == 0:
        yield first


def _gradients_s(run: Run, batch: object) -> float:
    network = unwrap(run.model).train()
    begun = clock.perf_counter()
    with run.processes.autocast():
        run.objective(network, batch, epoch=0, step=0)["loss"].backward()
    run.processes.synchronize()
    return clock.perf_counter() - begun
