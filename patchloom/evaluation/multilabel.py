"""Multi-label metrics: one pass over a dataset gives the score of every label of every image.

Letters: N images, K labels. Unknown labels (NaN) are ignored everywhere, and labels that apply to no image are left out
of means over labels. Shares are in percent, as in papers.

name          value
map           mean average precision: the area below the steps of precision over recall, mean over labels
macro_f1      F1 of the decisions, mean over labels
micro_f1      F1 of all decisions together
loss          mean binary cross-entropy of the known labels, in nats
labels        labels that apply to an image, which the means are over
images        number of images
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from patchloom.data.images.image_batch import IMAGENET_MEAN, IMAGENET_STD, ImageBatch
from patchloom.evaluation.calibration import LabeledLogits, choose_temperature
from patchloom.evaluation.intervals import bootstrap_weights, central
from patchloom.evaluation.target_vectors import predict_vectors
from patchloom_runtime.calibration import TemperatureFit

UNDECIDED = 0.5  # threshold before one is chosen
RARE = 5  # images to which a label must apply on val to get a threshold of its own
ROUNDS = 200  # of the bootstrap


@dataclass(frozen=True)
class Thresholds:
    """The lowest score with which each label is predicted."""

    values: np.ndarray  # (K,) float64
    own: np.ndarray  # (K,) bool: chosen for the label itself; the others share one threshold
    shared: float

    @classmethod
    def undecided(cls, labels: int) -> "Thresholds":
        """Return 0.5 for every label."""
        return cls(np.full(labels, UNDECIDED), np.zeros(labels, bool), UNDECIDED)


def choose_thresholds(targets: np.ndarray, scores: np.ndarray) -> Thresholds:
    """Choose the threshold of every label that maximizes its F1.

    A label that applies to fewer than `RARE` images, or to all, gets the threshold that maximizes the micro-F1 of the
    other labels, since its own best one would follow the accidents of a few images. `targets` and `scores` are (N, K).
    """
    known = ~np.isnan(targets)
    applies, denied = ((known & (targets == value)).sum(axis=0) for value in (1, 0))
    own = (applies >= RARE) & (denied > 0)
    pooled = known & (own if own.any() else applies > 0)
    shared = _best_threshold(targets[pooled], scores[pooled])
    values = np.full(targets.shape[1], shared)
    for label in np.flatnonzero(own):
        rows = known[:, label]
        values[label] = _best_threshold(targets[rows, label], scores[rows, label])
    return Thresholds(values, own, shared)


def _best_threshold(targets: np.ndarray, scores: np.ndarray) -> float:
    """Return the threshold with the highest F1, halfway between two scores; the highest of equals."""
    if not np.any(targets == 1):
        return UNDECIDED
    order = np.argsort(-scores, kind="stable")
    ranked = scores[order].astype(np.float64)
    last = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))  # of images with equal scores
    right = np.cumsum(targets[order] == 1)[last]
    best = int(np.argmax(2 * right / (last + 1 + right[-1])))
    below = ranked[last[best] + 1] if last[best] + 1 < len(ranked) else 0.0
    return float(ranked[last[best]] + below) / 2


@dataclass(frozen=True, eq=False)
class MultilabelReport:
    """Scores and targets of every image in the order of the dataset, and the metrics that follow from them."""

    classes: tuple[str, ...]
    index: np.ndarray  # (N,) int64, increasing, in the dataset
    targets: np.ndarray  # (N, K) float32: 1, 0 or NaN
    scores: np.ndarray  # (N, K) float32, probabilities
    thresholds: Thresholds
    temperature: float = 1.0  # of the scores
    logits: np.ndarray | None = None  # (N, K) float32; None for a report that was read from a file
    fit: TemperatureFit | None = None  # how the temperature was chosen, if on these images

    def __iter__(self) -> Iterator[tuple[str, float]]:
        yield "map", self.mean_ap
        yield "macro_f1", self.macro_f1
        yield "micro_f1", self.micro_f1
        yield "loss", self.loss
        yield "labels", float(np.sum(self.counts > 0))
        yield "images", float(len(self.index))

    def __repr__(self) -> str:
        count = f"{len(self.index):,} images, {len(self.classes)} labels"
        return f"MultilabelReport({count}: mAP {self.mean_ap:.2f} %, micro-F1 {self.micro_f1:.2f} %)"

    @property
    def decisions_on_labels(self) -> LabeledLogits:
        """The logits (M, 2) against and for each known label of an image, and whether it applies."""
        assert self.logits is not None
        known = ~np.isnan(self.targets)
        logits = np.stack([np.zeros(known.sum(), np.float32), self.logits[known]], axis=1)
        return LabeledLogits(logits, self.targets[known].astype(int), np.nonzero(known)[0])

    def at_temperature(self, temperature: float) -> "MultilabelReport":
        """Return the report with the scores at another temperature; it must have logits."""
        assert self.logits is not None
        scores = (torch.from_numpy(self.logits) / temperature).sigmoid().numpy()
        return replace(self, scores=scores, temperature=temperature)

    def calibrated(self) -> "MultilabelReport":
        """Return the report at the temperature and the thresholds chosen on its images; it must have logits."""
        fit = choose_temperature(self.decisions_on_labels)
        return replace(self.at_temperature(fit.temperature).with_thresholds(), fit=fit)

    def with_thresholds(self) -> "MultilabelReport":
        """Return the report with the thresholds that maximize F1 on its images."""
        return replace(self, thresholds=choose_thresholds(self.targets, self.scores))

    @cached_property
    def counts(self) -> np.ndarray:
        """(K,) images to which each label applies."""
        return np.asarray((self.targets == 1).sum(axis=0))

    @property
    def left_out(self) -> tuple[str, ...]:
        """Labels that apply to no image."""
        return tuple(name for name, count in zip(self.classes, self.counts, strict=True) if not count)

    @cached_property
    def average_precision(self) -> np.ndarray:
        """(K,) average precision in percent; NaN for labels that apply to no image."""
        return np.array(
            [self._precision(label, np.ones((1, len(self.index))))[0] for label in range(len(self.classes))]
        )

    @property
    def mean_ap(self) -> float:
        """Mean average precision."""
        return _mean(self.average_precision)

    @cached_property
    def resampled_map(self) -> np.ndarray:
        """The mean average precision in each round of the bootstrap over images that draws one with a label."""
        weights = bootstrap_weights(len(self.index), ROUNDS)
        each = np.stack([self._precision(label, weights) for label in np.flatnonzero(self.counts).tolist()])
        return np.nanmean(each[:, ~np.isnan(each).all(axis=0)], axis=0)

    def map_interval(self) -> tuple[float, float]:
        """Return the 95 % bootstrap interval of the mean average precision, in percent."""
        return central(self.resampled_map)

    def _precision(self, label: int, weights: np.ndarray) -> np.ndarray:
        """Return the average precision of a label for image weights (rounds, N); NaN if it applies to no image."""
        known = ~np.isnan(self.targets[:, label])
        scores, applies, weights = self.scores[known, label], self.targets[known, label] == 1, weights[:, known]
        if not len(scores):
            return np.full(len(weights), np.nan)
        order = np.argsort(-scores, kind="stable")
        ranked = scores[order]
        last = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))  # of images with equal scores
        right = np.cumsum(weights[:, order] * applies[order], axis=1)[:, last]
        predicted = np.cumsum(weights[:, order], axis=1)[:, last]
        precision = right / np.maximum(predicted, 1e-12)
        steps = np.diff(right, axis=1, prepend=0)
        total = right[:, -1]
        area = (steps * precision).sum(axis=1)
        return 100 * np.divide(area, total, out=np.full(len(total), np.nan), where=total > 0)

    @property
    def decisions(self) -> np.ndarray:
        """(N, K) bool: the labels that are predicted."""
        return np.asarray(self.scores >= self.thresholds.values)

    def _counted(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return right, spurious and missing decisions per label, (K,) each."""
        applies, denied, chosen = self.targets == 1, self.targets == 0, self.decisions
        right, spurious, missing = applies & chosen, denied & chosen, applies & ~chosen
        return right.sum(axis=0), spurious.sum(axis=0), missing.sum(axis=0)

    @cached_property
    def precision_recall_f1(self) -> np.ndarray:
        """(K, 3) precision, recall and F1 of the decisions in percent; NaN for labels that apply to no image."""
        right, spurious, missing = self._counted()
        precision = right / np.maximum(right + spurious, 1)
        recall = right / np.maximum(right + missing, 1)
        f1 = 2 * right / np.maximum(2 * right + spurious + missing, 1)
        return np.where((self.counts > 0)[:, None], 100 * np.stack([precision, recall, f1], axis=1), np.nan)

    @property
    def macro_f1(self) -> float:
        """Mean F1 over labels."""
        return _mean(self.precision_recall_f1[:, 2])

    @property
    def micro_f1(self) -> float:
        """F1 of all decisions on labels that apply to an image."""
        right, spurious, missing = (each[self.counts > 0].sum() for each in self._counted())
        return 100 * float(2 * right / max(2 * right + spurious + missing, 1))

    @property
    def loss(self) -> float:
        """Mean binary cross-entropy of the known labels."""
        known = ~np.isnan(self.targets)
        chosen = np.where(self.targets[known] == 1, self.scores[known], 1 - self.scores[known].astype(np.float64))
        return float(-np.log(np.maximum(chosen, 1e-12)).mean())

    def worst(self, count: int = 20) -> list["LabelMistake"]:
        """Return the images with the most surprising mistakes: the highest sum of −log of the wrong labels' scores."""
        wrong = ((self.targets == 1) & ~self.decisions) | ((self.targets == 0) & self.decisions)
        of_true = np.where(self.targets == 1, self.scores, 1 - self.scores)
        surprise = np.where(wrong, -np.log(np.maximum(of_true, 1e-12)), 0).sum(axis=1)
        rows = [int(row) for row in np.argsort(-surprise, kind="stable")[:count] if wrong[row].any()]
        return [self._mistake(row) for row in rows]

    def _mistake(self, row: int) -> "LabelMistake":
        applies, chosen = self.targets[row] == 1, self.decisions[row]

        def named(where: np.ndarray) -> tuple[tuple[str, float], ...]:
            labels = sorted(np.flatnonzero(where).tolist(), key=lambda k: -self.scores[row, k])
            return tuple((self.classes[k], float(self.scores[row, k])) for k in labels)

        spurious = chosen & (self.targets[row] == 0)
        return LabelMistake(int(self.index[row]), named(applies & chosen), named(applies & ~chosen), named(spurious))


