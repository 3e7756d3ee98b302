"""The order of images and the seeds of their augmentation.

Everything random about data follows from (seed, epoch, position in the epoch), never from a process's history. A run
can therefore stop at any step and resume, and neither the number of workers nor of processes changes an image.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch

from patchloom.data.labels.class_balance import class_counts, sampling_shares
from patchloom_runtime.errors import UsageError

# The authors of repeated augmentation cut an epoch to whole batches of 256, whatever the actual batch size.
REPEATED_EPOCH_MULTIPLE = 256
_VIEW_STREAM, _STEP_STREAM = 0, 1


def epoch_order(images: int, seed: int, epoch: int, shuffle: bool = True) -> np.ndarray:
    """Return the order of the images in one epoch, (images,) int64. Seed 0 gives the order of DeiT's sampler."""
    return torch.randperm(images, generator=_generator(seed, epoch)).numpy() if shuffle else np.arange(images)


def _generator(seed: int, epoch: int) -> torch.Generator:
    # torch's CPU generator reads 32 bits of its seed; modulo the largest prime below, no bit of ours is lost.
    return torch.Generator().manual_seed((seed * 1_000_003 + epoch) % (2**32 - 5))


@dataclass(frozen=True, eq=False)
class ClassSampling:
    """Sampling of an epoch by class: equally often, or by the square root of the images of a class.

    An epoch has as many samples as the dataset. Class k gets N·share_k of them in expectation, exactly, and in every
    epoch one of the two whole numbers around it. Within a class, the samples of any two images differ by one at most.
    """

    labels: np.ndarray  # (N,) int64; images without a label (negative) are not sampled
    sampling: Literal["sqrt", "balanced"]

    def order(self, seed: int, epoch: int) -> np.ndarray:
        """Return the order of the images in one epoch, (N,) int64, a function of seed and epoch alone."""
        generator, total = _generator(seed, epoch), len(self.labels)
        shuffled = torch.randperm(total, generator=generator).numpy()
        by_class = shuffled[np.argsort(self.labels[shuffled], kind="stable")]  # in random order within each class
        counts = class_counts(self.labels)
        firsts = total - counts.sum() + np.cumsum(counts) - counts  # of each class in `by_class`, after the unlabeled
        # Systematic sampling: one random offset rounds the ends of all classes.
        ends = np.cumsum(total * sampling_shares(counts, self.sampling))
        ends = np.floor(ends + torch.rand((), dtype=torch.float64, generator=generator).item()).astype(np.int64)
        ends[-1] = total  # against rounding of the sum
        draws = np.diff(ends, prepend=0)
        classes = np.repeat(np.arange(len(counts)), draws)
        rounds = np.arange(total) - np.repeat(ends - draws, draws)  # number of the sample within its class
        sampled = by_class[firsts[classes] + rounds % counts[classes]]
        return sampled[torch.randperm(total, generator=generator).numpy()]


def repeated_order(order: np.ndarray, repeats: int) -> np.ndarray:
    """Apply repeated augmentation: each image `repeats` times in a row, cut to about the length of a plain epoch.

    An epoch then contains about 1/repeats of the images. DeiT's process r of R takes every R-th entry from r on.
    """
    return np.repeat(order, repeats)[: epoch_length(len(order), repeats)]


def epoch_length(images: int, repeats: int) -> int:
    """Return the number of samples per epoch of `images` images, over all processes."""
    if repeats == 1:
        return images
    return images // REPEATED_EPOCH_MULTIPLE * REPEATED_EPOCH_MULTIPLE or images


def mixed_seeds(seed: int, epoch: int, stream: int, positions: np.ndarray) -> np.ndarray:
    """Return a well-mixed seed per position, (len(positions),) uint64, by three rounds of SplitMix64."""
    state = np.zeros(len(positions), np.uint64)
    for word in (seed, epoch * 2 + stream, positions):
        state = state + np.asarray(word, np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return state


def step_seed(seed: int, epoch: int, step: int, view: int = 0) -> int:
    """Return the seed for a whole batch (mixing, batched operations), the same on every process.

    Further views of the same images have their own seeds.
    """
    position = np.array([step]) + (view << 32)  # steps of an epoch never reach that far
    return int(mixed_seeds(seed, epoch, _STEP_STREAM, position)[0] >> np.uint64(1))


def rank_positions(size: int, rank: int, world: int) -> np.ndarray:
    """Return the positions of a batch of `size` that one process of `world` takes.

    If the batch divides by 2·world, positions i and size−1−i stay together, in mirrored order: Mixup with the reversed
    batch then pairs the same images on any number of processes. Otherwise every world-th position is taken.
    """
    if size % (2 * world):
        return np.arange(rank, size, world)
    front = np.arange(rank, size // 2, world)
    return np.concatenate([front, size - 1 - front[::-1]])


@dataclass(frozen=True)
class StepSamples:
    """The samples of one process in one step."""

    index: np.ndarray  # (b,) int64, in the dataset
    seed: np.ndarray  # (b,) uint64, of each image's augmentation


@dataclass(frozen=True)
class SamplingPlan:
    """The samples of every epoch and step. `batch_size` counts all processes."""

    images: int
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    repeats: int = 1
    drop_last: bool = True
    rank: int = 0
    world: int = 1
    sampling: ClassSampling | None = None  # None: every image once per epoch

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.batch_size % self.world:
            raise UsageError(
                f"A batch of {self.batch_size} cannot be shared by {self.world} processes. "
                f"Use a batch size that is a multiple of {self.world}."
            )
        if not 0 <= self.rank < self.world:
            raise UsageError(f"Process {self.rank} of {self.world} does not exist; processes are numbered from 0.")
        if self.repeats < 1:
            raise UsageError(f"repeats is {self.repeats}, expected 1 or more.")
        if self.seed < 0:
            raise UsageError(f"The seed is {self.seed}, expected 0 or more.")
        if self.steps_per_epoch == 0:
            raise UsageError(
                f"A batch of {self.batch_size} is larger than an epoch of {self.views_per_epoch} images. "
                f"Pass --batch {self.views_per_epoch} or less."
            )

    @property
    def views_per_epoch(self) -> int:
        """Return the number of samples per epoch over all processes, an incomplete last batch included."""
        return epoch_length(self.images, self.repeats)

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of batches per epoch."""
        extra = 0 if self.drop_last else self.batch_size - 1
        return (self.views_per_epoch + extra) // self.batch_size

    def order(self, epoch: int) -> np.ndarray:
        """Return the images of all processes' batches in a row, (views_per_epoch,) int64, read-only."""
        return _views_of_epoch(self.images, self.seed, epoch, self.shuffle, self.repeats, self.sampling)

    def views(self, epoch: int, step: int) -> StepSamples:
        """Return what this process reads in `step` of `epoch`."""
        order = self.order(epoch)
        start = step * self.batch_size
        size = min(self.batch_size, len(order) - start)
        positions = start + rank_positions(size, self.rank, self.world)
        return StepSamples(order[positions], mixed_seeds(self.seed, epoch, _VIEW_STREAM, positions))


@lru_cache(maxsize=4)
def _views_of_epoch(
    images: int, seed: int, epoch: int, shuffle: bool, repeats: int, sampling: ClassSampling | None
) -> np.ndarray:
    order = sampling.order(seed, epoch) if sampling else epoch_order(images, seed, epoch, shuffle)
    order = repeated_order(order, repeats)
    order.setflags(write=False)
    return order
