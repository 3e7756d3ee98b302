"""How well every pixel is classified: intersection over union, over the pixels of the whole set.

Letters: N images, K classes. All numbers follow from counts of each image, which are added over the images asked about:

    miou                 mean over the classes of |truth ∩ answer| / |truth ∪ answer|; classes in neither do not count
    pixel_accuracy       share of the labelled pixels that are right
    mean_class_accuracy  mean over the classes of the share of their pixels that is found
    boundary_iou         as miou, of pixels within 2 % of the diagonal from the border of a class (Cheng et al. 2021)

Pixels without a label count nowhere. mIoU of a set is no mean of the images' own mIoU: a class counts once, not once
per image that shows it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from patchloom.evaluation.intervals import LEVEL, bootstrap_weights, central

BOUNDARY_SHARE = 0.02  # of the diagonal
_AT_ONCE = 1 << 25  # numbers of one-hot masks, while borders are looked for
TRUTH, ANSWER, BOTH = range(3)  # columns of `counts`


@dataclass(frozen=True, eq=False)
class SegmentationReport:
    """Counts of each image; iterating gives (name, value) in percent."""

    classes: tuple[str, ...]
    index: np.ndarray  # (N,), places in the set
    counts: np.ndarray  # (N, K, 3): pixels of the truth, of the answer, of both
    confusion: np.ndarray  # (K, K): pixels of class [row] that were taken for class [column]
    borders: np.ndarray | None = None  # (N, K, 2): of the borders, pixels of both and of either

    def __iter__(self) -> Iterator[tuple[str, float]]:
        """(name, value)."""
        yield "miou", self.miou
        yield "pixel_accuracy", self.pixel_accuracy
        yield "mean_class_accuracy", nan_mean(self.class_accuracy)
        if self.borders is not None:
            yield "boundary_iou", nan_mean(self.class_boundary_iou)

    @property
    def iou(self) -> np.ndarray:
        """(K,) in percent; NaN for classes that are in no image and no answer."""
        return iou_of(self.counts.sum(axis=0))

    @property
    def miou(self) -> float:
        """Mean over the classes that occur, in percent."""
        return nan_mean(self.iou)

    @property
    def pixel_accuracy(self) -> float:
        """In percent."""
        total = self.counts.sum(axis=(0, 1))
        return 100 * float(total[BOTH] / max(1, total[TRUTH]))

    @property
    def class_accuracy(self) -> np.ndarray:
        """(K,) in percent; NaN for classes without a pixel."""
        total = self.counts.sum(axis=0)
        return _percent(total[:, BOTH], total[:, TRUTH])

    @property
    def class_boundary_iou(self) -> np.ndarray:
        """(K,) in percent; NaN for classes without a border."""
        assert self.borders is not None
        total = self.borders.sum(axis=0)
        return _percent(total[:, 0], total[:, 1])

    @property
    def image_miou(self) -> np.ndarray:
        """(N,) mean over the classes in an image or its answer, in percent: which images are best and worst."""
        return np.array([nan_mean(iou_of(each)) for each in self.counts])

    def miou_interval(self, level: float = LEVEL) -> tuple[float, float]:
        """Where mIoU would lie for other images of the kind: a bootstrap over the images."""
        return central(self.resampled_miou(), level)

    def class_intervals(self, level: float = LEVEL) -> list[tuple[float, float]]:
        """The same for the IoU of each class."""
        resampled = self._resampled()
        return [central(resampled[:, k], level) for k in range(len(self.classes))]

    def resampled_miou(self) -> np.ndarray:
        """(rounds,) mIoU of sets of N images drawn from these; the same draws for every report on as many images."""
        return np.array([nan_mean(row) for row in self._resampled()])

    def _resampled(self) -> np.ndarray:
        """(rounds, K)."""
        weights = bootstrap_weights(len(self.index))
        flat = self.counts.reshape(len(self.index), -1).astype(np.float64)
        return iou_of((weights @ flat).reshape(len(weights), -1, 3))

    def rows(self, places: Sequence[int]) -> "SegmentationReport":
        """The report on some of the images; it tells no confusion, which is known of all together alone."""
        at = np.asarray(places)
        borders = None if self.borders is None else self.borders[at]
        return SegmentationReport(self.classes, self.index[at], self.counts[at], np.zeros_like(self.confusion), borders)


@dataclass(eq=False)
class Counting:
    """Images that were answered, added one batch after the other."""

    classes: tuple[str, ...]
    with_borders: bool = True

    def __post_init__(self) -> None:
        self._rows: list[tuple[np.ndarray, np.ndarray, np.ndarray | None]] = []
        self._confusion = np.zeros((len(self.classes), len(self.classes)), np.int64)

    def add(self, index: Sequence[int], truth: Tensor, answers: Tensor) -> None:
        """Classes of the pixels (B, H, W) as they are and as they were told; negative truth is not labelled."""
        confusion = confusion_of(truth, answers, len(self.classes))
        counts = torch.stack([confusion.sum(2), confusion.sum(1), confusion.diagonal(dim1=1, dim2=2)], dim=2)
        borders = border_counts(truth, answers, len(self.classes)).cpu().numpy() if self.with_borders else None
        self._rows.append((np.asarray(index), counts.cpu().numpy(), borders))
        self._confusion += confusion.sum(0).cpu().numpy()

    def report(self) -> SegmentationReport:
        """All that was added, in the order of the set."""
        classes, k = self.classes, len(self.classes)
        index = np.concatenate([np.zeros(0, np.int64), *(row[0] for row in self._rows)])
        counts = np.concatenate([np.zeros((0, k, 3), np.int64), *(row[1] for row in self._rows)])
        order = np.argsort(index, kind="stable")
        borders = None
        if self.with_borders:
            found = [row[2] for row in self._rows if row[2] is not None]
            borders = np.concatenate([np.zeros((0, k, 2), np.int64), *found])[order]
        return SegmentationReport(classes, index[order], counts[order], self._confusion, borders)


def joined(reports: Sequence[SegmentationReport]) -> SegmentationReport:
    """Reports on parts of a set as one, each image once."""
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


def confusion_of(truth: Tensor, answers: Tensor, classes: int) -> Tensor:
    """(B, H, W) twice → (B, K, K): pixels of class [row] that were taken for class [column]."""
    known = (truth >= 0) & (truth < classes)
    image = torch.arange(len(truth), device=truth.device)[:, None, None]
    pairs = (image * classes + truth.long()) * classes + answers.long()
    return torch.bincount(pairs[known], minlength=len(truth) * classes**2).view(len(truth), classes, classes)


def border_counts(truth: Tensor, answers: Tensor, classes: int) -> Tensor:
    """(B, H, W) twice → (B, K, 2): of the borders of each class, pixels of both and of either."""
    known = (truth >= 0) & (truth < classes)
    answers = answers.long().where(known, -1)
    width = border_width(truth.shape[1], truth.shape[2])
    found = torch.zeros(len(truth), classes, 2, dtype=torch.int64, device=truth.device)
    for image in range(len(truth)):
        seen = torch.cat([truth[image][known[image]].long(), answers[image][known[image]]]).unique()
        for some in seen.split(max(1, _AT_ONCE // truth[0].numel())):
            of_truth, of_answer = (_borders(mask[image], some, width) for mask in (truth, answers))
            found[image, some, 0] = (of_truth & of_answer).sum((1, 2))
            found[image, some, 1] = (of_truth | of_answer).sum((1, 2))
    return found


def border_width(height: int, width: int) -> int:
    """Pixels of a border."""
    return max(1, round(BOUNDARY_SHARE * float(np.hypot(height, width))))


def _borders(numbers: Tensor, classes: Tensor, width: int) -> Tensor:
    """(H, W) → (k, H, W): pixels of each class with another one, or the edge of the image, within so many pixels."""
    one_hot = numbers[None] == classes[:, None, None]
    others = F.pad((~one_hot).half() if numbers.is_cuda else (~one_hot).float(), (width,) * 4, value=1.0)[None]
    side = 2 * width + 1
    near = F.max_pool2d(F.max_pool2d(others, (side, 1), stride=1), (1, side), stride=1)[0] > 0
    return one_hot & near


def iou_of(counts: np.ndarray) -> np.ndarray:
    """(…, K, 3) pixels of truth, answer and both → (…, K) in percent, NaN where there is neither."""
    return _percent(counts[..., BOTH], counts[..., TRUTH] + counts[..., ANSWER] - counts[..., BOTH])


def nan_mean(values: np.ndarray) -> float:
    """The mean of those that are numbers; NaN of none."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def _percent(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.where(whole > 0, 100.0 * part / np.maximum(whole, 1), np.nan)
