"""mIoU and its neighbours against slow references, with ignored pixels and classes that do not occur."""

import math

import numpy as np
import pytest
import torch

from patchloom.evaluation.segmentation import SegmentationCounter, border_width, joined

NAMES = ("a", "b", "c", "d", "absent", "only told")


def images(count: int = 5, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """Truth and answer: blobs of classes 0 to 3, −1 where nothing is labelled; class 5 is told and never true."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        coarse = rng.integers(-1, 4, (4, 5))
        truth = coarse.repeat(5, 0).repeat(4, 1)
        answer = np.where(rng.random(truth.shape) < 0.7, truth.clip(0), rng.choice([0, 1, 2, 3, 5], truth.shape))
        made.append((truth, answer))
    return made


def counted(pairs: list[tuple[np.ndarray, np.ndarray]], first: int = 0):
    counting = SegmentationCounter(NAMES)
    for number, (truth, answer) in enumerate(pairs, start=first):
        counting.add([number], torch.from_numpy(truth)[None], torch.from_numpy(answer)[None])
    return counting.report()


def slow_iou(pairs: list[tuple[np.ndarray, np.ndarray]]) -> list[float]:
    result = []
    for k in range(len(NAMES)):
        both = either = 0
        for truth, answer in pairs:
            for t, a in zip(truth.ravel(), answer.ravel(), strict=True):
                if t >= 0:
                    both += t == k and a == k
                    either += t == k or a == k
        result.append(100 * both / either if either else math.nan)
    return result


def slow_borders(pairs: list[tuple[np.ndarray, np.ndarray]]) -> list[float]:
    """A pixel of a class is on its border where one of another class, or the edge of the image, is within the width."""
    both, either = np.zeros(len(NAMES)), np.zeros(len(NAMES))
    for truth, answer in pairs:
        answer = np.where(truth >= 0, answer, -1)
        height, width = truth.shape
        reach = border_width(height, width)
        for k in range(len(NAMES)):
            masks = []
            for numbers in (truth, answer):
                padded = np.pad(numbers == k, reach)
                near = np.zeros((height, width), bool)
                for y in range(height):
                    for x in range(width):
                        near[y, x] = not padded[y : y + 2 * reach + 1, x : x + 2 * reach + 1].all()
                masks.append((numbers == k) & near)
            both[k] += (masks[0] & masks[1]).sum()
            either[k] += (masks[0] | masks[1]).sum()
    return [100 * b / e if e else math.nan for b, e in zip(both, either, strict=True)]


def test_iou_is_counted_over_the_set_and_classes_in_neither_do_not_count() -> None:
    pairs = images()
    report, slow = counted(pairs), slow_iou(pairs)
    assert report.iou == pytest.approx(slow, nan_ok=True)
    assert math.isnan(report.iou[4])
    assert report.iou[5] == 0
    values = dict(report)
    assert values["miou"] == pytest.approx(np.nanmean(slow))
    known = np.concatenate([truth.ravel() for truth, _ in pairs]) >= 0
    right = np.concatenate([(truth == answer).ravel() for truth, answer in pairs])
    assert values["pixel_accuracy"] == pytest.approx(100 * right[known].mean())
    result = [100 * right[np.concatenate([t.ravel() for t, _ in pairs]) == k].mean() for k in range(4)]
    assert values["mean_class_accuracy"] == pytest.approx(np.mean(result))


def test_boundary_iou_is_that_of_the_definition() -> None:
    pairs = images(3)
    report = counted(pairs)
    assert report.class_boundary_iou == pytest.approx(slow_borders(pairs), nan_ok=True)
    assert dict(report)["boundary_iou"] == pytest.approx(np.nanmean(slow_borders(pairs)))


def test_confusion_counts_labeled_pixels_by_class() -> None:
    pairs = images(2)
    report = counted(pairs)
    truth = np.concatenate([t.ravel() for t, _ in pairs])
    answer = np.concatenate([a.ravel() for _, a in pairs])
    assert report.confusion[1, 3] == ((truth == 1) & (answer == 3)).sum()
    assert report.confusion.sum() == (truth >= 0).sum()


def test_batches_and_processes_count_as_one() -> None:
    pairs = images(6)
    whole = counted(pairs)
    together = SegmentationCounter(NAMES)
    together.add([3, 4, 5], *(torch.from_numpy(np.stack(each)) for each in zip(*pairs[3:], strict=True)))
    together.add([0, 1, 2], *(torch.from_numpy(np.stack(each)) for each in zip(*pairs[:3], strict=True)))
    parts = joined([counted(pairs[:2]), counted(pairs[2:], first=2)])
    for other in (together.report(), parts):
        assert np.array_equal(other.index, whole.index)
        assert np.array_equal(other.counts, whole.counts)
        assert np.array_equal(other.confusion, whole.confusion)
        assert np.array_equal(other.borders, whole.borders)


def test_an_interval_holds_the_number_and_narrows_with_images() -> None:
    few, many = counted(images(8)), counted(images(60))
    for report in (few, many):
        low, high = report.miou_interval()
        assert low < report.miou < high
    assert np.diff(many.miou_interval()) < np.diff(few.miou_interval())


def test_images_are_ranked_by_the_classes_in_them() -> None:
    truth = np.zeros((4, 4), np.int64)
    right, wrong = (truth, truth), (truth, truth + 1)
    report = counted([right, wrong])
    assert report.image_miou.tolist() == [100.0, 0.0]
