"""What a task says of itself. `training/` has one path for all of them and knows none by name.

A task is one file in this folder and a row in `tasks.table`. It says how its data open, what network, batches,
objective and evaluator it has, what a run of it keeps and reads back, what its report shows, its number in a sentence,
and what a user may do next. A file of a task imports at its head what reading a run needs; what training, evaluation
and reports need is imported by the method that does it, so that predicting loads none of it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

if TYPE_CHECKING:
    from torch import nn

    from patchloom.engine.distribution import Processes
    from patchloom.engine.run import Average, Batches, Run
    from patchloom.objectives.objective import Objective
    from patchloom.recipes.choices import Choice
    from patchloom.tasks.plan import Plan, TrainingSettings
    from patchloom.tasks.report import ReportSettings


P = TypeVar("P", bound="Plan")


class Judge(ABC):
    """What judges a network while it is trained; every process calls it, and gets the same numbers."""

    metric: str  # of its names: what "best" means
    tie_breaker: str | None = None  # what decides between equal values of the metric, the less the better
    lower_is_better: bool = False
    batch_size: int = 1  # less where that of the recipe does not fit in memory

    @property
    def broken(self) -> Mapping[Any, str]:
        """What could not be read and does not count, and why."""
        return {}

    @abstractmethod
    def report(self, model: "nn.Module") -> Iterable[tuple[str, float]]:
        """The whole evaluation; (name, value) pairs."""

    def __call__(self, model: "nn.Module") -> Iterable[tuple[str, float]]:
        """(name, value) pairs, as the engine wants them."""
        return self.report(model)

    def seconds(self, run: "Run") -> tuple[float, float]:
        """Of one evaluation, and of what is done once before the first; zeros where it is not worth measuring."""
        del run
        return 0.0, 0.0


@dataclass(frozen=True, kw_only=True)
class TaskPage:
    """What a report shows beside what every run has: curves of the loss, recipe, notes, environment."""

    best: str = ""  # its number, with its unit
    measure: str = "best"  # what that number is called
    interval: tuple[float, float] | None = None
    numbers: Sequence[tuple[str, str, str]] = ()  # name, value, what it is
    charts: Mapping[str, Any] = field(default_factory=dict)  # see `pages.report.Charts`
    trained_on: str = "augmented images with the targets of the objective"  # what the training loss is computed on
    sections: Sequence[Any] = ()  # HTML, see `pages.sections`
    cost: Sequence[tuple[str, str, str]] = ()  # name, value, what it is
    notes: Sequence[str] = ()
    next_command: str = ""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What `patchloom evaluate` prints: a table, with notes before and lines after it; and the same for machines."""

    columns: Sequence[str]  # '#' before those of numbers
    rows: Sequence[Sequence[str]]
    values: Mapping[str, Any]  # run → what machines read
    notes: Sequence[str] = ()
    lines: Sequence[str] = ()


