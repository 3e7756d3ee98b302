"""Export of detection runs. Graphs compute what has a fixed shape; the artifact selects boxes between them."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from patchloom.data.augmentation.canvas import on_canvas
from patchloom.data.images.image_batch import ImageBatch
from patchloom.evaluation.detection import DetectionReport, Detections, box_iou, truth_of
from patchloom.exporters.formats import GraphFormat
from patchloom.exporters.graph import GraphPart, state_bytes
from patchloom.exporters.parity import Outputs
from patchloom.exporters.subject import ExportSettings, ExportSubject, class_summary, data_of, spread
from patchloom.models.dense.detector import Detector
from patchloom.objectives.detection import prepare_inputs
from patchloom.tasks.detection.data import open_objects
from patchloom.tasks.detection.graph import detector_parts
from patchloom.tasks.detection.model import view_of
from patchloom.tasks.detection.run_files import load_detector
from patchloom_runtime.artifacts.detector import (
    BATCH,
    MASKS,
    REGIONS,
    BoxLimits,
    GraphDetector,
    RegionBoxes,
    to_image_pixels,
)
from patchloom_runtime.engines.engine import MODEL, Graph
from patchloom_runtime.errors import UsageError
from patchloom_runtime.images.samples import EXTENT

OBJECTS = "objects"  # output of a whole detector: one RegionBoxes per image
SAME_IOU = 0.9  # from which two boxes of a class count as the same object
MOST_UNMATCHED = 0.01  # of the objects: of two equally likely boxes, either may be suppressed


class DetectorSubject(ExportSubject):
    """A detector, compared by its objects: equal if run and export agree on the class and nearly on the box."""

    task = "detection"
    measure = "box AP"
    precisions: ClassVar[tuple[str, ...]] = ("float32",)
    most = 100
    batch = BATCH
    takes = "uint8 (batch, {0}, {1}, 3), RGB, and `sizes`, int64 (batch, 2), of the images at their top left"
    usage = (
        'model.predict("photo.jpg")  # objects with name, score, box and mask; also bytes, PIL images, arrays, lists'
    )

    def __init__(self, folder: Path, settings: ExportSettings) -> None:
        network, files = load_detector(folder)
        self.model: Detector = network if settings.size is None else network.for_images_of(settings.size)
        canvas = (settings.size, settings.size) if settings.size else files.preprocessing.image_size
        self.preprocessing = replace(files.preprocessing, image_size=canvas)
        self.view = replace(view_of(files), image_size=canvas)
        self.network, self.labels = files.model, files.labels
        self.weights = state_bytes(self.model)
        self.limits = box_limits(self.model, self.view)
        self.metadata = {"detection": asdict(self.limits)}
        what = "Boxes and masks" if self.model.config.masks else "Boxes"
        self.summary = f"{what} of objects of {len(self.labels)} classes: {class_summary(self.labels)}"
        self._images, notes = open_objects(folder, settings.data or data_of(folder), settings.split, self.labels)
        self.notes = tuple(notes)
        samples = spread(
            self._images, settings.images or self.most, lambda row: on_canvas(self._images.read(row), self.view)
        )
        self.rows = np.zeros(len(samples), [("pixels", np.uint8, (*canvas, 3)), ("extent", np.int64, (4,))])
        self._truths = []
        for number, (row, sample) in enumerate(samples):
            self.rows[number] = sample["image"], sample[EXTENT]
            self._truths.append(truth_of(self._images.objects(row), tuple(sample[EXTENT][2:].tolist())))

    def parts(self, *, half: bool) -> Sequence[GraphPart]:
        """Return two parts, or three with masks."""
        del half
        return detector_parts(self.model, self.preprocessing, self.rows[np.arange(2) % len(self.rows)])

    def open(self, form: GraphFormat, folder: Path, threads: int) -> Graph:
        parts = (MODEL, REGIONS, MASKS) if self.model.config.masks else (MODEL, REGIONS)
        detector = GraphDetector({part: form.open(folder, threads, part) for part in parts}, self.limits)

        def run(rows: np.ndarray) -> dict[str, np.ndarray]:
            return {OBJECTS: as_array(detector(np.ascontiguousarray(rows["pixels"]), rows["extent"][:, :2].copy()))}

        return run

    def describe_preprocessing(self) -> str:
        height, width = self.preprocessing.image_size
        return (
            f"Images are resized, keeping their shape, to fit into the top left of {height}×{width} (Pillow, bicubic)."
        )

    @torch.inference_mode()
    def run(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return the objects on canvases, computed as `patchloom predict` does."""
        batch = ImageBatch.of_pixels(list(rows["pixels"]))
        batch.parts[EXTENT] = torch.from_numpy(rows["extent"].astype(np.int32))
        mean, std = self.preprocessing.mean, self.preprocessing.std
        images, sizes = prepare_inputs(batch, mean, std, self.model.any_resolution)
        results = []
        for output in self.model(images, sizes):
            arrays = {name: value.numpy() for name, value in output.items()}
            shares = arrays["masks"][:, 0] if "masks" in arrays else None
            results.append(RegionBoxes(arrays["boxes"], arrays["labels"], arrays["scores"], shares))
        return {OBJECTS: as_array(results)}

    def calibration(self, count: int) -> np.ndarray:
        del count
        raise UsageError(f"a {self.task} run cannot be quantized")

    def agreement(self, outputs: Outputs, expected: Outputs) -> float:
        """Return twice the matched objects relative to the objects of both, in percent."""
        both = sum(len(pairs(*two)) for two in zip(outputs[OBJECTS], expected[OBJECTS], strict=True))
        either = sum(len(one.scores) for each in (outputs, expected) for one in each[OBJECTS])
        return 100 * 2 * both / either if either else 100.0

    def differences(self, outputs: Outputs, expected: Outputs) -> tuple[float, float]:
        """Return the largest difference of matched boxes in pixels of the canvas, and the largest relative one.

        The relative one is that of boxes to the canvas, of scores or of masks; and the share of unmatched objects if
        more than `MOST_UNMATCHED`.
        """
        worst, relative = 0.0, 0.0
        side = max(self.preprocessing.image_size)
        for ours, theirs in zip(outputs[OBJECTS], expected[OBJECTS], strict=True):
            if not len(matched := pairs(ours, theirs)):
                continue
            i, j = matched.T
            gap = float(np.abs(ours.boxes[i] - theirs.boxes[j]).max())
            others = [np.abs(ours.scores[i] - theirs.scores[j]).max()]
            if ours.shares is not None and theirs.shares is not None:
                others.append(np.abs(ours.shares[i] - theirs.shares[j]).max())
            worst, relative = max(worst, gap), max(relative, gap / side, *map(float, others))
        unmatched = 1 - self.agreement(outputs, expected) / 100
        return worst, relative if unmatched <= MOST_UNMATCHED else max(relative, unmatched)

    def quality(self, outputs: Outputs) -> float | None:
        """Return COCO's box AP on the compared images."""
        detections = []
        for objects, extent in zip(outputs[OBJECTS], self.rows["extent"], strict=True):
            regions = RegionBoxes(objects.boxes, objects.labels, objects.scores)
            boxes, categories, scores, _ = to_image_pixels(regions, extent.tolist())
            detections.append(Detections(boxes, categories, scores))
        truths = [replace(truth, masks=None) for truth in self._truths]
        ap = DetectionReport(self.labels, truths, detections).summary()["ap"]
        return None if np.isnan(ap) else ap


