"""Regression metrics: one pass over a dataset gives the predicted numbers of every image.

Letters: N images, K numbers per image. Unknown numbers (NaN) are ignored. With several numbers per image, `scaled_mae`,
`r2` and `spearman` are means over them, and the errors of each have its name.

name              value
scaled_mae        mean absolute error in standard deviations of the training data; selects the best weights
mae, rmse         mean absolute error and root of the mean squared error, in the units of the number
mae_NAME …        the same of each of several numbers
r2                share of the variance that is explained; 0 for always predicting the mean, below 0 for worse
spearman          rank correlation of predictions and targets; NaN if one of them is constant
exact             grades only: percentage of images whose nearest grade is the true one
images            number of images
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor, nn

from patchloom.data.images.image_batch import IMAGENET_MEAN, IMAGENET_STD, ImageBatch
from patchloom.evaluation.intervals import bootstrap_weights, central
from patchloom.evaluation.target_vectors import predict_vectors
from patchloom_runtime.artifacts.regression import NumberScale
from patchloom_runtime.errors import DataError

ROUNDS = 200  # of the bootstrap


@dataclass(frozen=True, eq=False)
class RegressionReport:
    """Predicted and true numbers of every image in the order of the dataset, and the metrics that follow from them."""

    scale: NumberScale
    index: np.ndarray  # (N,) int64, increasing, in the dataset
    targets: np.ndarray  # (N, K) float64, NaN if unknown
    predictions: np.ndarray  # (N, K) float64, in the units of the targets

    def __iter__(self) -> Iterator[tuple[str, float]]:
        names = self.scale.names
        yield "scaled_mae", self.scaled_mae()
        for name, mae, rmse in zip(names, self.of_each(mean_absolute), self.of_each(root_mean_square), strict=True):
            ending = f"_{name}" if len(names) > 1 else ""
            yield f"mae{ending}", mae
            yield f"rmse{ending}", rmse
        yield "r2", float(np.mean(self.of_each(explained)))
        yield "spearman", float(np.mean(self.of_each(rank_correlation)))
        if self.scale.grades:
            yield "exact", self.exact
        yield "images", float(len(self.index))

    def __repr__(self) -> str:
        named = zip(self.scale.names, self.of_each(mean_absolute), strict=True)
        errors = ", ".join(f"{name} {mae:.4g}" for name, mae in named)
        return f"RegressionReport({len(self.index):,} images: mean absolute error {errors})"

    @cached_property
    def residuals(self) -> np.ndarray:
        """(N, K): predicted minus true numbers."""
        return self.predictions - self.targets

    def of_each(self, metric: Callable[[np.ndarray, np.ndarray], float], rows: np.ndarray | None = None) -> list[float]:
        """Return a metric of (predictions, targets) for each number, of all images or of some."""
        rows = np.arange(len(self.index)) if rows is None else rows
        values = []
        for own, true in zip(self.predictions[rows].T, self.targets[rows].T, strict=True):
            known = ~np.isnan(true)
            values.append(metric(own[known], true[known]) if known.any() else float("nan"))
        return values

    def scaled_mae(self, rows: np.ndarray | None = None) -> float:
        """Return the mean absolute error in standard deviations of the training data, mean over the numbers."""
        return float(np.nanmean(np.array(self.of_each(mean_absolute, rows)) / self.scale.std))

    @property
    def exact(self) -> float:
        """Percentage of images whose nearest grade is the true one."""
        known = ~np.isnan(self.targets[:, 0])
        return 100 * float((self.scale.grade_of(self.predictions[known, 0]) == self.targets[known, 0]).mean())

    def interval(self, metric: Callable[[np.ndarray, np.ndarray], float], column: int = 0) -> tuple[float, float]:
        """Return the 95 % bootstrap interval of a metric of one number, over images."""
        return central(np.array([self.of_each(metric, rows)[column] for rows in resampled(len(self.index))]))

    @cached_property
    def resampled_mae(self) -> np.ndarray:
        """(rounds,): `scaled_mae` of images drawn with replacement; the same draws for the same number of images."""
        return np.array([self.scaled_mae(rows) for rows in resampled(len(self.index))])

    def worst(self, count: int = 20) -> list[int]:
        """Return the rows with the largest errors, in standard deviations of the training data."""
        errors = np.nan_to_num(np.abs(self.residuals) / self.scale.std).max(axis=1)
        return [int(row) for row in np.argsort(-errors, kind="stable")[:count] if errors[row] > 0]


def mean_absolute(predictions: np.ndarray, targets: np.ndarray) -> float:
    """Return the mean absolute error."""
    return float(np.abs(predictions - targets).mean())


def root_mean_square(predictions: np.ndarray, targets: np.ndarray) -> float:
    """Return the root of the mean squared error."""
    return float(np.sqrt(((predictions - targets) ** 2).mean()))


def explained(predictions: np.ndarray, targets: np.ndarray) -> float:
    """Return R²: 1 − Σ(y − ŷ)² / Σ(y − mean y)²; NaN if all targets are equal."""
    total = ((targets - targets.mean()) ** 2).sum()
    return float(1 - ((predictions - targets) ** 2).sum() / total) if total else float("nan")


def rank_correlation(predictions: np.ndarray, targets: np.ndarray) -> float:
    """Return Spearman's ρ: the correlation of ranks, with the mean rank for ties; NaN if one side is constant."""
    first, second = (_ranks(each) for each in (predictions, targets))
    first, second = first - first.mean(), second - second.mean()
    length = np.sqrt((first**2).sum() * (second**2).sum())
    return float((first * second).sum() / length) if length else float("nan")


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def resampled(images: int) -> Iterator[np.ndarray]:
    """Yield the rows of images drawn with replacement, always the same draws."""
    for weights in bootstrap_weights(images, ROUNDS):
        yield np.repeat(np.arange(images), weights.astype(np.int64))


def evaluate(
    model: nn.Module,
    batches: Iterable[ImageBatch],
    *,
    scale: NumberScale,
    pixel_mean: tuple[float, ...] = IMAGENET_MEAN,
    pixel_std: tuple[float, ...] = IMAGENET_STD,
    gather: Callable[[Tensor], Tensor] | None = None,
) -> RegressionReport:
    """Predict the numbers of all images; see `predict_vectors`."""
    index, targets, outputs = predict_vectors(
        model, batches, len(scale.names), "number", pixel_mean=pixel_mean, pixel_std=pixel_std, gather=gather
    )
    return RegressionReport(scale, index, targets.astype(np.float64), scale.numbers(outputs.astype(np.float64)))


def scale_of(names: Sequence[str], values: np.ndarray, most_grades: int) -> NumberScale:
    """Return the scale of training targets (N, K): mean and standard deviation of each number, and its grades.

    A single number with few different values, all of them whole, is a grade: an ordinal label.
    """
    known = [column[~np.isnan(column)].astype(np.float64) for column in values.T]
    for name, column in zip(names, known, strict=True):
        if not len(column) or np.all(column == column[0]):
            what = f"always {column[0]:g}" if len(column) else "unknown"
            raise DataError(f"{name!r} is {what} in the training images, so there is nothing to learn; drop it")
    different = np.unique(known[0]) if len(known) == 1 else np.empty(0)
    is_graded = 1 < len(different) <= most_grades and bool(np.all(different == np.round(different)))
    return NumberScale(
        tuple(names),
        np.array([column.mean() for column in known]),
        np.array([column.std() for column in known]),
        tuple(different.tolist()) if is_graded else (),
    )
