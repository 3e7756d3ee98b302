"""Several views of each image, each with its own random numbers, as compared by DINO and Grafit.

If the images fit in memory, every view is drawn from the decoded dataset on the device. Otherwise a worker decodes an
image once, draws all its views, and returns them as one row of pixels.
"""

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from patchloom.data.augmentation.augment import TrainTransform, check_policy, train_transform
from patchloom.data.batches.decoded_dataset import DeviceLoader, make_loader
from patchloom.data.batches.loader import WORKER_TIMEOUT_S, Loader
from patchloom.data.batches.ragged import Parts
from patchloom.data.batches.sampler import ClassSampling
from patchloom.data.datasets import ImageSet
from patchloom.data.images.image_batch import ImageBatch
from patchloom.recipes.parts import AugmentPart
from patchloom.recipes.schema import Recipe
from patchloom_runtime.errors import UsageError
from patchloom_runtime.images.evaluation_transform import as_size
from patchloom_runtime.images.geometry import Size
from patchloom_runtime.images.samples import Sample


@dataclass(frozen=True)
class View:
    """Augmentation and size of one view."""

    augment: AugmentPart
    size: int | Size


def views_of(recipe: Recipe) -> list[View]:
    """Return the views of a recipe: those of full size, then the local ones."""
    part, augment, size = recipe.views, recipe.augment, recipe.model.image_size
    second = replace(
        augment,
        blur=augment.blur if part.second_blur is None else part.second_blur,
        solarise=augment.solarise if part.second_solarise is None else part.second_solarise,
    )
    local = replace(
        augment, crop_min_scale=part.local_min_scale, crop_max_scale=part.local_max_scale, blur=part.local_blur
    )
    whole = [View(second if number == 1 else augment, size) for number in range(part.number)]
    return [*whole, *[View(local, part.local_size)] * part.local]


@dataclass(frozen=True)
class ViewBatch:
    """Views of the images of one step, of one process."""

    views: list[Tensor]  # each (B, 3, H, W) uint8; sizes may differ
    labels: Tensor  # (B,) int64
    index: Tensor  # (B,) int64, in the dataset
    parts: list[Parts] = field(default_factory=list)  # per view; empty if none are requested
    targets: Tensor | None = None  # (B, K) float32, as in `ImageBatch`

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "ViewBatch":
        """Return the same batch on another device."""
        views = [view.to(device, non_blocking=non_blocking) for view in self.views]
        labels, index = (tensor.to(device, non_blocking=non_blocking) for tensor in (self.labels, self.index))
        parts = [{name: part.to(device, non_blocking=non_blocking) for name, part in own.items()} for own in self.parts]
        targets = None if self.targets is None else self.targets.to(device, non_blocking=non_blocking)
        return ViewBatch(views, labels, index, parts, targets)


