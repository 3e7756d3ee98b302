"""Samples of a dataset in memory: each is decoded once, by the worker that reads it first, and augmented from there.

The memory is anonymous and shared with the processes that are forked from this one. It is not in /dev/shm, which
containers limit to 64 MiB by default, and counts only once it is written. A stored sample equals a decoded one byte for
byte, so a run does not depend on how much memory there is.
"""

import mmap
import multiprocessing
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any

import numpy as np
from PIL import Image

from patchloom.data.augmentation.augment import TrainTransform
from patchloom.data.datasets import ImageSet
from patchloom.machine import available_bytes
from patchloom_runtime.errors import DataError
from patchloom_runtime.images.evaluation_transform import ImageTransform
from patchloom_runtime.images.samples import BOX_VALUES, Layer, Sample

MEMORY_SHARE = 0.5  # of the available memory; the rest is for training
EXAMPLES = 16  # images that are decoded to estimate the size of all
MARGIN = 1.25  # memory reserved per estimated byte
MIB = 2**20
_FACTS = 6  # per sample: start, width, height, original width and height, number of boxes


class SampleMemory:
    """Decoded samples of one dataset, up to `capacity` bytes; samples beyond that are not stored."""

    def __init__(self, dataset: ImageSet, capacity: int) -> None:
        self.capacity = capacity
        self._layers = dataset.layers
        self._has_boxes = "boxes" in dataset.parts
        self._bytes = mmap.mmap(-1, max(1, capacity))
        numbers = np.frombuffer(mmap.mmap(-1, (len(dataset) + 1) * _FACTS * 8), np.int64).reshape(-1, _FACTS)
        self._facts, self._used = numbers[:-1], numbers[-1]  # a width of 0: not stored; `_used[0]` counts bytes
        self._lock = multiprocessing.Lock()  # also orders what processes read and write

    @property
    def left(self) -> int:
        """Return the bytes that are not written yet."""
        return self.capacity - int(self._used[0])

    def __contains__(self, index: int) -> bool:
        with self._lock:
            return bool(self._facts[index, 1])  # its width

    def get(self, index: int) -> Sample | None:
        """Return a stored sample, or None."""
        with self._lock:
            start, width, height, whole_width, whole_height, boxes = self._facts[index].tolist()
        if not width:
            return None
        pixels = width * height
        image = Image.frombytes("RGB", (width, height), memoryview(self._bytes)[start : start + 3 * pixels])
        start += 3 * pixels
        layers = {}
        for name, kind in self._layers.items():
            numbers = np.frombuffer(self._bytes, kind.dtype, pixels, start).reshape(height, width)
            numbers.flags.writeable = False
            layers[name] = Layer(numbers, kind.outside)
            start += numbers.nbytes
        rows = None
        if self._has_boxes:
            rows = np.frombuffer(self._bytes, np.float32, boxes * BOX_VALUES, start).reshape(-1, BOX_VALUES).copy()
        whole = (whole_width, whole_height)
        return Sample(image, layers, rows, None if whole == (width, height) else whole)

    def put(self, index: int, sample: Sample) -> None:
        """Store a sample if there is room for it."""
        layers = [sample.layers[name].numbers.astype(kind.dtype, copy=False) for name, kind in self._layers.items()]
        parts = [np.asarray(sample.image), *layers]
        parts += [] if sample.boxes is None else [sample.boxes]
        size = sum(part.nbytes for part in parts)
        with self._lock:
            start = int(self._used[0])
            if start + size > self.capacity or self._facts[index, 1]:
                return
            self._used[0] += size
        end = start
        for part in parts:
            begin, end = end, end + part.nbytes
            self._bytes[begin:end] = part.tobytes()
        boxes = 0 if sample.boxes is None else len(sample.boxes)
        with self._lock:
            self._facts[index] = start, *sample.image.size, *sample.size, boxes


def sample_memory(
    dataset: ImageSet, transform: Any, stores: dict[Any, Any], *, workers: int, world: int
) -> tuple[SampleMemory | None, str]:
    """Return the memory for the samples that a transform crops, or None; and the reason.

    A memory in `stores` is reused if its samples are decoded in the same way.
    """
    key = _key(dataset, transform)
    if key not in stores:
        if workers and multiprocessing.get_start_method() != "fork":
            return None, "workers that are not forked cannot share them"
        available = available_bytes()
        allowed = int(MEMORY_SHARE * (available or 0) / world)
        needed = decoded_bytes(dataset, reduction_of(transform))
        sizes = f"{needed / MIB:,.0f} MiB of {allowed / MIB:,.0f} MiB"
        if needed > allowed:
            return None, f"decoded they do not fit in memory: {sizes}"
        try:
            stores[key] = SampleMemory(dataset, min(allowed, int(MARGIN * needed))), f"they fit in memory: {sizes}"
        except OSError as error:
            return None, f"{sizes} of memory cannot be reserved ({error})"
    return stores[key]


def reduction_of(transform: Any) -> Callable[[tuple[int, int]], int] | None:
    """Return the function from an image's size to the factor by which it is decoded smaller; None for 1."""
    return transform.reduction if isinstance(transform, ImageTransform) else None


def decoded_bytes(dataset: ImageSet, reduction: Callable[[tuple[int, int]], int] | None) -> int:
    """Estimate the bytes of all samples from a few that are spread over the dataset."""
    count = min(EXAMPLES, len(dataset))
    sizes = []
    for number in range(count):
        with suppress(DataError):
            sample = dataset.sample(number * len(dataset) // count, reduction)
            width, height = sample.image.size
            layers = sum(layer.numbers.nbytes for layer in sample.layers.values())
            sizes.append(3 * width * height + layers + (0 if sample.boxes is None else sample.boxes.nbytes))
    return int(np.mean(sizes) * len(dataset)) if sizes else 0


def _key(dataset: ImageSet, transform: Any) -> Hashable:
    if not isinstance(transform, TrainTransform):
        return SampleMemory, dataset.parts
    augment = transform.augment
    return SampleMemory, dataset.parts, augment.crop, augment.crop_min_scale, augment.crop_ratio, transform.image_size
