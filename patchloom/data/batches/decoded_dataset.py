"""Datasets that fit in memory: decoded once, kept on the device, augmented there batch by batch.

Images of different sizes are kept on canvases of one size, on a GPU only: a CPU crops them one by one as fast.
`DeviceLoader` has `Loader`'s interface. `make_loader` and `make_evaluation_loader` choose between the two.
"""

import math
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from patchloom.data.augmentation.augment import check_policy, size_before_window, train_transform
from patchloom.data.augmentation.batch_augment import BATCHED_POLICIES, augment_batch, draw
from patchloom.data.augmentation.canvas import EXTENT_VALUES
from patchloom.data.augmentation.crops import Draws
from patchloom.data.augmentation.own_transform import OwnTransform
from patchloom.data.batches.cuda_graph import capture
from patchloom.data.batches.loader import WORKER_TIMEOUT_S, Loader, Transform, read_or_next
from patchloom.data.batches.ragged import Boxes, Parts, padded, ragged
from patchloom.data.batches.sample_memory import SampleMemory, sample_memory
from patchloom.data.batches.sampler import ClassSampling, SamplingPlan, rank_positions, step_seed
from patchloom.data.datasets import ImageSet
from patchloom.data.images.image_batch import ImageBatch
from patchloom.machine import available_bytes, cores
from patchloom.recipes.parts import AugmentPart
from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.images.evaluation_transform import ImageTransform, as_size, test_transform
from patchloom_runtime.images.geometry import Geometry, Size, scaled_size
from patchloom_runtime.images.samples import EXTENT, UNLABELED, Sample

DEFAULT_BUDGET_BYTES = 4 << 30
GPU_SHARE = 0.25  # of a GPU's memory for decoded images, if that is more than the default
# Crops are not antialiased on the device, which would be visible for images much larger than the crop.
LARGEST_REDUCTION = 1.5
DECODED_AT_ONCE = 256
LONGEST_SIDE = 3  # of images on canvases, in sides of the crop
MARGIN = 2  # pixels around an image on its canvas that interpolation reads
RGB_BYTES = 3
# Values per batch up to which a captured graph is replayed; it keeps the memory of about twenty such batches in
# float32. In larger batches the work takes longer than the launches.
MOST_VALUES_REPLAYED = 16 << 20
# Values that a CPU augments at once; larger batches are made in parts, because their float32 copies would fill the
# memory.
MOST_VALUES_AT_ONCE = 16 << 20
BYTES_AUGMENTED = 32  # per value during augmentation: about eight copies in float32


def fits_in_memory(
    images: int, size: Size, budget_bytes: int = DEFAULT_BUDGET_BYTES, pixel_bytes: int = RGB_BYTES
) -> bool:
    """Return whether `images` images of (height, width) take at most `budget_bytes`."""
    return images * size[0] * size[1] * pixel_bytes <= budget_bytes


def pixel_bytes(dataset: ImageSet) -> int:
    """Return the stored bytes per pixel: colors and the layers that are read."""
    return RGB_BYTES + sum(np.dtype(kind.dtype).itemsize for kind in dataset.layers.values())


