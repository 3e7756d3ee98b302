"""Classification metrics: one pass over a dataset gives one row per image, from which everything else follows.

Letters: B images of a batch, N of the dataset, K classes. Shares are in percent, as in papers.

name                   value
top1, top5             images whose label is among the k classes with the highest logits, in percent;
                       top5 is omitted for data with at most 5 classes
loss                   mean cross-entropy with the labels, in nats
mean_class_accuracy    balanced accuracy: top-1 averaged over the classes that have images, in percent
macro_f1               F1 averaged over the classes that have images or predictions, in percent
calibration_error      expected calibration error of the top class's probability, 15 bins, in percent
images                 number of images
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchloom.data.images.image_batch import IMAGENET_MEAN, IMAGENET_STD, ImageBatch, normalize
from patchloom.data.labels.class_balance import is_imbalanced
from patchloom.evaluation.intervals import wilson
from patchloom_runtime.errors import DataError, UsageError, first_line

CALIBRATION_BINS = 15
MACRO_METRICS = {"mean_class_accuracy": "mean class accuracy", "macro_f1": "macro F1"}  # count every class equally
TOPS = (1, 5)  # top5 only for data with more classes
LOWER_IS_BETTER = ("loss", "calibration_error")
OVERFITTING_GAP = 20.0  # percentage points between training and val accuracy


@dataclass(frozen=True)
class Mistake:
    """A misclassified image."""

    index: int  # in the dataset
    label: int
    prediction: int
    confidence: float  # probability of the prediction, 0…1


@dataclass(frozen=True, eq=False)
class ClassificationReport:
    """Per-image results in the order of the dataset, and the metrics that follow from them."""

    classes: tuple[str, ...]
    index: np.ndarray  # (N,) int64, increasing, in the dataset
    labels: np.ndarray  # (N,) int64
    predictions: np.ndarray  # (N,) int64
    ranks: np.ndarray  # (N,) int64, number of classes with a higher logit than the label; ties go to the lower class
    confidence: np.ndarray  # (N,) float32, probability of the prediction
    losses: np.ndarray  # (N,) float32
    own: Mapping[str, float] = field(default_factory=dict, kw_only=True)  # metrics of the user

    def __iter__(self) -> Iterator[tuple[str, float]]:
        for k in tops_of(len(self.classes)):
            yield f"top{k}", self.top(k)
        yield "loss", self.loss
        yield "mean_class_accuracy", float(np.nanmean(self.class_accuracy))
        yield "macro_f1", self.macro_f1
        yield "calibration_error", self.calibration_error()
        yield "images", float(len(self.index))
        yield from self.own.items()

    def __repr__(self) -> str:
        count = f"{len(self.index):,} images, {len(self.classes)} classes"
        return f"ClassificationReport({count}: top1 {self.top(1):.2f} %, loss {self.loss:.4g})"

    def top(self, k: int) -> float:
        """Return the percentage of images whose label is among the k highest logits."""
        return 100 * float(np.mean(self.ranks < k))

    def top_interval(self, k: int = 1) -> tuple[float, float]:
        """Return Wilson's 95 % confidence interval of `top(k)`, in percent."""
        return wilson(int(np.sum(self.ranks < k)), len(self.ranks))

    @property
    def loss(self) -> float:
        """Return the mean cross-entropy."""
        return float(np.mean(self.losses, dtype=np.float64))

    @property
    def class_accuracy(self) -> np.ndarray:
        """Return the accuracy per class (K,) in percent; NaN for classes without images."""
        images = np.bincount(self.labels, minlength=len(self.classes))
        right = np.bincount(self.labels[self.ranks == 0], minlength=len(self.classes))
        return 100 * np.divide(right, images, out=np.full(len(images), np.nan), where=images > 0)

    @property
    def macro_f1(self) -> float:
        """Return 2·right/(labeled + predicted) averaged over the classes that have either, in percent."""
        count = len(self.classes)
        right = np.bincount(self.labels[self.labels == self.predictions], minlength=count)
        both = np.bincount(self.labels, minlength=count) + np.bincount(self.predictions, minlength=count)
        return 100 * float(np.mean(2 * right[both > 0] / both[both > 0]))

    @property
    def is_imbalanced(self) -> bool:
        """Return whether the classes of the images are uneven, so that top-1 says little about the small ones."""
        return is_imbalanced(self.labels)

    @property
    def confusion(self) -> np.ndarray:
        """Return the confusion matrix (K, K): images of class [row] predicted as class [column]."""
        count = len(self.classes)
        pairs = np.bincount(self.labels * count + self.predictions, minlength=count * count)
        return pairs.reshape(count, count)

    def calibration_error(self, bins: int = CALIBRATION_BINS) -> float:
        """Return the mean gap between confidence and accuracy over equal bins, in percent (arXiv 1706.04599)."""
        # Bin b holds confidences in (b/bins, (b+1)/bins].
        bin_of = np.clip(np.ceil(np.nan_to_num(self.confidence).astype(np.float64) * bins).astype(int) - 1, 0, bins - 1)
        gap = np.bincount(bin_of, self.confidence - (self.ranks == 0), minlength=bins)
        return 100 * float(np.abs(gap).sum()) / len(self.index)

    def worst(self, count: int = 20) -> list[Mistake]:
        """Return the most confident mistakes, most confident first."""
        wrong = np.flatnonzero(self.ranks > 0)
        wrong = wrong[np.argsort(-self.confidence[wrong], kind="stable")][:count]
        columns = (self.index, self.labels, self.predictions, self.confidence)
        return [Mistake(*row) for row in zip(*(column[wrong].tolist() for column in columns), strict=True)]


