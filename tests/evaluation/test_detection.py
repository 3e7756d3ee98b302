"""Average precision is COCO's: equal to its loops, written out slowly, and to faster-coco-eval where there is one."""

import math
from dataclasses import replace

import numpy as np
import pytest

from patchloom.evaluation.detection import (
    AREAS,
    THRESHOLDS,
    DetectionReport,
    Detections,
    TrueObjects,
    box_iou,
    difference,
)
from patchloom.evaluation.intervals import bootstrap, bootstrap_weights
from patchloom_runtime.errors import UsageError
from patchloom_runtime.images.object_masks import ObjectMask

SIDE = 160
CLASSES = ("cat", "dog", "absent", "owl")


def blob(rng, box):
    mask = np.zeros((SIDE, SIDE), bool)
    x0, y0, x1, y1 = np.round(box).astype(int).clip(0, SIDE)
    mask[y0:y1, x0:x1] = rng.random((max(0, y1 - y0), max(0, x1 - x0))) < 0.8
    return ObjectMask.of(mask)


def random_boxes(rng, count):
    corner, size = rng.uniform(0, SIDE - 20, (count, 2)), np.exp(rng.uniform(1.5, 4.8, (count, 2)))
    return np.concatenate([corner, np.minimum(corner + size, SIDE)], axis=1).round(1)


def random_report(seed, images=8, masks=True, digits=1):
    """Crowds, pictures without objects, pictures without detections, a class nobody has, equal scores and copies."""
    rng = np.random.default_rng(seed)
    truths, detected = [], []
    for image in range(images):
        count = 0 if image in (2, 5) else int(rng.integers(1, 9))
        boxes = random_boxes(rng, count)
        crowd = rng.random(count) < 0.2
        categories = rng.choice([0, 1, 3], count)
        outlines = [blob(rng, box) for box in boxes]
        areas = np.array([mask.area for mask in outlines], float).reshape(count)
        truths.append(TrueObjects(boxes, categories, crowd, areas, outlines if masks else None))
        near = np.repeat(boxes, 3, axis=0) + rng.normal(0, 4, (3 * count, 4))
        near[:, 2:] = np.maximum(near[:, 2:], near[:, :2] + 1)
        guessed = np.concatenate([near, random_boxes(rng, int(rng.integers(0, 12)))]).clip(0, SIDE)
        guessed = guessed[:0] if image in (3, 5) else np.concatenate([guessed, boxes])  # some exactly right
        labels = np.concatenate([np.repeat(categories, 3), rng.integers(0, 4, len(guessed))])[: len(guessed)]
        scores = rng.random(len(guessed)).round(digits)
        drawn = [blob(rng, box) for box in guessed]
        detected.append(Detections(guessed, labels, scores, drawn if masks else None))
    return DetectionReport(CLASSES, truths, detected)


def slow_precision(report, kind):
    """COCOeval's evaluateImg and accumulate, loop by loop."""
    result = np.full((len(CLASSES), len(AREAS), len(THRESHOLDS), 101), np.nan)
    for k in range(len(CLASSES)):
        for a, (low, high) in enumerate(AREAS.values()):
            for t, threshold in enumerate(THRESHOLDS):
                rows, total = [], 0
                for truth, detected in zip(report.truths, report.detections, strict=True):
                    part, counted = slow_image(truth, detected, k, low, high, threshold, kind)
                    rows += part
                    total += counted
                if not total:
                    continue
                rows = [row for row in sorted(rows, key=lambda row: -row[0]) if not row[2]]
                right = wrong = 0
                recalls, precisions = [], []
                for _, hit, _ in rows:
                    right, wrong = right + hit, wrong + (not hit)
                    recalls.append(right / total)
                    precisions.append(right / (right + wrong))
                for i in range(len(precisions) - 1, 0, -1):
                    precisions[i - 1] = max(precisions[i - 1], precisions[i])
                for r, wanted in enumerate(np.linspace(0, 1, 101)):
                    reached = [p for p, recall in zip(precisions, recalls, strict=True) if recall >= wanted]
                    result[k, a, t, r] = reached[0] if reached else 0.0
    return result


