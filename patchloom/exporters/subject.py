"""The subject of an export: a run with its graph parts, the inputs it is compared on, and the measures of agreement.

Each task has its own in `tasks/<task>/export.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from patchloom.data.datasets import ImageSet
from patchloom.exporters.formats import GraphFormat
from patchloom.exporters.graph import FromPixels, GraphPart
from patchloom.exporters.parity import BATCH, Outputs, differences
from patchloom.runs.run_metadata import data_path, read_run_metadata
from patchloom_runtime.engines.engine import MODEL, Graph
from patchloom_runtime.errors import DataError


@dataclass(frozen=True)
class ExportSettings:
    """Which images run and export are compared on, and at which size."""

    data: str | None
    split: str | None
    size: int | None
    images: int | None  # at most; default: the subject's `most`


class ExportSubject(ABC):
    """A run to export."""

    measure: ClassVar[str]  # name of the metric that `quality` returns
    precisions: ClassVar[tuple[str, ...]] = ("float32", "float16", "int8")
    most: ClassVar[int] = 1000  # images to compare
    batch: ClassVar[int] = BATCH
    compared: ClassVar[str] = "images"  # plural noun for the inputs

    task: str
    network: str  # name
    labels: tuple[str, ...]
    preprocessing: Any  # a Preprocessing; None if the model takes no images
    weights: int  # bytes
    notes: tuple[str, ...]
    rows: np.ndarray  # (N, …) inputs to compare on: pixels (N, H, W, 3) uint8
    takes: str = "uint8 (batch, {0}, {1}, 3), RGB"  # description of `pixels`, with height and width to fill in
    metadata: Mapping[str, Any]  # fields of `artifact.json` in addition to the common ones
    summary: str  # sentence of the model card
    usage: str  # line of Python for the model card

    def files(self) -> Mapping[str, bytes]:
        """Return files of the artifact in addition to the common ones."""
        return {}

    def describe_graphs(self, outputs: Sequence[str]) -> str:
        """Describe inputs and outputs of the graphs for the model card."""
        height, width = self.preprocessing.image_size
        names = "` and `".join(outputs)
        takes = f"The graph takes `pixels`, {self.takes.format(height, width)}, and returns `{names}`."
        return f"{takes} It\nsubtracts the mean and divides by the deviation itself. {self.describe_preprocessing()}"

    def describe_preprocessing(self) -> str:
        """Describe how images of any size become the input of the graph."""
        preprocessing, (height, width) = self.preprocessing, self.preprocessing.image_size
        ratio, filter_name = f"{preprocessing.crop_ratio:g}", f"(Pillow, {preprocessing.interpolation})"
        if preprocessing.resize == "square":
            return f"Images are resized to a square and cropped to the middle {ratio} of each side {filter_name}."
        return (
            f"Images are resized so that a center crop of {height}×{width} is {ratio} of the short side {filter_name}."
        )

    def module(self, *, half: bool) -> FromPixels:
        """Return the module to export, if it is one part."""
        raise NotImplementedError

    def parts(self, *, half: bool) -> Sequence[GraphPart]:
        """Return the parts to export."""
        module = self.module(half=half).eval()
        return [GraphPart(module, {"pixels": torch.from_numpy(self.rows[:2].repeat(2, 0)[:2])}, module.outputs)]

    def open(self, form: GraphFormat, folder: Path, threads: int) -> Graph:
        """Open the exported parts as one function of `rows`."""
        return form.open(folder, threads, MODEL)

    def differences(self, outputs: Outputs, expected: Outputs) -> tuple[float, float]:
        """Return the largest difference from the run, absolute and relative to the run's largest output."""
        return differences(outputs, expected)

    @abstractmethod
    def run(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return the outputs of the run itself, computed by the code of `patchloom predict`."""

    @abstractmethod
    def calibration(self, count: int) -> np.ndarray:
        """Return at most `count` training images for calibration, as pixels.

        Without training images, return the images that the export is compared on.
        """

    @abstractmethod
    def agreement(self, outputs: Outputs, expected: Outputs) -> float:
        """Return the percentage of equal predictions."""

    @abstractmethod
    def quality(self, outputs: Outputs) -> float | None:
        """Return the metric named `measure` in percent, or None without labels."""


def data_of(folder: Path | None) -> str:
    """Return the data path that a run was trained on. Raises UsageError if it is not recorded."""
    return data_path(folder, read_run_metadata(folder) if folder else None)


def class_summary(labels: Sequence[str]) -> str:
    """Return the first 20 class names for the model card."""
    return ", ".join(labels[:20]) + (" …" if len(labels) > 20 else "")


def spread(images: ImageSet, most: int, read: Callable[[int], Any]) -> list[tuple[int, Any]]:
    """Return at most `most` rows, evenly spread over a dataset, with the result of `read`. Skips unreadable images."""
    rows = np.unique(np.linspace(0, len(images) - 1, min(most, len(images))).round().astype(int))
    results = []
    for row in rows.tolist():
        try:
            results.append((row, read(row)))
        except DataError:
            continue
    if not results:
        raise DataError("none of the images to compare on can be read; pass others with --data")
    return results
