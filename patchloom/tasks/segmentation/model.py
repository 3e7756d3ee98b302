"""A trained segmentation model: predicts the class of every pixel of images, files, folders and videos."""

import io
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from patchloom.data.images.video import frames_or_error
from patchloom.disk import atomic_write, make_folder
from patchloom.machine import resolve_device
from patchloom.models.dense.upernet import SegmentationConfig, SegmentationNetwork
from patchloom.report.pictures.overlays import class_shares, color_mask, index_image, overlay_mask
from patchloom.runs.calibration import FILE as CALIBRATION
from patchloom.runs.calibration import read_calibration
from patchloom.runs.config import RunFiles, read_run_files
from patchloom.runs.locate import run_folder
from patchloom.runs.weights import load_trained
from patchloom.tasks.segmentation.pixel_classes import PixelClassifier, ViewSettings
from patchloom.tasks.segmentation.run_files import FILE, read_segmented
from patchloom.tasks.task import ModelLoader
from patchloom_runtime.artifacts.artifact import load
from patchloom_runtime.artifacts.segmenter import ArtifactSegmenter
from patchloom_runtime.errors import UsageError, at_least
from patchloom_runtime.images.inputs import ImagesLike, is_single_image, iterate_images, list_image_files


@dataclass(frozen=True)
class Segmented:
    """Prediction for one file: the share of pixels per class, and the files that were written."""

    path: str
    answers: list[tuple[str, float]]  # class name, share of the pixels; largest first
    error: str | None = None
    written: list[str] = field(default_factory=list)

    def in_words(self) -> str:
        """Return the classes with their shares as text."""
        return "  ".join(f"{name} {share:.1%}" for name, share in self.answers)


class Segmenter:
    """A segmentation network with its class names and view settings."""

    def __init__(
        self, model: SegmentationNetwork, files: RunFiles, *, multi_scale: bool = False, temperature: float = 1.0
    ) -> None:
        self.model = model
        self.labels = files.labels
        self._name = files.model
        self.maps = PixelClassifier(model, ViewSettings.of(files.recipe, multi_scale=multi_scale), temperature)

    def __repr__(self) -> str:
        return f"Segmenter({self._name}, {len(self.labels)} classes, {self.device})"

    @property
    def device(self) -> torch.device:
        """The device of the network."""
        return next(self.model.parameters()).device

    def predict(self, images: ImagesLike) -> Any:
        """Return the class indices (H, W), int16, of one image, or a list of them for several images."""
        masks = [self.numbers(each.read()) for each in iterate_images(images)]
        return masks[0] if is_single_image(images) else masks

    def numbers(self, picture: Image.Image) -> np.ndarray:
        """Return the class indices (H, W) of an RGB image."""
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None]
        return self.maps(pixels.to(self.device))[0].cpu().numpy()

    def predict_files(
        self,
        paths: Iterable[str | os.PathLike[str]],
        *,
        top: int = 3,
        every: int | None = None,
        out: str | os.PathLike[str] | None = None,
    ) -> Iterator[Segmented]:
        """Yield one prediction per file or frame, in order; that of an unreadable file has `error`.

        With the folder `out`, three files per image are written: NAME.png holds the class indices, NAME.colour.png
        their colors, and NAME.overlay.jpg the colors over the image.
        """
        at_least("top", top, 1)
        names = _Names()
        for path in list_image_files(paths):
            for name, picture in frames_or_error(path, every):
                if isinstance(picture, str):
                    yield Segmented(name, [], picture)
                    continue
                numbers = self.numbers(picture)
                written = [] if out is None else self._write(Path(out), names.of(name), picture, numbers)
                shares = [(self.labels[number], share) for number, share in class_shares(numbers)]
                yield Segmented(name, shares[:top], written=written)

    def _write(self, folder: Path, name: str, picture: Image.Image, numbers: np.ndarray) -> list[str]:
        classes = len(self.labels)
        made = {
            f"{name}.png": index_image(numbers, classes),
            f"{name}.colour.png": color_mask(numbers, classes),
            f"{name}.overlay.jpg": overlay_mask(picture, numbers, classes),
        }
        make_folder(folder)
        for file, image in made.items():
            atomic_write(folder / file, _encoded(image, file))
        return [str(folder / file) for file in made]


