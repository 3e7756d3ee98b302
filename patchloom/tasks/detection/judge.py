"""Evaluation of a detector during training: average precision on val."""

import time as clock
from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import nn

from patchloom.data.batches.loader import Loader
from patchloom.data.datasets import LabeledImages
from patchloom.engine.distribution import Processes, unwrap
from patchloom.engine.run import Run
from patchloom.evaluation.detection import TrueObjects, find_objects, truth_of
from patchloom.tasks.detection.plan import DetectionPlan
from patchloom.tasks.detection.run_files import DetectedImage, ValDetections
from patchloom.tasks.task import Judge
from patchloom_runtime.errors import DataError

TIMED = 8  # images of the pass that is timed


class DetectionJudge(Judge):
    """Evaluates the average precision of boxes and masks; that of boxes selects the best weights."""

    metric = "ap"

    def __init__(self, plan: DetectionPlan, processes: Processes) -> None:
        self._plan, self._processes = plan, processes
        self._classes, self._val, self._view = plan.class_names, plan.objects("val"), plan.evaluation_view()
        self.batch_size = plan.recipe.optim.batch_size
        self._loaders: dict[bool, Loader] = {}
        self._truths: dict[int, TrueObjects] = {}

    @property
    def is_complete(self) -> bool:
        return self._processes.world == 1

    @property
    def broken(self) -> dict[int, str]:
        """Return the images that could not be read, with the reason."""
        return {row: why for loader in self._loaders.values() for row, why in loader.broken.items()}

    def __call__(self, model: nn.Module) -> Iterable[tuple[str, float]]:
        """Evaluate with all processes, each a part of the images."""
        world = self._processes.world
        return self._evaluate(model, together=world > 1 and len(self._val) >= world)

    def report(self, model: nn.Module) -> ValDetections:
        """Evaluate in this process alone."""
        return self._evaluate(model, together=False)

    def seconds(self, run: Run) -> tuple[float, float]:
        """Estimate the seconds per evaluation from a few images."""
        network: Any = unwrap(run.model)
        few = LabeledImages(self._val.images, self._val.rows[:TIMED], self._val.labels[:TIMED], self._val.classes)
        loader = Loader(few, self._view, batch_size=len(few), shuffle=False, skip_broken=True)
        with run.processes.autocast(), run.processes.rng_preserved():
            batches = list(loader.epoch(0))
            list(find_objects(network, batches))
            begun = clock.perf_counter()
            list(find_objects(network, batches))
            run.processes.synchronize()
        networks = 2 if run.average or run.averaged is not None else 1
        return networks * len(self._val) * (clock.perf_counter() - begun) / len(few), 0.0

    def _evaluate(self, model: nn.Module, *, together: bool) -> ValDetections:
        network: Any = unwrap(model)
        own: dict[int, DetectedImage] = {}
        for index, size, objects in find_objects(network, self._batches(together)):
            if index not in own:  # a substitute for an unreadable image is there already
                own[index] = self._truth(index, size), objects, size
        joined = own
        if together:
            joined = {index: each for part in self._processes.gather(own) for index, each in part.items()}
        return ValDetections.of(joined, self._val, self._classes)

    def _truth(self, index: int, size: tuple[int, int]) -> TrueObjects:
        if index not in self._truths:
            try:
                truth = truth_of(self._val.objects(index), size)
            except DataError:
                truth = TrueObjects(np.zeros((0, 4)), np.zeros(0, np.int64), np.zeros(0, bool), np.zeros(0))
            self._truths[index] = truth
        return self._truths[index]

    def _batches(self, together: bool) -> Any:
        if together not in self._loaders:
            world = self._processes.world if together else 1
            size = max(world, self.batch_size - self.batch_size % world)
            self._loaders[together] = Loader(
                self._val.with_parts(),
                self._view,
                batch_size=min(size, len(self._val) // world * world),
                shuffle=False,
                drop_last=False,
                workers=self._plan.workers,
                rank=self._processes.rank if together else 0,
                world=world,
                pin=self._processes.device.type == "cuda",
                skip_broken=True,
                timeout_s=self._plan.settings.worker_timeout,
            )
        return self._loaders[together].epoch(0)
