"""How well a network classifies: one pass over a set, one row of numbers per image, everything else from the rows.

Letters: B images of a batch, N of the set, K classes. Shares are in percent, as papers print them.

name                   value
top1, top5             images whose label is among the k classes with the highest logits, in percent;
                       a k other than 1 is left out where the data has no more than k classes
loss                   mean cross-entropy with the labels, in nats
mean_class_accuracy    mean over the classes that have images of their top-1, in percent
calibration_error      expected calibration error of the top class's probability, 15 bins, in percent
images                 images counted
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchloom.data.images.image_batch import IMAGENET_MEAN, IMAGENET_STD, ImageBatch, normalize
from patchloom.evaluation.intervals import wilson
from patchloom_runtime.errors import DataError, UsageError

CALIBRATION_BINS = 15
TOPS = (1, 5)  # the second where there are more classes


@dataclass(frozen=True)
class Mistake:
    """An image that was put in a wrong class."""

    index: int  # place in the set
    label: int
    prediction: int
    confidence: float  # probability of the prediction, 0…1


@dataclass(frozen=True, eq=False)
class ClassificationReport:
    """What became of each image, in the order of the set, and the numbers that follow from it."""

    classes: tuple[str, ...]
    index: np.ndarray  # (N,) int64, places in the set, rising
    labels: np.ndarray  # (N,) int64
    predictions: np.ndarray  # (N,) int64
    ranks: np.ndarray  # (N,) int64, classes with a higher logit than the label; ties go to the lower number
    confidence: np.ndarray  # (N,) float32, probability of the prediction
    losses: np.ndarray  # (N,) float32

    def __iter__(self) -> Iterator[tuple[str, float]]:
        for k in TOPS:
            if k == 1 or k < len(self.classes):
                yield f"top{k}", self.top(k)
        yield "loss", self.loss
        yield "mean_class_accuracy", float(np.nanmean(self.class_accuracy))
        yield "calibration_error", self.calibration_error()
        yield "images", float(len(self.index))

    def __repr__(self) -> str:
        count = f"{len(self.index):,} images, {len(self.classes)} classes"
        return f"ClassificationReport({count}: top1 {self.top(1):.2f} %, loss {self.loss:.4g})"

    def top(self, k: int) -> float:
        """Percent of the images whose label is among the k highest logits."""
        return 100 * float(np.mean(self.ranks < k))

    def top_interval(self, k: int = 1) -> tuple[float, float]:
        """What `top(k)` may be on more images like these: Wilson's 95 % interval, in percent."""
        return wilson(int(np.sum(self.ranks < k)), len(self.ranks))

    @property
    def loss(self) -> float:
        """Mean cross-entropy."""
        return float(np.mean(self.losses, dtype=np.float64))

    @property
    def class_accuracy(self) -> np.ndarray:
        """(K,) percent of each class's images that are put in it; NaN for a class without images."""
        images = np.bincount(self.labels, minlength=len(self.classes))
        right = np.bincount(self.labels[self.ranks == 0], minlength=len(self.classes))
        return 100 * np.divide(right, images, out=np.full(len(images), np.nan), where=images > 0)

    @property
    def confusion(self) -> np.ndarray:
        """(K, K) int64: images of class [row] put in class [column]."""
        count = len(self.classes)
        pairs = np.bincount(self.labels * count + self.predictions, minlength=count * count)
        return pairs.reshape(count, count)

    def calibration_error(self, bins: int = CALIBRATION_BINS) -> float:
        """Percent by which confidence and accuracy differ, over equal bins of confidence (arXiv 1706.04599)."""
        # Bin b holds confidences in (b/bins, (b+1)/bins].
        place = np.clip(np.ceil(np.nan_to_num(self.confidence).astype(np.float64) * bins).astype(int) - 1, 0, bins - 1)
        gap = np.bincount(place, self.confidence - (self.ranks == 0), minlength=bins)
        return 100 * float(np.abs(gap).sum()) / len(self.index)

    def worst(self, count: int = 20) -> list[Mistake]:
        """The mistakes the network was surest of, surest first."""
        wrong = np.flatnonzero(self.ranks > 0)
        wrong = wrong[np.argsort(-self.confidence[wrong], kind="stable")][:count]
        columns = (self.index, self.labels, self.predictions, self.confidence)
        return [Mistake(*row) for row in zip(*(column[wrong].tolist() for column in columns), strict=True)]


def evaluate(
    model: nn.Module,
    batches: Iterable[ImageBatch],
    *,
    classes: Sequence[str],
    pixel_mean: tuple[float, ...] = IMAGENET_MEAN,
    pixel_std: tuple[float, ...] = IMAGENET_STD,
    gather: Callable[[Tensor], Tensor] | None = None,
) -> ClassificationReport:
    """Classify the images of `batches` with `model`, in eval mode and under the caller's autocast.

    An image counts once, however often it comes, and not at all where its label is negative: batches may be
    partial, padded or spread over processes. `gather` joins the rows of all processes: (n, columns) of this one →
    those of all, below one another; rows of −1 that fill them up to one length are ignored.
    The device is waited for once, at the end.
    """
    device = next(model.parameters()).device
    whole: list[Tensor] = []
    real: list[Tensor] = []
    with in_eval_mode(model), torch.no_grad():
        for batch in batches:
            batch = batch.to(device, non_blocking=True)
            logits = model(normalize(batch.images, pixel_mean, pixel_std)).float()
            if logits.shape[1] != len(classes):
                raise UsageError(
                    f"The network tells {logits.shape[1]} classes apart, the data has {len(classes)}. "
                    "Evaluate it on the classes it was trained on."
                )
            rows = _judged(logits, batch.labels.clamp(min=0))
            whole.append(torch.stack([batch.index, batch.labels, *rows[:2]], dim=1))
            real.append(torch.stack(rows[2:], dim=1))
    if not whole:
        raise DataError("There is no image to evaluate on: the set or its split is empty.")
    join = gather or (lambda rows: rows)
    return _report(join(torch.cat(whole)).cpu().numpy(), join(torch.cat(real)).cpu().numpy(), classes)


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode, and afterwards as it was."""
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in was_training:
            module.training = True


def _judged(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits (B, K) → prediction, rank of the label, confidence, loss; (B,) each."""
    of_label = logits.gather(1, labels[:, None])  # (B, 1)
    later = torch.arange(logits.shape[1], device=logits.device) >= labels[:, None]
    # Counted from below, so that a label never ranks first among logits that are not numbers.
    below = (logits < of_label) | ((logits == of_label) & later)
    ranks = logits.shape[1] - below.sum(dim=1)
    confidence = logits.softmax(dim=1).amax(dim=1)
    return logits.argmax(dim=1), ranks, confidence, F.cross_entropy(logits, labels, reduction="none")


def _report(whole: np.ndarray, real: np.ndarray, classes: Sequence[str]) -> ClassificationReport:
    counted = whole[:, 1] >= 0
    whole, real = whole[counted], real[counted]
    if not len(whole):
        raise DataError("None of the images has a label, so nothing can be evaluated.")
    index, first = np.unique(whole[:, 0], return_index=True)
    return ClassificationReport(tuple(classes), index, *whole[first, 1:].T, *real[first].T)
