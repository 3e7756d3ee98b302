"""ClusterFit's labels: clusters of the features of another run, found once and kept in the run's folder."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from patchloom.data.batches.decoded_dataset import make_evaluation_loader
from patchloom.data.datasets import ClassTable, ImageSet
from patchloom.disk import atomic_write
from patchloom.engine.distribution import Processes
from patchloom.evaluation.embeddings import embed
from patchloom.objectives.clusters import cluster_labels
from patchloom.runs.locate import run_folder
from patchloom.runs.weights import load_network
from patchloom.tasks.images.plan import ImagePlan
from patchloom_runtime.errors import CheckpointError
from patchloom_runtime.untrusted import check_shape, parse_json, read_plain

FILE = "clusters.json"


def clustered(plan: ImagePlan, processes: Processes) -> ImageSet:
    """The training images with the number of their cluster as label; rank 0 finds them for all."""
    images: Any = plan.splits.train
    labels = None
    if processes.is_main:
        path = plan.folder / FILE
        is_kept, clusters = os.path.lexists(path), plan.recipe.grafit.clusters
        labels = _kept(path, len(images), clusters) if is_kept else _found(plan, images, processes)
    names = tuple(f"cluster {number}" for number in range(plan.recipe.grafit.clusters))
    return replace(images, labels=np.array(processes.from_main(labels), np.int64), classes=ClassTable(names))


def keep_clusters(plan: ImagePlan) -> None:
    """Write them into the run's folder."""
    atomic_write(plan.folder / FILE, json.dumps(plan.learned.labels.tolist()).encode())


def _found(plan: ImagePlan, images: ImageSet, processes: Processes) -> list[int]:
    part = plan.recipe.grafit
    assert part.clusters_of is not None  # the plan saw to it
    network, files = load_network(run_folder(part.clusters_of))
    shown = files.preprocessing
    batches = make_evaluation_loader(
        images,
        shown.image_size,
        shown.crop_ratio,
        shown.interpolation,
        shown.resize,
        batch_size=plan.recipe.optim.batch_size,
        device=processes.device,
        workers=plan.workers,
    )
    with torch.no_grad(), processes.autocast():
        found = embed(network.to(processes.device), batches.epoch(0), pixel_mean=shown.mean, pixel_std=shown.std)
    return cluster_labels(found.vectors, part.clusters, seed=plan.recipe.seed).tolist()


def _kept(path: Path, images: int, clusters: int) -> list[int]:
    """A resumed run goes on with the clusters it began with: on a GPU they would not be found the same again."""
    try:
        labels = parse_json(read_plain(path))
        check_shape(labels, list[int])
        if not all(0 <= label < clusters for label in labels):
            raise ValueError(f"it has numbers that are none of {clusters:,} clusters")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}). Remove the folder to start again.") from error
    if len(labels) != images:
        raise CheckpointError(
            f"{path} is for {len(labels)} images, there are {images} now. Give a new folder with --out."
        )
    return labels
