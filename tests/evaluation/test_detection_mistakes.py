"""What became of each object: found, of another class, missed, false, in a crowd; drawn so that it is seen."""

import numpy as np
from PIL import Image

from patchloom.evaluation.detection import DetectionReport, Detections, TrueObjects
from patchloom.evaluation.detection_mistakes import detection_confusion, outcome, outcomes
from patchloom.report.pictures.overlays import MISTAKE, DrawnObject, class_color, draw_objects
from patchloom_runtime.images.object_masks import ObjectMask

A, B, C, D = (0, 0, 10, 10), (20, 0, 30, 10), (0, 20, 10, 30), (20, 20, 30, 30)
NOWHERE = (40, 40, 50, 50)


def truth(*objects: tuple, masks: bool = False) -> TrueObjects:
    boxes = np.array([box for box, *_ in objects], float).reshape(-1, 4)
    crowd = np.array([bool(more) for _, _, *more in objects], bool)
    drawn = [mask_of(box) for box, *_ in objects] if masks else None
    return TrueObjects(
        boxes, np.array([kind for _, kind, *_ in objects], np.int64), crowd, np.full(len(boxes), 100.0), drawn
    )


def detected(*detections: tuple, masks: bool = False) -> Detections:
    boxes = np.array([box for box, _, _ in detections], float).reshape(-1, 4)
    drawn = [mask_of(box) for box, *_ in detections] if masks else None
    kinds, scores = (np.array([each[i] for each in detections]) for i in (1, 2))
    return Detections(boxes, kinds.astype(np.int64), scores.astype(float), drawn)


def mask_of(box: tuple) -> ObjectMask:
    return ObjectMask(int(box[1]), int(box[0]), np.ones((int(box[3] - box[1]), int(box[2] - box[0])), bool))


THERE = (A, 0), (B, 1), (C, 2), (D, 1, "crowd")
SEEN = (A, 0, 0.6), (A, 0, 0.9), (B, 2, 0.8), (D, 1, 0.7), (NOWHERE, 1, 0.55), (C, 2, 0.4)


def test_every_object_and_every_sure_detection_has_one_outcome() -> None:
    one = outcome(truth(*THERE), detected(*SEEN))
    assert one.sure.tolist() == [1, 2, 3, 0, 4]  # surest first, without the unsure one of C
    assert one.object_of.tolist() == [0, 1, -1, -1, -1]  # the second of A has no object left
    assert one.excused.tolist() == [False, False, True, False, False]
    assert one.false.tolist() == [False, False, False, True, True]
    assert one.missed.tolist() == [2]


def test_a_detection_of_the_right_class_is_served_before_a_surer_one_of_another() -> None:
    one = outcome(truth((A, 0)), detected((A, 1, 0.99), (A, 0, 0.5)))
    assert one.object_of.tolist() == [-1, 0]


def test_masks_count_where_there_are_some() -> None:
    pair = detected((A, 0, 0.9))
    drawn = Detections(pair.boxes, pair.categories, pair.scores, [mask_of(B)])
    report = DetectionReport(("x",), [truth((A, 0), masks=True)], [drawn])
    assert outcomes(report)[0].missed.tolist() == [0]
    assert outcome(report.truths[0], drawn, "box").missed.tolist() == []


def test_confusions_add_up_to_objects_and_detections() -> None:
    empty = truth()
    report = DetectionReport(("a", "b", "c"), [truth(*THERE), empty], [detected(*SEEN), detected((A, 0, 0.5))])
    counts = detection_confusion(report)
    assert counts.tolist() == [[1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [2, 1, 0, 0]]
    right = np.diag(counts)[:-1].sum()
    scores = report.image_scores()
    assert scores[0] == 2 * right / (
        3 + 4
    )  # as the worst pictures are chosen: of 3 objects and 4 detections that count


def test_mistakes_are_drawn_in_red_dashes_and_the_rest_in_the_color_of_the_class() -> None:
    image = Image.new("RGB", (480, 480))
    box = (100, 100, 300, 300)
    whole = np.asarray(draw_objects(image, [DrawnObject("", box, 3)]))
    dashed = np.asarray(draw_objects(image, [DrawnObject("", box, 3, mistake=True)]))
    lower = (slice(298, 300), slice(100, 300))
    assert (whole[lower] == class_color(3)).all()
    red = (dashed[lower] == MISTAKE).all(2)
    assert 0.3 < red.mean() < 0.7
    assert not (dashed == class_color(3)).all(2).any()


def test_names_stay_inside_the_picture() -> None:
    image = Image.new("RGB", (480, 480))
    drawn = np.asarray(draw_objects(image, [DrawnObject("a long name 99%", (470, 470, 480, 480), 1)]))
    assert (drawn[-12:, 380:400] == class_color(1)).all(2).any()
