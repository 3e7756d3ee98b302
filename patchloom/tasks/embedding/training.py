"""Training of embedding networks: DINO, Grafit, ClusterFit, whose labels are clusters of another run's features."""

import os
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from patchloom.data.batches.decoded_dataset import make_evaluation_loader
from patchloom.data.datasets import ClassTable, ImageSet
from patchloom.engine.distribution import Processes
from patchloom.evaluation.embeddings import embed
from patchloom.models.network import Network
from patchloom.objectives.clusters import cluster_labels
from patchloom.runs.computed_labels import read_labels, write_labels
from patchloom.runs.locate import run_folder
from patchloom.runs.weights import load_network
from patchloom.tasks.images.judges import NeighborJudge
from patchloom.tasks.images.plan import ImagePlan
from patchloom.tasks.images.training import WholeImageTraining

CLUSTERS = "clusters.json"


class EmbeddingTraining(WholeImageTraining):
    """A network without a classifier for the data's classes, evaluated by nearest neighbors if there are labels."""

    def prepare(self, plan: ImagePlan, processes: Processes) -> ImagePlan:
        """Find the clusters that are learned."""
        if plan.method.learns_from != "clusters":
            return plan
        return replace(plan, clustered=clustered(plan, processes))

    def judge(self, plan: ImagePlan, processes: Processes) -> NeighborJudge | None:
        labeled = all(bool((images.labels >= 0).any()) for images in (plan.splits.train, plan.splits.val))
        return NeighborJudge(plan, processes) if labeled else None

    def write_files(self, plan: ImagePlan, network: Network) -> None:
        super().write_files(plan, network)
        if plan.clustered is not None:
            write_labels(plan.folder / CLUSTERS, plan.learned.labels)


def clustered(plan: ImagePlan, processes: Processes) -> ImageSet:
    """Return the training images labeled by cluster; rank 0 computes the clusters for all."""
    images: Any = plan.splits.train
    labels = None
    if processes.is_main:
        path = plan.folder / CLUSTERS
        is_kept, clusters = os.path.lexists(path), plan.recipe.grafit.clusters
        labels = read_labels(path, len(images), clusters) if is_kept else _compute(plan, images, processes)
    names = tuple(f"cluster {number}" for number in range(plan.recipe.grafit.clusters))
    return replace(images, labels=np.array(processes.from_main(labels), np.int64), classes=ClassTable(names))


def _compute(plan: ImagePlan, images: ImageSet, processes: Processes) -> list[int]:
    part = plan.recipe.grafit
    assert part.clusters_of is not None  # checked by the plan
    network, files = load_network(run_folder(part.clusters_of))
    used = files.preprocessing
    batches = make_evaluation_loader(
        images,
        used.image_size,
        used.crop_ratio,
        used.interpolation,
        used.resize,
        batch_size=plan.recipe.optim.batch_size,
        device=processes.device,
        workers=plan.workers,
    )
    with torch.no_grad(), processes.autocast():
        embedded = embed(network.to(processes.device), batches.epoch(0), pixel_mean=used.mean, pixel_std=used.std)
    return cluster_labels(embedded.vectors, part.clusters, seed=plan.recipe.seed).tolist()
