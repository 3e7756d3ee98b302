"""A user's callbacks: functions that are called during training and may end it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from patchloom.engine.run import Run
    from patchloom.engine.state import Progress


EVENTS = ("on_step", "on_epoch", "on_evaluation", "on_end")  # methods of a callback


@dataclass
class TrainingState:
    """What a callback sees."""

    model: nn.Module
    step: int  # updates done
    total_steps: int
    epoch: int  # epochs done
    epochs: int
    best: float | None  # value of the metric that selects the best weights
    values: Callable[[], dict[str, float]]  # returns the means of loss and others since the last record
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the latest evaluation
    weights: str = "model"  # that the latest evaluation is of: model or ema
    stops: bool = False

    def stop(self) -> None:
        """End the run after this step or epoch. It is evaluated and saved, and the same command does not resume it."""
        self.stops = True


class Callback:
    """Base class of callbacks; define the methods that you need.

    They are called in the first process only, and the random numbers that they draw do not affect the training. Their
    own state is not saved: a resumed run starts with new callbacks.
    """

    def on_step(self, state: TrainingState) -> None:
        """Follow an update of the weights."""

    def on_epoch(self, state: TrainingState) -> None:
        """Follow an epoch and its evaluation."""

    def on_evaluation(self, state: TrainingState) -> None:
        """Follow an evaluation on val; `state.metrics` has its results, `state.weights` which weights they are of."""

    def on_end(self, state: TrainingState) -> None:
        """Follow the end of the training."""


class Callbacks:
    """The callbacks of a run. Any object with some of the methods of `Callback` is one."""

    def __init__(self, callbacks: Sequence[Any] = ()) -> None:
        self._callbacks = callbacks
        self._metrics: Mapping[str, float] = {}
        self._weights = "model"
        self.stops = False

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def evaluated(self, run: "Run", progress: "Progress", metrics: Mapping[str, float], weights: str) -> None:
        """Call `on_evaluation` with the results."""
        self._metrics, self._weights = metrics, weights
        self.call("on_evaluation", run, progress)

    def call(self, event: str, run: "Run", progress: "Progress") -> None:
        """Call one method of every callback that has it, in the first process."""
        if not self._callbacks or not run.processes.is_main:
            return
        state = TrainingState(
            model=run.model,
            step=progress.step,
            total_steps=progress.total_steps or run.schedule.total_steps,
            epoch=progress.epoch,
            epochs=run.epochs,
            best=progress.best,
            values=run.running_means.read,
            metrics=self._metrics,
            weights=self._weights,
        )
        with torch.no_grad(), run.processes.rng_preserved():
            for callback in self._callbacks:
                if (method := getattr(callback, event, None)) is not None:
                    method(state)
        self.stops |= state.stops
