"""A run ends when its time budget does, whatever its steps and evaluations take; the clock is a fake one."""

import os
import signal
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from patchloom.data.images.image_batch import ImageBatch
from patchloom.engine.loop import train
from patchloom.engine.run import Run
from patchloom.engine.signals import Stopped
from patchloom.engine.time_budget import TimeBudget
from patchloom.runs.checkpoints import epochs_begun, find_checkpoint
from tests.engine.toys import STEPS, classify, evaluator, make_run

BUDGET_S, REPORT_S = 100.0, 4.0


class Clock:
    """Seconds that pass only where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def budgeted(
    folder: Path | None = None,
    *,
    step_s: Callable[[float], float],
    evaluation_s: float = 1.0,
    estimated_s: float | None = None,
    estimated_step_s: float = 0.0,
    slowdown: float = 1.0,
    most_steps: int = 10_000,
    stop_at: int = -1,
    **fields: Any,
) -> tuple[Run, Clock, list[float]]:
    """A run whose steps take `step_s` of the time of day; its clock, and when it was evaluated."""
    clock, evaluations, steps = Clock(), [], iter(range(10_000))

    def objective(model: nn.Module, batch: ImageBatch, *, epoch: int, step: int) -> dict[str, Tensor]:
        clock.now += step_s(clock.now)
        if next(steps) == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return classify(model, batch, epoch=epoch, step=step)

    def evaluating(model: nn.Module) -> Iterator[tuple[str, float]]:
        evaluations.append(clock.now)
        clock.now += evaluation_s
        yield from evaluator(model)

    estimate_s = evaluation_s if estimated_s is None else estimated_s
    budget = TimeBudget(
        BUDGET_S, 0.0, estimate_s, estimated_step_s, REPORT_S, most_steps, clock, slowdown=lambda: slowdown
    )
    run = make_run(folder, objective=objective, evaluators=[evaluating], time_budget=budget, **fields)
    return run, clock, evaluations


def slow_start(now: float) -> float:
    return 8.0 if now == 0 else 0.5


def slower_later(now: float) -> float:
    return 0.3 if now < 60 else 0.9


def faster_later(now: float) -> float:
    return 0.9 if now < 60 else 0.3


@pytest.mark.parametrize("epochs", [1, 20, 300])
@pytest.mark.parametrize("step_s", [lambda _: 0.4, slow_start, slower_later, faster_later])
def test_a_run_ends_with_its_budget_whatever_was_planned(step_s, epochs) -> None:
    run, clock, _ = budgeted(step_s=step_s, epochs=epochs)
    outcome = train(run)
    assert outcome.ended == "finished"
    taken = clock.now + 1.0 + REPORT_S  # the best weights are evaluated once more
    assert 0.95 * BUDGET_S <= taken <= 1.02 * BUDGET_S


def test_the_learning_rate_follows_the_whole_schedule_without_a_jump() -> None:
    run, _, _ = budgeted(step_s=slower_later, epochs=10)
    rates: list[float] = []
    step = run.optimizer.step
    run.optimizer.step = lambda *a, **k: (rates.append(run.optimizer.param_groups[0]["lr"]), step(*a, **k))[1]
    train(run)
    peak = max(rates)
    assert peak == pytest.approx(0.01, rel=0.05)
    assert rates[-1] < 0.02 * peak
    assert max(abs(after - before) for before, after in pairwise(rates)) <= 0.21 * peak  # warm-up


@pytest.mark.parametrize(("epochs", "steps"), [(10, 17), (3, 40)])
def test_a_schedule_is_fitted_to_a_number_of_updates(epochs: int, steps: int) -> None:
    run = make_run(None, epochs=epochs, steps=steps)
    rates: list[float] = []
    step = run.optimizer.step
    run.optimizer.step = lambda *a, **k: (rates.append(run.optimizer.param_groups[0]["lr"]), step(*a, **k))[1]
    outcome = train(run)
    assert (outcome.ended, outcome.progress.step, len(rates)) == ("finished", steps, steps)
    assert rates[-1] < 0.1 * max(rates)


def test_a_machine_as_fast_as_planned_changes_nothing() -> None:
    run, _, _ = budgeted(step_s=lambda _: 0.4, evaluation_s=0.0, epochs=48)  # 96 s of steps
    assert train(run).progress.total_steps == 0


def test_no_more_updates_than_allowed() -> None:
    run, clock, _ = budgeted(step_s=lambda _: 0.1, most_steps=40, epochs=8)
    assert train(run).progress.step == 40
    assert clock.now < BUDGET_S / 2


def test_evaluations_longer_than_an_epoch_take_a_fifth_of_the_time() -> None:
    run, clock, evaluations = budgeted(step_s=lambda _: 0.2, evaluation_s=6.0, estimated_s=0.1, epochs=60)
    train(run)
    assert 6.0 * (len(evaluations) - 1) <= 0.25 * BUDGET_S
    assert len(evaluations) >= 2
    assert 0.95 * BUDGET_S <= clock.now + 6.0 + REPORT_S <= 1.02 * BUDGET_S


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_an_estimate_on_a_busy_machine_does_not_end_a_run_early(factor: float) -> None:
    run, clock, _ = budgeted(
        step_s=lambda _: 0.5, evaluation_s=6.0, estimated_s=6.0 * factor, estimated_step_s=0.5 * factor, epochs=1
    )
    train(run)
    assert 0.95 * BUDGET_S <= clock.now + 6.0 + REPORT_S <= 1.02 * BUDGET_S


def test_a_report_takes_longer_on_a_busy_machine() -> None:
    run, clock, _ = budgeted(step_s=lambda _: 0.5, epochs=1, slowdown=5.0)
    train(run)
    assert 0.95 * BUDGET_S <= clock.now + 1.0 + 5.0 * REPORT_S <= 1.02 * BUDGET_S


def test_less_time_than_an_epoch_is_a_part_of_it() -> None:
    run, clock, evaluations = budgeted(step_s=lambda _: 30.0, epochs=1)
    outcome = train(run)
    assert 0 < outcome.progress.step < STEPS
    assert outcome.progress.epoch == 0
    assert len(evaluations) == 1
    assert clock.now <= 1.02 * BUDGET_S


def test_a_resumed_run_follows_the_schedule_that_was_stored(tmp_path: Path) -> None:
    whole, _, _ = budgeted(tmp_path / "whole", step_s=lambda _: 2.0, epochs=30)
    expected = train(whole).progress
    assert 0 < expected.total_steps < 30 * STEPS
    stopped, _, _ = budgeted(tmp_path / "stopped", step_s=lambda _: 2.0, epochs=30, stop_at=expected.step // 2)
    with pytest.raises(Stopped):
        train(stopped)
    result = find_checkpoint(tmp_path / "stopped")
    again = make_run(tmp_path / "stopped", epochs=30)  # without a budget: the decision was made
    assert result is not None
    outcome = train(again, result.snapshot)
    assert (outcome.ended, outcome.progress.step) == ("finished", expected.step)
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, again.model.state_dict()[name])
    assert outcome.progress.has_ended(30)
    assert not outcome.progress.has_ended(31)


def test_more_updates_than_planned_are_no_more_epochs_than_the_recipe_has(tmp_path: Path) -> None:
    run, _, _ = budgeted(tmp_path, step_s=lambda _: 0.5, epochs=2)
    assert train(run).progress.epoch > 2
    assert epochs_begun(tmp_path) == 2
