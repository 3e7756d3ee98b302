"""Evaluation during training: the predictions for val, or the nearest neighbors of val in train."""

import time as clock
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from patchloom.data.batches.decoded_dataset import fits_in_memory, make_evaluation_loader
from patchloom.data.datasets import ImageSet
from patchloom.data.labels.class_balance import is_imbalanced
from patchloom.engine.distribution import Processes, unwrap
from patchloom.engine.run import Run
from patchloom.evaluation.classification import LOWER_IS_BETTER, ClassificationReport, evaluate
from patchloom.evaluation.embeddings import Embeddings, embed
from patchloom.evaluation.knn import NEIGHBORS, NeighborReport, knn
from patchloom.machine import cores
from patchloom.models.network import Network
from patchloom.plugins import metrics_by_name
from patchloom.tasks.images.plan import ImagePlan
from patchloom.tasks.task import Judge
from patchloom_runtime.errors import DataError

READ_IMAGES = 8  # that are timed


class ImageJudge(Judge):
    """Base class of the judges of whole images; each split is decoded once."""

    def __init__(self, plan: ImagePlan, processes: Processes) -> None:
        self._plan, self._processes = plan, processes
        self.image_size = plan.recipe.test.image_size or plan.recipe.model.image_size
        self.batch_size = plan.recipe.optim.batch_size
        self._loaders: dict[str, Any] = {}
        self._together = False

    @property
    def is_complete(self) -> bool:
        return self._processes.world == 1

    @property
    def broken(self) -> dict[tuple[str, int], str]:
        """Return split and row of the images that could not be read, with the reason."""
        return {(split, row): why for split, loader in self._loaders.items() for row, why in loader.broken.items()}

    def images(self) -> list[ImageSet]:
        """Return the datasets that one evaluation reads."""
        return [self._plan.splits.val]

    def network(self, model: nn.Module) -> Network:
        """Return the network for the image size of evaluation."""
        network: Any = unwrap(model)
        return network.for_images_of(self.image_size) if isinstance(network, Network) else network

    @torch.no_grad()
    def seconds(self, run: Run) -> tuple[float, float]:
        """Estimate the seconds per evaluation, and those of reading its images if they stay in memory."""
        network: nn.Module = self.network(unwrap(run.model)).eval()
        device, size, datasets = run.processes.device, self.image_size, self.images()
        # A GPU takes as long for a few images as for many, and prepares itself for a batch of another size.
        count = READ_IMAGES if device.type == "cpu" else min(self.batch_size, *map(len, datasets))
        images = torch.zeros(count, 3, size, size, device=device)
        with run.processes.autocast(), run.processes.rng_preserved():
            network(images)
            run.processes.synchronize()
            begun = clock.perf_counter()
            network(images)
            run.processes.synchronize()
        per_image = (clock.perf_counter() - begun) / count
        networks = 2 if run.average or run.averaged is not None else 1
        reading_s = sum(_reading_s(images) * len(images) for images in datasets) / cores()
        kept = all(fits_in_memory(len(images), (size, size)) for images in datasets)
        forward_s = sum(map(len, datasets)) * per_image * networks
        return (forward_s, reading_s) if kept else (forward_s + reading_s * networks, 0.0)

    def __call__(self, model: nn.Module) -> Iterable[tuple[str, float]]:
        """Evaluate with all processes, each a part of the images, if there are enough images."""
        self._together = self._processes.world > 1 and all(map(self._is_shared, self.images()))
        try:
            return self.report(model)
        finally:
            self._together = False

    def _is_shared(self, images: ImageSet) -> bool:
        """Return whether every process gets at least one image."""
        return min(len(images), self.batch_size) >= self._processes.world

    def _batches(self, split: Literal["train", "val"]) -> Any:
        """Return batches of a split, or of this process's part of it."""
        plan, key = self._plan, f"{split}, shared" if self._together else split
        if key not in self._loaders:
            self._loaders[key] = make_evaluation_loader(
                getattr(plan.splits, split),
                self.image_size,
                plan.recipe.test.crop_ratio,
                resize=plan.recipe.test.resize,
                batch_size=self.batch_size,
                device=self._processes.device,
                workers=plan.workers,
                rank=self._processes.rank if self._together else 0,
                world=self._processes.world if self._together else 1,
                timeout_s=plan.settings.worker_timeout,
            )
        # The last batch may have fewer images than there are processes.
        return (batch for batch in self._loaders[key].epoch(0) if len(batch))

    def _joined(self, rows: Tensor) -> Tensor:
        """Concatenate the rows (n, …) of all processes; rows of −1 pad them to one length."""
        if not self._together:
            return rows
        most = max(self._processes.gather(len(rows)))
        filled = rows.new_full((most - len(rows), *rows.shape[1:]), -1)
        return self._processes.gather_rows(torch.cat([rows, filled]))


def _reading_s(images: ImageSet) -> float:
    count = min(READ_IMAGES, len(images))
    begun = clock.perf_counter()
    for number in range(count):
        with suppress(DataError):
            images.read(number * len(images) // count)
    return (clock.perf_counter() - begun) / max(1, count)


class ClassJudge(ImageJudge):
    """Evaluates predictions for val. Top-1 selects the best weights.

    If the recipe has a remedy for uneven classes and those of val are uneven, the mean class accuracy selects them:
    top-1 would favor the weights that neglect small classes.
    """

    tie_breaker = "loss"

    def __init__(self, plan: ImagePlan, processes: Processes) -> None:
        super().__init__(plan, processes)
        by_class = plan.recipe.balance.remedies and is_imbalanced(plan.splits.val.labels)
        self.metric = "mean_class_accuracy" if by_class else "top1"
        self._metrics = metrics_by_name(plan.settings.metrics)
        if plan.settings.select is not None:
            self.metric = plan.settings.select
            own = getattr(self._metrics.get(self.metric), "lower_is_better", False)
            self.lower_is_better = self.metric in LOWER_IS_BETTER or own

    def report(self, model: nn.Module) -> ClassificationReport:
        network = self.network(model)
        return evaluate(
            network,
            self._batches("val"),
            classes=self._plan.splits.classes.names,
            pixel_mean=network.pixel_mean,
            pixel_std=network.pixel_std,
            gather=self._joined,
            metrics=self._metrics,
            keep_logits=not self._together,  # for the temperature
        )


class NeighborJudge(ImageJudge):
    """Evaluates how often the nearest training images have the class of a val image."""

    def __init__(self, plan: ImagePlan, processes: Processes) -> None:
        super().__init__(plan, processes)
        self._k = min(*NEIGHBORS, int((plan.splits.train.labels >= 0).sum()))
        self.metric = f"knn{self._k}_top1"

    def images(self) -> list[ImageSet]:
        return [self._plan.splits.train, self._plan.splits.val]

    def report(self, model: nn.Module) -> NeighborReport:
        network = self.network(model)
        train, val = self._embedded(network, "train"), self._embedded(network, "val")
        return knn(train, val, classes=len(self._plan.splits.classes), k=[self._k])

    @torch.no_grad()
    def _embedded(self, network: Network, split: Literal["train", "val"]) -> Embeddings:
        own = embed(network, self._batches(split)).projected(network)
        index = self._joined(own.index)
        # Sorted by index, each image once, without padding.
        places = np.unique(index.cpu().numpy(), return_index=True)[1]
        whole = Embeddings(self._joined(own.vectors), self._joined(own.labels), index).rows(places)
        return whole.rows(torch.nonzero(whole.index >= 0)[:, 0])
