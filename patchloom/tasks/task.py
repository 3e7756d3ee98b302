"""A task: one row that names its parts, and the interfaces of those parts.

Each task is a folder of `tasks/`. Its `__init__.py` holds the row, `TASK`, and `tasks.table` lists all rows. A part is
given as "module:Name" and imported when it is first used, so that predicting loads no training code and each module of
a task can import what it needs at its head.
"""

import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, overload

if TYPE_CHECKING:
    from torch import nn

    from patchloom.engine.distribution import Processes
    from patchloom.engine.run import Average, Batches, Run
    from patchloom.exporters.subject import ExportSubject
    from patchloom.objectives.objective import Objective
    from patchloom.recipes.candidates import Candidate
    from patchloom.recipes.choices import Choice
    from patchloom.tasks.endpoints import Serving
    from patchloom.tasks.plan import Plan, TrainingSettings
    from patchloom.tasks.report import ReportSettings

NONE = "none"  # the label of an image that no class was predicted for

T = TypeVar("T")
P = TypeVar("P", bound="Plan")


class Part(Generic[T]):
    """A field that is set to "module:Name" and gives the named object when read; None if it was not set.

    A subclass of `TaskPart` is instantiated with the row of its task.
    """

    def __init__(self, *, optional: bool = False) -> None:
        self._optional = optional

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __set__(self, row: "Task", value: str) -> None:
        row.__dict__[self._name] = value

    @overload
    def __get__(self, row: None, owner: type) -> str: ...

    @overload
    def __get__(self, row: "Task", owner: type) -> T: ...

    def __get__(self, row: "Task | None", owner: type) -> Any:
        if row is None:  # `dataclass` asks for the default of the field
            if self._optional:
                return ""
            raise AttributeError(self._name)
        value = row.__dict__[self._name]
        if isinstance(value, str):
            module, _, attribute = value.partition(":")
            value = getattr(import_module(module), attribute) if value else None
            if isinstance(value, type) and issubclass(value, TaskPart):
                value = value(row)
            row.__dict__[self._name] = value
        return value


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Task:
    """One row of the table of tasks."""

    name: str  # in config.json, in artifacts and in recipes/methods.py
    training: "Part[Training[Any]]" = Part()
    model: "Part[ModelLoader]" = Part()
    report: "Part[Reporting]" = Part()
    export: "Part[type[ExportSubject] | None]" = Part(optional=True)
    serving: "Part[Serving | None]" = Part(optional=True)
    artifact: str = ""  # module:class of its exported models, if patchloom_runtime has none for the task
    word: str | None = None  # in `train --task`; None if the task is chosen by a recipe alone
    noun: str = "run"  # in `patchloom verify`
    whole_images: bool = False  # classes or vectors of whole images: probes, levels, indexes, comparisons apply
    refusal: str = "does not apply to runs of this task"  # follows the name of an option of other tasks

    def __post_init__(self) -> None:
        if self.artifact:
            from patchloom_runtime.artifacts import PREDICTORS  # predicting does not need it

            PREDICTORS[self.name] = self.artifact

    def __repr__(self) -> str:
        return f"Task({self.name})"


class TaskPart:
    """Base class of the parts that are instantiated with the row of their task."""

    def __init__(self, task: Task) -> None:
        self.task = task


class Judge(ABC):
    """Evaluates a network during training. Every process calls it and gets the same numbers."""

    metric: str  # the one of its metrics that selects the best weights
    tie_breaker: str | None = None  # a metric that decides between equal values; lower is better
    lower_is_better: bool = False
    batch_size: int = 1  # lower than the recipe's if that does not fit in memory

    @property
    def broken(self) -> Mapping[Any, str]:
        """Return the samples that could not be read and do not count, with the reason."""
        return {}

    @property
    def is_complete(self) -> bool:
        """Whether calling it during training returns what `report` returns."""
        return False

    @abstractmethod
    def report(self, model: "nn.Module") -> Iterable[tuple[str, float]]:
        """Evaluate the model on the whole val split and return (name, value) pairs."""

    def __call__(self, model: "nn.Module") -> Iterable[tuple[str, float]]:
        """Return what `report` returns; the engine calls this."""
        return self.report(model)

    def seconds(self, run: "Run") -> tuple[float, float]:
        """Estimate the seconds per evaluation, and those spent once before the first; zeros if not worth measuring."""
        del run
        return 0.0, 0.0


