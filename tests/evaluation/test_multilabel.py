"""Metrics of several labels per image, compared with scikit-learn's, and the choice of thresholds."""

import numpy as np
import pytest
import torch
from torch import nn

from patchloom.data.images.image_batch import ImageBatch
from patchloom.evaluation.multilabel import RARE, MultilabelReport, Thresholds, choose_thresholds, evaluate
from patchloom_runtime.errors import DataError, UsageError

metrics = pytest.importorskip("sklearn.metrics")
LABELS = tuple("abcdef")


def made_up(seed=0, images=80, unknown=0.0, rounded=False):
    rng = np.random.default_rng(seed)
    targets = (rng.random((images, len(LABELS))) < np.linspace(0.1, 0.7, len(LABELS))).astype(np.float32)
    scores = (0.6 * rng.random(targets.shape) + 0.35 * targets).astype(np.float32)
    if rounded:
        scores = np.round(scores, 1)  # many equal scores
    targets[rng.random(targets.shape) < unknown] = np.nan
    thresholds = Thresholds(np.linspace(0.3, 0.6, len(LABELS)), np.ones(len(LABELS), bool), 0.5)
    return MultilabelReport(LABELS, np.arange(images), targets, scores, thresholds)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("unknown", [0.0, 0.3])
def test_metrics_equal_those_of_scikit_learn(unknown, rounded):
    report = made_up(3, unknown=unknown, rounded=rounded)
    known = ~np.isnan(report.targets)
    columns = [(report.targets[k, i], report.scores[k, i], report.decisions[k, i]) for i, k in enumerate(known.T)]
    precisions = [100 * metrics.average_precision_score(truth, scores) for truth, scores, _ in columns]
    assert report.average_precision == pytest.approx(precisions, abs=1e-6)
    values = dict(report)
    assert values["map"] == pytest.approx(np.mean(precisions), abs=1e-6)
    f1 = [100 * metrics.f1_score(truth, chosen) for truth, _, chosen in columns]
    assert values["macro_f1"] == pytest.approx(np.mean(f1), abs=1e-6)
    micro = 100 * metrics.f1_score(report.targets[known] == 1, report.decisions[known])
    assert values["micro_f1"] == pytest.approx(micro, abs=1e-6)
    assert values["loss"] == pytest.approx(metrics.log_loss(report.targets[known], report.scores[known]), rel=1e-5)
    for (truth, _, chosen), (precision, recall, _) in zip(columns, report.precision_recall_f1, strict=True):
        assert precision == pytest.approx(100 * metrics.precision_score(truth, chosen, zero_division=0), abs=1e-6)
        assert recall == pytest.approx(100 * metrics.recall_score(truth, chosen), abs=1e-6)


def test_labels_without_images_are_left_out_and_named():
    report = made_up()
    report.targets[:, 2] = 0
    fewer = MultilabelReport(
        LABELS[:2] + LABELS[3:], report.index, np.delete(report.targets, 2, 1), np.delete(report.scores, 2, 1),
        Thresholds(np.delete(report.thresholds.values, 2), np.ones(5, bool), 0.5),
    )  # fmt: skip
    assert report.left_out == ("c",)
    assert np.isnan(report.average_precision[2])
    for name in ("map", "macro_f1", "micro_f1", "labels"):
        assert dict(report)[name] == pytest.approx(dict(fewer)[name])


def test_the_interval_holds_the_value_and_shrinks_with_more_images():
    few, many = made_up(images=40), made_up(images=400)
    for report in (few, many):
        low, high = report.map_interval()
        assert low < report.mean_ap < high
    assert np.ptp(many.map_interval()) < np.ptp(few.map_interval())


def slow_f1(targets, scores, threshold):
    chosen = scores >= threshold
    right = np.sum(chosen & (targets == 1))
    return 2 * right / max(1, np.sum(chosen) + np.sum(targets == 1))


