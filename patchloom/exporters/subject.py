"""A run as it is exported: what is traced, the images it is compared on, and what counts as an answer about them.

One file per kind of run: `of_classifier.py`, `of_segmenter.py`, `of_detector.py`,
`of_translator.py`. The table of tasks is in `export.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from patchloom.data.datasets import ImageSet
from patchloom.exporters.graph import FromPixels, Traced
from patchloom.exporters.parity import BATCH, Outputs, differences
from patchloom.runs.run_metadata import data_path, read_run_metadata
from patchloom_runtime.engines.formats import MODEL, Graph, GraphFormat
from patchloom_runtime.errors import DataError


@dataclass(frozen=True)
class ExportSettings:
    """Which images are compared, and at which size."""

    data: str | None
    split: str | None
    size: int | None
    images: int | None  # at most; by default the subject's own number


class ExportSubject(ABC):
    """One run."""

    measure: ClassVar[str]  # what `right` tells, in percent
    precisions: ClassVar[tuple[str, ...]] = ("float32", "float16", "int8")
    most: ClassVar[int] = 1000  # images that are compared
    batch: ClassVar[int] = BATCH  # of them that are seen together
    compared: ClassVar[str] = "images"

    task: str
    network: str  # its name
    labels: tuple[str, ...]
    shown: Any  # how pictures are shown: a Preprocessing; None where there are none
    weights: int  # bytes
    notes: tuple[str, ...]
    rows: np.ndarray  # (N, …) of what is compared: pixels (N, H, W, 3) uint8
    takes: str = "uint8 (batch, {0}, {1}, 3), RGB"  # what `pixels` are, of height and width
    told: Mapping[str, Any]  # what `artefact.json` says beside what all artefacts do
    answers: str  # a sentence of the card
    use: str  # a line of Python

    def files(self) -> Mapping[str, bytes]:
        """What the artefact has beside what all have."""
        return {}

    def in_words(self, outputs: Sequence[str]) -> str:
        """What the graph takes and gives, for the card."""
        height, width = self.shown.image_size
        takes = f"The graph takes `pixels`, {self.takes.format(height, width)}, and gives `{'` and `'.join(outputs)}`."
        return f"{takes} Mean and\ndeviation are inside it. {self.seen_in_words()}"

    def seen_in_words(self) -> str:
        """How pictures of any size become what the graph takes."""
        shown, (height, width) = self.shown, self.shown.image_size
        by = f"(Pillow, {shown.interpolation})"
        if shown.resize == "square":
            return f"Images are resized to a square of which the middle {shown.crop_ratio:g} of each side is seen {by}."
        whole = f"a centre crop of {height}×{width} is {shown.crop_ratio:g} of the short side"
        return f"Images are resized so that {whole} {by}."

    def module(self, *, half: bool) -> FromPixels:
        """What is traced, where it is one part."""
        raise NotImplementedError

    def traced(self, *, half: bool) -> Sequence[Traced]:
        """What is traced, part by part."""
        module = self.module(half=half).eval()
        return [Traced(module, {"pixels": torch.from_numpy(self.rows[:2].repeat(2, 0)[:2])}, module.outputs)]

    def opened(self, form: GraphFormat, folder: Path, threads: int) -> Graph:
        """What answers about rows from the files of a folder."""
        return form.open(folder, threads, MODEL)

    def differences(self, found: Outputs, expected: Outputs) -> tuple[float, float]:
        """The largest from the run, and the same as a share of the run's largest number."""
        return differences(found, expected)

    @abstractmethod
    def run(self, pixels: np.ndarray) -> dict[str, np.ndarray]:
        """What the run itself says, by the code that answers `patchloom predict`."""

    @abstractmethod
    def calibration(self, count: int) -> np.ndarray:
        """Pixels of so many images of train, or of those compared where there are no others."""

    @abstractmethod
    def same(self, found: Outputs, expected: Outputs) -> float:
        """How many of the answers are the same, in percent."""

    @abstractmethod
    def right(self, found: Outputs) -> float | None:
        """How good the answers are, in percent; None without labels."""


def data_of(folder: Path | None) -> str:
    """Return the data path that a run was trained on."""
    return data_path(folder, read_run_metadata(folder) if folder else None)


def spread(pictures: ImageSet, most: int, shown: Callable[[int], Any]) -> list[tuple[int, Any]]:
    """At most `most` rows, spread over a set, each with what `shown` makes of it; unreadable ones are left out."""
    rows = np.unique(np.linspace(0, len(pictures) - 1, min(most, len(pictures))).round().astype(int))
    found = []
    for row in rows.tolist():
        try:
            found.append((row, shown(row)))
        except DataError:
            continue
    if not found:
        raise DataError("none of the images to compare on can be read; give others with --data")
    return found
