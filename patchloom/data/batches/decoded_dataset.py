"""Sets that fit in memory: decoded once, kept on the device as bytes, augmented there batch by batch.

`DeviceLoader` has `Loader`'s interface. `make_loader` takes it where it applies and says why or why not.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from patchloom.data.augmentation.augment import check_policy, size_before_window, train_transform
from patchloom.data.augmentation.batch_augment import BATCHED_POLICIES, augment_batch, draw
from patchloom.data.augmentation.crops import Draws
from patchloom.data.batches.cuda_graph import record
from patchloom.data.batches.loader import WORKER_TIMEOUT_S, Loader, Transform, read_or_next
from patchloom.data.batches.ragged import Boxes, Parts, padded, ragged
from patchloom.data.batches.sampler import SamplingPlan, rank_positions, step_seed
from patchloom.data.datasets import ImageSet
from patchloom.data.images.image_batch import ImageBatch
from patchloom.machine import cores
from patchloom.recipes.parts import AugmentPart
from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.images.evaluation_transform import ImageTransform, as_size
from patchloom_runtime.images.geometry import Geometry, Size
from patchloom_runtime.images.samples import Sample

DEFAULT_BUDGET_BYTES = 4 << 30
# Crops are not antialiased on the device; from pictures much larger than the crop it would show.
LARGEST_REDUCTION = 1.5
DECODED_AT_ONCE = 256
RGB_BYTES = 3
# Values in a batch that is augmented by replay, which keeps the memory of about twenty such batches in float32. With
# more of them the work takes longer than the launches.
MOST_VALUES_REPLAYED = 16 << 20
# Values that a CPU augments at once; a batch of more is made in parts, since its float32 copies would fill the memory.
MOST_VALUES_AT_ONCE = 16 << 20
BYTES_AUGMENTED = 32  # a value, while it is augmented: about eight copies in float32


def fits_in_memory(
    pictures: int, size: Size, budget_bytes: int = DEFAULT_BUDGET_BYTES, pixel_bytes: int = RGB_BYTES
) -> bool:
    """Whether `pictures` of (height, width) take at most `budget_bytes`."""
    return pictures * size[0] * size[1] * pixel_bytes <= budget_bytes


def pixel_bytes(dataset: ImageSet) -> int:
    """What is kept of a pixel: its colours and its numbers in the layers that are read."""
    return RGB_BYTES + sum(np.dtype(kind.dtype).itemsize for kind in dataset.layers.values())


@dataclass(frozen=True)
class Store:
    """A whole set, decoded."""

    pixels: Tensor  # (N, h, w, 3) uint8
    labels: Tensor  # (N,) int64
    broken: dict[int, str] = field(default_factory=dict)  # what was replaced, and why
    layers: dict[str, Tensor] = field(default_factory=dict)  # each (N, h, w)
    outside: dict[str, int] = field(default_factory=dict)  # what a layer has where there is no picture
    boxes: Tensor | None = None  # (N, most of a picture, 6), NaN where a picture has fewer

    @property
    def parts(self) -> tuple[str, ...]:
        """What there is beside pictures and labels."""
        return (*self.layers, *(["boxes"] if self.boxes is not None else []))


def decode_all(
    dataset: ImageSet,
    transform: Transform,
    device: torch.device | str,
    *,
    workers: int = 0,
    skip_broken: bool = False,
    timeout_s: float = WORKER_TIMEOUT_S,
) -> Store:
    """Read every picture once, through a transform without chance: `test_transform` or `BeforeCrop`."""
    loader = Loader(
        dataset,
        transform,
        batch_size=min(DECODED_AT_ONCE, len(dataset)),
        shuffle=False,
        drop_last=False,
        workers=workers,
        skip_broken=skip_broken,
        timeout_s=timeout_s,
    )
    shapes, labels, done = transform.shapes(dataset.parts), torch.empty(len(dataset), dtype=torch.int64), 0
    pixels = torch.empty((len(dataset), *shapes.pop("image")), dtype=torch.uint8, device=device)
    layers: dict[str, Tensor] = {}
    boxes: list[Boxes] = []
    with closing(loader):
        for batch in loader.epoch(0):
            rows = slice(done, done + len(batch))
            pixels[rows] = batch.images.permute(0, 2, 3, 1).to(device)
            labels[rows] = batch.labels
            for name, part in batch.parts.items():
                if isinstance(part, Boxes):
                    boxes.append(part)
                    continue
                if name not in layers:
                    layers[name] = torch.empty((len(dataset), *shapes[name]), dtype=part.dtype, device=device)
                layers[name][rows] = part.to(device)
            done = rows.stop
    outside = {name: kind.outside for name, kind in dataset.layers.items()}
    kept = padded(boxes).to(device) if boxes else None
    return Store(pixels, labels.to(device), loader.broken, layers, outside, kept)


class UnevenSizesError(DataError):
    """A picture whose size is not that of the others."""


@dataclass(frozen=True)
class BeforeCrop(ImageTransform):
    """What the random part of a crop starts from, the same size for every picture of a set."""

    crop: str
    crop_ratio: float
    crop_size: Size
    image_size: Size  # what comes out

    @classmethod
    def like(cls, first: Image.Image, augment: AugmentPart, crop_size: Size) -> "BeforeCrop":
        """For a set of pictures like its first."""
        chosen = augment.crop, augment.crop_ratio, crop_size
        return cls(*chosen, cls._size(first.size, *chosen))

    def geometry(self, sample: Sample, rng: random.Random) -> Geometry:  # noqa: ARG002
        """The whole picture."""
        if self._size(sample.size, self.crop, self.crop_ratio, self.crop_size) != self.image_size:
            raise UnevenSizesError("the pictures differ in size")
        return self._whole(sample.size)

    def reduction(self, size: tuple[int, int], rng: random.Random) -> int:  # noqa: ARG002
        """As the size allows that comes out."""
        return self._whole(size).reduction

    def _whole(self, size: tuple[int, int]) -> Geometry:
        return Geometry((0, 0, *size), self.image_size, self.image_size)

    @staticmethod
    def _size(picture: tuple[int, int], crop: str, crop_ratio: float, crop_size: Size) -> Size:
        if crop == "random_resized":
            return picture[1], picture[0]
        return size_before_window(picture, crop, crop_size, crop_ratio)


class DeviceLoader:
    """A decoded set in augmented batches; without `augment`, pictures stay as they are.

    Augmentation follows from (seed, epoch, step, view, place in the batch): a run resumes exactly, and several
    processes see the pictures of one. The numbers come from the device's own generator, so a CPU and a GPU
    draw differently. Of several `views` a batch has V·B images: all pictures in the first view, then in the second.
    Made at once they take a device no more launches than one, which is what bounds it with small pictures.
    """

    def __init__(
        self,
        store: Store,
        augment: AugmentPart | None,
        image_size: int | Size,
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        repeats: int = 1,
        rank: int = 0,
        world: int = 1,
        drop_last: bool = True,
        views: Sequence[int] = (0,),
    ) -> None:
        if augment:
            check_policy(augment, store.parts)
        if augment and augment.policy not in BATCHED_POLICIES:
            raise UsageError(
                f"augment.policy={augment.policy} works on one image at a time, not on whole batches; "
                f"those that do: {', '.join(BATCHED_POLICIES)}. Use Loader with workers for the others."
            )
        self.plan = SamplingPlan(len(store.labels), batch_size, seed, shuffle, repeats, drop_last, rank, world)
        self.broken = store.broken
        self._store = store
        self._augment = augment
        self._size = as_size(image_size)
        self._views = views
        self._replay: Callable[..., tuple[Tensor, ...]] | None = None
        self._rows: dict[int, Tensor] = {}  # of a batch of so many pictures, sent to the device once

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch."""
        return self.plan.steps_per_epoch

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[ImageBatch]:
        """The batches of `epoch` from `start_step` on, on the store's device."""
        device = self._store.labels.device
        # One transfer per epoch instead of one per step.
        order = torch.from_numpy(self.plan.order(epoch).copy()).to(device, non_blocking=True)
        for step in range(start_step, self.steps_per_epoch):
            index = order[step * self.plan.batch_size : (step + 1) * self.plan.batch_size]
            size, rows = len(index), None
            if self.plan.world > 1:
                rows = self._own_rows(size)
                index = index[rows]
            if self._augment:
                seeds = [step_seed(self.plan.seed, epoch, step, view) for view in self._views]
                draws = draw(size, self._augment, self._size, seeds, device, rows)
                images, *parts = self._augmented(index.repeat(len(self._views)), draws.values, draws.field)
            else:
                images, parts = self._store.pixels[index].permute(0, 3, 1, 2), self._stored_parts(index)
            yield ImageBatch(images, self._store.labels[index], index, self._named(parts))

    def sample(self, pictures: int) -> ImageBatch:
        """The first so many pictures of the run: what a step costs is measured on them."""
        of, count = self.plan, min(pictures, self.plan.pictures)
        few = DeviceLoader(self._store, self._augment, self._size, batch_size=count, seed=of.seed, views=self._views)
        return next(few.epoch(0))

    workers = 0

    def preparing_bytes(self) -> int:
        """Memory that batches take: images that are augmented at once, as numbers; two batches, and parts of one."""
        values = self.plan.batch_size // self.plan.world * len(self._views) * 3 * self._size[0] * self._size[1]
        return min(values, MOST_VALUES_AT_ONCE) * BYTES_AUGMENTED + 3 * values

    def showing(self, views: Sequence[int], augment: AugmentPart, image_size: int | Size) -> "DeviceLoader":
        """The same pictures in the same order in other views, by number, with random numbers of their own."""
        of = self.plan
        if augment.crop != "random_resized" and as_size(image_size) != self._size:
            raise UsageError(
                f"augment.crop {augment.crop} cannot show a picture of {self._size} at {as_size(image_size)}; "
                "use random_resized for views of several sizes"
            )
        return DeviceLoader(
            self._store,
            augment,
            image_size,
            batch_size=of.batch_size,
            seed=of.seed,
            shuffle=of.shuffle,
            repeats=of.repeats,
            rank=of.rank,
            world=of.world,
            drop_last=of.drop_last,
            views=views,
        )

    def _augmented(self, index: Tensor, values: Tensor, field: Tensor) -> tuple[Tensor, ...]:
        """Pictures `index` with these numbers, and their parts; whole batches of small pictures in one launch."""
        whole = len(index) == self.plan.batch_size // self.plan.world * len(self._views)
        small = len(index) * 3 * self._size[0] * self._size[1] <= MOST_VALUES_REPLAYED
        if not (index.is_cuda and whole and small):
            at_once = (
                len(index) if index.is_cuda else max(1, MOST_VALUES_AT_ONCE // (3 * self._size[0] * self._size[1]))
            )
            if len(index) <= at_once:
                return self._augment_each(index, values, field)
            parts = zip(index.split(at_once), values.split(at_once), strict=True)
            made = [self._augment_each(rows, numbers, field) for rows, numbers in parts]
            return tuple(torch.cat(some) for some in zip(*made, strict=True))
        if self._replay is None:
            self._replay = record(self._augment_each, index, values, field)
        return self._replay(index, values, field)

    def _augment_each(self, index: Tensor, values: Tensor, field: Tensor) -> tuple[Tensor, ...]:
        """Images, then the parts in the order of the store's."""
        assert self._augment
        store = self._store
        images, crops = augment_batch(store.pixels, index, self._augment, self._size, Draws(values, field))
        layers = [crops.layer(numbers, index, store.outside[name]) for name, numbers in store.layers.items()]
        return images, *layers, *([] if store.boxes is None else [crops.boxes(store.boxes[index])])

    def _stored_parts(self, index: Tensor) -> list[Tensor]:
        layers = [numbers[index] for numbers in self._store.layers.values()]
        return layers if self._store.boxes is None else [*layers, self._store.boxes[index]]

    def _named(self, parts: Sequence[Tensor]) -> Parts:
        """Parts in the order of the store's → by name."""
        named = zip(self._store.parts, parts, strict=True)
        return {name: ragged(part) if name == "boxes" else part for name, part in named}

    def _own_rows(self, size: int) -> Tensor:
        if size not in self._rows:
            rows = torch.from_numpy(rank_positions(size, self.plan.rank, self.plan.world))
            self._rows[size] = rows.to(self._store.labels.device)
        return self._rows[size]

    def close(self) -> None:
        """Nothing to end: there are no workers."""


def make_loader(
    dataset: ImageSet,
    augment: AugmentPart,
    image_size: int | Size,
    *,
    batch_size: int,
    seed: int,
    device: torch.device | str,
    workers: int = 0,
    rank: int = 0,
    world: int = 1,
    skip_broken: bool = False,
    timeout_s: float = WORKER_TIMEOUT_S,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    stores: dict["BeforeCrop", Store] | None = None,
) -> tuple[Loader | DeviceLoader, str]:
    """A recipe's training loader, on the device where that applies, else from workers; and the reason.

    What is decoded is left in `stores`, where it is given, and taken from there when the loader is made again.
    """
    size = as_size(image_size)
    check_policy(augment, dataset.parts)
    first, _, _ = read_or_next(dataset, 0, skip_broken)
    before_crop = BeforeCrop.like(first.image, augment, size)
    reason = _against_device(dataset, augment, before_crop, budget_bytes)
    if not reason:
        try:
            stores = {} if stores is None else stores
            kept = stores.get(before_crop)
            if kept is None or set(kept.parts) != set(dataset.parts):
                stores[before_crop] = decode_all(
                    dataset, before_crop, device, workers=workers, skip_broken=skip_broken, timeout_s=timeout_s
                )
            store = stores[before_crop]
            loader = DeviceLoader(
                store,
                augment,
                size,
                batch_size=batch_size,
                seed=seed,
                repeats=augment.repeats,
                rank=rank,
                world=world,
            )
            mib = (store.pixels.nbytes + sum(numbers.nbytes for numbers in store.layers.values())) / 2**20
            return loader, f"pictures stay decoded on {device} ({mib:.0f} MiB) and are augmented there"
        except UnevenSizesError as error:
            reason = str(error)
    return (
        Loader(
            dataset,
            train_transform(augment, size),
            batch_size=batch_size,
            seed=seed,
            repeats=augment.repeats,
            workers=workers,
            rank=rank,
            world=world,
            pin=torch.device(device).type == "cuda",
            skip_broken=skip_broken,
            timeout_s=timeout_s,
        ),
        f"pictures are decoded and augmented by {_who(workers)}: {reason}",
    )


def _who(workers: int) -> str:
    if not workers:
        return "the main process"
    return f"{workers} workers" + (f" (more than the {cores()} cores: likely no faster)" if workers > cores() else "")


def _against_device(dataset: ImageSet, augment: AugmentPart, before_crop: BeforeCrop, budget_bytes: int) -> str:
    """Why a set cannot be kept and augmented on the device; '' where it can."""
    (height, width), size = before_crop.image_size, before_crop.crop_size
    if augment.crop == "scaled":
        return "augment.crop=scaled works on one image at a time, not on whole batches"
    if augment.policy not in BATCHED_POLICIES:
        return f"augment.policy={augment.policy} works on one image at a time, not on whole batches"
    if not fits_in_memory(len(dataset), (height, width), budget_bytes, pixel_bytes(dataset)):
        needed, allowed = len(dataset) * height * width * pixel_bytes(dataset) / 2**20, budget_bytes / 2**20
        return f"decoded they take {needed:,.0f} MiB, more than the {allowed:,.0f} MiB set aside"
    if augment.crop == "random_resized" and max(height / size[0], width / size[1]) > LARGEST_REDUCTION:
        return f"images of {height}×{width} are much larger than their crops, so each is resized by itself"
    return ""
