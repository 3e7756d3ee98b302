"""What judges a network while it is trained: its decisions about the val split, or its neighbours in train."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Literal

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


class Evaluator(ABC):
    """Every rank does all of it, so that none waits for another's; a split is decoded once."""

    metric: str
    tie_breaker: str | None = None  # what decides between equal values of the metric, the less the better

    def __init__(self, plan: Plan, processes: Processes, workers: int) -> None:
        self._plan, self._processes, self._workers = plan, processes, workers
        self.image_size = plan.recipe.test.image_size or plan.recipe.model.image_size
        self.batch_size = plan.recipe.optim.batch_size  # less where that does not fit in memory
        self._loaders: dict[str, Any] = {}

    @property
    def broken(self) -> dict[tuple[str, int], str]:
        """Split and row of the pictures that could not be read and do not count, and why."""
        return {(split, row): why for split, loader in self._loaders.items() for row, why in loader.broken.items()}

    @abstractmethod
    def report(self, model: nn.Module) -> Report:
        """The whole evaluation."""

    def __call__(self, model: nn.Module) -> Iterable[tuple[str, float]]:
        """(name, value) pairs, as the engine wants them."""
        return self.report(model)

    def images(self) -> list[ImageSet]:
        """What the network sees in one evaluation."""
        return [self._plan.splits.val]

    def network(self, model: nn.Module) -> Network:
        """The network as it is evaluated."""
        network: Any = unwrap(model)
        return network.for_images_of(self.image_size) if isinstance(network, Network) else network

    def _batches(self, split: Literal["train", "val"]) -> Any:
        plan = self._plan
        if split not in self._loaders:
            self._loaders[split] = make_evaluation_loader(
                getattr(plan.splits, split),
                self.image_size,
                plan.recipe.test.crop_ratio,
                batch_size=self.batch_size,
                device=self._processes.device,
                workers=self._workers,
                timeout_s=plan.settings.worker_timeout,
            )
        return self._loaders[split].epoch(0)


class ClassEvaluator(Evaluator):
    """Top-1 and the rest on the val split."""

    metric = "top1"
    tie_breaker = "loss"

    def report(self, model: nn.Module) -> ClassificationReport:
        """Its decisions."""
        network = self.network(model)
        return evaluate(
            network,
            self._batches("val"),
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

    def images(self) -> list[ImageSet]:
        """Both splits."""
        return [self._plan.splits.train, self._plan.splits.val]

    def report(self, model: nn.Module) -> NeighbourReport:
        """Its neighbours."""
        network = self.network(model)
        train, val = self._embedded(network, "train"), self._embedded(network, "val")
        return knn(train, val, classes=len(self._plan.splits.classes), k=[self._k])

    @torch.no_grad()
    def _embedded(self, network: Network, split: Literal["train", "val"]) -> Embeddings:
        return embed(network, self._batches(split)).projected(network)