class Training(TaskPart, ABC, Generic[P]):
    """How a run of the task is planned, assembled and concluded; `patchloom/training` calls these in this order."""

    batch_unit: ClassVar[str] = "images"  # what optim.batch_size counts
    speed_unit: ClassVar[str] = "img"
    # Method of the network, from images of one shape to tensors, that a GPU replays as CUDA graphs; "" if shapes vary.
    captured_method: ClassVar[str] = "forward"
    compiles_by_default: ClassVar[bool] = True  # on a GPU, if it is measured to save time
    compile_options: ClassVar[Mapping[str, Any]] = {}
    plugins: ClassVar[Collection[str]] = ()  # kinds of `patchloom.plugins` that the task uses

    @abstractmethod
    def plan(self, settings: "TrainingSettings", device: str) -> P:
        """Plan a run. Errors in options, recipe and data are raised here, before any work."""

    def prepare(self, plan: P, processes: "Processes") -> P:
        """Finish the plan after the processes are connected; all ranks must return the same plan."""
        del processes
        return plan

    def with_epochs(self, plan: P, epochs: "Choice", device: str) -> P:
        """Return the plan with another number of epochs and what depends on it; needed for --time."""
        raise NotImplementedError

    def with_start(self, plan: P, init: str) -> P:
        """Return the plan of a new run with initial weights; needed if the plan has an offer."""
        raise NotImplementedError

    def candidates(self, plan: P) -> "Sequence[Candidate]":
        """Return the changes of the automatic recipe that a race compares; without any, there is no race."""
        del plan
        return ()

    def with_choices(self, plan: P, choices: "Sequence[Choice]") -> P:
        """Return the plan with the choices of a race and what depends on them; needed if there are candidates."""
        raise NotImplementedError

    def held_out(self, plan: P, share: float) -> P:
        """Return a plan that validates on a share of the training samples; needed if there are candidates."""
        raise NotImplementedError

    @abstractmethod
    def network(self, plan: P) -> "nn.Module":
        """Build the network with random or initial weights."""

    def begin(self, plan: P, network: Any, processes: "Processes", say: Callable[[str], None]) -> None:
        """Change the network, already on its device, before the first step of a new run."""
        del plan, network, processes, say

    def images_before(self, plan: P) -> int:
        """Return the number of images that `begin` passes through the network, for the planned time."""
        del plan
        return 0

    @abstractmethod
    def loader(self, plan: P, processes: "Processes", stores: Any) -> "tuple[Batches, str]":
        """Return the training batches and a note on how they are made; `stores` holds images decoded earlier."""

    @abstractmethod
    def objective(self, plan: P, network: Any, loader: Any, processes: "Processes") -> "Objective":
        """Return the objective to minimize."""

    @abstractmethod
    def judge(self, plan: P, processes: "Processes") -> "Judge | None":
        """Return the evaluator; None if there is nothing to evaluate with."""

    def average(self, plan: P, network: Any, loader: Any) -> "Average | None":
        """Return an average of the weights to evaluate as well."""
        del plan, network, loader
        return None

    def compile_extras(self, plan: P, network: Any) -> None:
        """Compile what the objective runs apart from the network's forward pass."""
        del plan, network

    def after_epoch(self, plan: P, network: Any, processes: "Processes") -> "Callable[[Any, int], None] | None":
        """Return a function of the model and the completed epochs, called after each epoch."""
        del plan, network, processes
        return None

    @abstractmethod
    def write_files(self, plan: P, network: Any) -> None:
        """Write the files that are known before the first step; an unwritable folder fails here."""

    @abstractmethod
    def evaluate_best(self, plan: P, run: "Run", network: Any, reports: Sequence[Any]) -> Any:
        """Evaluate the best weights on val: an iterable of (name, value) pairs, or None if nothing evaluates them.

        `reports` are what the evaluators returned for these weights during training; none after a resume.
        """

    def write_val(self, plan: P, report: Any) -> None:
        """Write the predictions for val, as `evaluate_best` returned them, into the run folder."""
        del plan, report


