from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics
from torch import Tensor, nn

from patchloom.data.images.image_batch import ImageBatch
from patchloom.evaluation.classification import ClassificationReport, evaluate, overfitting_note
from patchloom_runtime.errors import DataError, UsageError
from tests.networks import small

NAMES = ("ant", "bee", "cat", "dog", "eel", "fox", "gnu")


class Table(nn.Module):
    """Answers with a row of a table: each picture's first pixels hold the number of its row."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)
        self.dropout = nn.Dropout(0.5)

    def forward(self, images: Tensor) -> Tensor:
        rows = (images[:, 0, 0, 0] * 255).round().long()
        return self.dropout(self.logits[rows])


def batches(labels: Tensor, size: int) -> Iterator[ImageBatch]:
    for index in torch.arange(len(labels)).split(size):
        images = torch.zeros(len(index), 3, 4, 4, dtype=torch.uint8)
        images[:, 0, 0, 0] = index.to(torch.uint8)
        yield ImageBatch(images, labels[index], index)


def report(logits: Tensor, labels: Tensor, size: int = 8, **options) -> ClassificationReport:
    names = NAMES[: logits.shape[1]]
    pixels = {"pixel_mean": (0.0, 0.0, 0.0), "pixel_std": (1.0, 1.0, 1.0)}
    given = options.pop("batches", None) or batches(labels, size)
    return evaluate(Table(logits), given, classes=names, **pixels, **options)


def sample(images: int = 50, classes: int = 7, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(images, classes, generator=generator)
    return logits, torch.randint(classes, (images,), generator=generator)


def slow_calibration_error(probabilities: np.ndarray, labels: np.ndarray, bins: int) -> float:
    """Σ_b |B_b|/N · |accuracy(B_b) − confidence(B_b)| over bins (b/bins, (b+1)/bins], in percent."""
    total = 0.0
    confidence = probabilities.max(axis=1)
    right = probabilities.argmax(axis=1) == labels
    for b in range(bins):
        inside = (confidence > b / bins) & (confidence <= (b + 1) / bins)
        if inside.any():
            total += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    return 100 * total


@settings(max_examples=15, deadline=None)
@given(images=st.integers(1, 60), classes=st.integers(2, 7), size=st.integers(1, 20), seed=st.integers(0, 99))
def test_numbers_equal_sklearns(images, classes, size, seed):
    logits, labels = sample(images, classes, seed)
    result = report(logits, labels, size)
    numbers = dict(result)
    probabilities = logits.double().softmax(dim=1).numpy()
    truth, every = labels.numpy(), np.arange(classes)
    assert numbers["top1"] == pytest.approx(100 * metrics.accuracy_score(truth, probabilities.argmax(axis=1)))
    assert ("top5" in numbers) == (classes > 5)
    for k in range(2, classes):
        expected = metrics.top_k_accuracy_score(truth, probabilities, k=k, labels=every)
        assert result.top(k) == pytest.approx(100 * expected)
    assert numbers["loss"] == pytest.approx(metrics.log_loss(truth, probabilities, labels=every), rel=1e-5)
    matrix = metrics.confusion_matrix(truth, probabilities.argmax(axis=1), labels=every)
    assert np.array_equal(result.confusion, matrix)
    assert result.confusion.dtype == np.int64
    has_images = matrix.sum(axis=1) > 0
    recall = metrics.recall_score(
        truth, probabilities.argmax(axis=1), labels=every[has_images], average=None, zero_division=0
    )
    np.testing.assert_allclose(result.class_accuracy[has_images], 100 * recall)
    assert np.isnan(result.class_accuracy[~has_images]).all()
    assert numbers["mean_class_accuracy"] == pytest.approx(100 * recall.mean())
    predicted = probabilities.argmax(axis=1)
    if set(predicted) <= set(truth) and len(set(truth)) > 1:  # else scikit-learn warns
        assert numbers["mean_class_accuracy"] == pytest.approx(100 * metrics.balanced_accuracy_score(truth, predicted))
    f1 = metrics.f1_score(truth, predicted, average="macro", zero_division=0)
    assert numbers["macro_f1"] == pytest.approx(100 * f1)
    slow = slow_calibration_error(probabilities, truth, 15)
    assert numbers["calibration_error"] == pytest.approx(slow, abs=1e-4)
    assert numbers["images"] == images


def test_names_and_their_order_stay():
    assert [name for name, _ in report(*sample())] == [
        "top1", "top5", "loss", "mean_class_accuracy", "macro_f1", "calibration_error", "images",
    ]  # fmt: skip
    assert [name for name, _ in report(*sample(classes=5))][:2] == ["top1", "loss"]


def test_every_image_counts_once_however_it_comes():
    logits, labels = sample(20)
    whole = report(logits, labels)
    padded = []
    for batch in batches(labels, 8):
        filler = 8 - len(batch)
        unlabeled = torch.cat([batch.labels, torch.full((filler,), -1)])
        index = torch.cat([batch.index, torch.zeros(filler, dtype=torch.int64)])
        images = torch.cat([batch.images, batch.images[:1].expand(filler, -1, -1, -1)])
        padded.append(ImageBatch(images, unlabeled, index))
    twice = [*batches(labels, 8), *batches(labels, 3)]
    backwards = reversed(list(batches(labels, 8)))
    empty = [ImageBatch(torch.zeros(0, 3, 4, 4, dtype=torch.uint8), labels[:0], labels[:0]), *batches(labels, 8)]
    for other in (padded, twice, backwards, empty):
        again = report(logits, labels, batches=other)
        assert dict(again) == dict(whole)
        assert np.array_equal(again.predictions, whole.predictions)


def test_processes_are_joined_by_gather():
    """Two processes with 12 and 8 images; the shorter one's rows are filled up with −1, as gathering needs."""
    logits, labels = sample(20)
    parts = list(batches(labels, 4))
    shares = [[parts[0], parts[2], parts[4]], [parts[1], parts[3]]]
    rows: list[list[Tensor]] = []
    for share in shares:
        rows.append([])
        report(logits, labels, batches=share, gather=lambda mine, own=rows[-1]: own.append(mine) or mine)
    rows[1] = [torch.cat([part, torch.full_like(part[:4], -1)]) for part in rows[1]]
    joined = iter(zip(*rows, strict=True))
    both = report(logits, labels, batches=shares[0], gather=lambda _: torch.cat(next(joined)))
    assert dict(both) == dict(report(logits, labels))
    assert both.index.tolist() == list(range(20))