@dataclass(frozen=True)
class Store:
    """A whole dataset, decoded."""

    pixels: Tensor  # (N, h, w, 3) uint8
    labels: Tensor  # (N,) int64
    broken: dict[int, str] = field(default_factory=dict)  # unreadable images, which were replaced, and why
    layers: dict[str, Tensor] = field(default_factory=dict)  # each (N, h, w)
    outside: dict[str, int] = field(default_factory=dict)  # fill value of each layer outside the image
    boxes: Tensor | None = None  # (N, most per image, 6), NaN for missing boxes
    targets: Tensor | None = None  # (N, K) float32, NaN for unknown values
    sizes: Tensor | None = None  # (N, 2) height and width of images that do not fill their canvas

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the names of everything except images and labels."""
        return (*self.layers, *(["boxes"] if self.boxes is not None else []))


def decode_all(
    dataset: ImageSet,
    transform: Transform,
    device: torch.device | str,
    *,
    workers: int = 0,
    skip_broken: bool = False,
    timeout_s: float = WORKER_TIMEOUT_S,
    budget_bytes: float = math.inf,
) -> Store:
    """Read every image once with a deterministic transform: `test_transform`, `BeforeCrop` or `OnCanvas`.

    Canvases are cut to the largest image. Raises UnevenSizesError if they take more than `budget_bytes`.
    """
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
    labels, targets, boxes = torch.empty(len(dataset), dtype=torch.int64), [], []
    kept: dict[str, Tensor] = {}
    done = 0
    with closing(loader):
        for batch in loader.epoch(0):
            rows = slice(done, done + len(batch))
            parts: dict[str, Any] = {"image": batch.images.permute(0, 2, 3, 1)} | batch.parts
            labels[rows] = batch.labels
            targets += [] if batch.targets is None else [batch.targets]
            used = [int(side) + MARGIN for side in parts[EXTENT][:, :2].amax(0)] if EXTENT in parts else [None, None]
            for name, part in parts.items():
                if isinstance(part, Boxes):
                    boxes.append(part)
                    continue
                part = part[:, : used[0], : used[1]] if part.ndim > 2 else part  # images and layers
                kept[name] = _with_rows(kept.get(name), rows, part, len(dataset), device, budget_bytes)
            done = rows.stop
    pixels, extents = kept.pop("image"), kept.pop(EXTENT, None)
    sizes = None if extents is None else extents[:, :2].long()
    outside = {name: kind.outside for name, kind in dataset.layers.items()}
    all_boxes = padded(boxes).to(device) if boxes else None
    all_targets = torch.cat(targets).to(device) if targets else None
    return Store(pixels, labels.to(device), loader.broken, kept, outside, all_boxes, all_targets, sizes)


def _with_rows(
    kept: Tensor | None, rows: slice, part: Tensor, count: int, device: torch.device | str, budget_bytes: float
) -> Tensor:
    """Write some of `count` rows of an array, which is made larger if these rows are."""
    shape = tuple(part.shape[1:]) if kept is None else tuple(map(max, kept.shape[1:], part.shape[1:]))
    if kept is None or tuple(kept.shape[1:]) != shape:
        if count * math.prod(shape) * part.element_size() > budget_bytes:
            raise UnevenSizesError(f"decoded on canvases they take more than {budget_bytes / 2**20:,.0f} MiB")
        larger = torch.zeros((count, *shape), dtype=part.dtype, device=device)
        if kept is not None:
            larger[: rows.start, : kept.shape[1], : kept.shape[2]] = kept[: rows.start]
        kept = larger
    kept[(rows, *(slice(length) for length in part.shape[1:]))] = part.to(device)
    return kept


class UnevenSizesError(DataError):
    """Raised if an image's size differs from the others."""


@dataclass(frozen=True)
class BeforeCrop(ImageTransform):
    """The deterministic resizing before a random crop, to one size for every image of a dataset."""

    crop: str
    crop_ratio: float
    crop_size: Size
    image_size: Size  # of the result

    @classmethod
    def like(cls, first: Image.Image, augment: AugmentPart, crop_size: Size) -> "BeforeCrop":
        """Create the transform for a dataset whose images are like `first`."""
        crop = augment.crop, augment.crop_ratio, crop_size
        return cls(*crop, cls._size(first.size, *crop))

    def geometry(self, sample: Sample, rng: random.Random) -> Geometry:  # noqa: ARG002
        """Return the whole image."""
        if self._size(sample.size, self.crop, self.crop_ratio, self.crop_size) != self.image_size:
            raise UnevenSizesError("the images differ in size")
        return self._whole(sample.size)

    def reduction(self, size: tuple[int, int]) -> int:
        return self._whole(size).reduction

    def _whole(self, size: tuple[int, int]) -> Geometry:
        return Geometry((0, 0, *size), self.image_size, self.image_size)

    @staticmethod
    def _size(image: tuple[int, int], crop: str, crop_ratio: float, crop_size: Size) -> Size:
        if crop == "random_resized":
            return image[1], image[0]
        return size_before_window(image, crop, crop_size, crop_ratio)