@dataclass(frozen=True)
class ManyViews:
    """A transform that concatenates all views of an image: (1, sum of their pixels, 3)."""

    views: tuple[View, ...]

    @cached_property
    def transforms(self) -> list[TrainTransform]:
        """Return one transform per view."""
        return [train_transform(view.augment, view.size) for view in self.views]

    @property
    def sizes(self) -> list[Size]:
        """Return (H, W) of each view."""
        return [as_size(view.size) for view in self.views]

    def shapes(self, parts: Collection[str]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the rows of pixels."""
        each = [transform.shapes(parts) for transform in self.transforms]
        length = sum(height * width for height, width in self.sizes)
        return {name: (1, length, *shape[2:]) for name, shape in each[0].items()}

    def arrays(self, sample: Sample, rng: random.Random) -> dict[str, np.ndarray]:
        """Draw every view, continuing from the previous one's random numbers; ragged boxes stay separate by name."""
        views = [transform.arrays(sample, rng) for transform in self.transforms]
        arrays = {_boxes_of(number): view.pop("boxes") for number, view in enumerate(views) if "boxes" in view}
        for name, first in views[0].items():
            arrays[name] = np.concatenate([view[name].reshape(1, -1, *first.shape[2:]) for view in views], axis=1)
        return arrays

    def separate(self, batch: ImageBatch) -> ViewBatch:
        """Split a batch of rows of pixels into its views."""
        pixels = self._split(batch.images.permute(0, 2, 3, 1))
        layers = {name: self._split(part) for name, part in batch.parts.items() if isinstance(part, Tensor)}
        parts: list[Parts] = [{} for _ in self.views] if batch.parts else []
        for number, own in enumerate(parts):
            own |= {name: split[number] for name, split in layers.items()}
            if (name := _boxes_of(number)) in batch.parts:
                own["boxes"] = batch.parts[name]
        views = [view.permute(0, 3, 1, 2) for view in pixels]
        return ViewBatch(views, batch.labels, batch.index, parts, batch.targets)

    def _split(self, rows: Tensor) -> list[Tensor]:
        """Split (B, 1, pixels, …) into (B, H, W, …) of each view."""
        split = rows.split([height * width for height, width in self.sizes], dim=2)
        return [part.reshape(len(rows), *size, *rows.shape[3:]) for part, size in zip(split, self.sizes, strict=True)]


def _boxes_of(view: int) -> str:
    return f"boxes of view {view}"


class ViewLoader:
    """Synchronized loaders of views of the same images, or one loader whose rows contain all views."""

    def __init__(self, loaders: Sequence[Loader | DeviceLoader], joined: ManyViews | None = None) -> None:
        self._loaders, self._joined = loaders, joined
        self.broken, self.plan = loaders[0].broken, loaders[0].plan

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of batches per epoch."""
        return self._loaders[0].steps_per_epoch

    def epoch(self, epoch: int, start_step: int = 0, offset: int = 0) -> Iterator[ViewBatch]:
        """Yield the batches of `epoch` from `start_step` on, moved by `offset` samples."""
        for batches in zip(*(loader.epoch(epoch, start_step, offset) for loader in self._loaders), strict=True):
            yield self._together(batches)

    def _together(self, batches: tuple[ImageBatch, ...]) -> ViewBatch:
        first = batches[0]
        if self._joined:
            return self._joined.separate(first)
        size = len(first.index)
        views = [view for batch in batches for view in batch.images.split(size)]
        parts = [own for batch in batches for own in _parts_of(batch, size)]
        return ViewBatch(views, first.labels, first.index, parts, first.targets)

    def sample(self, count: int) -> ViewBatch:
        """Return the first `count` images of the run, made in this process; the cost of a step is measured on them."""
        return self._together(tuple(loader.sample(count) for loader in self._loaders))

    @property
    def workers(self) -> int:
        """Return the number of worker processes."""
        return self._loaders[0].workers

    def preparing_bytes(self) -> int:
        """Return the memory for preparing batches."""
        return sum(loader.preparing_bytes() for loader in self._loaders)

    def close(self) -> None:
        for loader in self._loaders:
            loader.close()


def _parts_of(batch: ImageBatch, size: int) -> list[Parts]:
    """Split the parts of a batch by view: its first `size` images are the first view, the next `size` the second …"""
    if not batch.parts:
        return []
    rows = [slice(start, start + size) for start in range(0, len(batch.images), size)]
    return [{name: part[own] for name, part in batch.parts.items()} for own in rows]


def make_view_loader(
    dataset: ImageSet,
    views: Sequence[View],
    *,
    batch_size: int,
    seed: int,
    device: torch.device | str,
    workers: int = 0,
    rank: int = 0,
    world: int = 1,
    skip_broken: bool = False,
    timeout_s: float = WORKER_TIMEOUT_S,
    stores: dict[Any, Any] | None = None,
    sampling: ClassSampling | None = None,
) -> tuple[ViewLoader, str]:
    """Return a loader of views, drawn on the device if possible, else by workers; and the reason."""
    if not views:
        raise UsageError("a batch needs at least one view of each image; none is requested")
    for view in views:
        check_policy(view.augment, dataset.parts)
    shared: dict[str, Any] = {"batch_size": batch_size, "seed": seed, "rank": rank, "world": world}
    shared |= {"skip_broken": skip_broken, "workers": workers, "timeout_s": timeout_s, "sampling": sampling}
    joined = ManyViews(tuple(views))
    first, note = make_loader(
        dataset, views[0].augment, views[0].size, device=device, stores=stores, views=joined, **shared
    )
    if isinstance(first, DeviceLoader):
        same_views = groupby(range(len(views)), lambda number: views[number])
        return ViewLoader(
            [first.showing(tuple(numbers), view.augment, view.size) for view, numbers in same_views]
        ), note
    return ViewLoader([first], joined), note