class Task(ABC, Generic[P]):
    """Base of all tasks; one instance serves all runs."""

    name: ClassVar[str]  # as `config.json` and the table of tasks call it
    kind: ClassVar[str] = "run"  # what `patchloom verify` calls it
    counts: ClassVar[str] = "images"  # what a batch counts
    unit: ClassVar[str] = "img"  # of the speed
    judges_decisions: ClassVar[bool] = False  # by classes named and vectors found alike: probes, levels, sweeps …
    not_read: ClassVar[str] = "is no option for runs of this task"  # what is said of an option of other tasks
    compiles_by_default: ClassVar[bool] = True  # on a GPU, where the run is long
    compile_options: ClassVar[dict[str, Any]] = {}
    fits_recipes: ClassVar[bool] = True  # whether --fit fits a named recipe to the data; else `auto` is its fitted form
    writes_predictions: ClassVar[bool] = False  # whether `predict --out` has files to write
    draws_looks: ClassVar[bool] = False  # whether `look` is the task's own
    evaluation_options: ClassVar[tuple[str, ...]] = ()  # of `patchloom evaluate`, that `evaluate` takes too

    # Before ---------------------------------------------------------------------------------------------------------

    @abstractmethod
    def plan(self, settings: "TrainingSettings", device: str) -> P:
        """What will be run; whatever can be wrong with options, recipe and data is found here."""

    def prepare(self, plan: P, processes: "Processes") -> P:
        """What is left to do once the processes know each other; every rank must then plan the same."""
        del processes
        return plan

    def planned_for(self, plan: P, epochs: "Choice", device: str) -> P:
        """The same run with so many epochs, and with what follows from them."""
        raise NotImplementedError

    @abstractmethod
    def data_lines(self, plan: P, *, dry_run: bool) -> list[str]:
        """The data and the network of a plan for a person."""

    @abstractmethod
    def data_facts(self, plan: P) -> dict[str, Any]:
        """The data of a plan for machines."""

    def model_facts(self, plan: P) -> dict[str, Any]:
        """What else is known of the network of a plan, for machines."""
        del plan
        return {}

    @abstractmethod
    def examples(self, plan: P) -> Any:
        """What is trained on, which knows `where` each of its rows came from."""

    # The objects of a run -------------------------------------------------------------------------------------------

    @abstractmethod
    def network(self, plan: P) -> "nn.Module":
        """With random weights, or those it starts from."""

    def begin(self, plan: P, network: Any, processes: "Processes", say: Callable[[str], None]) -> None:
        """What is done once to the network, on its device, before the first step of a run that does not go on."""
        del plan, network, processes, say

    def shown_before(self, plan: P) -> int:
        """Images that `begin` shows the network without training on them: a planned time counts them too."""
        del plan
        return 0

    @abstractmethod
    def loader(self, plan: P, processes: "Processes", stores: Any) -> "tuple[Batches, str]":
        """Batches to train on, and how they are made; what an earlier run decoded is taken from `stores`."""

    @abstractmethod
    def objective(self, plan: P, network: Any, loader: Any, processes: "Processes", compiles: bool) -> "Objective":
        """What is minimised."""

    @abstractmethod
    def judge(self, plan: P, processes: "Processes") -> "Judge | None":
        """What judges the network; None where nothing can."""

    def average(self, plan: P, network: Any, loader: Any) -> "Average | None":
        """An average of the weights that is evaluated beside them."""
        del plan, network, loader
        return None

    def prepare_compiling(self, plan: P, network: Any, mode: str | None) -> None:
        """Compile what runs beside the network."""
        del plan, network, mode

    def after_epoch(self, plan: P, network: Any, processes: "Processes") -> Any:
        """What is called with the model and the epochs done, after each; None for nothing."""
        del plan, network, processes

    # After ----------------------------------------------------------------------------------------------------------

    @abstractmethod
    def write_files(self, plan: P, network: Any) -> None:
        """Write what is known before the first step, so that a bad folder is known then."""

    @abstractmethod
    def final(self, plan: P, run: "Run", network: Any) -> Any:
        """The best weights on val: an iterable of (name, value); None where nothing judges them."""

    def keep(self, plan: P, judged: Any) -> None:
        """Keep what the run decided about val in its folder."""
        del plan, judged

    @abstractmethod
    def in_words(self, run: "Run", metrics: Mapping[str, float]) -> str:
        """Its number in a sentence."""

    def more_words(self, plan: P, judged: Any) -> Iterator[str]:
        """Lines that follow."""
        del plan, judged
        return iter(())

    @abstractmethod
    def data_name(self, plan: P) -> str:
        """What its data are called in reports."""

    @abstractmethod
    def next_commands(self, plan: P) -> Sequence[str]:
        """What a user may want to do now."""

    # A run's folder -------------------------------------------------------------------------------------------------

    @abstractmethod
    def load_network(self, folder: Path) -> "nn.Module":
        """The trained network, in eval mode."""

    @abstractmethod
    def load(self, folder: Path, *, device: str = "auto") -> Any:
        """The trained model as it is used."""

    def readers(self, folder: Path) -> dict[str, Callable[[], object]]:
        """Files that only runs of this task have, each with what reads it, or says what is wrong with it."""
        del folder
        return {}

    def predictor(self, folder: Path, *, device: str = "auto") -> Any:
        """What `patchloom predict` asks: `predict_files(paths, top=, every=)` gives an `Answer` per picture."""
        return self.load(folder, device=device)

    def evaluate(
        self, runs: Mapping[str, Path], data: str | None, *, split: str | None, device: str, **options: Any
    ) -> "Scores":
        """The numbers of runs on data; tasks with `judges_decisions` are judged by `patchloom.evaluate` instead."""
        raise NotImplementedError

    def look(self, folder: Path, images: Sequence[str], **options: Any) -> Any:
        """A page on pictures, or on the worst of val, where the task draws one of its own (`draws_looks`).

        Options are `data`, `out`, `top` and `count`.
        """
        raise NotImplementedError

    @abstractmethod
    def page(self, folder: Path, asked: "ReportSettings") -> TaskPage:
        """What the page of a run shows of this task."""