@dataclass(frozen=True)
class LabelMistake:
    """An image with wrong labels; each label has its score."""

    index: int  # in the dataset
    right: tuple[tuple[str, float], ...]
    missing: tuple[tuple[str, float], ...]
    spurious: tuple[tuple[str, float], ...]

    @property
    def labels(self) -> list[str]:
        """The labels that apply."""
        return [name for name, _ in (*self.right, *self.missing)]


def evaluate(
    model: nn.Module,
    batches: Iterable[ImageBatch],
    *,
    classes: Sequence[str],
    pixel_mean: tuple[float, ...] = IMAGENET_MEAN,
    pixel_std: tuple[float, ...] = IMAGENET_STD,
    gather: Callable[[Tensor], Tensor] | None = None,
    thresholds: Thresholds | None = None,
    temperature: float = 1.0,
) -> MultilabelReport:
    """Score the labels of all images at a temperature; see `predict_vectors`."""
    index, targets, logits = predict_vectors(
        model, batches, len(classes), "label", pixel_mean=pixel_mean, pixel_std=pixel_std, gather=gather
    )
    undecided = thresholds or Thresholds.undecided(len(classes))
    return MultilabelReport(tuple(classes), index, targets, logits, undecided, logits=logits).at_temperature(
        temperature
    )


def _mean(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")
