"""What the loop is told: one value with the objects of a run. `training/assemble.py` makes it from a plan."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer

from patchloom.engine.averages import Averages
from patchloom.engine.distribution import Processes
from patchloom.engine.optimization import Schedule
from patchloom.engine.records import Records
from patchloom.engine.time_budget import TimeBudget
from patchloom.objectives.objective import Objective

if TYPE_CHECKING:
    from patchloom.engine.state import Snapshot

Evaluator = Callable[[nn.Module], Iterable[tuple[str, float]]]


class Batches(Protocol):
    """A loader: this rank's share of every effective batch, from any step of any epoch on."""

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch."""

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[Any]:
        """The batches of `epoch` from `start_step` on."""

    @property
    def broken(self) -> Mapping[Any, str]:
        """What could not be read, and why."""

    def close(self) -> None:
        """Let go of workers and memory."""


@runtime_checkable
class SampledBatches(Batches, Protocol):
    """A loader of which a few examples can be had: a step's cost is then measured on them."""

    workers: int

    def sample(self, count: int) -> Any:
        """A batch of about so many."""

    def preparing_bytes(self) -> int:
        """Memory that preparing batches takes."""


class Average(Protocol):
    """An average of the weights: evaluated beside the model, and kept where it is better."""

    @property
    def name(self) -> str:
        """What records and checkpoints call it."""

    @property
    def model(self) -> nn.Module | None:
        """The network with the averaged weights; None while there is nothing to average."""

    def update(self, step: int) -> None:
        """Called after the update that followed `step` others."""

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint must keep."""

    def restore(self, kept: dict[str, Tensor], weights: dict[str, Tensor]) -> list[str]:
        """Go on from what `tensors` gave, empty where a checkpoint has none, and the model's `weights`; notes."""


class Saver(Protocol):
    """Where a run is kept; called on rank 0 only."""

    def save(self, snapshot: "Snapshot") -> None:
        """Keep what a resume needs."""

    def save_weights(self, weights: dict[str, Tensor], about: dict[str, Any]) -> None:
        """Keep the best weights so far, with what is known of them."""


@dataclass(kw_only=True)
class Run:
    """The objects of one training run; the model is already on `processes.device`."""

    model: nn.Module
    objective: Objective
    optimizer: Optimizer
    schedule: Schedule
    loader: Batches
    processes: Processes
    records: Records = field(default_factory=Records)
    saver: Saver | None = None
    average: Average | None = None
    accumulate: int = 1  # micro-batches an update
    clip_norm: float | None = None  # of the gradient of the whole batch
    clip_each: float | None = None  # of each tensor's
    eval_mode: bool = False  # train without stochastic depth, batch statistics fixed
    evaluators: Sequence[Evaluator] = ()
    evaluate_every: int = 1  # epochs; the last epoch is always evaluated
    after_epoch: Callable[[nn.Module, int], None] | None = None  # with the model and the epochs done; all ranks call it
    metric: str | None = None  # of the evaluators' names: what "best" means
    lower_is_better: bool = False
    tie_breaker: str | None = None  # of the evaluators' names: of equal metrics, the one with less of it is kept
    patience: int | None = None  # evaluations without a better metric before the run ends
    time_limit_s: float | None = None  # of this call
    time_budget: TimeBudget | None = None  # that the number of updates is fitted to
    save_every_s: float = 300.0
    unit: str = "img"  # of what the speed counts
    log_every: int = 50  # steps that a line of metrics.jsonl averages over
    averages: Averages = field(default_factory=Averages)

    @property
    def averaged(self) -> nn.Module | None:
        """The average of the model: the run's own, or one that the objective keeps."""
        return self.average.model if self.average else self.objective.averaged

    @property
    def averaged_name(self) -> str:
        """What records call it."""
        return self.average.name if self.average else "ema"

    @property
    def epochs(self) -> int:
        """Epochs of the whole run."""
        return self.schedule.schedule.epochs
