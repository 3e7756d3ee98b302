"""Fitting the number of updates to a wall-clock budget while a run trains.

A plan made before the first step is a guess: the first steps are slow, and another program may take half of the cores
later. So the budget measures every step and every evaluation and corrects the number of updates whenever the run would
end too early or too late. The schedule is always followed to its end: `Progress.position` moves through it faster or
slower, so the learning rate never jumps and always reaches its final value.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

from patchloom.machine import slowdown

CHECKS = 50  # corrections are considered about this often
TOLERANCE = 0.01  # accepted error of the predicted end, as a share of the budget
WINDOW_SHARE = 0.25  # the speed is measured over the last quarter of the time, but at least over WINDOW_S
WINDOW_S = 5.0
EVALUATION_SHARE = 0.2  # maximum share of the time for evaluations before the last


@dataclass
class TimeBudget:
    """The time a run may take, and the measured times of its steps and evaluations."""

    budget_s: float
    started: float  # when the command started, by `clock`
    evaluation_s: float  # estimate for one evaluation; measured ones replace it
    step_s: float  # estimate for one step, made with that of an evaluation
    report_s: float  # estimate for everything after the last evaluation, on an idle machine
    most_steps: int  # maximum number of updates
    clock: Callable[[], float] = perf_counter
    slowdown: Callable[[], float] = slowdown  # by other programs
    _evaluated_s: float = 0.0  # 0 until an evaluation was measured
    _next_check: int = 2
    _marks: deque[tuple[int, float]] = field(default_factory=deque)  # (step, seconds spent in steps so far)

    @property
    def left_s(self) -> float:
        """Return the seconds left for steps and for evaluations before the last."""
        # The best weights are evaluated once more for the report.
        after_s = 2 * self.next_evaluation_s + self.slowdown() * self.report_s
        return self.budget_s - (self.clock() - self.started) - after_s

    @property
    def next_evaluation_s(self) -> float:
        """Return the expected seconds of an evaluation: those of the last, or the estimate at the speed of the steps.

        An estimate made while other programs took the cores is wrong by as much for an evaluation as for a step.
        """
        if self._evaluated_s or not self._has_speed() or not self.step_s:
            return self.evaluation_s
        return self.evaluation_s * self._measured_step_s() / self.step_s

    def check_due(self, step: int, total: int) -> bool:
        """Return whether to reconsider the number of updates after `step` updates; the same on all ranks."""
        self._mark(step)
        if step < self._next_check:
            return False
        self._next_check = step + max(1, min(step, total // CHECKS))
        return True

    def corrected(self, step: int, total: int, steps_per_evaluation: int) -> int:
        """Return the number of updates that ends the run in time, or `total` if that is close enough."""
        if not self._has_speed():
            return total
        step_s, evaluation_s = self._measured_step_s(), self.next_evaluation_s
        evaluating_s = min(evaluation_s / steps_per_evaluation, EVALUATION_SHARE / (1 - EVALUATION_SHARE) * step_s)
        fitting = min(self.most_steps, step + max(1, int(self.left_s / (step_s + evaluating_s))))
        return fitting if abs(fitting - total) * step_s > max(step_s, TOLERANCE * self.budget_s) else total

    def affords_evaluation(self) -> bool:
        """Return whether another evaluation before the last keeps evaluations within their share of the time."""
        spent_s = self.clock() - self.started
        next_s = self.next_evaluation_s
        return self._evaluated_s + next_s <= EVALUATION_SHARE * (spent_s + next_s)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Measure an evaluation. Its time does not count as time of steps."""

        begun = self.clock()
        yield
        self.evaluation_s = self.clock() - begun
        self._evaluated_s += self.evaluation_s

    def _has_speed(self) -> bool:
        return len(self._marks) > 1 and self._marks[-1][1] > self._marks[0][1]

    def _measured_step_s(self) -> float:
        """Return the seconds per step over the window of the marks."""
        (first, first_s), (last, last_s) = self._marks[0], self._marks[-1]
        return (last_s - first_s) / (last - first)

    def _mark(self, step: int) -> None:
        now = self.clock() - self._evaluated_s
        self._marks.append((step, now))
        window_s = max(WINDOW_S, WINDOW_SHARE * (self._marks[-1][1] - self.started))
        while len(self._marks) > 2 and now - self._marks[1][1] > window_s:
            self._marks.popleft()
