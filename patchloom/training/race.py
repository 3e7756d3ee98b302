"""The race: candidates of the automatic recipe train briefly, and the best on held-out training images is trained.

Successive halving: all candidates train for the same time, then the better half for twice as long. Val and test images
are not used. Speeds are measured first and stored with the number of updates that follows from them, so that a trial
depends on the seed alone, and a race that was killed repeats only the trial in progress.

Every trial follows the whole schedule of its recipe, compressed: learning rates can only be compared once they have
decayed. Therefore the winner starts afresh, with all training images and a full schedule, and its run is the one that
its recipe.yaml describes.
"""

import hashlib
import json
import math
import time as clock
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from patchloom.engine.display import duration
from patchloom.engine.distribution import Processes
from patchloom.engine.loop import train as run_loop
from patchloom.engine.signals import Stopped
from patchloom.machine import device_kind
from patchloom.recipes.candidates import Candidate
from patchloom.recipes.choices import Choice
from patchloom.recipes.schema import flatten
from patchloom.runs.race import Race, RaceCandidate, Trial, choices_of, read_race, write_race
from patchloom.tasks.plan import Plan, plugged_parts
from patchloom.training.assemble import EVALUATIONS, Stores, make_run, release, silent
from patchloom.training.timing import (
    StepTimes,
    epochs_within,
    is_automatic,
    longest_epochs,
    measure,
    seconds_per_image,
)
from patchloom_runtime.errors import CheckpointError, NumericalError

SHARE = 0.2  # of the time of a run, at most
LEAST_TIME_S = 90.0  # of a run; in less, the trials would say little
LEAST_TRIAL_S = 20.0  # of the race per candidate; in less time, fewer candidates take part
LEAST_IMAGES = 200  # to train on
LEAST_STEPS = 8  # of a trial
HELD_OUT, MOST_HELD_OUT = 0.2, 1_000  # share and number of training images
MEASURING_SHARE = 0.2  # of the race
START_UP = 0.5  # share of the least time that must be left after the data were read
OVERRUN = 2.0  # a race that takes this many times as long as planned, on a busy machine, ends early
EPOCHS = "schedule.epochs"


def candidates_of(plan: Plan) -> Sequence[Candidate]:
    """Return the candidates of a plan: at least two, or none if there is no race."""
    assert plan.record is not None
    settings = plan.settings
    is_timed = plan.time_s is None or plan.time_s >= LEAST_TIME_S
    if not settings.race or not is_automatic(plan) or not is_timed or plan.record.train < LEAST_IMAGES:
        return ()
    if settings.epochs or EPOCHS in settings.changes or plugged_parts(settings):  # trials must not change the user's
        return ()
    rows = plan.task.training.candidates(plan)
    return rows if len(rows) > 1 else ()


def run_race(
    plan: Plan, candidates: Sequence[Candidate], processes: Processes, started: float, say: Callable[[str], None]
) -> Plan:
    """Return the plan with the choices of the best candidate. The folder must be locked."""
    assert plan.record is not None
    share = min(HELD_OUT, MOST_HELD_OUT / plan.record.train)
    trial_plan = plan.task.training.held_out(plan, share)
    race = _Race(plan, trial_plan, processes, say)
    if not race.state.winner:
        if not race.state.candidates and not race.prepare(candidates, started):
            return plan
        race.run()
    return plan.task.training.with_choices(plan, choices_of(race.state))


