"""A task in one file: count the dots in an image. `tests/tasks/test_tasks.py` adds it to the tables and runs it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from patchloom.exporters.graph import FromPixels, state_bytes
from patchloom.exporters.parity import Outputs
from patchloom.exporters.subject import ExportSettings, ExportSubject
from patchloom.models.from_config import load_weights
from patchloom.objectives.objective import Ingredients, Objective
from patchloom.recipes.choices import base_recipe, changed_recipe
from patchloom.recipes.methods import EVERYTHING, Method
from patchloom.report.run_report import validation
from patchloom.report.sections import table_section
from patchloom.runs.checksums import read_checked, write_checked
from patchloom.runs.config import read_config, write_config
from patchloom.runs.provenance import Provenance, write_provenance
from patchloom.runs.weights import read_weights
from patchloom.tasks.endpoints import NUMBER, Endpoint, OutputTensor, Serving, VerbFunction, object_schema
from patchloom.tasks.plan import Plan, TrainingSettings, check_numbers, chosen_folder, same_run
from patchloom.tasks.provenance import refuse_other_data, starting_record
from patchloom.tasks.task import Judge, ModelLoader, Reporting, Scores, Task, TaskPage, Training
from patchloom_runtime.artifacts.artifact import Artifact
from patchloom_runtime.artifacts.artifact import load as load_artifact
from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.images.decode import decode
from patchloom_runtime.images.evaluation_transform import EvaluationTransform
from patchloom_runtime.images.inputs import iterate_images, list_image_files

SIDE, MOST = 16, 9
METHOD = Method(
    task="counting",
    objective=__name__,
    reads={"model": EVERYTHING, "objective": ("method",), "optim": EVERYTHING, "schedule": EVERYTHING},
    learns_from="labels",
)
CHARTS: dict[str, dict[str, str]] = {}


@dataclass(frozen=True)
class Batch:
    pictures: Tensor  # (B, 1, H, W)
    counts: Tensor  # (B,)
    index: Tensor

    def __len__(self) -> int:
        return len(self.counts)

    def to(self, device: Any, non_blocking: bool = False) -> "Batch":
        move = (each.to(device, non_blocking=non_blocking) for each in (self.pictures, self.counts, self.index))
        return Batch(*move)


class Dots:
    """Pictures with so many dots, made from a seed; as a loader, an epoch is another order of them."""

    workers = 0

    def __init__(self, count: int, seed: int, batch: int = 8) -> None:
        rng = np.random.default_rng(seed)
        self.counts = rng.integers(0, MOST + 1, count)
        pixels = np.zeros((count, SIDE * SIDE), np.float32)
        for row, dots in enumerate(self.counts):
            pixels[row, rng.permutation(SIDE * SIDE)[:dots]] = 1
        self.pictures = pixels.reshape(count, 1, SIDE, SIDE)
        self.broken: dict[int, str] = {}
        self.steps_per_epoch, self._batch = count // batch, batch

    def where(self, row: int) -> str:
        return f"dots {row}"

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        order = np.random.default_rng(epoch).permutation(len(self.counts))
        for step in range(start_step, self.steps_per_epoch):
            rows = order[step * self._batch : (step + 1) * self._batch]
            yield Batch(*map(torch.from_numpy, (self.pictures[rows], self.counts[rows].astype(np.float32), rows)))

    def close(self) -> None: ...


@dataclass(frozen=True)
class Config:
    name: str = "dot_counter"
    hidden: int = 8


class Counter(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.Sequential(
            nn.Conv2d(1, config.hidden, 3, padding=1), nn.ReLU(), nn.Dropout(0.1), nn.Conv2d(config.hidden, 1, 1)
        )

    def forward(self, pictures: Tensor) -> Tensor:
        return self.layers(pictures).sum(dim=(1, 2, 3))


class SquaredError(Objective):
    def __call__(self, model: nn.Module, batch: Batch, *, epoch: int, step: int) -> dict[str, Tensor]:
        return {"loss": ((model(batch.pictures) - batch.counts) ** 2).mean()}


def make_objective(given: Ingredients) -> SquaredError:
    del given
    return SquaredError()


class Errors(Judge):
    metric, lower_is_better = "off_by", True

    def __init__(self, val: Dots) -> None:
        self._val = val

    def report(self, model: nn.Module) -> Iterable[tuple[str, float]]:
        with torch.no_grad():
            found = model(torch.from_numpy(self._val.pictures)).numpy()
        off = np.abs(found - self._val.counts)
        return {"off_by": float(off.mean()), "right": 100 * float((off < 0.5).mean())}.items()


@dataclass(frozen=True, kw_only=True)
class DotPlan(Plan):
    train: Dots
    val: Dots

    @property
    def examples(self) -> Dots:
        return self.train

    @property
    def data_name(self) -> str:
        return self.settings.data_text

    def data_lines(self, *, dry_run: bool) -> list[str]:
        del dry_run
        return [f"data       {len(self.train.counts)} pictures of dots, {len(self.val.counts)} to validate"]

    def data_facts(self) -> dict[str, Any]:
        return {"train": len(self.train.counts)}


@dataclass(frozen=True)
class Counted:
    path: str
    answers: list[tuple[str, float]]
    error: str | None = None

    def in_words(self) -> str:
        return f"{self.answers[0][1]:.1f} dots"


@dataclass(frozen=True)
class DotCounter:
    count: Callable[[Any], np.ndarray]  # pixels (B, H, W, 3) uint8 → (B,)

    def predict(self, images: Any) -> list[float]:
        return [float(self.count(np.asarray(each.read())[None])[0]) for each in iterate_images(images)]

    def predict_files(self, paths: Iterable[str], *, top: int = 1, every: int | None = None) -> Iterator[Counted]:
        del top, every
        for path in list_image_files(paths):
            try:
                picture: Image.Image = decode(Path(path), str(path)).convert("RGB")
            except DataError as error:
                yield Counted(str(path), [], str(error))
                continue
            yield Counted(str(path), [("dots", self.predict(picture)[0])])


class DotGraph(FromPixels):
    outputs = ("dots",)

    def __init__(self, network: Counter) -> None:
        super().__init__((0.0,) * 3, (1.0,) * 3)
        self.network = network

    def network_outputs(self, images: Tensor) -> dict[str, Tensor]:
        return {"dots": self.network(images[:, :1])}

    @torch.inference_mode()
    def count(self, pixels: np.ndarray) -> np.ndarray:
        return self(torch.tensor(pixels))["dots"].numpy()


class CountingSubject(ExportSubject):
    task, measure = "counting", "right"
    precisions: ClassVar[tuple[str, ...]] = ("float32",)
    labels, notes = (), ()
    summary, usage = "It counts dots.", 'model.predict("dots.png")'
    preprocessing = EvaluationTransform((SIDE, SIDE), 1.0)
    metadata: ClassVar[Mapping[str, Any]] = {"dots": {"most": MOST}}

    def __init__(self, folder: Path, settings: ExportSettings) -> None:
        del settings
        network = TASK.model.load_network(folder)
        self._graph, self.network, self.weights = DotGraph(network), network.config.name, state_bytes(network)
        self._val = Dots(64, 1)
        self.rows = (255 * self._val.pictures).astype(np.uint8).transpose(0, 2, 3, 1).repeat(3, 3)

    def module(self, *, half: bool) -> FromPixels:
        del half
        return self._graph

    def run(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        return {"dots": self._graph.count(rows)}

    def calibration(self, count: int) -> np.ndarray:
        return self.rows[:count]

    def agreement(self, outputs: Outputs, expected: Outputs) -> float:
        return 100 * float((np.abs(outputs["dots"] - expected["dots"]) < 0.01).mean())

    def quality(self, outputs: Outputs) -> float:
        return 100 * float((np.abs(outputs["dots"] - self._val.counts) < 0.5).mean())


class ArtifactCounter(Artifact):
    settings_shape: ClassVar[Mapping[str, Any]] = {"dots": {"most": int}}

    @classmethod
    def read_settings(cls, values: Mapping[str, Any]) -> int:
        if values["dots"]["most"] < 1:
            raise ValueError("it counts no dots")
        return values["dots"]["most"]

    def count(self, pixels: np.ndarray) -> np.ndarray:
        return np.minimum(self.outputs(pixels)["dots"], self.about.settings)

    def predict(self, images: Any) -> list[float]:
        return DotCounter(self.count).predict(images)


class CountingServing(Serving):
    endpoints: ClassVar[Mapping[str, Endpoint]] = {
        "count": Endpoint(
            summary="The dots in images",
            result=object_schema(dots=NUMBER),
            tensors={"dots": OutputTensor("FP32", lambda result: result["dots"], is_list=False)},
            warmed=False,
        )
    }

    def functions(self, model: Any) -> dict[str, VerbFunction]:
        return {"count": lambda images, _: [{"dots": dots} for dots in model.predict(images)]}


class CountingTraining(Training[DotPlan]):
    compiles_by_default = False

    def plan(self, settings: TrainingSettings, device: str) -> DotPlan:
        del device
        check_numbers(settings)
        base = base_recipe(settings.recipe, settings.model)
        assert base is not None
        recipe, choices = changed_recipe(base, settings.recipe_changes())
        train, val = dots_of(settings.data_text)
        record = starting_record(
            Provenance(("dots",), len(train.counts), len(val.counts), settings.data_text, ""), settings.data, None
        )
        folder, why = chosen_folder(settings, record.is_of)
        refuse_other_data(folder, record)
        same_run(folder, recipe)
        return DotPlan(
            task=self.task, settings=settings, recipe=recipe, choices=choices, folder=folder, why_folder=why,
            record=record, train=train, val=val,
        )  # fmt: skip

    def network(self, plan: DotPlan) -> Counter:
        return Counter(Config(**plan.recipe.model.options))

    def loader(self, plan: DotPlan, processes: Any, stores: Any) -> tuple[Dots, str]:
        del processes, stores
        return plan.train, "in memory"

    def objective(self, plan: DotPlan, network: Any, loader: Any, processes: Any) -> Objective:
        del loader, processes
        return make_objective(Ingredients(recipe=plan.recipe, network=network))

    def judge(self, plan: DotPlan, processes: Any) -> Errors:
        del processes
        return Errors(plan.val)

    def write_files(self, plan: DotPlan, network: Counter) -> None:
        write_config(plan.folder, self.task.name, network.config, plan.recipe)
        assert plan.record is not None
        write_provenance(plan.folder, plan.record)

    def evaluate_best(self, plan: DotPlan, run: Any, network: Counter, reports: Any) -> Mapping[str, float]:
        del run, reports
        return dict(Errors(plan.val).report(network))

    def write_val(self, plan: DotPlan, report: Mapping[str, float]) -> None:
        write_checked(plan.folder, {"off_by.txt": f"{report['off_by']:.6f}".encode()})


class CounterLoader(ModelLoader):
    def load_network(self, folder: Path) -> Counter:
        network = Counter(Config(**read_config(folder)["options"]))
        load_weights(network, read_weights(folder / "weights.safetensors"), str(folder))
        return network.eval()

    def load(self, folder: Path, *, device: str = "auto") -> DotCounter:
        del device
        return DotCounter(DotGraph(self.load_network(folder)).count)

    def open_artifact(self, folder: Path) -> DotCounter:
        return DotCounter(load_artifact(folder).count)


class CountingReporting(Reporting):
    def metrics_text(self, metrics: Mapping[str, float]) -> str:
        return f"off by {metrics['off_by']:.2f} dots"

    def next_commands(self, plan: DotPlan) -> Sequence[str]:
        return (f"patchloom predict {plan.folder} IMAGE…",)

    def evaluate(
        self, runs: Mapping[str, Path], data: str | None, *, split: str | None, device: str, **options: Any
    ) -> Scores:
        del split, device, options
        if data is None:
            raise UsageError("say how many dots: patchloom evaluate RUN dots:COUNT")
        _, val = dots_of(data)
        found = {name: dict(Errors(val).report(TASK.model.load_network(folder))) for name, folder in runs.items()}
        rows = [(name, f"{values['off_by']:.2f}", f"{values['right']:.1f}") for name, values in found.items()]
        return Scores(columns=["run", "#off by", "#right"], rows=rows, values=found)

    def page(self, folder: Path, settings: Any) -> TaskPage:
        del settings
        off_by = read_checked(folder, "off_by.txt").decode()
        return TaskPage(
            best=f"{float(off_by):.2f}",
            measure="off by, in dots",
            charts={"Off by, dots": validation("off_by")},
            sections=[table_section("Dots that were counted", ["split", "off by"], [["val", off_by]])],
        )


TASK = Task(
    name="counting",
    training="tests.tasks.dots:CountingTraining",
    model="tests.tasks.dots:CounterLoader",
    report="tests.tasks.dots:CountingReporting",
    export="tests.tasks.dots:CountingSubject",
    serving="tests.tasks.dots:CountingServing",
    artifact="tests.tasks.dots:ArtifactCounter",
)


def dots_of(data: str) -> tuple[Dots, Dots]:
    kind, _, count = data.partition(":")
    if kind != "dots" or not count.isdecimal():
        raise DataError(f"{data} is no data of dots; expected dots:COUNT")
    return Dots(int(count), 0), Dots(64, 1)