def as_array(objects: Sequence[RegionBoxes]) -> np.ndarray:
    """Return an object array (B,), which `outputs_of` can concatenate."""
    rows = np.empty(len(objects), object)
    rows[:] = objects
    return rows


def pairs(ours: RegionBoxes, theirs: RegionBoxes) -> np.ndarray:
    """Match equal objects one to one and return their positions, (n, 2)."""
    overlap = box_iou(ours.boxes, theirs.boxes, np.zeros(len(theirs.boxes), bool))
    overlap = np.where(ours.labels[:, None] == theirs.labels, overlap, 0.0)
    matches = []
    while overlap.size and overlap.max() >= SAME_IOU:
        i, j = np.unravel_index(overlap.argmax(), overlap.shape)
        matches.append((i, j))
        overlap[i, :], overlap[:, j] = 0.0, 0.0
    return np.array(matches, np.int64).reshape(-1, 2)


def box_limits(network: Detector, view: Any) -> BoxLimits:
    """Return the thresholds and counts by which a detector selects boxes."""
    rpn, heads = network.rpn, network.roi_heads
    anchors = tuple(tuple(map(tuple, around.tolist())) for around in rpn.anchor_generator.cell_anchors)
    return BoxLimits(
        anchors,
        rpn._pre_nms_top_n["testing"],
        rpn._post_nms_top_n["testing"],
        rpn.nms_thresh,
        heads.score_thresh,
        heads.nms_thresh,
        heads.detections_per_img,
        network.any_resolution,
        view.short or 0,
        view.long or 0,
    )
