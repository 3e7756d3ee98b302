"""Batches from worker processes, independent of their number, startable at any step.

`SamplingPlan` defines which image is used when and from which seed; workers read it, augment it and write it into
shared memory; the main process joins their parts into one batch. Apart from that, only numbers and ragged values
(boxes) are sent between processes.
"""

import random
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from patchloom.data.batches.ragged import Boxes, Parts
from patchloom.data.batches.sample_memory import SampleMemory, reduction_of
from patchloom.data.batches.sampler import ClassSampling, SamplingPlan
from patchloom.data.batches.workers import Workers, keep_working, no_core_warning, watched, workers_started
from patchloom.data.datasets import ImageSet, LabeledImages
from patchloom.data.images.image_batch import ImageBatch
from patchloom_runtime.errors import DataError, ResourceError
from patchloom_runtime.images.samples import EXTENT, Sample

# Parts each worker may be ahead of the main process; every part is 1/workers of a batch.
PREFETCHED_PARTS = 2
# Subsequent images tried in place of an unreadable one, before the dataset counts as unreadable.
REPLACEMENTS_TRIED = 20
# Images of a part that are read at once from where that is faster, such as a bucket.
_READ_AT_ONCE = 64
# Without an image from a worker: longer than a slow disk takes, shorter than a night.
WORKER_TIMEOUT_S = 120.0
_TORCH: dict[type[np.integer], torch.dtype] = {np.uint8: torch.uint8, np.int16: torch.int16, np.int32: torch.int32}