def slow_image(truth, detected, k, low, high, threshold, kind):
    objects = [g for g in range(len(truth.boxes)) if truth.categories[g] == k]
    ignored = {g: bool(truth.crowd[g]) or not low <= truth.areas[g] <= high for g in objects}
    objects.sort(key=lambda g: ignored[g])
    detections = [d for d in range(len(detected.boxes)) if detected.categories[d] == k]
    detections = sorted(detections, key=lambda d: -detected.scores[d])[:100]
    taken, rows = set(), []
    for d in detections:
        best, match = min(threshold, 1 - 1e-10), None
        for g in objects:
            if g in taken and not truth.crowd[g]:
                continue
            if match is not None and not ignored[match] and ignored[g]:
                break
            if (iou := slow_iou(truth, detected, d, g, kind)) < best:
                continue
            best, match = iou, g
        if match is not None:
            taken.add(match)
        x0, y0, x1, y1 = detected.boxes[d]
        area = (x1 - x0) * (y1 - y0) if kind == "box" else detected.masks[d].bits.sum()
        excused = ignored[match] if match is not None else not low <= area <= high
        rows.append((detected.scores[d], match is not None, excused))
    return rows, sum(not each for each in ignored.values())


def slow_iou(truth, detected, d, g, kind):
    if kind == "box":
        return float(box_iou(detected.boxes[d : d + 1], truth.boxes[g : g + 1], truth.crowd[g : g + 1])[0, 0])
    one, other = detected.masks[d].whole((SIDE, SIDE)), truth.masks[g].whole((SIDE, SIDE))
    shared = (one & other).sum()
    return float(shared / max(1, one.sum() if truth.crowd[g] else (one | other).sum()))


@pytest.mark.parametrize("kind", ["box", "mask"])
@pytest.mark.parametrize("seed", [0, 1])
def test_equal_to_coco_written_out(kind, seed):
    report = random_report(seed)
    expected = slow_precision(report, kind)
    np.testing.assert_allclose(report.precision(kind), expected, atol=1e-12)
    assert np.isnan(report.precision(kind)[2]).all()  # the class nobody has
    assert 5 < report.summary(kind)["ap50"] < 95
    assert dict(report)["ap" if kind == "box" else "mask_ap"] == pytest.approx(100 * np.nanmean(expected[:, 0]))


def coco_summary(report, kind):
    coco = pytest.importorskip("faster_coco_eval")
    images = [{"id": i + 1, "width": SIDE, "height": SIDE} for i in range(len(report.truths))]
    annotations, results = [], []
    for i, (truth, detected) in enumerate(zip(report.truths, report.detections, strict=True), 1):
        for g, (x0, y0, x1, y1) in enumerate(truth.boxes.tolist()):
            annotations.append(
                {"id": len(annotations) + 1, "image_id": i, "category_id": int(truth.categories[g]) + 1,
                 "bbox": [x0, y0, x1 - x0, y1 - y0], "area": float(truth.areas[g]), "iscrowd": int(truth.crowd[g]),
                 "segmentation": truth.masks[g].to_coco((SIDE, SIDE))}
            )  # fmt: skip
        for d, (x0, y0, x1, y1) in enumerate(detected.boxes.tolist()):
            result = {"image_id": i, "category_id": int(detected.categories[d]) + 1, "score": float(detected.scores[d])}
            inputs = (
                {"bbox": [x0, y0, x1 - x0, y1 - y0]}
                if kind == "box"
                else {"segmentation": detected.masks[d].to_coco((SIDE, SIDE))}
            )
            results.append(result | inputs)
    truth = coco.COCO(
        {"images": images, "annotations": annotations,
         "categories": [{"id": i, "name": name} for i, name in enumerate(CLASSES, 1)]}
    )  # fmt: skip
    judged = coco.COCOeval_faster(
        truth, truth.loadRes(results), "bbox" if kind == "box" else "segm", print_function=len
    )
    judged.evaluate()
    judged.accumulate()
    judged.summarize()
    names = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")
    return dict(zip(names, 100 * np.array(judged.stats[:6]), strict=True)) | {"recall": 100 * judged.stats[8]}