@dataclass(frozen=True)
class OnCanvas(ImageTransform):
    """The deterministic resizing before a random crop, of images of any size, at the top left of a canvas.

    Images that are much larger than the crop are reduced, with antialiasing. What an image leaves of its canvas is its
    reflection, which crops see only by the width of the interpolation.
    """

    crop: str
    crop_ratio: float
    crop_size: Size

    @property
    def image_size(self) -> Size:  # type: ignore[override]
        """Return the size of the canvas."""
        height, width = self.crop_size
        return int(LONGEST_SIDE * height), int(LONGEST_SIDE * width)

    def geometry(self, sample: Sample, rng: random.Random) -> Geometry:  # noqa: ARG002
        """Return the whole image."""
        size, canvas = sample.size, self.image_size
        scaled = self._scaled(size)
        if scaled[0] > canvas[0] or scaled[1] > canvas[1]:
            raise UnevenSizesError(
                f"an image of {size[1]}×{size[0]} is too long for a canvas of {canvas[0]}×{canvas[1]}"
            )
        return Geometry((0, 0, *size), scaled, canvas, reflect=True)

    def arrays(self, sample: Sample, rng: random.Random) -> dict[str, np.ndarray]:
        """Return the canvas with its parts and the extent of the image."""
        geometry = self.geometry(sample, rng)
        width, height = sample.size
        return self.applied(geometry, sample, rng) | {EXTENT: np.array([*geometry.scaled, height, width], np.int32)}

    def shapes(self, parts: Collection[str]) -> dict[str, tuple[int, ...]]:
        return super().shapes(parts) | {EXTENT: (EXTENT_VALUES,)}

    def reduction(self, size: tuple[int, int]) -> int:
        return Geometry((0, 0, *size), self._scaled(size), self.image_size).reduction

    def _scaled(self, image: tuple[int, int]) -> Size:
        if self.crop != "random_resized":
            return size_before_window(image, self.crop, self.crop_size, self.crop_ratio)
        pixels = LARGEST_REDUCTION * LARGEST_REDUCTION * self.crop_size[0] * self.crop_size[1]
        scale = min(1.0, math.sqrt(pixels / (image[0] * image[1])))
        return scaled_size(
            image, min(scale, *(most / side for most, side in zip(self.image_size, image[::-1], strict=True)))
        )


