"""Evaluation of a segmentation network on every labeled pixel, at the sizes of the images."""

import time as clock
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from patchloom.data.datasets import ImageSet, Progress
from patchloom.engine.distribution import Processes, unwrap
from patchloom.engine.run import Run
from patchloom.evaluation.calibration import LabeledLogits
from patchloom.evaluation.segmentation import SegmentationCounter, SegmentationReport, joined
from patchloom.machine import cores
from patchloom.objectives.segmentation import labeled
from patchloom.tasks.images.plan import ImagePlan
from patchloom.tasks.segmentation.pixel_classes import PixelClassifier, ViewSettings
from patchloom.tasks.task import Judge
from patchloom_runtime.errors import DataError

CACHE_BYTES = 2 << 30  # of images and masks that stay decoded between evaluations
READ_AHEAD = 32
TIMED_IMAGES = 8  # that are timed for --time
SAMPLED_IMAGES, SAMPLED_PIXELS = 64, 500  # of val, and of each of these, that a temperature is fitted to


@dataclass(frozen=True)
class Pixels:
    """One image and its mask, as they are in their files."""

    row: int
    picture: np.ndarray  # (H, W, 3) uint8
    mask: np.ndarray  # (H, W)


class PixelSet:
    """A dataset that is read in order, and only once if it fits in memory; unreadable samples are in `broken`."""

    def __init__(self, images: ImageSet, rows: Sequence[int] | None = None) -> None:
        self.images = images
        self.rows = list(range(len(images)) if rows is None else rows)
        self.broken: dict[int, str] = {}
        self._cached: list[Pixels] = []
        self._done = False

    def __iter__(self) -> Iterator[Pixels]:
        if self._done:
            yield from self._cached
            return
        cached: list[Pixels] = []
        taken, keeps = 0, True
        for pixels in self._read():
            taken += pixels.picture.nbytes + pixels.mask.nbytes
            keeps = keeps and taken <= CACHE_BYTES
            if keeps:
                cached.append(pixels)
            yield pixels
        self._cached, self._done = (cached, True) if keeps else ([], False)

    def _read(self) -> Iterator[Pixels]:
        """Read with a few threads, as decoding releases the GIL."""
        with ThreadPoolExecutor(min(8, cores())) as pool:
            rows = iter(self.rows)
            while some := list(islice(rows, READ_AHEAD)):
                yield from (pixels for pixels in pool.map(self._one, some) if pixels is not None)

    def _one(self, row: int) -> Pixels | None:
        try:
            sample = self.images.sample(row)
        except DataError as error:
            self.broken[row] = str(error)
            return None
        return Pixels(row, np.asarray(sample.image), sample.layers["mask"].numbers)


def evaluate_pixels(
    maps: PixelClassifier,
    pixels: PixelSet,
    classes: Sequence[str],
    *,
    ignored: int,
    numbers: np.ndarray | None = None,
    with_borders: bool = True,
    progress: Progress | None = None,
) -> SegmentationReport:
    """Evaluate a network; `numbers` maps the classes of the data to those of the model, −1 for none."""
    counting = SegmentationCounter(tuple(classes), with_borders)
    device = maps.device
    translated = None if numbers is None else torch.from_numpy(numbers).to(device)
    done = 0
    for some in _of_one_size(pixels, maps):
        images = torch.from_numpy(np.stack([each.picture for each in some])).to(device).permute(0, 3, 1, 2)
        truth = torch.from_numpy(np.stack([each.mask for each in some]).astype(np.int32)).to(device)
        known = labeled(truth, len(classes) if translated is None else len(translated), ignored)
        counting.add([each.row for each in some], _translated(known, translated), maps(images))
        done += len(some)
        if progress:
            progress(done, len(pixels.rows))
    return counting.report()