class Transform(Protocol):
    """A transform from a sample and its random numbers to rows of a batch's arrays."""

    def shapes(self, parts: Collection[str]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the arrays of fixed size: image, (H, W, 3), and each layer among `parts`."""

    def arrays(self, sample: Sample, rng: random.Random) -> dict[str, np.ndarray]:
        """Return the image, uint8, and its parts; boxes are those of each view in turn."""


class Loader:
    """A loader of an `ImageSet` in batches, with the `parts` that it reads.

    `batch_size` counts all processes; this one yields its `rank`'s share of each batch. One epoch is iterated at a
    time. With `skip_broken`, an unreadable image is replaced by the next readable one and listed in `broken`; otherwise
    its `DataError` ends the epoch. A worker that dies, or returns nothing for `timeout_s`, raises a `ResourceError`
    that names it. With a `memory`, every image is decoded once; batches are the same without it.
    """

    def __init__(
        self,
        dataset: ImageSet,
        transform: Transform,
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        repeats: int = 1,
        workers: int = 0,
        rank: int = 0,
        world: int = 1,
        drop_last: bool = True,
        pin: bool = False,
        skip_broken: bool = False,
        timeout_s: float = WORKER_TIMEOUT_S,
        sampling: ClassSampling | None = None,
        memory: SampleMemory | None = None,
    ) -> None:
        self.plan = SamplingPlan(len(dataset), batch_size, seed, shuffle, repeats, drop_last, rank, world, sampling)
        self.broken: dict[int, str] = {}
        self._labels = torch.from_numpy(np.asarray(dataset.labels, np.int64))
        self._targets = torch.from_numpy(dataset.targets.values) if dataset.targets is not None else None
        self._pin = pin
        self._parts = max(1, workers)
        self._tasks = _Tasks(self._parts, slots=PREFETCHED_PARTS * workers + 1)
        part_size = -(-batch_size // world // self._parts)
        dtypes = {"image": torch.uint8, EXTENT: torch.int32} | {
            name: _TORCH[kind.dtype] for name, kind in dataset.layers.items()
        }
        self._shared = {
            name: _shared_memory((self._tasks.slots, part_size, *shape), dtypes[name], workers)
            for name, shape in transform.shapes(dataset.parts).items()
        }
        images = _WorkerDataset(dataset, transform, self.plan, self._parts, self._shared, skip_broken, memory)
        self._memory = memory
        self._timeout_s = timeout_s
        with no_core_warning():
            self._pool: DataLoader = DataLoader(
                images,
                batch_size=None,
                sampler=self._tasks,
                collate_fn=_identity,
                num_workers=workers,
                prefetch_factor=PREFETCHED_PARTS if workers else None,
                persistent_workers=workers > 0,
                worker_init_fn=_start_worker,
                timeout=timeout_s if workers else 0,
            )

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of batches per epoch."""
        return self.plan.steps_per_epoch

    def epoch(self, epoch: int, start_step: int = 0, offset: int = 0) -> Iterator[ImageBatch]:
        """Yield the batches of `epoch` from `start_step` on, moved by `offset` samples."""
        self._tasks.begin(epoch, start_step, self.steps_per_epoch, offset)
        filled = iter(self._filled_parts())
        for step in range(start_step, self.steps_per_epoch):
            views = self.plan.views(epoch, step, offset)
            index = torch.from_numpy(views.index.copy())
            buffers = {
                name: torch.empty((len(index), *shared.shape[2:]), dtype=shared.dtype, pin_memory=self._pin)
                for name, shared in self._shared.items()
            }
            ragged: dict[str, list[np.ndarray]] = {}
            for rows in _split(len(index), self._parts):
                part = next(filled)
                for name, buffer in buffers.items():
                    buffer[rows] = self._shared[name][part.slot, : rows.stop - rows.start]
                for name, arrays in part.ragged.items():
                    ragged.setdefault(name, []).extend(arrays)
                for row, (used, message) in part.replaced.items():
                    self.broken[int(index[rows][row])] = message
                    index[rows][row] = used
            images = buffers.pop("image").permute(0, 3, 1, 2)
            parts: Parts = {**buffers, **{name: Boxes.of(arrays) for name, arrays in ragged.items()}}
            targets = None if self._targets is None else self._targets[index]
            yield ImageBatch(images, self._labels[index], index, parts, targets)

    def sample(self, count: int) -> ImageBatch:
        """Return the first `count` images of the run, made in this process; the cost of a step is measured on them."""
        images = self._pool.dataset
        assert isinstance(images, _WorkerDataset)
        count, seed = min(count, self.plan.images), self.plan.seed
        few = Loader(images.dataset, images.transform, batch_size=count, seed=seed, skip_broken=images.skip_broken)
        with closing(few.epoch(0)) as batches:  # type: ignore[type-var]
            return next(batches)

    @property
    def workers(self) -> int:
        """Return the number of worker processes."""
        return self._pool.num_workers

    def preparing_bytes(self) -> int:
        """Return the memory for preparing batches: the workers' shared memory, the current batch, and the next."""
        image = sum(shared[0, 0].nbytes for shared in self._shared.values())
        batch = self.plan.batch_size // self.plan.world * image
        decoded = self._memory.left if self._memory else 0
        return sum(shared.nbytes for shared in self._shared.values()) + 2 * batch + decoded

    def close(self) -> None:
        """End the workers now instead of at garbage collection."""
        Workers(self._pool._iterator).end()
        self._pool._iterator = None

    def _filled_parts(self) -> Iterator["_Filled"]:
        try:
            # Later epochs start no processes but wait for the existing ones, and a signal must be able to end that
            # wait.
            with workers_started() if self._pool._iterator is None else nullcontext(), no_core_warning():
                parts = watched(iter(self._pool))
            for part in parts:
                if isinstance(part, DataError | ResourceError):
                    raise part
                yield part
        except GeneratorExit:
            raise  # the epoch is abandoned: the workers wait for the next
        except BaseException as error:
            workers = Workers(self._pool._iterator)
            reason = workers.what_happened(self._timeout_s) if str(error).startswith("DataLoader ") else ""
            workers.kill()
            self.close()
            if reason:
                raise ResourceError(reason) from error
            raise


@dataclass(frozen=True)
class _Task:
    epoch: int
    step: int
    part: int
    slot: int
    offset: int


class _Tasks:
    """The parts of one epoch in order, each with its slot of shared memory.

    The pool hands out a task only while fewer than `slots` − 1 are unread, so a slot is free again when its turn comes.
    """

    def __init__(self, parts: int, slots: int) -> None:
        self.slots = slots
        self._parts = parts
        self._span = (0, 0, 0, 0)

    def begin(self, epoch: int, start_step: int, end_step: int, offset: int) -> None:
        self._span = (epoch, start_step, end_step, offset)

    def __iter__(self) -> Iterator[_Task]:
        epoch, start, end, offset = self._span
        for number in range((end - start) * self._parts):
            step, part = divmod(number, self._parts)
            yield _Task(epoch, start + step, part, number % self.slots, offset)


@dataclass(frozen=True)
class _Filled:
    """A part of a step as returned by a worker."""

    slot: int
    replaced: dict[int, tuple[int, str]]  # row → the image used instead, and the error
    ragged: dict[str, list[np.ndarray]]  # name → one array per row


@dataclass(frozen=True)
class _WorkerDataset(Dataset):
    """The work of a worker: fill a slot of `shared` with one part of a step."""

    dataset: ImageSet
    transform: Transform
    plan: SamplingPlan
    parts: int
    shared: dict[str, Tensor]  # each (slots, images of a part, …)
    skip_broken: bool
    memory: SampleMemory | None = None

    def __getitem__(self, task: _Task) -> _Filled | DataError | ResourceError:
        views = self.plan.views(task.epoch, task.step, task.offset)
        rows = _split(len(views.index), self.parts)[task.part]
        out = {name: shared[task.slot].numpy() for name, shared in self.shared.items()}
        filled = _Filled(task.slot, {}, {})
        reduction = reduction_of(self.transform)
        try:
            for row, (index, seed) in enumerate(zip(views.index[rows], views.seed[rows], strict=True)):
                if row % _READ_AT_ONCE == 0 and isinstance(self.dataset, LabeledImages):
                    self.dataset.prefetch(self._absent(views.index[rows][row : row + _READ_AT_ONCE]))
                sample, used, message = read_or_next(self.dataset, int(index), self.skip_broken, reduction, self.memory)
                for name, values in self.transform.arrays(sample, random.Random(int(seed))).items():
                    if name in out:
                        out[name][row] = values
                    else:
                        filled.ragged.setdefault(name, []).append(values)
                if message:
                    filled.replaced[row] = (used, message)
        except (DataError, ResourceError) as error:
            return error
        return filled

    def _absent(self, indices: np.ndarray) -> list[int]:
        """Return those of these images that are not in the memory of decoded ones, each once."""
        return [i for i in dict.fromkeys(indices.tolist()) if not (self.memory and i in self.memory)]


def read_or_next(
    dataset: ImageSet,
    index: int,
    skip_broken: bool,
    reduction: Callable[[tuple[int, int]], int] | None = None,
    memory: SampleMemory | None = None,
) -> tuple[Sample, int, str]:
    """Return the sample, its index, and the error of the requested one ("" if none).

    Samples are taken from `memory`, if passed, and stored there.
    """
    message = ""
    for attempt in range(REPLACEMENTS_TRIED):
        used = (index + attempt) % len(dataset)
        try:
            stored = memory.get(used) if memory else None
            sample = stored or dataset.sample(used, reduction)
        except DataError as error:
            if not skip_broken:
                raise
            message = message or str(error)
            continue
        if memory and not stored:
            memory.put(used, sample)
        return sample, used, message
    raise DataError(f"{REPLACEMENTS_TRIED} images in a row cannot be read. The first: {message}")


def _shared_memory(shape: tuple[int, ...], dtype: torch.dtype, workers: int) -> Tensor:
    memory = torch.empty(shape, dtype=dtype)
    if not workers:
        return memory
    try:
        return memory.share_memory_()
    except RuntimeError as error:
        raise ResourceError(
            f"{memory.nbytes / 2**20:,.0f} MiB of shared memory for batches cannot be allocated: {error}. "
            "Use fewer workers or a smaller batch, or give the container more (docker: --shm-size)."
        ) from error


def _split(size: int, parts: int) -> list[slice]:
    part = -(-size // parts)
    return [slice(min(k * part, size), min((k + 1) * part, size)) for k in range(parts)]


def _identity(filled: Any) -> Any:
    return filled


def _start_worker(worker: int) -> None:  # noqa: ARG001
    # By default Pillow frees an image's memory at once; allocating it again costs a tenth of the decoding.
    Image.core.set_blocks_max(32)
    keep_working()
