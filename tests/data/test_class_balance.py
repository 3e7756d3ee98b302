import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.utils import compute_class_weight

from patchloom.data.labels.class_balance import (
    class_counts,
    class_ratio,
    class_weights,
    is_imbalanced,
    logit_adjustment,
    sampling_shares,
)

counts_of_classes = st.lists(st.integers(1, 500), min_size=2, max_size=8).map(np.array)


@given(counts_of_classes)
def test_inverse_weights_equal_sklearns(counts):
    labels = np.repeat(np.arange(len(counts)), counts)
    expected = compute_class_weight("balanced", classes=np.arange(len(counts)), y=labels)
    np.testing.assert_allclose(class_weights(class_counts(labels), "inverse", 0.9), expected)


@given(counts_of_classes, st.sampled_from([0.5, 0.9, 0.999, 0.9999]))
def test_effective_weights_are_their_equation(counts, beta):
    effective = [sum(beta**j for j in range(n)) for n in counts.tolist()]  # equation 1: Σ_{j<n} β^j
    ratios = [1 / number for number in effective]
    scale = counts.sum() / sum(n * ratio for n, ratio in zip(counts.tolist(), ratios, strict=True))
    weights = class_weights(counts, "effective", beta)
    np.testing.assert_allclose(weights, [ratio * scale for ratio in ratios])
    assert (counts * weights).sum() == pytest.approx(counts.sum())


def test_the_effective_number_is_between_no_weights_and_the_inverse():
    counts = np.array([500, 50, 5])
    np.testing.assert_allclose(class_weights(counts, "effective", 1e-9), 1)
    np.testing.assert_allclose(
        class_weights(counts, "effective", 1 - 1e-12), class_weights(counts, "inverse", 0.9), rtol=1e-6
    )


def test_logits_are_adjusted_by_shares_or_log_odds():
    counts = np.array([90, 9, 1])
    np.testing.assert_allclose(logit_adjustment(counts, 1.5, "cross_entropy"), 1.5 * np.log([0.9, 0.09, 0.01]))
    odds = np.log(np.array([9, 0.09 / 0.91, 1 / 99])) - np.log(0.5)  # 1/3 against 2/3 is one half
    np.testing.assert_allclose(logit_adjustment(counts, 2.0, "bce"), 2 * odds)
    np.testing.assert_allclose(logit_adjustment(np.array([7, 7, 7]), 1.0, "bce"), 0, atol=1e-12)


def test_an_empty_class_counts_as_one_image():
    counts = np.array([10, 0])
    assert np.isfinite(class_weights(counts, "effective", 0.9)).all()
    assert np.isfinite(logit_adjustment(counts, 1.0, "bce")).all()
    np.testing.assert_allclose(sampling_shares(counts, "balanced"), [1, 0])


@given(counts_of_classes)
def test_shares_of_an_epoch(counts):
    np.testing.assert_allclose(sampling_shares(counts, "none"), counts / counts.sum())
    np.testing.assert_allclose(sampling_shares(counts, "balanced"), 1 / len(counts))
    roots = np.sqrt(counts)
    np.testing.assert_allclose(sampling_shares(counts, "sqrt"), roots / roots.sum())


def test_imbalance_is_the_ratio_of_the_classes_that_have_images():
    labels = np.repeat([0, 2, -1], [20, 2, 5])
    assert class_ratio(labels) == 10
    assert is_imbalanced(labels)
    assert not is_imbalanced(labels[1:])
    assert class_ratio(np.full(4, -1)) == class_ratio(np.array([], int)) == 1