class _Race:
    """A race in progress; its state is on disk after every trial."""

    def __init__(self, plan: Plan, trial_plan: Plan, processes: Processes, say: Callable[[str], None]) -> None:
        assert trial_plan.record is not None
        self._plan, self._trial_plan, self._processes, self._say = plan, trial_plan, processes, say
        self._stores: Stores = {}
        self._limit_s = math.inf
        key = _key(plan, processes)
        record = trial_plan.record
        state = processes.from_main(_stored(plan, key) if processes.is_main else None)
        self.state = state or Race(key, record.train, record.val, metric="")

    def prepare(self, candidates: Sequence[Candidate], started: float) -> bool:
        """Measure the candidates and fix the updates of their trials. Return False if there is too little time."""
        begun, plan = clock.perf_counter(), self._plan
        time_s = plan.time_s - (begun - started) if plan.time_s else self._default_s()
        if time_s < LEAST_TIME_S * (START_UP if plan.time_s else 1.0):
            return False
        race_s = SHARE * time_s
        most = max(2, int(race_s / LEAST_TRIAL_S))
        each_s = max(0.5, MEASURING_SHARE * race_s / min(most, len(candidates)))
        measured: list[tuple[Candidate, StepTimes, int]] = []
        for row in candidates:
            # Not to be measured in vain: rows for short runs have the speed of the first row.
            if measured and row.most_epochs is not None and measured[0][2] > row.most_epochs:
                continue
            measured.append((row, *self._measure(row, each_s, (1 - SHARE) * time_s)))
            if len(measured) == most:
                break
        evaluating_s = sum(times.evaluation_s + times.decoding_s for _, times, _ in measured) * 1.5
        left_s = race_s - (clock.perf_counter() - begun) - evaluating_s
        rounds = [1.0] if len(measured) <= 2 else [1.0, 2.0]
        unit_s = left_s / (len(measured) + sum(rounds[1:]) * _survivors(len(measured)))
        for number, (row, times, epochs) in enumerate(measured):
            steps = [rounded_steps(factor * unit_s / times.step_s) for factor in rounds]
            if steps[0] < LEAST_STEPS and number:
                self._say(f"race       {row.name} is too slow for a race of {duration(race_s)}")
                continue
            changes = json.loads(json.dumps(row.changes)) | ({} if plan.time_s else {EPOCHS: max(1, epochs)})
            steps = [max(LEAST_STEPS, count) for count in steps]
            self.state.candidates.append(RaceCandidate(row.name, changes, max(1, epochs), steps))
        self.state = self._processes.from_main(self.state)
        if len(self.state.candidates) < 2:
            return False
        self._limit_s = OVERRUN * race_s
        self._save()
        self._say(
            f"race       {len(self.state.candidates)} candidates for {duration(race_s)} of {duration(time_s)}, judged "
            f"on {self.state.held_out:,} of {self.state.train + self.state.held_out:,} training images"
        )
        return True

    def run(self) -> None:
        """Run the remaining trials and decide."""
        begun, state = clock.perf_counter(), self.state
        racing, width = [row.name for row in state.candidates], max(len(row.name) for row in state.candidates)
        for number in range(len(state.candidates[0].steps)):
            for name in racing:
                if state.trial(number, name) is None:
                    if self._processes.from_main(clock.perf_counter() - begun > self._limit_s) and number:
                        break
                    state.trials.append(self._trial(number, name))
                    self._save()
                done = state.trial(number, name)
                assert done is not None
                score = "diverged" if done.score is None else f"{state.metric} {done.score:5.1f}"
                self._say(f"           {name:{width}}  {score} after {done.steps:,} steps")
            best = ranked(state, number)
            racing = best[: _survivors(len(racing))] or [state.candidates[0].name]
        state.winner = racing[0]
        self._save()
        self._say(f"           winner: {state.winner}")

    def _default_s(self) -> float:
        """Estimate the seconds of the automatic run, for races without --time; 0 if it is short."""
        run, _, _ = make_run(self._trial_plan, self._processes, silent, self._stores)
        try:
            if device_kind(str(self._processes.device)) == "cpu":
                images = run.schedule.optim.batch_size * run.schedule.total_steps
                if seconds_per_image(run) * images < LEAST_TIME_S:  # too high, if anything
                    return 0.0
            return measure(run).total_s(run)
        finally:
            release(run)
            run.loader.close()

    def _measure(self, row: Candidate, most_s: float, time_s: float) -> tuple[StepTimes, int]:
        """Return a candidate's times per step and evaluation, and the epochs of its whole run of `time_s`."""
        plan = self._trial_plan.task.training.with_choices(self._trial_plan, _choices(row.changes))
        run, _, _ = make_run(plan, self._processes, silent, self._stores)
        try:
            self.state.metric, self.state.lower_is_better = run.metric or "", run.lower_is_better
            times, steps_per_epoch = measure(run, most_s=most_s), run.loader.steps_per_epoch
        finally:
            release(run)
            run.loader.close()
        assert self._plan.record is not None
        whole = round(steps_per_epoch * self._plan.record.train / max(1, self.state.train))
        longest = longest_epochs(self._plan)
        epochs = epochs_within(time_s, times, whole, longest=longest, evaluations=EVALUATIONS)
        return times, self._processes.from_main(epochs)

    def _trial(self, number: int, name: str) -> Trial:
        row, training = self.state.row(name), self._plan.task.training
        begun = clock.perf_counter()
        plan = training.with_choices(self._trial_plan, _choices(row.changes))
        plan = training.with_epochs(plan, Choice(EPOCHS, row.epochs, "auto: race"), str(self._processes.device))
        score, tie = trial_score(plan, self._processes, self._stores, row.steps[number])
        return Trial(number, name, row.steps[number], score, tie, round(clock.perf_counter() - begun, 1))

    def _save(self) -> None:
        if self._processes.is_main:
            write_race(self._plan.folder, self.state)


