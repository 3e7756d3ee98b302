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

Confidences and losses are those at the temperature of the model, if it has one (`evaluation/calibration.py`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchloom.data.images.image_batch import IMAGENET_MEAN, IMAGENET_STD, ImageBatch, normalize
from patchloom.data.labels.class_balance import is_imbalanced
from patchloom.evaluation.calibration import (
    BINS,
    LabeledLogits,
    Reliability,
    choose_temperature,
    reliability,
)
from patchloom.evaluation.intervals import wilson
from patchloom_runtime.calibration import TemperatureFit
from patchloom_runtime.errors import DataError, UsageError, first_line

MACRO_METRICS = {"mean_class_accuracy": "mean class accuracy", "macro_f1": "macro F1"}  # count every class equally
TOPS = (1, 5)  # top5 only for data with more classes
LOWER_IS_BETTER = ("loss", "calibration_error")
OVERFITTING_GAP = 20.0  # percentage points between training and val accuracy
MOST_LOGITS = 1 << 26  # that a report keeps, enough for ImageNet's val
# Normalized images → logits (B, K) and, if the model has a distance rule, distances from the training images (B,).
Classify: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor | None]]


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
    temperature: float = 1.0  # of confidence and losses
    fit: TemperatureFit | None = None  # how the temperature was chosen, if on these images
    logits: np.ndarray | None = None  # (N, K) float32, if kept
    distances: np.ndarray | None = None  # (N,) float32 from the training images, if measured
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

    def calibration_error(self) -> float:
        """Return the mean gap between confidence and accuracy over equal bins, in percent (arXiv 1706.04599)."""
        return self.reliability().calibration_error

    def reliability(self, bins: int = BINS) -> Reliability:
        """Return confidence and accuracy by bins of confidence."""
        return reliability(self.confidence, self.ranks == 0, self.losses, bins)

    def at_temperature(self, temperature: float) -> "ClassificationReport":
        """Return the report with the confidences and losses at another temperature; the logits must have been kept."""
        assert self.logits is not None
        confidence, losses = _confidence_and_losses(
            torch.from_numpy(self.logits), torch.from_numpy(self.labels), temperature
        )
        return replace(self, confidence=confidence.numpy(), losses=losses.numpy(), temperature=temperature)

    def calibrated(self) -> "ClassificationReport":
        """Return the report at the temperature chosen on its images; the logits must have been kept."""
        assert self.logits is not None
        fit = choose_temperature(LabeledLogits(self.logits, self.labels, self.index))
        return replace(self.at_temperature(fit.temperature), fit=fit)

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
    classify: Classify | None = None,
    temperature: float = 1.0,
    keep_logits: bool = False,
) -> ClassificationReport:
    """Classify the images of `batches` with `model`, in eval mode and under the caller's autocast.

    Each image counts once, even if it is repeated, and images with a negative label are ignored, so batches may be
    partial, padded or distributed over processes. `gather` concatenates the rows (n, columns) of all processes; rows of
    −1 that pad them to equal length are ignored. The host waits for the device once, at the end.
    `metrics` are functions of all logits (N, K) and labels (N,), in the order of the dataset.

    `classify` replaces the forward pass of `model`, and probabilities are those at `temperature`, which changes no
    prediction. `keep_logits` keeps the logits in the report, up to `MOST_LOGITS` numbers.
    """
    device = next(model.parameters()).device
    integers: list[Tensor] = []
    floats: list[Tensor] = []
    outputs: list[Tensor] = []
    count = 0
    with in_eval_mode(model), torch.no_grad():
        for batch in batches:
            batch = batch.to(device, non_blocking=True)
            images = normalize(batch.images, pixel_mean, pixel_std)
            logits, distances = classify(images) if classify else (model(images), None)
            logits = logits.float()
            if logits.shape[1] != len(classes):
                raise UsageError(
                    f"The network has {logits.shape[1]} classes, the data {len(classes)}. "
                    "Evaluate it on the classes it was trained on."
                )
            labels = batch.labels.clamp(min=0)
            integers.append(torch.stack([batch.index, batch.labels, *_decide(logits, labels)], dim=1))
            columns = _confidence_and_losses(logits, labels, temperature)
            floats.append(torch.stack(columns if distances is None else (*columns, distances), dim=1))
            count += logits.numel()
            if metrics or (keep_logits and count <= MOST_LOGITS):
                outputs.append(logits)
    if not integers:
        raise DataError("There are no images to evaluate: the dataset or its split is empty.")
    join = gather or (lambda rows: rows)
    rows_of_all, columns_of_all = join(torch.cat(integers)).cpu().numpy(), join(torch.cat(floats)).cpu().numpy()
    all_logits = join(torch.cat(outputs)).cpu() if len(outputs) == len(integers) else None
    kept = all_logits.numpy() if all_logits is not None and keep_logits else None
    report = _report(rows_of_all, columns_of_all, kept, classes, temperature)
    if not metrics:
        return report
    assert all_logits is not None
    return replace(report, own=_own_metrics(metrics, report, rows_of_all[:, 0], all_logits))


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


def _decide(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return prediction and rank of the label, (B,) each, from logits (B, K)."""
    label_logits = logits.gather(1, labels[:, None])  # (B, 1)
    later = torch.arange(logits.shape[1], device=logits.device) >= labels[:, None]
    # Counted from below, so that a label never ranks first among NaN logits.
    below = (logits < label_logits) | ((logits == label_logits) & later)
    return logits.argmax(dim=1), logits.shape[1] - below.sum(dim=1)


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


def _confidence_and_losses(logits: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the probability of the best class and the cross-entropy at a temperature, (B,) each."""
    scaled = logits / temperature
    return scaled.softmax(dim=1).amax(dim=1), F.cross_entropy(scaled, labels, reduction="none")


def _report(
    integers: np.ndarray, floats: np.ndarray, logits: np.ndarray | None, classes: Sequence[str], temperature: float
) -> ClassificationReport:
    counted = integers[:, 1] >= 0
    if not counted.any():
        raise DataError("None of the images has a label, so nothing can be evaluated.")
    index, first = np.unique(integers[counted, 0], return_index=True)
    rows = np.flatnonzero(counted)[first]
    labels, predictions, ranks = integers[rows, 1:].T
    confidence, losses, *distances = floats[rows].T
    return ClassificationReport(
        tuple(classes),
        index,
        labels,
        predictions,
        ranks,
        confidence,
        losses,
        temperature=temperature,
        logits=None if logits is None else logits[rows],
        distances=distances[0] if distances else None,
    )
