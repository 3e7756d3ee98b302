"""The files of a detection run: its network, and `val.json`, the true and the detected objects of val.

Boxes are in COCO's form and masks in its run-length encoding. All metrics and curves can be computed from this file
without the images.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from patchloom.data.datasets import LabeledImages
from patchloom.evaluation.detection import DetectionReport, Detections, TrueObjects
from patchloom.models.dense.detector import Detector, create_detector
from patchloom.runs.checksums import read_checked, write_checked
from patchloom.runs.config import RunFiles, read_run_files
from patchloom.runs.weights import load_trained
from patchloom_runtime.errors import CheckpointError, DataError
from patchloom_runtime.images.object_masks import ObjectMask, masks_from_coco
from patchloom_runtime.untrusted import check_shape, parse_json

VAL = "val.json"
DetectedImage: TypeAlias = tuple[TrueObjects, Detections, tuple[int, int]]  # with height and width
MOST_BYTES = 1 << 30
_BOX = {"bbox": list[float], "category": int, "segmentation?": dict}


@dataclass(frozen=True)
class ValDetections:
    """Detections in val, and the name and size (height, width) of each image; iterating gives the metrics."""

    report: DetectionReport
    names: tuple[str, ...]
    sizes: tuple[tuple[int, int], ...]

    def __iter__(self) -> Iterator[tuple[str, float]]:
        return iter(self.report)

    @classmethod
    def of(cls, by_row: Mapping[int, DetectedImage], images: LabeledImages, classes: Sequence[str]) -> "ValDetections":
        """Collect the results of rows of a dataset."""
        order = sorted(by_row)
        truths, detections, sizes = zip(*(by_row[row] for row in order), strict=True) if order else ((), (), ())
        return cls(DetectionReport(tuple(classes), truths, detections), tuple(map(images.key, order)), sizes)


def load_detector(folder: Path) -> tuple[Detector, RunFiles]:
    """Load the trained network of a run folder, in eval mode, and its files."""
    files = read_run_files(folder)
    network = load_trained(folder, lambda: create_detector(files.network, **files.options), files.options)
    network.backbone.pixel_mean, network.backbone.pixel_std = files.preprocessing.mean, files.preprocessing.std
    return network, files


def write_val(folder: Path, val: ValDetections) -> None:
    """Write `val.json`."""
    images = [
        {"key": key, "size": list(size), "objects": _objects(truth, size), "found": _detections_json(detections, size)}
        for key, size, truth, detections in zip(
            val.names, val.sizes, val.report.truths, val.report.detections, strict=True
        )
    ]
    content = {"classes": list(val.report.classes), "images": images}
    write_checked(folder, {VAL: (json.dumps(content) + "\n").encode()})


def read_val(folder: Path) -> ValDetections | None:
    """Read `val.json`; None if there is none."""
    path = folder / VAL
    if not os.path.lexists(path):
        return None
    try:
        content = parse_json(read_checked(folder, VAL), MOST_BYTES)
        _check(content)
        images = content["images"]
        sizes = tuple((height, width) for height, width in (image["size"] for image in images))
        truths = [_read_truth(image["objects"], size) for image, size in zip(images, sizes, strict=True)]
        detections = [_read_detections(image["found"], size) for image, size in zip(images, sizes, strict=True)]
        return ValDetections(
            DetectionReport(tuple(content["classes"]), truths, detections),
            tuple(image["key"] for image in images),
            sizes,
        )
    except (ValueError, DataError) as error:
        raise CheckpointError(f"{path} is damaged: {error}. Remove it, or write it again by training.") from error


def coco_box(box: Sequence[float]) -> list[float]:
    """Return x, y, width, height of a box of corners."""
    x0, y0, x1, y1 = (round(float(value), 3) for value in box)
    return [x0, y0, round(x1 - x0, 3), round(y1 - y0, 3)]


def _object_json(
    box: Any, category: Any, masks: Sequence[ObjectMask] | None, number: int, size: tuple[int, int]
) -> Any:
    entry: dict[str, Any] = {"bbox": coco_box(box), "category": int(category)}
    return entry if masks is None else entry | {"segmentation": masks[number].to_coco(size)}


def _objects(truth: TrueObjects, size: tuple[int, int]) -> list[dict[str, Any]]:
    return [
        _object_json(box, truth.categories[i], truth.masks, i, size)
        | {"iscrowd": int(truth.crowd[i]), "area": float(truth.areas[i])}
        for i, box in enumerate(truth.boxes)
    ]


def _detections_json(detections: Detections, size: tuple[int, int]) -> list[dict[str, Any]]:
    return [
        _object_json(box, detections.categories[i], detections.masks, i, size) | {"score": float(detections.scores[i])}
        for i, box in enumerate(detections.boxes)
    ]


def _check(content: Any) -> None:
    check_shape(content, {"classes": list[str], "images": list[dict]})
    for image in content["images"]:
        check_shape(image, {"key": str, "size": list[int], "objects": list[dict], "found": list[dict]})
        if len(image["size"]) != 2 or min(image["size"]) < 1:
            raise ValueError(f"an image of size {image['size']}, expected height and width")
        for name, more in (("objects", {"iscrowd": int, "area": float}), ("found", {"score": float})):
            for one in image[name]:
                check_shape(one, {**_BOX, **more})
                if len(one["bbox"]) != 4 or not 0 <= one["category"] < len(content["classes"]):
                    raise ValueError(f"{name} has a box of {len(one['bbox'])} numbers or of an unknown class")


def _boxes(entries: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    boxes = np.array([one["bbox"] for one in entries], np.float64).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    return boxes, np.array([one["category"] for one in entries], np.int64)


def _masks(entries: Sequence[Any], size: tuple[int, int]) -> list[ObjectMask] | None:
    if not all("segmentation" in one for one in entries):
        return None
    return masks_from_coco([one["segmentation"] for one in entries], size)


def _read_truth(entries: Sequence[Any], size: tuple[int, int]) -> TrueObjects:
    boxes, categories = _boxes(entries)
    crowd, areas = (np.array([one[name] for one in entries], np.float64) for name in ("iscrowd", "area"))
    return TrueObjects(boxes, categories, crowd.astype(bool), areas, _masks(entries, size))


def _read_detections(entries: Sequence[Any], size: tuple[int, int]) -> Detections:
    boxes, categories = _boxes(entries)
    return Detections(boxes, categories, np.array([one["score"] for one in entries], np.float64), _masks(entries, size))
