"""Segmentation metrics over the pixels of a whole dataset.

Letters: N images, K classes. All metrics follow from counts per image, which are summed over the images in question:

    miou                 mean over classes of |truth ∩ prediction| / |truth ∪ prediction|; absent classes do not count
    pixel_accuracy       share of the labeled pixels that are correct
    mean_class_accuracy  mean over classes of the share of their pixels that is correct
    boundary_iou         as miou, for pixels within 2 % of the diagonal from the border of a class (Cheng et al. 2021)

Unlabeled pixels are ignored. The mIoU of a dataset is not the mean of its images' mIoU: a class counts once, not once
per image that contains it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from patchloom.evaluation.intervals import bootstrap_weights, central

BOUNDARY_SHARE = 0.02  # of the diagonal
_AT_ONCE = 1 << 25  # elements of the one-hot masks in memory while borders are computed
TRUTH, PREDICTION, BOTH = range(3)  # columns of `counts`


@dataclass(frozen=True, eq=False)
class SegmentationReport:
    """Pixel counts per image. Iterating yields (name, value) in percent."""

    classes: tuple[str, ...]
    index: np.ndarray  # (N,) in the dataset
    counts: np.ndarray  # (N, K, 3): pixels of the truth, of the prediction, of both
    confusion: np.ndarray  # (K, K): pixels of class [row] predicted as class [column]
    borders: np.ndarray | None = None  # (N, K, 2): border pixels in both masks and in either

    def __iter__(self) -> Iterator[tuple[str, float]]:
        """Yield (name, value)."""
        yield "miou", self.miou
        yield "pixel_accuracy", self.pixel_accuracy
        yield "mean_class_accuracy", nan_mean(self.class_accuracy)
        if self.borders is not None:
            yield "boundary_iou", nan_mean(self.class_boundary_iou)

    @property
    def iou(self) -> np.ndarray:
        """Return the IoU per class (K,) in percent; NaN for classes in neither truth nor prediction."""
        return iou_of(self.counts.sum(axis=0))

    @property
    def miou(self) -> float:
        """Return the mean IoU over the classes that occur, in percent."""
        return nan_mean(self.iou)

    @property
    def pixel_accuracy(self) -> float:
        """Return the percentage of correct labeled pixels."""
        total = self.counts.sum(axis=(0, 1))
        return 100 * float(total[BOTH] / max(1, total[TRUTH]))

    @property
    def class_accuracy(self) -> np.ndarray:
        """Return the accuracy per class (K,) in percent; NaN for classes without a pixel."""
        total = self.counts.sum(axis=0)
        return _percent(total[:, BOTH], total[:, TRUTH])

    @property
    def class_boundary_iou(self) -> np.ndarray:
        """Return the boundary IoU per class (K,) in percent; NaN for classes without a border."""
        assert self.borders is not None
        total = self.borders.sum(axis=0)
        return _percent(total[:, 0], total[:, 1])

    @property
    def image_miou(self) -> np.ndarray:
        """Return the mIoU per image (N,) in percent, over the classes in its truth or prediction."""
        return np.array([nan_mean(iou_of(each)) for each in self.counts])

    def miou_interval(self) -> tuple[float, float]:
        """Return the bootstrap interval of mIoU over images."""
        return central(self.resampled_miou())

    def class_intervals(self) -> list[tuple[float, float]]:
        """Return the bootstrap interval of each class's IoU."""
        resampled = self._resampled()
        return [central(resampled[:, k]) for k in range(len(self.classes))]

    def resampled_miou(self) -> np.ndarray:
        """Return mIoU (rounds,) of resampled datasets; reports on equally many images use the same draws."""
        return np.array([nan_mean(row) for row in self._resampled()])

    def _resampled(self) -> np.ndarray:  # (rounds, K)
        weights = bootstrap_weights(len(self.index))
        flat = self.counts.reshape(len(self.index), -1).astype(np.float64)
        return iou_of((weights @ flat).reshape(len(weights), -1, 3))

    def rows(self, places: Sequence[int]) -> "SegmentationReport":
        """Return the report on some of the images. Its confusion is empty: it is only known for all together."""
        at = np.asarray(places)
        borders = None if self.borders is None else self.borders[at]
        return SegmentationReport(self.classes, self.index[at], self.counts[at], np.zeros_like(self.confusion), borders)