class DeviceLoader:
    """A loader of a decoded dataset in augmented batches; without `augment`, images are unchanged.

    Augmentation follows from (seed, epoch, step, view, position in the batch): a run resumes exactly, and several
    processes see the images of one. The numbers come from the device's own generator, so a CPU and a GPU draw
    differently. With several `views` a batch has V·B images: all images in the first view, then in the second. Made
    together, they take no more kernel launches than one, which bound the time for small images.
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
        sampling: ClassSampling | None = None,
    ) -> None:
        if augment:
            check_policy(augment, store.parts)
        if augment and augment.policy not in BATCHED_POLICIES:
            raise UsageError(
                f"augment.policy={augment.policy} works on one image at a time, not on whole batches; "
                f"those that do: {', '.join(BATCHED_POLICIES)}. Use Loader with workers for the others."
            )
        self.plan = SamplingPlan(
            len(store.labels), batch_size, seed, shuffle, repeats, drop_last, rank, world, sampling
        )
        self.broken = store.broken
        self._store = store
        self._augment = augment
        self._size = as_size(image_size)
        self._views = views
        self._replay: Callable[..., tuple[Tensor, ...]] | None = None
        self._rows: dict[int, Tensor] = {}  # batch size → this process's rows, sent to the device once

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of batches per epoch."""
        return self.plan.steps_per_epoch

    def epoch(self, epoch: int, start_step: int = 0, offset: int = 0) -> Iterator[ImageBatch]:
        """Yield the batches of `epoch` from `start_step` on, moved by `offset` samples, on the store's device."""
        device = self._store.labels.device
        # One transfer per epoch instead of one per step.
        order = torch.from_numpy(self.plan.order(epoch)).to(device, non_blocking=True)
        for step in range(start_step, self.steps_per_epoch):
            start = step * self.plan.batch_size + offset
            index = order[start : start + self.plan.batch_size]
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
            targets = None if self._store.targets is None else self._store.targets[index]
            yield ImageBatch(images, self._store.labels[index], index, self._named(parts), targets)

    def sample(self, count: int) -> ImageBatch:
        """Return the first `count` images of the run, on which the cost of a step is measured."""
        plan, count = self.plan, min(count, self.plan.images)
        few = DeviceLoader(self._store, self._augment, self._size, batch_size=count, seed=plan.seed, views=self._views)
        return next(few.epoch(0))

    workers = 0

    def preparing_bytes(self) -> int:
        """Return the bytes needed to prepare batches: the values augmented at once, and three batches of pixels."""
        values = self.plan.batch_size // self.plan.world * len(self._views) * 3 * self._size[0] * self._size[1]
        return min(values, MOST_VALUES_AT_ONCE) * BYTES_AUGMENTED + 3 * values

    def showing(self, views: Sequence[int], augment: AugmentPart, image_size: int | Size) -> "DeviceLoader":
        """Return a loader of the same images in the same order in other views, with their own random numbers."""
        plan = self.plan
        if augment.crop != "random_resized" and as_size(image_size) != self._size:
            raise UsageError(
                f"augment.crop {augment.crop} cannot crop an image of {self._size} to {as_size(image_size)}; "
                "use random_resized for views of several sizes"
            )
        return DeviceLoader(
            self._store,
            augment,
            image_size,
            batch_size=plan.batch_size,
            seed=plan.seed,
            shuffle=plan.shuffle,
            repeats=plan.repeats,
            rank=plan.rank,
            world=plan.world,
            drop_last=plan.drop_last,
            views=views,
            sampling=plan.sampling,
        )

    def _augmented(self, index: Tensor, values: Tensor, field: Tensor) -> tuple[Tensor, ...]:
        """Augment the images at `index` and their parts; whole batches of small images in one launch."""
        whole = len(index) == self.plan.batch_size // self.plan.world * len(self._views)
        small = len(index) * 3 * self._size[0] * self._size[1] <= MOST_VALUES_REPLAYED
        if not (index.is_cuda and whole and small):
            at_once = (
                len(index) if index.is_cuda else max(1, MOST_VALUES_AT_ONCE // (3 * self._size[0] * self._size[1]))
            )
            if len(index) <= at_once:
                return self._augment_each(index, values, field)
            parts = zip(index.split(at_once), values.split(at_once), strict=True)
            results = [self._augment_each(rows, numbers, field) for rows, numbers in parts]
            return tuple(torch.cat(some) for some in zip(*results, strict=True))
        if self._replay is None:
            self._replay = capture(self._augment_each, index, values, field)
        return self._replay(index, values, field)

    def _augment_each(self, index: Tensor, values: Tensor, field: Tensor) -> tuple[Tensor, ...]:
        """Return images, then the parts in the order of the store."""
        assert self._augment
        store = self._store
        sizes, draws = None if store.sizes is None else store.sizes[index], Draws(values, field)
        images, crops = augment_batch(store.pixels, index, self._augment, self._size, draws, sizes)
        layers = [crops.layer(numbers, index, store.outside[name]) for name, numbers in store.layers.items()]
        return images, *layers, *([] if store.boxes is None else [crops.boxes(store.boxes[index])])

    def _stored_parts(self, index: Tensor) -> list[Tensor]:
        layers = [numbers[index] for numbers in self._store.layers.values()]
        return layers if self._store.boxes is None else [*layers, self._store.boxes[index]]

    def _named(self, parts: Sequence[Tensor]) -> Parts:
        """Return the parts, given in the order of the store, by name."""
        named = zip(self._store.parts, parts, strict=True)
        return {name: ragged(part) if name == "boxes" else part for name, part in named}

    def _own_rows(self, size: int) -> Tensor:
        if size not in self._rows:
            rows = torch.from_numpy(rank_positions(size, self.plan.rank, self.plan.world))
            self._rows[size] = rows.to(self._store.labels.device)
        return self._rows[size]

    def close(self) -> None:
        """Do nothing: there are no workers."""


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
    stores: dict[Any, Any] | None = None,
    sampling: ClassSampling | None = None,
    transform: Callable[..., Any] | None = None,
    views: Transform | None = None,
) -> tuple[Loader | DeviceLoader, str]:
    """Return a recipe's training loader, on the device if possible, else with workers; and the reason.

    `transform` is a user's function of one image (`own_transform`) in the place of the recipe's augmentation, `views`
    what workers do instead of the recipe's augmentation.
    Decoded datasets are kept in `stores`, if passed, and reused when the loader is created again.
    """
    size, device = as_size(image_size), _keeping_device(device)
    check_policy(augment, dataset.parts)
    first, _, _ = read_or_next(dataset, 0, skip_broken)
    budget_bytes = _budget(device, budget_bytes)
    own = OwnTransform(transform, size) if transform is not None else None
    if own is not None:
        own.shapes(dataset.parts)
        own.arrays(first, random.Random(seed))  # fails now rather than in a worker
    stores = {} if stores is None else stores
    order: dict[str, Any] = {"batch_size": batch_size, "seed": seed, "repeats": augment.repeats}
    order |= {"rank": rank, "world": world, "sampling": sampling}
    reading: dict[str, Any] = {"workers": workers, "skip_broken": skip_broken, "timeout_s": timeout_s}
    reason = "transform works on one image at a time" if own else ""
    for before_crop in () if own else _before_crops(first.image, augment, size, device):
        if reason := _against_device(dataset, augment, before_crop, budget_bytes):
            continue
        try:
            known = stores.get(before_crop)
            if known is None or set(known.parts) != set(dataset.parts):
                stores[before_crop] = decode_all(dataset, before_crop, device, budget_bytes=budget_bytes, **reading)
        except UnevenSizesError as error:
            reason = str(error)
            continue
        store = stores[before_crop]
        mib = (store.pixels.nbytes + sum(numbers.nbytes for numbers in store.layers.values())) / 2**20
        note = f"images stay decoded on {device} ({mib:,.0f} MiB) and are augmented there"
        return DeviceLoader(store, augment, size, **order), note
    by_image = own or views or train_transform(augment, size)
    memory, how = sample_memory(dataset, by_image, stores, workers=workers, world=world)
    loader = Loader(dataset, by_image, pin=device.type == "cuda", memory=memory, **order, **reading)
    return loader, made_by_image(memory, how, workers, reason)