def sampled_logits(maps: PixelClassifier, images: ImageSet, classes: int, ignored: int) -> LabeledLogits:
    """Return the logits of random labeled pixels of images spread over a dataset."""
    rng = np.random.default_rng(0)
    rows = np.unique(np.linspace(0, len(images) - 1, min(SAMPLED_IMAGES, len(images))).round().astype(int))
    logits, labels, numbers = [np.empty((0, classes), np.float32)], [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for pixels in PixelSet(images, rows.tolist()):
        known = labeled(torch.from_numpy(pixels.mask.astype(np.int32)), classes, ignored).flatten().numpy()
        places = np.flatnonzero(known >= 0)
        places = rng.permutation(places)[:SAMPLED_PIXELS]
        image = torch.from_numpy(pixels.picture.copy()).permute(2, 0, 1).to(maps.device)
        logits.append(maps.logits_at(image, torch.from_numpy(places).to(maps.device)).cpu().numpy())
        labels.append(known[places].astype(np.int64))
        numbers.append(np.full(len(places), pixels.row))
    return LabeledLogits(np.concatenate(logits), np.concatenate(labels), np.concatenate(numbers))


def _translated(known: Tensor, numbers: Tensor | None) -> Tensor:
    return known if numbers is None else numbers[known.clamp(min=0)].where(known >= 0, -1)


def _of_one_size(pixels: Iterable[Pixels], maps: PixelClassifier) -> Iterator[list[Pixels]]:
    """Yield groups of consecutive images of one size, as many as the network takes per call."""
    waiting: list[Pixels] = []
    for each in pixels:
        shape = each.picture.shape
        full = waiting and len(waiting) >= maps.images_at_once((shape[0], shape[1]))
        if waiting and (full or waiting[0].picture.shape != shape):
            yield waiting
            waiting = []
        waiting.append(each)
    if waiting:
        yield waiting


class SegmentationJudge(Judge):
    """Evaluates the mIoU of val; each process evaluates a part of the images."""

    metric = "miou"

    def __init__(self, plan: ImagePlan, processes: Processes) -> None:
        self._plan, self._processes = plan, processes
        self.batch_size = plan.recipe.optim.batch_size
        self._sets: dict[str, PixelSet] = {}

    @property
    def broken(self) -> dict[Any, str]:
        """Return the rows of val that could not be read, with the reason."""
        return {("val", row): why for pixels in self._sets.values() for row, why in pixels.broken.items()}

    def __call__(self, model: nn.Module) -> Iterable[tuple[str, float]]:
        """Evaluate without boundary IoU, which is slow, each process a part of the images."""
        world, rank = self._processes.world, self._processes.rank
        rows = range(rank, len(self._plan.splits.val), world)
        if world == 1 or len(self._plan.splits.val) < world:
            return self._evaluate_set(model, "whole", None, with_borders=False)
        part = self._evaluate_set(model, "part", rows, with_borders=False)
        return joined(self._processes.gather(part))

    @torch.no_grad()
    def seconds(self, run: Run) -> tuple[float, float]:
        """Estimate the seconds per evaluation, and those of reading val if it stays in memory."""
        val, networks = self._plan.splits.val, 2 if run.average or run.averaged is not None else 1
        few = PixelSet(val, range(min(TIMED_IMAGES, len(val))))
        took = []
        with run.processes.autocast(), run.processes.rng_preserved():
            for _ in range(3):  # the first reads, the second warms up the device, the third is timed
                begun = clock.perf_counter()
                self._evaluate(run.model, few, with_borders=False)
                run.processes.synchronize()
                took.append((clock.perf_counter() - begun) / len(few.rows))
        size = sum(each.picture.nbytes + each.mask.nbytes for each in few) / max(1, len(few.rows))
        forward_s, reading_s = took[2] * len(val), max(0.0, took[0] - took[1]) * len(val)
        if size * len(val) <= CACHE_BYTES:
            return forward_s * networks, reading_s
        return (forward_s + reading_s) * networks, 0.0

    def report(self, model: nn.Module) -> SegmentationReport:
        """Evaluate all of val in this process, with boundary IoU."""
        return self._evaluate_set(model, "whole", None, with_borders=True)

    def _evaluate_set(
        self, model: nn.Module, name: str, rows: Sequence[int] | None, *, with_borders: bool
    ) -> SegmentationReport:
        if name not in self._sets:
            self._sets[name] = PixelSet(self._plan.splits.val, rows)
        return self._evaluate(model, self._sets[name], with_borders=with_borders)

    def _evaluate(self, model: nn.Module, pixels: PixelSet, *, with_borders: bool) -> SegmentationReport:
        plan: Any = self._plan
        maps = PixelClassifier(unwrap(model).eval(), ViewSettings.of(plan.recipe))  # type: ignore[arg-type]
        names = plan.splits.classes.names
        ignored = plan.splits.train.layers["mask"].outside
        return evaluate_pixels(maps, pixels, names, ignored=ignored, with_borders=with_borders)
