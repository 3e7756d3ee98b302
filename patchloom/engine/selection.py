"""Model selection: evaluate the model and its average and keep the best weights."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from patchloom.engine.reporter import Reporter
from patchloom.engine.run import Run
from patchloom.engine.state import Progress, weights_of
from patchloom.layers.low_rank import merge_low_rank
from patchloom.models.from_config import is_sharded
from patchloom_runtime.errors import UsageError


class Selection:
    """Evaluates, remembers the best weights, and hands them to the saver together with the next checkpoint.

    Both are written together, so that a run that resumes from its checkpoint has the matching best weights.
    """

    def __init__(self, run: Run, progress: Progress, reporter: Reporter) -> None:
        self._run, self._progress, self._reporter = run, progress, reporter
        self._unsaved: dict[str, Tensor] = {}
        self.best_reports: Sequence[Any] = ()  # what each evaluator returned for the best weights, if in this process

    def evaluate(self) -> None:
        """Evaluate the model and its average. All ranks evaluate; the values of rank 0 count."""
        before, unsaved, reports = replace(self._progress), self._unsaved, self.best_reports
        try:
            self._evaluate()
        except BaseException:
            # An incomplete evaluation must not be saved: it is repeated.
            vars(self._progress).update(vars(before))
            self._unsaved, self.best_reports = unsaved, reports
            raise

    def _evaluate(self) -> None:
        run, progress = self._run, self._progress
        if not run.evaluators:
            return
        improved = False
        for which, model in self._candidates().items():
            model.eval()
            with torch.no_grad(), run.processes.autocast(), run.processes.rng_preserved():
                reports = [evaluator(model) for evaluator in run.evaluators]
                values = {name: float(value) for report in reports for name, value in report}
            values = run.processes.from_main(values)
            self._reporter.write("evaluation", values, which)
            improved |= self._consider(which, model, values)
            run.callbacks.evaluated(run, progress, values, which)
            if self._unsaved and progress.best_step == progress.step and progress.best_weights == which:
                self.best_reports = reports
        progress.not_better = 0 if improved else progress.not_better + 1

    def save_weights(self) -> None:
        """Write the best weights if they are new; without a metric, the newest. All ranks must call this together."""
        run, progress = self._run, self._progress
        if run.metric is None:
            which, model = list(self._candidates().items())[-1]
            progress.best_weights, progress.best_step = which, progress.step
            self._unsaved = merge_low_rank(weights_of(model))
        together = any(map(is_sharded, self._unsaved.values()))
        if self._unsaved and run.saver and (run.processes.is_main or together):
            about = {"weights": progress.best_weights, "step": progress.best_step}
            about |= {"metric": run.metric, "value": progress.best}
            run.saver.save_weights(self._unsaved, about, run.processes)
        self._unsaved = {}

    def _candidates(self) -> dict[str, nn.Module]:
        averaged = self._run.averaged
        return {"model": self._run.model} | ({self._run.averaged_name: averaged} if averaged is not None else {})

    def _consider(self, which: str, model: nn.Module, values: dict[str, float]) -> bool:
        run, progress = self._run, self._progress
        if run.metric is None:
            return True
        if run.metric not in values:
            raise UsageError(f"No evaluator measures {run.metric!r}; measured are {', '.join(values)}.")
        value, tie = values[run.metric], values.get(run.tie_breaker or "")
        sign = -1 if run.lower_is_better else 1
        better = not math.isnan(value) and (progress.best is None or sign * value > sign * progress.best)
        if not better and not (value == progress.best and _less(tie, progress.best_tie)):
            return False
        progress.best, progress.best_tie, progress.best_weights = value, tie, which
        progress.best_step = progress.step
        weights = merge_low_rank(weights_of(model))
        self._unsaved = {
            name: tensor.detach().clone() if is_sharded(tensor) else tensor.detach().to("cpu", copy=True)
            for name, tensor in weights.items()
        }
        return better  # breaking a tie does not reset patience


def _less(tie: float | None, best: float | None) -> bool:
    return tie is not None and best is not None and tie < best
