"""Temperatures, thresholds and limits against references from their equations, and the promise in a simulation."""

import math

import numpy as np
import pytest
import torch

from patchloom.evaluation.calibration import (
    FOLDS,
    LabeledLogits,
    Scored,
    binomial_cdf,
    certified_threshold,
    choose_temperature,
    conformal_limit,
    fewest_images,
    fit_temperature,
    parts_of,
    reliability,
    reliability_at,
)
from patchloom_runtime.calibration import TEMPERATURES, Calibration, DistanceRule, TemperatureFit

CLASSES = 5
MAX_ERROR, CONFIDENCE = 0.05, 0.9


def drawn_logits(images: int, sharpness: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Logits whose labels are drawn from softmax(logits / sharpness)."""
    rng = np.random.default_rng(seed)
    logits = 2 * sharpness * rng.standard_normal((images, CLASSES))
    shares = np.exp(logits / sharpness)
    shares /= shares.sum(axis=1, keepdims=True)
    return logits.astype(np.float32), (shares.cumsum(axis=1) < rng.random((images, 1))).sum(axis=1)


def slow_temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    """The minimum of the cross-entropy with one further uniform label, over a fine grid."""
    z, best = torch.from_numpy(logits).double(), (math.inf, 0.0)
    smoothing = 1 / (len(z) + 1)
    for temperature in np.geomspace(*TEMPERATURES, 4000):
        log_shares = (z / temperature).log_softmax(dim=1)
        right = log_shares[torch.arange(len(z)), torch.from_numpy(labels)].mean()
        loss = -((1 - smoothing) * right + smoothing * log_shares.mean())
        best = min(best, (float(loss), temperature))
    return best[1]


@pytest.mark.parametrize("sharpness", [0.5, 1.0, 3.0])
def test_temperature_minimizes_the_cross_entropy(sharpness: float) -> None:
    logits, labels = drawn_logits(400, sharpness)
    assert fit_temperature(logits, labels) == pytest.approx(slow_temperature(logits, labels), rel=2e-3)


def test_temperature_finds_the_one_that_the_labels_were_drawn_with() -> None:
    logits, labels = drawn_logits(20_000, 2.5)
    assert fit_temperature(logits, labels) == pytest.approx(2.5, rel=0.03)


def test_few_images_without_a_mistake_do_not_make_a_network_certain() -> None:
    labels = np.arange(20) % CLASSES
    logits = np.eye(CLASSES, dtype=np.float32)[labels]
    calibration = Calibration(fit_temperature(logits, labels))
    shares = calibration.probabilities(logits).max(axis=1)
    # One further image with a uniform label: the mean probability of the label is (20 + 1/5) / 21.
    assert shares == pytest.approx((20 + 1 / CLASSES) / 21, abs=1e-4)


def test_infinite_logits_have_a_temperature() -> None:
    logits, labels = drawn_logits(50, 1.0)
    logits[0, 0] = -np.inf
    assert TEMPERATURES[0] <= fit_temperature(logits, labels) <= TEMPERATURES[1]


@pytest.mark.parametrize(("sharpness", "rows_per_image"), [(2.5, 1), (2.5, 4), (1.0, 4)])
def test_a_temperature_is_judged_by_images_it_was_not_fitted_to(sharpness: float, rows_per_image: int) -> None:
    logits, labels = drawn_logits(200, sharpness)
    images = np.arange(200) // rows_per_image
    parts = np.random.default_rng(0).permutation(images.max() + 1) % FOLDS
    losses: dict[str, list[float]] = {"without": [], "with": []}
    for row, image in enumerate(images):
        others = parts[images] != parts[image]
        fitted = fit_temperature(logits[others], labels[others])
        for name, temperature in (("without", 1.0), ("with", fitted)):
            shares = torch.from_numpy(logits[row]).double().div(temperature).log_softmax(dim=0)
            losses[name].append(-float(shares[labels[row]]))
    fit = choose_temperature(LabeledLogits(logits, labels, images))
    assert fit.loss_without == pytest.approx(np.mean(losses["without"]))
    assert fit.loss_with == pytest.approx(np.mean(losses["with"]))
    assert fit.fitted == pytest.approx(fit_temperature(logits, labels))
    assert fit.helps == (np.mean(losses["with"]) < np.mean(losses["without"]))


def test_a_temperature_that_does_not_help_is_not_used() -> None:
    assert TemperatureFit(2.0, 0.5, 0.6).temperature == TemperatureFit(2.0, 0.5, 0.5).temperature == 1
    assert TemperatureFit(2.0, 0.5, 0.4).temperature == 2


def test_one_image_does_not_show_that_a_temperature_helps() -> None:
    logits, labels = drawn_logits(300, 3.0)
    assert not choose_temperature(LabeledLogits(logits, labels, np.zeros(300))).helps


def test_the_choice_costs_calibrated_networks_less_than_always_a_temperature() -> None:
    """Over 100 draws of 60 images from a calibrated network: excess loss in truth, chosen against always fitted."""
    chosen, always, kept = 0.0, 0.0, 0
    truth = reliability_at(*drawn_logits(5_000, 1.0, seed=999), 1.0).loss
    held_out = drawn_logits(5_000, 1.0, seed=999)
    for seed in range(100):
        fit = choose_temperature(LabeledLogits(*drawn_logits(60, 1.0, seed), np.arange(60)))
        always += reliability_at(*held_out, fit.fitted).loss - truth
        chosen += reliability_at(*held_out, fit.temperature).loss - truth
        kept += fit.helps
    assert kept < 50
    assert 0 < chosen < always


def test_reliability_counts_every_prediction_in_its_bin() -> None:
    confidence = np.array([0.15, 0.2, 0.95, 1.0])
    measured = reliability(confidence, np.array([True, False, True, True]), np.ones(4), bins=10)
    assert [each.images for each in measured.bins] == [0, 2, 0, 0, 0, 0, 0, 0, 0, 2]
    assert measured.bins[1].accuracy == 0.5
    assert measured.calibration_error == pytest.approx(100 * (2 * (0.5 - 0.175) + 2 * (1 - 0.975)) / 4)


def test_reliability_at_a_temperature_is_that_of_its_probabilities() -> None:
    logits, labels = drawn_logits(300, 1.0)
    shares = torch.from_numpy(logits).double().div(2.0).softmax(dim=1).numpy()
    measured = reliability_at(logits, labels, 2.0)
    losses = -np.log(shares[np.arange(300), labels])
    expected = reliability(shares.max(axis=1), shares.argmax(axis=1) == labels, losses)
    assert measured.loss == pytest.approx(expected.loss)
    assert measured.calibration_error == pytest.approx(expected.calibration_error)


def test_binomial_cdf_is_the_sum_of_its_terms() -> None:
    for n, p in ((1, 0.3), (17, 0.05), (60, 0.9)):
        terms = [math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)]
        np.testing.assert_allclose(binomial_cdf(n, p), np.cumsum(terms), atol=1e-12)


def test_a_promise_needs_enough_images() -> None:
    least = fewest_images(MAX_ERROR, CONFIDENCE)
    assert (1 - MAX_ERROR) ** least <= 1 - CONFIDENCE < (1 - MAX_ERROR) ** (least - 1)
    perfect = [Scored(np.full(n, 0.9), np.ones(n, bool), np.ones(n, bool)) for n in (least - 1, least)]
    few, enough = (certified_threshold(one, one, max_error=MAX_ERROR, confidence=CONFIDENCE) for one in perfect)
    assert (few, enough) == (None, 0.9)


def scored(images: int, rng: np.random.Generator) -> Scored:
    """Images whose error rate falls with their confidence; one in twenty is rejected by another rule."""
    confidence = rng.random(images)
    return Scored(confidence, rng.random(images) >= 0.4 * (1 - confidence) ** 2, rng.random(images) >= 0.05)


def true_error(threshold: float) -> float:
    """Mean of 0.4·(1 − c)² over c from the threshold to 1."""
    return 0.4 * (1 - threshold) ** 2 / 3


def naive_threshold(images: Scored) -> float:
    """The lowest threshold whose observed error is at most the maximum."""
    candidates = np.sort(images.confidence[images.eligible])
    for threshold in candidates:
        answered, wrong = images.above(threshold)
        if wrong <= MAX_ERROR * answered:
            return float(threshold)
    return 1.0


def test_the_promise_holds_over_random_splits_and_that_of_a_naive_threshold_does_not() -> None:
    rng = np.random.default_rng(0)
    broken, naively_broken, answered = 0, 0, []
    for _ in range(200):
        images = scored(1000, rng)
        parts = [Scored(images.confidence[rows], images.right[rows], images.eligible[rows]) for rows in parts_of(1000)]
        threshold = certified_threshold(*parts, max_error=MAX_ERROR, confidence=CONFIDENCE)
        answered.append(0.0 if threshold is None else 1 - threshold)
        broken += threshold is not None and true_error(threshold) > MAX_ERROR
        naively_broken += true_error(naive_threshold(images)) > MAX_ERROR
    assert broken <= 200 * (1 - CONFIDENCE)
    assert naively_broken > 200 * (1 - CONFIDENCE) * 2
    # The best possible threshold answers 61 %: the promise does not cost much of that.
    assert np.mean(answered) > 0.4
    assert np.mean(np.array(answered) > 0) > 0.85


def test_a_promise_below_what_a_network_can_do_is_not_made() -> None:
    rng = np.random.default_rng(0)
    made = 0
    for _ in range(200):
        parts = [Scored(rng.random(300), rng.random(300) >= 0.1, np.ones(300, bool)) for _ in range(2)]
        made += certified_threshold(*parts, max_error=MAX_ERROR, confidence=CONFIDENCE) is not None
    assert made <= 200 * (1 - CONFIDENCE)


def test_a_limit_rejects_at_most_its_share_of_new_images() -> None:
    rng = np.random.default_rng(0)
    rejected = []
    for _ in range(400):
        limit = conformal_limit(rng.standard_normal(99), 0.05)
        assert limit is not None
        rejected.append((rng.standard_normal(500) > limit).mean())
    assert 0.04 < np.mean(rejected) < 0.0525  # 0.05 is exact for 99 images; the rest is chance
    assert conformal_limit(rng.standard_normal(50), 0.01) is None


def test_distances_are_those_of_the_nearest_stored_vectors() -> None:
    rng = np.random.default_rng(0)
    stored, vectors = rng.standard_normal((30, 8)), rng.standard_normal((7, 8))
    stored /= np.linalg.norm(stored, axis=1, keepdims=True)
    rule = DistanceRule(1.0, 4, 0.01, 100, (30, 8))
    for vector, distance in zip(vectors, rule.distances(stored, vectors), strict=True):
        cosines = sorted((vector @ one / np.linalg.norm(vector) for one in stored), reverse=True)
        assert distance == pytest.approx(1 - cosines[3], abs=1e-6)