def trial_score(plan: Plan, processes: Processes, stores: Stores, steps: int) -> tuple[float | None, float | None]:
    """Train for `steps` updates and return the metric on val and its tie-breaker; None if the loss is not finite."""
    run, _, _ = make_run(plan, processes, silent, stores, begins=True)
    run = replace(run, saver=None, steps=steps, evaluate_every=run.epochs + 1, patience=None, after_epoch=None)
    try:
        progress = run_loop(run).progress
    except NumericalError:
        return None, None
    except Stopped as error:
        error.args = ("Stopped during the race; finished trials are saved. The same command resumes it.",)
        raise
    finally:
        release(run)
        run.loader.close()
    return progress.best, progress.best_tie


def rounded_steps(steps: float) -> int:
    """Round down to 2ⁿ or 3·2ⁿ, so that a slightly different speed gives the same trial."""
    if steps < 1:
        return 0
    power = 2 ** int(math.log2(steps))
    return power + power // 2 if steps >= 1.5 * power else power


def ranked(race: Race, number: int) -> list[str]:
    """Return the candidates of a round from best to worst, without those that diverged.

    Scores in percent within one standard error of the best count as equal: the first of the table is then better.
    """
    order = [row.name for row in race.candidates]
    sign = -1.0 if race.lower_is_better else 1.0
    scores = {
        trial.name: sign * trial.score for trial in race.trials if trial.round == number and trial.score is not None
    }
    names: list[str] = []
    while scores:
        best = max(scores.values())
        margin = 0.0 if race.lower_is_better else standard_error(best, race.held_out)
        first = min((name for name, score in scores.items() if score >= best - margin), key=order.index)
        names.append(first)
        del scores[first]
    return names


def standard_error(percent: float, images: int) -> float:
    """Return the standard error of a share of `images`, in points."""
    share = min(1.0, max(0.0, percent / 100))
    return 100 * math.sqrt(share * (1 - share) / max(1, images))


def _survivors(count: int) -> int:
    return max(2, count // 2)


def _choices(changes: Mapping[str, Any]) -> list[Choice]:
    return [Choice(key, value, "auto: race") for key, value in changes.items()]


def _key(plan: Plan, processes: Processes) -> str:
    """Return a digest of data, start, options and machine: another race is not continued."""
    assert plan.record is not None
    record, settings = plan.record, plan.settings
    facts: list[Any] = [
        record.rows,
        record.contents,
        record.init_weights,
        record.options,
        settings.time,
        settings.level,
    ]
    facts += [str(processes.device), processes.world, sorted(flatten(plan.recipe).items())]
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()


def _stored(plan: Plan, key: str) -> Race | None:
    """Return the race stored in the plan's folder if its key is `key`, else None."""
    try:
        race = read_race(plan.folder)
    except CheckpointError:
        return None
    return race if race and race.key == key else None