def test_thresholds_maximize_f1_and_rare_labels_share_one():
    report = made_up(5, images=120, unknown=0.1)
    report.targets[:, 0] = 0
    report.targets[: RARE - 1, 0] = 1  # too few images
    chosen = choose_thresholds(report.targets, report.scores)
    assert chosen.own.tolist() == [False, *[True] * 5]
    assert chosen.values[0] == chosen.shared
    for label in range(1, 6):
        known = ~np.isnan(report.targets[:, label])
        truth, scores = report.targets[known, label], report.scores[known, label]
        best = max(slow_f1(truth, scores, threshold) for threshold in scores)
        assert slow_f1(truth, scores, chosen.values[label]) == pytest.approx(best)
    pooled = ~np.isnan(report.targets) & chosen.own
    best = max(slow_f1(report.targets[pooled], report.scores[pooled], t) for t in report.scores[pooled][::7])
    assert slow_f1(report.targets[pooled], report.scores[pooled], chosen.shared) >= best


def test_thresholds_of_labels_that_nothing_is_known_about():
    nothing = choose_thresholds(np.zeros((4, 2), np.float32), np.full((4, 2), 0.2, np.float32))
    assert nothing.values.tolist() == [0.5, 0.5]
    always = choose_thresholds(np.ones((9, 1), np.float32), np.linspace(0.1, 0.9, 9, dtype=np.float32)[:, None])
    assert not always.own[0]
    assert 0 <= always.values[0] <= 0.1


def test_the_worst_images_have_missing_and_spurious_labels():
    targets = np.array([[1, 0], [1, 0], [1, 1]], np.float32)
    scores = np.array([[0.9, 0.1], [0.05, 0.8], [0.9, 0.4]], np.float32)
    report = MultilabelReport(("a", "b"), np.array([3, 5, 8]), targets, scores, Thresholds.undecided(2))
    first, second = report.worst()
    assert (first.index, second.index) == (5, 8)
    assert [name for name, _ in first.missing] == ["a"]
    assert [name for name, _ in first.spurious] == ["b"]
    assert second.labels == ["a", "b"]


class Pixels(nn.Module):
    """The first two channels of the first pixel are the logits."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(10.0))

    def forward(self, images):
        return self.scale * images[:, :2, 0, 0]


def batches(targets, pixels, index):
    for rows in torch.arange(len(targets)).split(2):
        images = torch.zeros(len(rows), 3, 2, 2, dtype=torch.uint8)
        images[:, :2, 0, 0] = pixels[rows]
        yield ImageBatch(images, torch.full((len(rows),), -1), index[rows], targets=targets[rows])


def test_images_count_once_in_order_and_those_without_labels_not():
    targets = torch.tensor([[1.0, 0.0], [0.0, 1.0], [float("nan")] * 2, [1.0, 1.0], [1.0, 0.0]])
    pixels = torch.tensor([[200, 10], [10, 200], [0, 0], [100, 100], [200, 10]], dtype=torch.uint8)
    index = torch.tensor([4, 2, 3, 0, 4])
    report = evaluate(Pixels(), batches(targets, pixels, index), classes=("a", "b"))
    assert report.index.tolist() == [0, 2, 4]
    assert report.targets.tolist() == [[1, 1], [0, 1], [1, 0]]
    assert report.mean_ap == pytest.approx(100)
    shared = evaluate(
        Pixels(),
        batches(targets, pixels, index),
        classes=("a", "b"),
        gather=lambda rows: torch.cat([rows, rows.new_full((2, *rows.shape[1:]), -1)]),
    )
    assert dict(shared) == dict(report)
    with pytest.raises(UsageError):
        evaluate(Pixels(), batches(targets, pixels, index), classes=("a", "b", "c"))
    with pytest.raises(DataError):
        evaluate(Pixels(), batches(torch.full_like(targets, torch.nan), pixels, index), classes=("a", "b"))
