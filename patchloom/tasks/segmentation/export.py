"""Export of segmentation runs. The graph sees one window; the artifact slides it over an image."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from patchloom.data.datasets import LabeledImages
from patchloom.data.images.image_batch import normalize
from patchloom.evaluation.segmentation import SegmentationCounter
from patchloom.exporters.graph import MAPS, FromPixels, SegmenterGraph, state_bytes
from patchloom.exporters.parity import Outputs
from patchloom.exporters.subject import ExportSettings, ExportSubject, class_summary, data_of, spread
from patchloom.objectives.segmentation import labeled
from patchloom.tasks.segmentation.data import open_masks
from patchloom.tasks.segmentation.model import load_segmentation
from patchloom.tasks.segmentation.pixel_classes import PixelClassifier, ViewSettings
from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.images.evaluation_transform import middle_start
from patchloom_runtime.images.geometry import Geometry

MASK = "mask"


class SegmenterSubject(ExportSubject):
    """A segmentation run, compared by the class of every pixel in the center of images at test size."""

    task = "segmentation"
    measure = "mIoU"
    usage = (
        'model.predict("photo.jpg")  # (height, width) class numbers; also bytes, PIL images, arrays, folders, lists'
    )

    def __init__(self, folder: Path, settings: ExportSettings) -> None:
        network, files = load_segmentation(folder)
        self.model = network if settings.size is None else network.for_images_of(settings.size)
        window = (settings.size, settings.size) if settings.size else self.model.image_size
        self.network, self.labels = files.model, files.labels
        self.preprocessing = replace(files.preprocessing, image_size=window)
        self.weights = state_bytes(self.model)
        view = ViewSettings.of(files.recipe)
        self._classifier = PixelClassifier(self.model, replace(view, mode="slide"))
        stride = [max(1, round(side * view.stride)) for side in window]
        self.metadata = {"windows": {"stride": stride, "short_side": view.short_side}}
        self.summary = f"The class of every pixel, of {len(self.labels)}: {class_summary(self.labels)}"
        self._folder, self._data = folder, settings.data or data_of(folder)
        images, notes = open_masks(self._data, settings.split, folder)
        if view.mode == "whole" or (view.mode == "auto" and self.model.any_resolution):
            notes.append(
                f"the run sees whole images, the artifact windows of {window[0]}×{window[1]} pixels; results differ"
            )
        self.notes = tuple(notes)
        self.rows, self._truth = self._windows(images, settings.images or self.most)

    def module(self, *, half: bool) -> FromPixels:
        return SegmenterGraph(self.model, self.preprocessing.mean, self.preprocessing.std, half=half)

    def describe_preprocessing(self) -> str:
        height, width = self.preprocessing.image_size
        return f"Windows of {height}×{width} slide over images of any size."

    @torch.inference_mode()
    def run(self, pixels: np.ndarray) -> dict[str, np.ndarray]:
        """Return the logits of windows, computed as `patchloom predict` does."""
        images = torch.from_numpy(pixels).permute(0, 3, 1, 2)
        return {MAPS: self.model(normalize(images, self.preprocessing.mean, self.preprocessing.std)).numpy()}

    def calibration(self, count: int) -> np.ndarray:
        try:
            images, _ = open_masks(self._data, "train", self._folder)
        except (DataError, UsageError):
            return self.rows[:count]
        return self._windows(images, count)[0]

    def agreement(self, outputs: Outputs, expected: Outputs) -> float:
        """Return the agreement per output position (1/4 resolution), in percent."""
        return 100 * float((outputs[MAPS].argmax(1) == expected[MAPS].argmax(1)).mean())

    def quality(self, outputs: Outputs) -> float | None:
        """Return the mIoU of pixels."""
        counting = SegmentationCounter(self.labels, with_borders=False)
        for row, (maps, truth) in enumerate(zip(outputs[MAPS], self._truth, strict=True)):
            logits = F.interpolate(torch.from_numpy(maps)[None], truth.shape, mode="bilinear", align_corners=False)
            counting.add([row], torch.from_numpy(truth)[None], logits.argmax(1))
        return counting.report().miou if (self._truth >= 0).any() else None

    def _windows(self, images: LabeledImages, most: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the center of each image, (N, H, W, 3), and its classes as the model numbers them, −1 for none."""
        known = {name: number for number, name in enumerate(self.labels)}
        numbers = np.array([known.get(name, -1) for name in images.classes.names], np.int64)
        window, outside = self.preprocessing.image_size, images.layers[MASK].outside

        def center(row: int) -> Any:
            sample = images.sample(row)
            scaled = self._classifier.view_size((sample.image.height, sample.image.width))
            view = Geometry((0, 0, *sample.image.size), scaled, window, middle_start(scaled, window))
            mask = view.apply_mask(sample.layers[MASK].numbers, outside)
            truth = labeled(torch.from_numpy(mask.astype(np.int64))[None], len(numbers), outside)[0].numpy()
            return view.apply_image(sample.image), np.where(truth >= 0, numbers[np.maximum(truth, 0)], -1)

        samples = spread(images, most, center)
        return np.stack([pixels for _, (pixels, _) in samples]), np.stack([truth for _, (_, truth) in samples])
