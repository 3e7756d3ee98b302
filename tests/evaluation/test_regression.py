"""Regression metrics against scikit-learn and slow references."""

import numpy as np
import pytest
from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error

from patchloom.evaluation.regression import (
    RegressionReport,
    explained,
    mean_absolute,
    rank_correlation,
    root_mean_square,
    scale_of,
)
from patchloom_runtime.artifacts.regression import NumberScale
from patchloom_runtime.errors import DataError


def report(targets: np.ndarray, predictions: np.ndarray, std=None, grades=()) -> RegressionReport:
    numbers = targets.shape[1]
    scale = NumberScale(tuple("abc"[:numbers]), np.zeros(numbers), np.ones(numbers) if std is None else std, grades)
    return RegressionReport(scale, np.arange(len(targets)), targets, predictions)


@pytest.fixture
def values():
    rng = np.random.default_rng(0)
    targets = rng.normal(3, 2, (40, 2)).round(1)  # with ties
    return targets, targets + rng.normal(0, 1, targets.shape).round(1)


def slow_spearman(a: np.ndarray, b: np.ndarray) -> float:
    def ranks(values):
        return np.array([sum(v < x for v in values) + (sum(v == x for v in values) + 1) / 2 for x in values])

    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


def test_metrics_equal_those_of_scikit_learn(values) -> None:
    targets, predictions = values
    result = report(targets, predictions)
    for number in range(2):
        true, own = targets[:, number], predictions[:, number]
        assert result.of_each(mean_absolute)[number] == pytest.approx(mean_absolute_error(true, own))
        assert result.of_each(root_mean_square)[number] == pytest.approx(root_mean_squared_error(true, own))
        assert result.of_each(explained)[number] == pytest.approx(r2_score(true, own))
        assert result.of_each(rank_correlation)[number] == pytest.approx(slow_spearman(own, true))


def test_names_of_one_and_of_several_numbers(values) -> None:
    targets, predictions = values
    assert [name for name, _ in report(targets[:, :1], predictions[:, :1])] == [
        "scaled_mae", "mae", "rmse", "r2", "spearman", "images",
    ]  # fmt: skip
    both = dict(report(targets, predictions, std=np.array([2.0, 4.0])))
    assert {"mae_a", "rmse_a", "mae_b", "rmse_b"} < both.keys()
    assert both["scaled_mae"] == pytest.approx((both["mae_a"] / 2 + both["mae_b"] / 4) / 2)


def test_unknown_numbers_do_not_count(values) -> None:
    targets, predictions = values
    unknown = targets.copy()
    unknown[::3, 0] = np.nan
    known = ~np.isnan(unknown[:, 0])
    mae = report(unknown, predictions).of_each(mean_absolute)
    assert mae[0] == pytest.approx(np.abs(predictions - targets)[known, 0].mean())
    assert mae[1] == pytest.approx(np.abs(predictions - targets)[:, 1].mean())


def test_the_interval_is_around_the_value_and_shrinks_with_images() -> None:
    rng = np.random.default_rng(0)
    widths = []
    for images in (30, 3_000):
        targets = rng.normal(size=(images, 1))
        result = report(targets, targets + rng.normal(size=targets.shape))
        low, high = result.interval(mean_absolute)
        assert low < result.of_each(mean_absolute)[0] < high
        widths.append(high - low)
    assert widths[1] < widths[0] / 4


def test_constant_sides_have_no_correlation() -> None:
    flat, rising = np.ones(5), np.arange(5.0)
    assert np.isnan(rank_correlation(flat, rising))
    assert np.isnan(explained(rising, flat))


def test_the_largest_errors_come_first() -> None:
    targets = np.zeros((4, 2))
    predictions = np.array([[1.0, 0], [0, 0], [0, 30], [-2, 0]])
    assert report(targets, predictions, std=np.array([1.0, 100.0])).worst() == [3, 0, 2]


def test_grades_are_few_whole_numbers() -> None:
    grades = np.array([[1.0], [2], [3], [2], [np.nan]])
    scale = scale_of(["stars"], grades, 12)
    assert scale.grades == (1.0, 2.0, 3.0)
    assert scale.mean.tolist() == [2.0]
    assert scale.grade_of(np.array([0.2, 1.4, 1.6, 9])).tolist() == [1, 1, 2, 3]
    assert scale_of(["stars"], grades, 2).grades == ()
    assert scale_of(["stars"], grades + 0.5, 12).grades == ()
    assert scale_of(["a", "b"], np.hstack([grades, grades]), 12).grades == ()
    graded = report(np.array([[1.0], [2], [3]]), np.array([[1.2], [2.9], [3.4]]), grades=(1.0, 2.0, 3.0))
    assert dict(graded)["exact"] == pytest.approx(200 / 3)


@pytest.mark.parametrize("column", [[[2.0], [2.0]], [[np.nan], [np.nan]]])
def test_a_number_that_never_changes_cannot_be_learned(column) -> None:
    with pytest.raises(DataError, match="weight"):
        scale_of(["weight"], np.array(column), 12)


@pytest.mark.parametrize(
    "values",
    [
        {"mean": [0.0], "std": [0.0], "grades": []},
        {"mean": [0.0, 1.0], "std": [1.0, 1.0], "grades": []},
        {"mean": [float("inf")], "std": [1.0], "grades": []},
        {"mean": [0.0], "std": [1.0], "grades": [2.0, 1.0]},
    ],
)
def test_a_damaged_scale_is_refused(values) -> None:
    with pytest.raises(ValueError, match=r"expected|increasing"):
        NumberScale.from_values(("a",), values)
