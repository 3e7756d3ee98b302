"""Fitting of calibrated predictions on held-out images: temperature, confidence threshold and distance limit.

`patchloom_runtime.calibration` applies what is fitted here. Letters: N images, K classes.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from patchloom_runtime.calibration import TEMPERATURES, Reliability, ReliabilityBin, TemperatureFit
from patchloom_runtime.errors import DataError

BINS = 15
MOST_NUMBERS = 1 << 23  # logits that a temperature is fitted to; more change it in the fourth digit
MOST_CANDIDATES = 200  # thresholds that are tested
FOLDS = 5  # that decide whether a temperature helps
_STEPS = 35  # bisections of the temperature
_WIDEST = 100.0  # largest difference of logits that counts, in case a class has the logit −∞


def reliability(confidence: np.ndarray, right: np.ndarray, losses: np.ndarray, bins: int = BINS) -> Reliability:
    """Return the reliability of predictions with `confidence` (N,); bin b holds those in (b/bins, (b+1)/bins]."""
    number = bin_numbers(confidence, bins)
    images = np.bincount(number, minlength=bins)
    sums = [np.bincount(number, values, minlength=bins) for values in (confidence, right)]
    means = [np.divide(total, images, out=np.zeros(bins), where=images > 0) for total in sums]
    rows = zip(images.tolist(), *(mean.tolist() for mean in means), strict=True)
    return Reliability(float(np.mean(losses, dtype=np.float64)), tuple(ReliabilityBin(*row) for row in rows))


def reliability_at(logits: np.ndarray, labels: np.ndarray, temperature: float) -> Reliability:
    """Return the reliability of softmax(logits / temperature) for logits (N, K) and labels (N,)."""
    scaled = logits.astype(np.float64) / temperature
    scaled -= scaled.max(axis=1, keepdims=True)
    log_shares = scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True))
    losses = -log_shares[np.arange(len(labels)), labels]
    return reliability(np.exp(log_shares.max(axis=1)), logits.argmax(axis=1) == labels, losses)


def bin_numbers(confidence: np.ndarray, bins: int) -> np.ndarray:
    """Return the bin of each confidence (N,), from 0."""
    return np.clip(np.ceil(np.nan_to_num(confidence).astype(np.float64) * bins).astype(int) - 1, 0, bins - 1)


def fit_temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    """Return the temperature T that minimizes the cross-entropy of softmax(logits / T) with the labels (N,).

    The cross-entropy is convex in β = 1/T, and its derivative is the mean of E[z] − z_label, where E is the expectation
    by softmax(βz). The root is found by bisection. One further image whose label is uniform over the classes counts as
    well, as in Platt's method: without it, a network without a mistake on few images would get a temperature of 0.
    """
    if not len(logits):
        raise DataError("a temperature needs at least one labeled image")
    rows = _some_rows(logits)
    z = logits[rows].astype(np.float64)
    z = np.maximum(z - z.max(axis=1, keepdims=True), -_WIDEST)
    uniform = 1 / (len(rows) + 1)  # share of the further image
    target = (1 - uniform) * z[np.arange(len(rows)), labels[rows]].mean() + uniform * z.mean()
    low, high = (math.log(1 / temperature) for temperature in reversed(TEMPERATURES))
    for _ in range(_STEPS):
        middle = (low + high) / 2
        shares = np.exp(math.exp(middle) * z)
        expected = ((shares * z).sum(axis=1) / shares.sum(axis=1)).mean()
        low, high = (low, middle) if expected > target else (middle, high)
    return math.exp(-(low + high) / 2)


class LabeledLogits(NamedTuple):
    """Logits, the right class of each row, and the image that it belongs to."""

    logits: np.ndarray  # (N, K)
    labels: np.ndarray  # (N,)
    images: np.ndarray  # (N,)


def choose_temperature(decisions: LabeledLogits) -> TemperatureFit:
    """Fit a temperature to all images, and decide by cross-fitting whether it helps on others.

    The images are divided at random into `FOLDS` parts. Each part is evaluated at the temperature that is fitted to the
    other parts. A single image cannot show that a temperature helps.
    """
    rows = _some_rows(decisions.logits)
    logits, labels, images = (values[rows] for values in decisions)
    number = np.unique(images, return_inverse=True)[1]
    count = int(number.max(initial=-1)) + 1
    fitted_to_all = fit_temperature(logits, labels)
    if count < 2:
        loss = reliability_at(logits, labels, 1.0).loss
        return TemperatureFit(fitted_to_all, loss, loss)
    fold = (np.random.default_rng(0).permutation(count) % FOLDS)[number]
    sums = np.zeros(2)
    for part in range(min(FOLDS, count)):
        held_out = fold == part
        fitted = fit_temperature(logits[~held_out], labels[~held_out])
        losses = [reliability_at(logits[held_out], labels[held_out], each).loss for each in (1.0, fitted)]
        sums += held_out.sum() * np.array(losses)
    return TemperatureFit(fitted_to_all, *(sums / len(labels)).tolist())


def _some_rows(logits: np.ndarray) -> np.ndarray:
    """Return evenly spaced rows that together have no more than `MOST_NUMBERS` numbers."""
    most = max(1, MOST_NUMBERS // logits.shape[1])
    return np.unique(np.linspace(0, len(logits) - 1, min(most, len(logits))).round().astype(int))


@dataclass(frozen=True, eq=False)
class Scored:
    """Images that a threshold is chosen or tested on; those that another rule rejects are not `eligible`."""

    confidence: np.ndarray  # (N,)
    right: np.ndarray  # (N,) bool
    eligible: np.ndarray  # (N,) bool

    def above(self, threshold: float) -> tuple[int, int]:
        """Return the number of images that are answered at a threshold, and how many of these are wrong."""
        answered = self.eligible & (self.confidence >= threshold)
        return int(answered.sum()), int((answered & ~self.right).sum())


def certified_threshold(first: Scored, second: Scored, *, max_error: float, confidence: float) -> float | None:
    """Return the lowest threshold at which at most `max_error` of the answered images are wrong, or None.

    The promise: let R(t) = P(wrong | confidence ≥ t) for a new image. If the images of `second` and the new image are
    independent draws of one distribution, then R(t) ≤ `max_error` holds for the returned t with a probability of at
    least `confidence` over the draw of `second`.

    Derivation (Learn then Test, arXiv 2110.01052). R is not monotone in t, so a threshold whose observed error is low
    is no proof. For a fixed t, the number of wrong among the m answered images of `second` is Binomial(m, R(t)), given
    m. Under the hypothesis R(t) > a, the p-value P(Binomial(m, a) ≤ wrong) is therefore below d with a probability of
    at most d. The candidate thresholds and their order come from `first`, which is independent of `second`: they start
    at the one that is most likely to pass, judging by `first`, and go down. Each is tested at level
    d = 1 − `confidence`, and the first that fails ends the sequence. A threshold that does not hold is returned only if
    the first such one in the order was rejected, which happens with a probability of at most d; so no correction for
    many tests is needed.

    Returns None if already the first candidate fails: `second` has too few images, or the network too many mistakes.
    """
    candidates = np.unique(first.confidence[first.eligible])[::-1]  # highest first
    if not len(candidates):
        return None
    places = np.linspace(0, len(candidates) - 1, min(MOST_CANDIDATES, len(candidates))).round().astype(int)
    candidates = candidates[np.unique(places)]
    larger = len(second.confidence) / max(1, len(first.confidence))
    chances = []
    for answered, wrong in map(first.above, candidates):
        expected = round(answered * larger)
        allowed = int((binomial_cdf(expected, max_error) <= 1 - confidence).sum()) - 1
        rate = (wrong + 0.5) / (answered + 1)  # Jeffreys' estimate
        chances.append(binomial_cdf(expected, rate)[allowed] if allowed >= 0 else 0.0)
    certified = None
    for threshold in candidates[int(np.argmax(chances)) :]:
        answered, wrong = second.above(threshold)
        if not answered or binomial_cdf(answered, max_error)[wrong] > 1 - confidence:
            break
        certified = float(threshold)
    return certified


def fewest_images(max_error: float, confidence: float) -> int:
    """Return the number of answered images without a mistake that a promise needs."""
    return math.ceil(math.log(1 - confidence) / math.log(1 - max_error))


def binomial_cdf(n: int, p: float) -> np.ndarray:
    """Return the probabilities (n + 1,) of at most 0, 1 … n successes in `n` trials of probability 0 < `p` < 1."""
    counts = np.arange(n + 1)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, n + 1)))])
    log_ways = log_factorial[n] - log_factorial - log_factorial[::-1]
    return np.minimum(1.0, np.exp(log_ways + counts * math.log(p) + (n - counts) * math.log1p(-p)).cumsum())


def conformal_limit(distances: np.ndarray, rejects: float) -> float | None:
    """Return a limit that a new image's distance exceeds with a probability of at most `rejects`, or None.

    The ⌈(n + 1)(1 − rejects)⌉-th smallest of n distances: if the n images and the new one are exchangeable, the rank of
    the new distance is uniform on 1 … n + 1. None if there is no such distance, since n is too small.
    """
    rank = math.ceil((len(distances) + 1) * (1 - rejects) - 1e-9)
    return float(np.sort(distances)[rank - 1]) if 1 <= rank <= len(distances) else None


def parts_of(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of a random third of `count` images and of the others; always the same for one count.

    The third is enough to choose a temperature and candidates; the others, on which they are tested, decide how much a
    promise costs.
    """
    order = np.random.default_rng(0).permutation(count)
    return np.sort(order[: count // 3]), np.sort(order[count // 3 :])
