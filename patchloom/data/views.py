"""Several views of each picture, each with random numbers of its own: what DINO and Grafit compare.

Where the pictures fit in memory every view is drawn from the decoded set on the device. Otherwise a worker decodes a
picture once, draws all its views, and hands them over in a row of pixels.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from patchloom.data.augment import TrainTransform, as_size, train_transform
from patchloom.data.device import BeforeCrop, DeviceLoader, Store, make_loader
from patchloom.data.loader import WORKER_TIMEOUT_S, ImageBatch, Loader
from patchloom.data.policies import Size
from patchloom.data.sets import ImageSet
from patchloom.errors import UsageError
from patchloom.recipes.parts import AugmentPart


@dataclass(frozen=True)
class View:
    """How one view of a picture is made."""

    augment: AugmentPart
    size: int | Size


@dataclass(frozen=True)
class ViewBatch:
    """Views of the pictures of one step, of one process."""

    views: list[Tensor]  # each (B, 3, H, W) uint8; sizes may differ
    labels: Tensor  # (B,) int64
    index: Tensor  # (B,) int64, places in the set

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "ViewBatch":
        """The same batch on another device."""
        views = [view.to(device, non_blocking=non_blocking) for view in self.views]
        labels, index = (tensor.to(device, non_blocking=non_blocking) for tensor in (self.labels, self.index))
        return ViewBatch(views, labels, index)


@dataclass(frozen=True)
class ManyViews:
    """A transform that puts all views of a picture behind one another: (1, sum of their pixels, 3)."""

    views: tuple[View, ...]

    @cached_property
    def transforms(self) -> list[TrainTransform]:
        """One a view."""
        return [train_transform(view.augment, view.size) for view in self.views]

    @property
    def image_size(self) -> Size:
        """A row of pixels."""
        return 1, sum(height * width for height, width in self.sizes)

    @property
    def sizes(self) -> list[Size]:
        """(H, W) of each view."""
        return [as_size(view.size) for view in self.views]

    def __call__(self, image: Image.Image, rng: random.Random) -> np.ndarray:
        """Every view draws on from where the one before stopped."""
        return np.concatenate([make(image, rng).reshape(1, -1, 3) for make in self.transforms], axis=1)

    def apart(self, rows: Tensor) -> list[Tensor]:
        """(B, 3, 1, pixels) of a batch → its views."""
        pixels = rows.permute(0, 2, 3, 1).split([height * width for height, width in self.sizes], dim=2)
        return [
            part.reshape(len(rows), *size, 3).permute(0, 3, 1, 2) for part, size in zip(pixels, self.sizes, strict=True)
        ]


class ViewLoader:
    """Loaders of views of the same pictures, in step; or one whose pictures are many views in a row."""

    def __init__(self, loaders: Sequence[Loader | DeviceLoader], joined: ManyViews | None = None) -> None:
        self._loaders, self._joined = loaders, joined
        self.broken = loaders[0].broken

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch."""
        return self._loaders[0].steps_per_epoch

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[ViewBatch]:
        """The batches of `epoch` from `start_step` on."""
        for batches in zip(*(loader.epoch(epoch, start_step) for loader in self._loaders), strict=True):
            yield self._together(batches)

    def _together(self, batches: tuple[ImageBatch, ...]) -> ViewBatch:
        first = batches[0]
        if self._joined:
            return ViewBatch(self._joined.apart(first.images), first.labels, first.index)
        views = [view for batch in batches for view in batch.images.split(len(first.index))]
        return ViewBatch(views, first.labels, first.index)

    def sample(self, pictures: int) -> ViewBatch:
        """The first so many pictures of the run, made in this process: what a step costs is measured on them."""
        return self._together(tuple(loader.sample(pictures) for loader in self._loaders))

    @property
    def workers(self) -> int:
        """Processes beside this one."""
        return self._loaders[0].workers

    def preparing_bytes(self) -> int:
        """Memory that batches take."""
        return sum(loader.preparing_bytes() for loader in self._loaders)

    def close(self) -> None:
        """End the workers."""
        for loader in self._loaders:
            loader.close()


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
    stores: dict[BeforeCrop, Store] | None = None,
) -> tuple[ViewLoader, str]:
    """Batches of views, drawn on the device where that applies, else by workers; and the reason."""
    if not views:
        raise UsageError("a batch has at least one view of each picture; none is asked for")
    shared: dict[str, Any] = {"batch_size": batch_size, "seed": seed, "rank": rank, "world": world}
    shared |= {"skip_broken": skip_broken, "workers": workers, "timeout_s": timeout_s}
    first, note = make_loader(dataset, views[0].augment, views[0].size, device=device, stores=stores, **shared)
    if isinstance(first, DeviceLoader):
        alike = groupby(range(len(views)), lambda number: views[number])
        return ViewLoader([first.showing(tuple(numbers), view.augment, view.size) for view, numbers in alike]), note
    first.close()
    joined = ManyViews(tuple(views))
    pin = torch.device(device).type == "cuda"
    loader = Loader(dataset, joined, pin=pin, **shared)
    return ViewLoader([loader], joined), note
