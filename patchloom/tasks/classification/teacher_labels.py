"""Distillation of images without labels (thesis table 3.3, "label ✗"): the teacher provides the classes.

The teacher decides on every image before training, at the student's resolution and without augmentation. Training and
validation use its decisions as labels, so the scores of val measure agreement with the teacher. During training the
teacher also sees the augmented images, as with labels; `objective.distillation_weight` 1 learns from these alone.
"""

import os
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from patchloom.data.batches.decoded_dataset import make_evaluation_loader
from patchloom.data.datasets import ImageSet, Source, Splits
from patchloom.data.images.image_batch import IMAGENET_MEAN, IMAGENET_STD, normalize
from patchloom.data.labels.unlabeled import task_of_data
from patchloom.engine.distribution import Processes
from patchloom.recipes.methods import method_of
from patchloom.runs.computed_labels import read_labels, write_labels
from patchloom.runs.config import read_run_files
from patchloom.runs.locate import find_run
from patchloom.tasks.images.networks import make_teacher, teacher_names
from patchloom.tasks.images.plan import ImagePlan
from patchloom.tasks.plan import method_of_settings
from patchloom.tasks.settings import TrainingSettings
from patchloom_runtime.errors import UsageError
from patchloom_runtime.images.samples import UNLABELED

FILE = "teacher_labels.json"
BATCH = 128


def labeling_teacher(source: Source, settings: TrainingSettings) -> str | None:
    """Return the teacher that must label the training images, or None if they have labels or there is no teacher."""
    method = method_of_settings(settings)
    if method is not None and method_of(method).teacher != "classes":
        return None
    is_plain = len(source.train) > 0 and not source.train.is_classified and task_of_data(source)[0] == "classify"
    return settings.recipe_changes().get("objective.teacher") if is_plain else None


def with_teacher_classes(source: Source, teacher: str) -> Source:
    """Return unlabeled images with the classes of the teacher, which are known without its network."""
    first = teacher_names(teacher)[0]
    folder = find_run(first)
    names = read_run_files(folder).labels if folder else ()
    if len(names) < 2:
        raise UsageError(
            f"{source.name}: the images have no labels, so the teacher must name the classes, and {first} does not; "
            "expected a run with a classifier, published weights, timm:NAME or torchvision:NAME"
        )
    note = f"the images have no labels: {teacher} labels them, and val measures agreement with it"
    return replace(source, train=replace(source.train, names=names), notes=(*source.notes, note))


def lacks_labels(plan: ImagePlan) -> bool:
    """Return whether the teacher labels the images of a run."""
    return not bool(np.any(plan.opened.splits.train.labels != UNLABELED))


def labeled_by_teacher(plan: ImagePlan, processes: Processes) -> Splits:
    """Return the splits with the teacher's decisions as labels; rank 0 computes them for all.

    Images of val that have labels keep them.
    """
    splits: Any = plan.splits
    labels = None
    if processes.is_main:
        path, images = plan.folder / FILE, len(splits.train) + len(splits.val)
        is_kept = os.path.lexists(path)
        labels = read_labels(path, images, len(splits.classes)) if is_kept else _decide(plan, processes)
    train, val = np.split(np.array(processes.from_main(labels), np.int64), [len(splits.train)])
    val = np.where(splits.val.labels == UNLABELED, val, splits.val.labels)
    return replace(splits, train=replace(splits.train, labels=train), val=replace(splits.val, labels=val))


def keep_teacher_labels(plan: ImagePlan) -> None:
    """Write the labels into the run folder."""
    write_labels(plan.folder / FILE, np.concatenate([plan.splits.train.labels, plan.splits.val.labels]))


def _decide(plan: ImagePlan, processes: Processes) -> list[int]:
    """Return the teacher's decisions on the images of train, then on those of val."""
    with processes.rng_preserved():
        teacher = make_teacher(str(plan.recipe.objective.teacher), plan.splits).to(processes.device)
    teacher.for_images_of(IMAGENET_MEAN, IMAGENET_STD)  # as `normalize` makes them
    return [
        label
        for images in (plan.splits.train, plan.splits.val)
        for label in _decide_on(images, teacher, plan, processes)
    ]


@torch.no_grad()
def _decide_on(images: ImageSet, teacher: nn.Module, plan: ImagePlan, processes: Processes) -> list[int]:
    test = plan.recipe.test
    loader = make_evaluation_loader(
        images,
        plan.recipe.model.image_size,
        test.crop_ratio,
        resize=test.resize,
        batch_size=BATCH,
        device=processes.device,
        workers=plan.workers,
        timeout_s=plan.settings.worker_timeout,
    )
    labels = np.zeros(len(images), np.int64)
    with processes.autocast():
        for batch in loader.epoch(0):
            batch = batch.to(processes.device)
            labels[batch.index.cpu().numpy()] = teacher(normalize(batch.images)).argmax(dim=1).cpu().numpy()
    loader.close()
    return labels.tolist()