def _keeping_device(device: torch.device | str) -> torch.device:
    """Return where decoded images are kept and augmented: `device`, or the CPU for MPS, which lacks float64."""
    return torch.device("cpu" if torch.device(device).type == "mps" else device)


def made_by_image(memory: SampleMemory | None, how: str, workers: int, reason: str = "") -> str:
    """Return a note on how a loader that augments images one by one makes its batches, and why."""
    once = "once" if memory else "every time"
    return f"images are decoded {once} ({how}) and augmented by {_who(workers)}" + (f": {reason}" if reason else "")


def make_evaluation_loader(
    dataset: ImageSet,
    image_size: int | tuple[int, int],
    crop_ratio: float,
    interpolation: str = "bicubic",
    resize: str = "short_side",
    *,
    batch_size: int,
    device: torch.device | str,
    workers: int = 0,
    rank: int = 0,
    world: int = 1,
    skip_broken: bool = True,
    timeout_s: float = WORKER_TIMEOUT_S,
) -> Loader | DeviceLoader:
    """Return a loader of every image once, in order; kept decoded on the device if it fits."""
    transform, device = test_transform(image_size, crop_ratio, interpolation, resize), _keeping_device(device)
    shared: dict[str, Any] = {
        "batch_size": batch_size,
        "shuffle": False,
        "drop_last": False,
        "rank": rank,
        "world": world,
    }
    if fits_in_memory(len(dataset), transform.image_size):
        store = decode_all(dataset, transform, device, workers=workers, skip_broken=skip_broken, timeout_s=timeout_s)
        if store.broken:  # a replacement must not count
            store.labels[torch.tensor(list(store.broken))] = UNLABELED
            if store.targets is not None:
                store.targets[torch.tensor(list(store.broken))] = torch.nan
        return DeviceLoader(store, None, transform.image_size, **shared)
    shared |= {"workers": workers, "skip_broken": skip_broken, "timeout_s": timeout_s}
    return Loader(dataset, transform, pin=torch.device(device).type == "cuda", **shared)


def _who(workers: int) -> str:
    if not workers:
        return "the main process"
    return f"{workers} workers" + (f" (more than the {cores()} cores: likely no faster)" if workers > cores() else "")


def _budget(device: torch.device, default: int) -> int:
    """Return the bytes for decoded images: a share of a GPU's memory, at most half of what a CPU has available."""
    if device.type == "cuda":
        return max(default, int(GPU_SHARE * torch.cuda.get_device_properties(device).total_memory))
    available = available_bytes()
    return default if available is None else min(default, available // 2)


def _before_crops(
    first: Image.Image, augment: AugmentPart, size: Size, device: torch.device
) -> Iterator[BeforeCrop | OnCanvas]:
    """Yield the ways to keep decoded images, best first."""
    yield BeforeCrop.like(first, augment, size)
    if device.type == "cuda":
        yield OnCanvas(augment.crop, augment.crop_ratio, size)


def _against_device(
    dataset: ImageSet, augment: AugmentPart, before_crop: BeforeCrop | OnCanvas, budget_bytes: int
) -> str:
    """Return why a dataset cannot be kept and augmented on the device; "" if it can."""
    (height, width), size = before_crop.image_size, before_crop.crop_size
    known = isinstance(before_crop, BeforeCrop)  # the size of the canvases is known after decoding
    if augment.crop == "scaled":
        return "augment.crop=scaled works on one image at a time, not on whole batches"
    if augment.policy not in BATCHED_POLICIES:
        return f"augment.policy={augment.policy} works on one image at a time, not on whole batches"
    if known and not fits_in_memory(len(dataset), (height, width), budget_bytes, pixel_bytes(dataset)):
        needed, allowed = len(dataset) * height * width * pixel_bytes(dataset) / 2**20, budget_bytes / 2**20
        return f"decoded they take {needed:,.0f} MiB, more than the {allowed:,.0f} MiB set aside"
    too_large = max(height / size[0], width / size[1]) > LARGEST_REDUCTION
    if known and augment.crop == "random_resized" and too_large:
        return f"images of {height}×{width} are much larger than their crops, so they are resized one by one"
    return ""