class _Names:
    """Output file names: those of the images, numbered if two are equal."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def of(self, path: str) -> str:
        """photos/a.jpg → a; clip.mp4#frame=120 (t=4.00 s) → clip-frame-120."""
        file, _, frame = path.partition("#frame=")
        name = Path(file).stem + (f"-frame-{frame.split()[0]}" if frame else "")
        name = re.sub(r"[^\w.-]+", "-", name).strip("-.") or "picture"
        self._counts[name] = self._counts.get(name, 0) + 1
        return name if self._counts[name] == 1 else f"{name}-{self._counts[name]}"


def _encoded(image: Image.Image, file: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG" if file.endswith(".jpg") else "PNG", **({"quality": 92} if file.endswith(".jpg") else {}))
    return buffer.getvalue()


def load_segmentation(folder: Path) -> tuple[SegmentationNetwork, RunFiles]:
    """Load the trained network of a run folder, in eval mode, and its files."""
    files = read_run_files(folder)
    options = dict(files.options)
    flat = {**{key: value for key, value in options.items() if key != "backbone"}, **options["backbone"]}

    def make() -> SegmentationNetwork:
        return SegmentationNetwork(SegmentationConfig(name=files.network, **options))

    network = load_trained(folder, make, flat)
    network.backbone.pixel_mean, network.backbone.pixel_std = files.preprocessing.mean, files.preprocessing.std
    return network, files


def load_segmenter(source: str | os.PathLike[str], *, device: str = "auto", multi_scale: bool = False) -> Segmenter:
    """Load the segmentation model of a run folder."""
    folder = run_folder(source)
    network, files = load_segmentation(folder)
    temperature = read_calibration(folder).rules.temperature
    return Segmenter(network.to(resolve_device(device)), files, multi_scale=multi_scale, temperature=temperature)


class ExportedSegmenter(Segmenter):
    """An exported segmentation model."""

    def __init__(self, artifact: ArtifactSegmenter) -> None:
        self.artifact, self.labels, self._name = artifact, artifact.labels, artifact.about.network
        self.maps: Any = GraphMaps(artifact)

    @property
    def device(self) -> torch.device:
        """The device of the graph."""
        return torch.device("cpu")

    def numbers(self, picture: Image.Image) -> np.ndarray:
        """Return the class indices (H, W) of an RGB image."""
        return self.artifact.numbers(picture)


class GraphMaps:
    """Class indices of images from a graph: what `PixelClassifier` is for a network."""

    def __init__(self, artifact: ArtifactSegmenter) -> None:
        self._artifact = artifact
        self.device = torch.device("cpu")

    def __call__(self, images: Tensor) -> Tensor:
        """Map (B, 3, H, W) uint8 to class indices (B, H, W), int16."""
        pixels = images.permute(0, 2, 3, 1).contiguous().numpy()
        return torch.from_numpy(np.stack([self._artifact.numbers(Image.fromarray(image)) for image in pixels]))

    def images_at_once(self, size: tuple[int, int]) -> int:
        """Return 1: the graph batches the windows of one image."""
        del size
        return 1


def open_exported_segmenter(folder: Path) -> ExportedSegmenter:
    """Load an artifact of a segmentation model; raise UsageError for one of another task."""
    artifact = load(folder)
    if not isinstance(artifact, ArtifactSegmenter):
        raise UsageError(f"{folder} is an artifact of the task {artifact.about.task}, not of segmentation")
    return ExportedSegmenter(artifact)


class SegmenterLoader(ModelLoader):
    """Models that give every pixel a class."""

    writes_files = True

    def load_network(self, folder: Path) -> SegmentationNetwork:
        return load_segmentation(folder)[0]

    def load(self, folder: Path, *, device: str = "auto") -> Segmenter:
        return load_segmenter(folder, device=device)

    def open_artifact(self, folder: Path) -> Segmenter:
        return open_exported_segmenter(folder)

    def readers(self, folder: Path) -> dict[str, Callable[[], object]]:
        return {
            "config.json": lambda: read_run_files(folder),
            FILE: lambda: read_segmented(folder),
            CALIBRATION: lambda: read_calibration(folder),
        }
