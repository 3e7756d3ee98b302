"""The order of images and the seeds of their augmentation.

Everything random about data follows from (seed, epoch, position in the epoch), never from a process's history. A run
can therefore stop at any step and resume, and neither the number of workers nor of processes changes an image. The
order of an epoch does not depend on the batch size either: a run that has used so many samples of an epoch continues
with the next one, in batches of any size.
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
# Shuffled datasets up to this size have a list of their order, 32 MiB of it, which is that of DeiT's sampler with seed
# 0. The order of larger ones is computed where it is read.
MOST_LISTED = 1 << 22
_VIEW_STREAM, _STEP_STREAM = 0, 1
_PERMUTATION_ROUNDS = 8


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


def permuted(positions: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Return the images at `positions` of an epoch's permutation of range(`size`), int64, without a list of it.

    A Feistel network permutes the numbers below the next power of two. What falls beyond `size` is permuted again until
    it falls below (cycle walking), twice on average at most.
    """
    bits = max(2, (size - 1).bit_length())
    low = np.uint64(bits // 2)
    low_mask, high_mask = np.uint64((1 << (bits // 2)) - 1), np.uint64((1 << (bits - bits // 2)) - 1)
    keys = mixed_seeds(seed, epoch, _STEP_STREAM, (1 << 62) + np.arange(_PERMUTATION_ROUNDS))  # no step reaches these

    def permute(numbers: np.ndarray) -> np.ndarray:
        left, right = numbers >> low, numbers & low_mask
        for number, key in enumerate(keys):
            if number % 2:
                right = right ^ (_mixed(left + key) & low_mask)
            else:
                left = left ^ (_mixed(right + key) & high_mask)
        return (left << low) | right

    images = permute(positions.astype(np.uint64))
    while len(beyond := np.flatnonzero(images >= size)):
        images[beyond] = permute(images[beyond])
    return images.astype(np.int64)


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
        state = _mixed(state)
    return state


def _mixed(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


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

    def step_at(self, samples: int) -> int:
        """Return the step of an epoch that follows `samples` of its samples, used in batches of any size.

        As many steps are left as the other samples make batches of this size, so the schedule continues at the same
        share of the epoch, to within a batch.
        """
        extra = 0 if self.drop_last else self.batch_size - 1
        return self.steps_per_epoch - (self.views_per_epoch - samples + extra) // self.batch_size

    def offset_at(self, samples: int) -> int:
        """Return by how many samples the rest of an epoch is moved if it continues after `samples` samples.

        It is 0 if all of its batches have this size, and smaller than a batch in any case.
        """
        return samples - self.step_at(samples) * self.batch_size

    def order(self, epoch: int) -> np.ndarray:
        """Return the images of all processes' batches in a row, (views_per_epoch,) int64."""
        return self.images_at(epoch, np.arange(self.views_per_epoch))

    def images_at(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Return the images at `positions` of an epoch, int64.

        Repeated augmentation has each image `repeats` times in a row, so an epoch contains about 1/repeats of them, and
        DeiT's process r of R takes every R-th entry from r on.
        """
        places = positions // self.repeats
        if self.sampling or (self.shuffle and self.images <= MOST_LISTED):
            return _listed_order(self.images, self.seed, epoch, self.sampling)[places]
        return permuted(places, self.images, self.seed, epoch) if self.shuffle else places

    def views(self, epoch: int, step: int, offset: int = 0) -> StepSamples:
        """Return what this process reads in `step` of `epoch`, whose batches are moved by `offset` samples."""
        start = step * self.batch_size + offset
        size = min(self.batch_size, self.views_per_epoch - start)
        positions = start + rank_positions(size, self.rank, self.world)
        return StepSamples(self.images_at(epoch, positions), mixed_seeds(self.seed, epoch, _VIEW_STREAM, positions))


@lru_cache(maxsize=2)
def _listed_order(images: int, seed: int, epoch: int, sampling: ClassSampling | None) -> np.ndarray:
    return sampling.order(seed, epoch) if sampling else epoch_order(images, seed, epoch)
