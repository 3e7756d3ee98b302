"""Runs that tell the class of every pixel: the graph sees a window, `artefact_segmenter.py` slides it over pictures."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from patchloom.data.datasets import LabeledImages
from patchloom.data.images.image_batch import normalize
from patchloom.evaluation.segmentation import SegmentationCounter
from patchloom.exporters.graph import MAPS, FromPixels, SegmenterGraph
from patchloom.exporters.parity import Outputs
from patchloom.exporters.subject import ExportSettings, ExportSubject, data_of, spread
from patchloom.objectives.segmentation import labeled
from patchloom.tasks.segmentation.data import open_masks
from patchloom.tasks.segmentation.pixel_classes import PixelClassifier, ViewSettings
from patchloom.tasks.segmentation.segmenter import load_segmentation
from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.images.evaluation_transform import middle_start
from patchloom_runtime.images.geometry import Geometry

MASK = "mask"


class SegmenterSubject(ExportSubject):
    """An answer is the class of a pixel; compared are the middles of pictures, at the size they are tested at."""

    task = "segmentation"
    measure = "mIoU"
    use = 'model.predict("photo.jpg")  # (height, width) class numbers; also bytes, PIL images, arrays, folders, lists'

    def __init__(self, folder: Path, asked: ExportSettings) -> None:
        network, files = load_segmentation(folder)
        self.model = network if asked.size is None else network.for_images_of(asked.size)
        window = (asked.size, asked.size) if asked.size else self.model.image_size
        self.network, self.labels = files.model, files.labels
        self.shown = replace(files.preprocessing, image_size=window)
        self.weights = sum(v.numel() * v.element_size() for v in self.model.state_dict().values())
        how = ViewSettings.of(files.recipe)
        self._maps = PixelClassifier(self.model, replace(how, mode="slide"))
        stride = [max(1, round(side * how.stride)) for side in window]
        self.told = {"windows": {"stride": stride, "short_side": how.short_side}}
        names = ", ".join(self.labels[:20]) + (" …" if len(self.labels) > 20 else "")
        self.answers = f"The class of every pixel, of {len(self.labels)}: {names}"
        self._folder, self._place = folder, asked.data or data_of(folder)
        pictures, notes = open_masks(self._place, asked.split, folder)
        if how.mode == "whole" or (how.mode == "auto" and self.model.any_resolution):
            notes.append(
                f"the run sees a picture whole, the artefact through windows of {window[0]}×{window[1]} pixels"
            )
        self.notes = tuple(notes)
        self.rows, self._truth = self._windows(pictures, asked.images or self.most)

    def module(self, *, half: bool) -> FromPixels:
        """Logits at a quarter of the sides."""
        return SegmenterGraph(self.model, self.shown.mean, self.shown.std, half=half)

    def seen_in_words(self) -> str:
        """How pictures of any size become what the graph takes."""
        height, width = self.shown.image_size
        return f"Pictures of any size are seen through windows of {height}×{width}."

    @torch.inference_mode()
    def run(self, pixels: np.ndarray) -> dict[str, np.ndarray]:
        """As a window is seen by `patchloom predict`."""
        images = normalize(torch.from_numpy(pixels).permute(0, 3, 1, 2), self.shown.mean, self.shown.std)
        return {MAPS: self.model(images).numpy()}

    def calibration(self, count: int) -> np.ndarray:
        """Of train, which nothing is measured on."""
        try:
            pictures, _ = open_masks(self._place, "train", self._folder)
        except (DataError, UsageError):
            return self.rows[:count]
        return self._windows(pictures, count)[0]

    def same(self, found: Outputs, expected: Outputs) -> float:
        """Of places, at a quarter of the sides."""
        return 100 * float((found[MAPS].argmax(1) == expected[MAPS].argmax(1)).mean())

    def right(self, found: Outputs) -> float | None:
        """mIoU, of pixels."""
        counting = SegmentationCounter(self.labels, with_borders=False)
        for row, (maps, truth) in enumerate(zip(found[MAPS], self._truth, strict=True)):
            logits = F.interpolate(torch.from_numpy(maps)[None], truth.shape, mode="bilinear", align_corners=False)
            counting.add([row], torch.from_numpy(truth)[None], logits.argmax(1))
        return counting.report().miou if (self._truth >= 0).any() else None

    def _windows(self, pictures: LabeledImages, most: int) -> tuple[np.ndarray, np.ndarray]:
        """The middle of each picture, (N, H, W, 3), and its classes as the model counts them, −1 for none."""
        known = {name: number for number, name in enumerate(self.labels)}
        numbers = np.array([known.get(name, -1) for name in pictures.classes.names], np.int64)
        window, outside = self.shown.image_size, pictures.layers[MASK].outside

        def middle(row: int) -> Any:
            sample = pictures.sample(row)
            scaled = self._maps.shown_size((sample.picture.height, sample.picture.width))
            view = Geometry((0, 0, *sample.picture.size), scaled, window, middle_start(scaled, window))
            mask = view.apply_mask(sample.layers[MASK].numbers, outside)
            truth = labeled(torch.from_numpy(mask.astype(np.int64))[None], len(numbers), outside)[0].numpy()
            return view.apply_picture(sample.picture), np.where(truth >= 0, numbers[np.maximum(truth, 0)], -1)

        found = spread(pictures, most, middle)
        return np.stack([pixels for _, (pixels, _) in found]), np.stack([truth for _, (_, truth) in found])
