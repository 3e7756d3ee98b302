"""Runs that find objects: what is the same for every picture is graphs, what chooses boxes is `object_choice.py`."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from patchloom.data.augmentation.canvas import on_canvas
from patchloom.data.images.image_batch import ImageBatch
from patchloom.evaluation.detection import DetectionReport, Detections, box_iou, truth_of
from patchloom.exporters.graph import Traced
from patchloom.exporters.parity import Outputs
from patchloom.exporters.subject import ExportSettings, ExportSubject, data_of, spread
from patchloom.models.dense.detector import Detector
from patchloom.objectives.detection import prepare_inputs
from patchloom.tasks.detection.data import open_objects
from patchloom.tasks.detection.detector import view_of
from patchloom.tasks.detection.graph import traced_detector
from patchloom.tasks.detection.run_files import load_detector
from patchloom_runtime.artifacts.box_selection import BoxLimits, RegionBoxes
from patchloom_runtime.artifacts.detector import AT_ONCE, MASKS, REGIONS, Finder, in_picture
from patchloom_runtime.engines.formats import MODEL, Graph, GraphFormat
from patchloom_runtime.errors import UsageError
from patchloom_runtime.images.samples import EXTENT

FOUND = "found"
SAME_IOU = 0.9  # from which two boxes of a class are the same object
MOST_UNMATCHED = 0.01  # of the objects: of two boxes that are equally likely, either may be left out for the other


class DetectorSubject(ExportSubject):
    """An answer is an object: the same if run and file find it with the same class and nearly the same box."""

    task = "detection"
    measure = "box AP"
    precisions: ClassVar[tuple[str, ...]] = ("float32",)
    most = 100
    batch = AT_ONCE
    takes = "uint8 (batch, {0}, {1}, 3), RGB, and `sizes`, int64 (batch, 2), of the pictures at their top left"
    use = 'model.predict("photo.jpg")  # objects with name, score, box and mask; also bytes, PIL images, arrays, lists'

    def __init__(self, folder: Path, asked: ExportSettings) -> None:
        network, files = load_detector(folder)
        self.model: Detector = network if asked.size is None else network.for_images_of(asked.size)
        canvas = (asked.size, asked.size) if asked.size else files.preprocessing.image_size
        self.shown = replace(files.preprocessing, image_size=canvas)
        self.view = replace(view_of(files), image_size=canvas)
        self.network, self.labels = files.model, files.labels
        self.weights = sum(v.numel() * v.element_size() for v in self.model.state_dict().values())
        self.choice = choice_of(self.model, self.view)
        self.told = {"detection": asdict(self.choice)}
        names = ", ".join(self.labels[:20]) + (" …" if len(self.labels) > 20 else "")
        what = "Boxes and masks" if self.model.config.masks else "Boxes"
        self.answers = f"{what} of objects of {len(self.labels)} classes: {names}"
        self._pictures, notes = open_objects(folder, asked.data or data_of(folder), asked.split, self.labels)
        self.notes = tuple(notes)
        found = spread(self._pictures, asked.images or self.most, self._seen)
        self.rows = np.zeros(len(found), [("pixels", np.uint8, (*canvas, 3)), ("extent", np.int64, (4,))])
        self._truths = []
        for place, (row, seen) in enumerate(found):
            self.rows[place] = seen["image"], seen[EXTENT]
            self._truths.append(truth_of(self._pictures.objects(row), tuple(seen[EXTENT][2:].tolist())))

    def traced(self, *, half: bool) -> Sequence[Traced]:
        """Two parts, with masks three."""
        del half
        return traced_detector(self.model, self.shown, self.rows[np.arange(2) % len(self.rows)])

    def opened(self, form: GraphFormat, folder: Path, threads: int) -> Graph:
        """All parts, and what chooses boxes between them."""
        parts = (MODEL, REGIONS, MASKS) if self.model.config.masks else (MODEL, REGIONS)
        finder = Finder({part: form.open(folder, threads, part) for part in parts}, self.choice)

        def answer(rows: np.ndarray) -> dict[str, np.ndarray]:
            return {FOUND: as_array(finder(np.ascontiguousarray(rows["pixels"]), rows["extent"][:, :2].copy()))}

        return answer

    def seen_in_words(self) -> str:
        """How pictures of any size become what the graph takes."""
        height, width = self.shown.image_size
        return f"Pictures are resized in shape to fit {height}×{width} and lie at the top left (Pillow, bicubic)."

    @torch.inference_mode()
    def run(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """As it answers `patchloom predict`, on canvases."""
        batch = ImageBatch.of_pixels(list(rows["pixels"]))
        batch.parts[EXTENT] = torch.from_numpy(rows["extent"].astype(np.int32))
        images, sizes = prepare_inputs(batch, self.shown.mean, self.shown.std, self.model.any_resolution)
        found = []
        for one in self.model(images, sizes):
            arrays = {name: value.numpy() for name, value in one.items()}
            shares = arrays["masks"][:, 0] if "masks" in arrays else None
            found.append(RegionBoxes(arrays["boxes"], arrays["labels"], arrays["scores"], shares))
        return {FOUND: as_array(found)}

    def calibration(self, count: int) -> np.ndarray:
        """There is no int8 of it."""
        del count
        raise UsageError(f"a run of {self.task} is not quantised")

    def same(self, found: Outputs, expected: Outputs) -> float:
        """Of the objects that either finds, twice those that both do."""
        both = sum(len(pairs(*two)) for two in zip(found[FOUND], expected[FOUND], strict=True))
        either = sum(len(one.scores) for each in (found, expected) for one in each[FOUND])
        return 100 * 2 * both / either if either else 100.0

    def differences(self, found: Outputs, expected: Outputs) -> tuple[float, float]:
        """Of boxes in pixels of the canvas; as a share of its side, or that of scores and masks where it is more."""
        worst, share = 0.0, 0.0
        side = max(self.shown.image_size)
        for ours, theirs in zip(found[FOUND], expected[FOUND], strict=True):
            if not len(matched := pairs(ours, theirs)):
                continue
            mine, its = matched.T
            gap = float(np.abs(ours.boxes[mine] - theirs.boxes[its]).max())
            others = [np.abs(ours.scores[mine] - theirs.scores[its]).max()]
            if ours.shares is not None and theirs.shares is not None:
                others.append(np.abs(ours.shares[mine] - theirs.shares[its]).max())
            worst, share = max(worst, gap), max(share, gap / side, *map(float, others))
        unmatched = 1 - self.same(found, expected) / 100
        return worst, share if unmatched <= MOST_UNMATCHED else max(share, unmatched)

    def right(self, found: Outputs) -> float | None:
        """AP by COCO's rules, of the pictures that are compared."""
        told = []
        for one, extent in zip(found[FOUND], self.rows["extent"], strict=True):
            boxes, categories, scores, _ = in_picture(RegionBoxes(one.boxes, one.labels, one.scores), extent.tolist())
            told.append(Detections(boxes, categories, scores))
        truths = [replace(truth, masks=None) for truth in self._truths]
        ap = DetectionReport(self.labels, truths, told).summary()["ap"]
        return None if np.isnan(ap) else ap

    def _seen(self, row: int) -> Any:
        return on_canvas(self._pictures.read(row), self.view)


def as_array(found: Sequence[RegionBoxes]) -> np.ndarray:
    """(B,) of objects, as `answers_of` joins them."""
    rows = np.empty(len(found), object)
    rows[:] = found
    return rows


def pairs(ours: RegionBoxes, theirs: RegionBoxes) -> np.ndarray:
    """(n, 2) places of the objects that are the same; none is in two pairs."""
    alike = box_iou(ours.boxes, theirs.boxes, np.zeros(len(theirs.boxes), bool))
    alike = np.where(ours.labels[:, None] == theirs.labels, alike, 0.0)
    found = []
    while alike.size and alike.max() >= SAME_IOU:
        mine, its = np.unravel_index(alike.argmax(), alike.shape)
        found.append((mine, its))
        alike[mine, :], alike[:, its] = 0.0, 0.0
    return np.array(found, np.int64).reshape(-1, 2)


def choice_of(network: Detector, view: Any) -> BoxLimits:
    """The numbers by which a detector chooses boxes."""
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
