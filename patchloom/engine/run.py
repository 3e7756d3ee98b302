"""The argument of the training loop: the objects of one run. `training/assemble.py` creates it from a plan."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer

from patchloom.data.batches.sampler import SamplingPlan
from patchloom.engine.callbacks import Callbacks
from patchloom.engine.distribution import Processes
from patchloom.engine.optimization import Schedule
from patchloom.engine.records import Records
from patchloom.engine.rounded_weights import RoundedWeights
from patchloom.engine.running_means import RunningMeans
from patchloom.engine.time_budget import TimeBudget
from patchloom.objectives.objective import Objective

if TYPE_CHECKING:
    from patchloom.engine.state import Snapshot

Evaluator = Callable[[nn.Module], Iterable[tuple[str, float]]]


class Batches(Protocol):
    """A loader: this rank's share of every effective batch, starting at any step of any epoch."""

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of batches per epoch."""

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[Any]:
        """Yield the batches of `epoch` from `start_step` on."""

    @property
    def broken(self) -> Mapping[Any, str]:
        """Return what could not be read, and why."""

    def close(self) -> None:
        """Release workers and memory."""


@runtime_checkable
class SampledBatches(Batches, Protocol):
    """A loader that can return a few examples, on which the cost of a step is measured."""

    workers: int

    def sample(self, count: int) -> Any:
        """Return a batch of about `count` examples."""

    def preparing_bytes(self) -> int:
        """Return the memory that preparing batches takes."""


class Average(Protocol):
    """An average of the weights, evaluated like the model and saved if it is better."""

    @property
    def name(self) -> str:
        """Return its name in records and checkpoints."""

    @property
    def model(self) -> nn.Module | None:
        """Return the network with averaged weights, or None if there is nothing to average yet."""

    def update(self, step: int) -> None:
        """Follow the model after update number `step`, counted from 0."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint."""

    def restore(self, saved: dict[str, Tensor], weights: dict[str, Tensor]) -> list[str]:
        """Continue from the result of `tensors` (empty if the checkpoint has none) or `weights`; return notes."""


class Saver(Protocol):
    """Storage for a run; called on rank 0, or on all ranks together if weights are sharded over them."""

    def save(self, snapshot: "Snapshot", processes: Processes) -> None:
        """Save what a resume needs."""

    def save_weights(self, weights: dict[str, Tensor], about: dict[str, Any], processes: Processes) -> None:
        """Save the best weights so far with a description."""


@dataclass(kw_only=True)
class Run:
    """The objects of one training run. The model is already on `processes.device`."""

    model: nn.Module
    objective: Objective
    optimizer: Optimizer
    schedule: Schedule
    loader: Batches
    processes: Processes
    records: Records = field(default_factory=Records)
    saver: Saver | None = None
    average: Average | None = None
    accumulate: int = 1  # micro-batches per update
    compiled: bool = False  # by torch.compile; a resumed run must be, too, to be exact
    clip_norm: float | None = None  # maximum gradient norm of all parameters together
    clip_each: float | None = None  # maximum gradient norm of each parameter tensor
    eval_mode: bool = False  # train without stochastic depth and with fixed batch statistics
    frozen: Sequence[nn.Parameter] = ()  # that do not learn in the first `frozen_epochs`
    frozen_epochs: int = 0
    rounded: RoundedWeights | None = None  # in each step, for training with quantized weights
    evaluators: Sequence[Evaluator] = ()
    evaluate_every: int = 1  # epochs; the last epoch is always evaluated
    after_epoch: Callable[[nn.Module, int], None] | None = None  # (model, epochs done); called by all ranks
    metric: str | None = None  # name of the value that defines "best"
    lower_is_better: bool = False
    tie_breaker: str | None = None  # name of the value that decides between equal metrics; lower is better
    patience: int | None = None  # evaluations without a better metric before the run ends
    time_limit_s: float | None = None  # for this call
    time_budget: TimeBudget | None = None  # the number of updates is fitted to it
    steps: int | None = None  # updates that the whole schedule is fitted to; None: its epochs
    save_every_s: float = 300.0
    callbacks: Callbacks = field(default_factory=Callbacks)
    unit: str = "img"  # of the throughput
    log_every: int = 50  # steps per record
    running_means: RunningMeans = field(default_factory=RunningMeans)

    @property
    def plan(self) -> SamplingPlan | None:
        """Return the loader's plan of samples; None for a loader that only counts batches, such as that of text."""
        return getattr(self.loader, "plan", None)

    @property
    def averaged(self) -> nn.Module | None:
        """Return the averaged model: the run's own, or the objective's."""
        return self.average.model if self.average else self.objective.averaged

    @property
    def averaged_name(self) -> str:
        """Return the average's name in records."""
        return self.average.name if self.average else "ema"

    @property
    def epochs(self) -> int:
        """Return the number of epochs of the whole run."""
        return self.schedule.schedule.epochs