@dataclass(eq=False)
class SegmentationCounter:
    """Counts of predicted images, added batch by batch."""

    classes: tuple[str, ...]
    with_borders: bool = True

    def __post_init__(self) -> None:
        self._rows: list[tuple[np.ndarray, np.ndarray, np.ndarray | None]] = []
        self._confusion = np.zeros((len(self.classes), len(self.classes)), np.int64)

    def add(self, index: Sequence[int], truth: Tensor, predictions: Tensor) -> None:
        """Add true and predicted classes (B, H, W) of a batch; negative truth is unlabeled."""
        confusion = confusion_of(truth, predictions, len(self.classes))
        counts = torch.stack([confusion.sum(2), confusion.sum(1), confusion.diagonal(dim1=1, dim2=2)], dim=2)
        borders = border_counts(truth, predictions, len(self.classes)).cpu().numpy() if self.with_borders else None
        self._rows.append((np.asarray(index), counts.cpu().numpy(), borders))
        self._confusion += confusion.sum(0).cpu().numpy()

    def report(self) -> SegmentationReport:
        """Return the report on all images, in the order of the dataset."""
        classes, k = self.classes, len(self.classes)
        index = np.concatenate([np.zeros(0, np.int64), *(row[0] for row in self._rows)])
        counts = np.concatenate([np.zeros((0, k, 3), np.int64), *(row[1] for row in self._rows)])
        order = np.argsort(index, kind="stable")
        borders = None
        if self.with_borders:
            parts = [row[2] for row in self._rows if row[2] is not None]
            borders = np.concatenate([np.zeros((0, k, 2), np.int64), *parts])[order]
        return SegmentationReport(classes, index[order], counts[order], self._confusion, borders)


def joined(reports: Sequence[SegmentationReport]) -> SegmentationReport:
    """Merge reports on parts of a dataset; each image counts once."""
    first = reports[0]
    index = np.concatenate([report.index for report in reports])
    _, places = np.unique(index, return_index=True)
    counts = np.concatenate([report.counts for report in reports])
    borders = [report.borders for report in reports if report.borders is not None]
    return SegmentationReport(
        first.classes,
        index[places],
        counts[places],
        sum((report.confusion for report in reports), np.zeros_like(first.confusion)),
        np.concatenate(borders)[places] if len(borders) == len(reports) else None,
    )


def confusion_of(truth: Tensor, predictions: Tensor, classes: int) -> Tensor:
    """Return pixels (B, K, K) of class [row] predicted as class [column], from two (B, H, W) masks."""
    known = (truth >= 0) & (truth < classes)
    image = torch.arange(len(truth), device=truth.device)[:, None, None]
    pairs = (image * classes + truth.long()) * classes + predictions.long()
    return torch.bincount(pairs[known], minlength=len(truth) * classes**2).view(len(truth), classes, classes)


def border_counts(truth: Tensor, predictions: Tensor, classes: int) -> Tensor:
    """Return border pixels (B, K, 2) per class, in both masks and in either, from two (B, H, W) masks."""
    known = (truth >= 0) & (truth < classes)
    predictions = predictions.long().where(known, -1)
    width = border_width(truth.shape[1], truth.shape[2])
    counts = torch.zeros(len(truth), classes, 2, dtype=torch.int64, device=truth.device)
    for image in range(len(truth)):
        present = torch.cat([truth[image][known[image]].long(), predictions[image][known[image]]]).unique()
        for some in present.split(max(1, _AT_ONCE // truth[0].numel())):
            expected, predicted = (_borders(mask[image], some, width) for mask in (truth, predictions))
            counts[image, some, 0] = (expected & predicted).sum((1, 2))
            counts[image, some, 1] = (expected | predicted).sum((1, 2))
    return counts


def border_width(height: int, width: int) -> int:
    """Return the width of a border in pixels."""
    return max(1, round(BOUNDARY_SHARE * float(np.hypot(height, width))))


def _borders(numbers: Tensor, classes: Tensor, width: int) -> Tensor:
    """Return pixels (k, H, W) of each class within `width` pixels of another class or the image's edge."""
    one_hot = numbers[None] == classes[:, None, None]
    others = F.pad((~one_hot).half() if numbers.is_cuda else (~one_hot).float(), (width,) * 4, value=1.0)[None]
    side = 2 * width + 1
    near = F.max_pool2d(F.max_pool2d(others, (side, 1), stride=1), (1, side), stride=1)[0] > 0
    return one_hot & near


def iou_of(counts: np.ndarray) -> np.ndarray:
    """Return IoU (…, K) in percent from pixels (…, K, 3) of truth, prediction and both; NaN for absent classes."""
    return _percent(counts[..., BOTH], counts[..., TRUTH] + counts[..., PREDICTION] - counts[..., BOTH])


def nan_mean(values: np.ndarray) -> float:
    """Return the mean, ignoring NaN; NaN if there is nothing else."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def _percent(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.where(whole > 0, 100.0 * part / np.maximum(whole, 1), np.nan)