def tops_of(classes: int) -> list[int]:
    """Return the k of the top-k accuracies that are measured for a number of classes."""
    return [k for k in TOPS if k == 1 or k < classes]


def metric_names(classes: int) -> list[str]:
    """Return the names of the metrics for a number of classes, without the number of images."""
    return [*(f"top{k}" for k in tops_of(classes)), "loss", "mean_class_accuracy", "calibration_error"]


def evaluate(
    model: nn.Module,
    batches: Iterable[ImageBatch],
    *,
    classes: Sequence[str],
    pixel_mean: tuple[float, ...] = IMAGENET_MEAN,
    pixel_std: tuple[float, ...] = IMAGENET_STD,
    gather: Callable[[Tensor], Tensor] | None = None,
    metrics: Mapping[str, Callable[[Tensor, Tensor], float]] | None = None,
) -> ClassificationReport:
    """Classify the images of `batches` with `model`, in eval mode and under the caller's autocast.

    Each image counts once, even if it is repeated, and images with a negative label are ignored, so batches may be
    partial, padded or distributed over processes. `gather` concatenates the rows (n, columns) of all processes; rows of
    −1 that pad them to equal length are ignored. The host waits for the device once, at the end.
    `metrics` are functions of all logits (N, K) and labels (N,), in the order of the dataset.
    """
    device = next(model.parameters()).device
    integers: list[Tensor] = []
    floats: list[Tensor] = []
    outputs: list[Tensor] = []
    with in_eval_mode(model), torch.no_grad():
        for batch in batches:
            batch = batch.to(device, non_blocking=True)
            logits = model(normalize(batch.images, pixel_mean, pixel_std)).float()
            if logits.shape[1] != len(classes):
                raise UsageError(
                    f"The network has {logits.shape[1]} classes, the data {len(classes)}. "
                    "Evaluate it on the classes it was trained on."
                )
            rows = _score(logits, batch.labels.clamp(min=0))
            integers.append(torch.stack([batch.index, batch.labels, *rows[:2]], dim=1))
            floats.append(torch.stack(rows[2:], dim=1))
            if metrics:
                outputs.append(logits)
    if not integers:
        raise DataError("There are no images to evaluate: the dataset or its split is empty.")
    join = gather or (lambda rows: rows)
    rows_of_all = join(torch.cat(integers)).cpu().numpy()
    report = _report(rows_of_all, join(torch.cat(floats)).cpu().numpy(), classes)
    if not metrics:
        return report
    return replace(report, own=_own_metrics(metrics, report, rows_of_all[:, 0], join(torch.cat(outputs)).cpu()))


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Put every module in eval mode inside this context and restore the modes afterwards."""
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in was_training:
            module.training = True


def training_accuracy(records: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the mean accuracy on the augmented images of the last epoch, in percent, or None if not recorded."""
    rows = [r for r in records if r.get("kind") == "train" and r.get("values", {}).get("accuracy") is not None]
    last = [float(r["values"]["accuracy"]) for r in rows if r.get("epoch") == rows[-1].get("epoch")]
    return sum(last) / len(last) if last else None