def test_the_worst_mistakes_come_first():
    logits = torch.tensor([[5.0, 0, 0], [0, 9.0, 0], [0, 1.0, 0], [0, 0, 7.0]])
    labels = torch.tensor([1, 1, 0, 0])
    worst = report(logits, labels).worst(2)
    assert [(m.index, m.label, m.prediction) for m in worst] == [(3, 0, 2), (0, 1, 0)]
    assert worst[0].confidence == pytest.approx(logits[3].softmax(0)[2].item())
    assert len(report(logits, labels).worst()) == 3


def test_equal_logits_are_not_taken_as_right():
    """A network that has learned nothing gives every class the same logit: only class 0 comes first."""
    labels = torch.arange(14) % 7
    assert report(torch.zeros(14, 7), labels).top(1) == pytest.approx(100 / 7)
    assert report(torch.zeros(14, 7), labels).top(2) == pytest.approx(200 / 7)


def test_a_diverged_network_has_no_accuracy():
    numbers = dict(report(torch.full((6, 7), torch.nan), torch.zeros(6, dtype=torch.int64)))
    assert numbers["top1"] == numbers["top5"] == 0
    assert np.isnan(numbers["loss"])


def test_modules_are_in_eval_mode_and_then_as_they_were():
    logits, labels = sample()
    model = Table(logits).train()
    model.dropout.eval()
    pixels = {"pixel_mean": (0.0, 0.0, 0.0), "pixel_std": (1.0, 1.0, 1.0)}
    evaluate(model, batches(labels, 8), classes=NAMES, **pixels)
    assert model.training
    assert not model.dropout.training
    model.dropout.train()
    result = evaluate(model, batches(labels, 8), classes=NAMES, **pixels)
    assert model.dropout.training
    assert dict(result) == dict(report(logits, labels))


def test_errors():
    with pytest.raises(DataError):
        report(*sample(), batches=iter(()))
    with pytest.raises(DataError):
        report(sample()[0], torch.full((50,), -1))
    images = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    one = ImageBatch(images, torch.zeros(1).long(), torch.zeros(1).long())
    with pytest.raises(UsageError) as error:
        evaluate(small("resmlp_s12"), [one], classes=NAMES)
    assert "5" in str(error.value)
    assert "7" in str(error.value)


def _records(*accuracies: float) -> list[dict]:
    return [
        {"kind": "train", "epoch": epoch, "values": {"accuracy": value, "loss": 1.0}}
        for epoch, value in enumerate(accuracies)
    ]


def _report_of(right: int, images: int) -> ClassificationReport:
    ranks = np.array([0] * right + [1] * (images - right))
    zeros = np.zeros(images, np.int64)
    return ClassificationReport(("a", "b"), np.arange(images), zeros, ranks, ranks, np.ones(images), np.ones(images))


def test_overfitting_is_named_with_what_to_do():
    note = overfitting_note(_records(20.0, 81.0), _report_of(345, 1000))
    assert "overfitting" in note
    assert "81.0 %" in note
    assert "34.5 %" in note
    assert "--init in1k" in note
    assert "--init" not in overfitting_note(_records(20.0, 81.0), _report_of(345, 1000), pretrained=True)


@pytest.mark.parametrize(
    ("records", "report"),
    [
        (_records(81.0, 40.0), _report_of(345, 1000)),  # the last epoch counts
        (_records(90.0, 60.0), _report_of(5, 10)),
        (_records(90.0), _report_of(345, 1000)),  # one epoch: every image was new
        (_records(82.0, 82.0), _report_of(6, 10)),  # ten images: it may be chance
        ([{"kind": "train", "epoch": 0, "values": {"loss": 1.0}}], _report_of(345, 1000)),  # mixed images
        ([], _report_of(345, 1000)),
    ],
)
def test_no_overfitting_is_named_where_there_is_none(records, report):
    assert overfitting_note(records, report) == ""
