"""What judges a network while it is trained: its decisions about the val split, or its neighbours in train."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from patchloom.build import make_evaluation_loader
from patchloom.data.sets import ImageSet
from patchloom.engine.distribution import Processes, unwrap
from patchloom.evaluation.classification import ClassificationReport, evaluate
from patchloom.evaluation.embeddings import Embeddings, embed
from patchloom.evaluation.knn import NEIGHBOURS, NeighbourReport, knn
from patchloom.models.network import Network
from patchloom.training.plan import Plan

Report = ClassificationReport | NeighbourReport


class Evaluator:
    """Every rank does all of it, so that none waits for another's; a split is decoded once."""

    metric: str

    def __init__(self, plan: Plan, processes: Processes, workers: int) -> None:
        self._plan, self._processes, self._workers = plan, processes, workers
        self._size = plan.recipe.test.image_size or plan.recipe.model.image_size
        self._loaders: dict[int, Any] = {}

    @property
    def broken(self) -> dict[int, str]:
        """The pictures that could not be read and do not count, and why."""
        return {row: why for loader in self._loaders.values() for row, why in getattr(loader, "broken", {}).items()}

    def report(self, model: nn.Module) -> Report:
        """The whole evaluation."""
        raise NotImplementedError

    def __call__(self, model: nn.Module) -> Iterable[tuple[str, float]]:
        """(name, value) pairs, as the engine wants them."""
        return self.report(model)

    def _network(self, model: nn.Module) -> Network:
        network: Any = unwrap(model)
        return network.for_images_of(self._size) if isinstance(network, Network) else network

    def _batches(self, images: ImageSet) -> Any:
        plan = self._plan
        if id(images) not in self._loaders:
            self._loaders[id(images)] = make_evaluation_loader(
                images,
                self._size,
                plan.recipe.test.crop_ratio,
                batch_size=plan.recipe.optim.batch_size,
                device=self._processes.device,
                workers=self._workers,
                timeout_s=plan.settings.worker_timeout,
            )
        return self._loaders[id(images)].epoch(0)


class ClassEvaluator(Evaluator):
    """Top-1 and the rest on the val split."""

    metric = "top1"

    def report(self, model: nn.Module) -> ClassificationReport:
        """Its decisions."""
        network = self._network(model)
        return evaluate(
            network,
            self._batches(self._plan.splits.val),
            classes=self._plan.splits.classes.names,
            pixel_mean=network.pixel_mean,
            pixel_std=network.pixel_std,
        )


class NeighbourEvaluator(Evaluator):
    """How often the nearest images of train tell the class of one of val: labels judge, they do not teach."""

    def __init__(self, plan: Plan, processes: Processes, workers: int) -> None:
        super().__init__(plan, processes, workers)
        self._k = min(*NEIGHBOURS, int((plan.splits.train.labels >= 0).sum()))
        self.metric = f"knn{self._k}_top1"

    def report(self, model: nn.Module) -> NeighbourReport:
        """Its neighbours."""
        network = self._network(model)
        train, val = (self._embedded(network, images) for images in (self._plan.splits.train, self._plan.splits.val))
        return knn(train, val, classes=len(self._plan.splits.classes), k=[self._k])

    @torch.no_grad()
    def _embedded(self, network: Network, images: ImageSet) -> Embeddings:
        return embed(network, self._batches(images)).projected(network)