def overfitting_note(
    records: Sequence[Mapping[str, Any]], report: ClassificationReport, *, pretrained: bool = False
) -> str:
    """Return advice if training accuracy is far above val accuracy, otherwise "".

    `records` come from `metrics.jsonl` and `report` from val. Training accuracy must also lie above the confidence
    interval of val accuracy, so chance on few images is not reported; nor is a single epoch, in which every image is
    new.
    """
    trained, val = training_accuracy(records), report.top(1)
    last_epoch = max((r.get("epoch") or 0 for r in records if r.get("kind") == "train"), default=0)
    if trained is None or last_epoch < 1 or trained - val < OVERFITTING_GAP or trained <= report.top_interval()[1]:
        return ""
    start = "" if pretrained else " or pretrained weights (--init in1k)"
    return (
        f"overfitting: training accuracy {trained:.1f} %, val top-1 {val:.1f} %. More training images{start} help most;"
        " mixed images (--set augment.mixup=0.8 --set augment.cutmix=1), a smaller network or fewer epochs may help too"
    )


def _score(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return prediction, rank of the label, confidence and loss, (B,) each, from logits (B, K)."""
    label_logits = logits.gather(1, labels[:, None])  # (B, 1)
    later = torch.arange(logits.shape[1], device=logits.device) >= labels[:, None]
    # Counted from below, so that a label never ranks first among NaN logits.
    below = (logits < label_logits) | ((logits == label_logits) & later)
    ranks = logits.shape[1] - below.sum(dim=1)
    confidence = logits.softmax(dim=1).amax(dim=1)
    return logits.argmax(dim=1), ranks, confidence, F.cross_entropy(logits, labels, reduction="none")


def _own_metrics(
    metrics: Mapping[str, Callable[[Tensor, Tensor], float]],
    report: ClassificationReport,
    index: np.ndarray,
    outputs: Tensor,
) -> dict[str, float]:
    """Return the user's metrics of the images that count, in the order of the dataset."""
    order = {image: row for row, image in reversed([*enumerate(index.tolist())])}
    chosen = outputs[[order[image] for image in report.index.tolist()]]
    values = {}
    for name, metric in metrics.items():
        try:
            values[name] = float(metric(chosen, torch.from_numpy(report.labels)))
        except Exception as error:  # code of the user
            raise UsageError(f"the metric {name} failed: {type(error).__name__}: {first_line(error)}") from error
    return values


def _report(integers: np.ndarray, floats: np.ndarray, classes: Sequence[str]) -> ClassificationReport:
    counted = integers[:, 1] >= 0
    integers, floats = integers[counted], floats[counted]
    if not len(integers):
        raise DataError("None of the images has a label, so nothing can be evaluated.")
    index, first = np.unique(integers[:, 0], return_index=True)
    return ClassificationReport(tuple(classes), index, *integers[first, 1:].T, *floats[first].T)