@pytest.mark.parametrize("kind", ["box", "mask"])
def test_equal_to_faster_coco_eval(kind):
    report = random_report(7, images=20)
    expected = {name: value for name, value in coco_summary(report, kind).items() if value >= 0}  # −1: no such object
    assert len(expected) > 5
    assert report.summary(kind) == pytest.approx(expected, abs=1e-9)


def perfect(images=3, **changes):
    truth = random_report(3).truths[:images]
    detected = [Detections(t.boxes, t.categories, np.linspace(0.9, 0.6, len(t.boxes)), t.masks) for t in truth]
    return DetectionReport(CLASSES, truth, detected, **changes)


def test_all_found_is_100_and_none_is_0():
    report = perfect()
    assert dict(report)["ap"] == dict(report)["mask_ap"] == 100
    assert report.image_scores().tolist() == [1, 1, 1]  # also of the picture without objects
    nothing = [Detections(np.zeros((0, 4)), np.zeros(0, int), np.zeros(0)) for _ in report.truths]
    values = dict(DetectionReport(CLASSES, report.truths, nothing))
    assert (values["ap"], values["recall"]) == (0, 0)
    assert "mask_ap" not in values


def test_no_objects_at_all_is_0_and_no_error():
    empty = TrueObjects(np.zeros((0, 4)), np.zeros(0, int), np.zeros(0, bool), np.zeros(0))
    detected = Detections(np.array([[1.0, 1, 5, 5]]), np.zeros(1, int), np.ones(1))
    report = DetectionReport(("a",), [empty], [detected])
    assert dict(report) == {"ap": 0, "ap50": 0, "ap75": 0, "recall": 0, "images": 1, "objects": 0}
    assert report.image_scores().tolist() == [0]
    assert math.isnan(report.interval("ap")[0])


def test_classes_curves_and_pictures():
    report = random_report(0)
    of_class = report.class_ap()
    assert np.nanmean([each["ap50"] for each in of_class]) == pytest.approx(report.summary()["ap50"])
    assert [each["objects"] for each in of_class] == [int(m.objects[0].sum()) for m in report.matches()]
    curve = report.curve(0)
    assert np.all(np.diff(curve.recall) >= 0)
    assert np.all(np.diff(curve.precision) <= 0)
    assert curve.recall[-1] == pytest.approx(report.recall()[0, 0, 0])
    assert report.image_scores().shape == (8,)


def test_an_interval_is_that_of_pictures_drawn_again():
    report = random_report(1, digits=12)  # equal scores would be ordered by picture
    low, high = report.interval("ap50", rounds=40)
    assert 0 < low < report.summary()["ap50"] < high < 100
    again = []
    for times in bootstrap_weights(8, 40):  # the slow way: reports of the pictures drawn
        chosen = np.repeat(np.arange(8), times.astype(int))
        drawn = DetectionReport(CLASSES, [report.truths[i] for i in chosen], [report.detections[i] for i in chosen])
        again.append(drawn.summary()["ap50"])
    assert (low, high) == pytest.approx(tuple(np.quantile(again, [0.025, 0.975])))
    with pytest.raises(UsageError) as error:
        report.interval("recall")
    assert "recall" in str(error.value)
    assert "ap50" in str(error.value)


def test_two_networks_on_the_same_pictures():
    worse, better = random_report(1), perfect()
    better = replace(better, truths=worse.truths, detections=[
        Detections(t.boxes, t.categories, np.linspace(0.9, 0.6, len(t.boxes)), t.masks) for t in worse.truths
    ])  # fmt: skip
    more, low, high = difference(better, worse)
    assert more == pytest.approx(100 - worse.summary()["ap50"])
    assert 0 < low < more < high
    assert difference(worse, worse) == (0, 0, 0)
    with pytest.raises(UsageError) as error:
        difference(worse, perfect())
    assert "8" in str(error.value)
    assert "3" in str(error.value)


def test_bootstrap_of_a_mean():
    values = np.random.default_rng(0).normal(50, 10, 400)
    low, high = bootstrap(lambda times: float(values @ times / times.sum()), 400)
    assert (low, high) == pytest.approx((values.mean() - 0.98, values.mean() + 0.98), abs=0.25)