class ModelLoader(TaskPart, ABC):
    """How a trained model is read from a run folder or an artifact."""

    writes_files: ClassVar[bool] = False  # whether `predict --out` writes files
    most_answers: ClassVar[int | None] = 3  # per image, unless `top` is passed; None: all that apply
    scores_classes: ClassVar[bool] = True  # whether answers are classes with scores, for --top and --threshold
    threshold_option: ClassVar[str] = ""  # keyword of `predict_files` for the lowest score; '' if it has none

    @abstractmethod
    def load_network(self, folder: Path) -> "nn.Module":
        """Load the trained network of a run, in eval mode."""

    @abstractmethod
    def load(self, folder: Path, *, device: str = "auto") -> Any:
        """Load the model of a run as users get it from `patchloom.load`."""

    def predictor(self, folder: Path, *, device: str = "auto") -> Any:
        """Load a model with `predict_files(paths, top=, every=)`, which yields one prediction per image."""
        return self.load(folder, device=device)

    def open_artifact(self, folder: Path) -> Any:
        """Load the model of an artifact with the methods of that of a run."""
        raise NotImplementedError

    def columns(self, answers: int) -> dict[str, type]:
        """Return the columns of a table of predictions with at most `answers` classes per image, and their types."""
        numbers = ["", *map(str, range(2, answers + 1))]
        classes = {f"{name}{number}": kind for number in numbers for name, kind in (("label", str), ("score", float))}
        return {"path": str, **classes, "reason": str, "error": str}

    def rows(self, prediction: Any, answers: int) -> list[dict[str, Any]]:
        """Return the rows of one prediction. The first has its main label: `none` without a class, None if unreadable.

        The columns "level", "reason" and "error" are added from the attributes of the prediction.
        """
        row = {"path": prediction.path, "label": None if prediction.error else NONE}
        for number, (label, score) in enumerate(prediction.answers[:answers], 1):
            ending = str(number) if number > 1 else ""
            row |= {f"label{ending}": label, f"score{ending}": score}
        return [row]

    def readers(self, folder: Path) -> dict[str, Callable[[], object]]:
        """Return the files that only runs of this task have, each with a function that reads and checks it."""
        del folder
        return {}


@dataclass(frozen=True, kw_only=True)
class TaskPage:
    """What the report of a run contains besides loss curves, recipe, notes and environment."""

    best: str = ""  # the main metric with its unit
    measure: str = "best"  # its name
    interval: tuple[float, float] | None = None
    more_scores: Sequence[tuple[str, str]] = ()  # further main metrics: name, value with its unit
    numbers: Sequence[tuple[str, str, str]] = ()  # name, value, explanation
    charts: Mapping[str, Any] = field(default_factory=dict)  # see `report.run_report.Charts`
    trained_on: str = "augmented images with the targets of the objective"  # what the training loss is computed on
    sections: Sequence[Any] = ()  # HTML, see `report.sections`
    cost: Sequence[tuple[str, str, str]] = ()  # name, value, explanation
    notes: Sequence[str] = ()
    next_command: str = ""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The output of `patchloom evaluate`: a table with notes before and lines after it, and the values for --json."""

    columns: Sequence[str]  # numeric ones begin with '#'
    rows: Sequence[Sequence[str]]
    values: Mapping[str, Any]  # run → its metrics
    notes: Sequence[str] = ()
    lines: Sequence[str] = ()


class Reporting(TaskPart, ABC):
    """How the results of a run are presented: one line, a page, a table of several runs."""

    draws_looks: ClassVar[bool] = False  # whether the task has its own `look`
    evaluation_options: ClassVar[tuple[str, ...]] = ()  # options of `patchloom evaluate` that `evaluate` takes
    reading_options: ClassVar[tuple[str, ...]] = ()  # fields of `Reading` that it heeds besides those of every task

    @abstractmethod
    def metrics_text(self, metrics: Mapping[str, float]) -> str:
        """Return the main metrics in a few words."""

    def headline(self, report: Any) -> str:
        """Return the main val metrics of a finished run, in a few words."""
        return self.metrics_text(dict(report))

    def result_lines(self, plan: Any, report: Any) -> Iterator[str]:
        """Yield the lines that `train` prints after the main metrics."""
        del plan, report
        return iter(())

    def next_commands(self, plan: Any) -> Sequence[str]:
        """Return the commands that a user may want to run after training."""
        folder, data = shlex.quote(str(plan.folder)), shlex.quote(plan.settings.data_text)
        return f"patchloom predict {folder} IMAGE…", f"patchloom evaluate {folder} {data}"

    @abstractmethod
    def page(self, folder: Path, settings: "ReportSettings") -> TaskPage:
        """Return what the report of a run contains for this task."""

    def look(
        self, folder: Path, images: Sequence[str], *, data: str | None = None, out: Path, top: int = 5, count: int = 12
    ) -> Any:
        """Write a page on some images, at most `count`, or on the worst of val."""
        raise NotImplementedError

    def evaluate(
        self, runs: Mapping[str, Path], data: str | None, *, split: str | None, device: str, **options: Any
    ) -> Scores:
        """Evaluate runs on data. Tasks of `whole_images` are evaluated by `patchloom.evaluate` instead."""
        raise NotImplementedError
