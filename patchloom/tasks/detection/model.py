"""A trained detector: predicts names, scores, boxes and masks of objects, in pixels of the image."""

import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from patchloom.data.augmentation.canvas import CanvasView, on_canvas
from patchloom.data.images.image_batch import ImageBatch
from patchloom.data.images.video import frames_or_error
from patchloom.disk import atomic_write, make_folder
from patchloom.evaluation.detection import Detections, find_objects
from patchloom.machine import resolve_device
from patchloom.models.dense.detector import Detector
from patchloom.report.pictures.overlays import DrawnObject, draw_objects, object_text
from patchloom.runs.config import RunFiles, read_run_files
from patchloom.tasks.detection.run_files import VAL, coco_box, load_detector, read_val
from patchloom.tasks.task import NONE, ModelLoader
from patchloom_runtime.artifacts.artifact import load
from patchloom_runtime.artifacts.detector import DEFAULT_MIN_SCORE, ArtifactDetector, DetectedObject, surest_first
from patchloom_runtime.errors import UsageError, with_near_options
from patchloom_runtime.images.inputs import ImagesLike, is_single_image, iterate_images, list_image_files
from patchloom_runtime.images.samples import EXTENT
from patchloom_runtime.printable import printable

AT_ONCE = 8  # images per forward pass
JPEG_QUALITY = 90
ANNOTATIONS = "annotations.json"


@dataclass(frozen=True)
class ImageDetections:
    """Detections in one image."""

    path: str
    objects: Sequence[DetectedObject] = ()
    size: tuple[int, int] = (0, 0)  # height, width
    error: str | None = None
    written: tuple[str, ...] = ()  # files
    picture: Image.Image | None = field(default=None, repr=False)

    @property
    def answers(self) -> list[dict[str, Any]]:
        """The objects as plain values for JSON."""
        return [
            {"name": one.name, "score": round(one.score, 4), "box": [round(value, 1) for value in one.box]}
            for one in self.objects
        ]

    def in_words(self) -> str:
        """Return the number of objects per class and the highest score, as text."""
        counted: dict[str, list[float]] = {}
        for one in self.objects:
            counted.setdefault(one.name, []).append(one.score)
        counts = [f"{len(scores)} {name} ({max(scores):.0%})" for name, scores in counted.items()]
        return ", ".join(counts) or "nothing found"


class ObjectDetector:
    """A detection network with its class names and the canvas that images are placed on."""

    def __init__(self, network: Detector, files: RunFiles, folder: Path | None = None) -> None:
        self.network, self.labels, self.folder = network, files.labels, folder
        self.view = view_of(files)

    def __repr__(self) -> str:
        height, width = self.view.image_size
        what = "boxes and masks" if self.network.config.masks else "boxes"
        return (
            f"ObjectDetector({self.network.config.name}, {height}×{width} pixels, {what} of {len(self.labels)} classes)"
        )

    @with_near_options
    def predict(self, pictures: ImagesLike, *, min_score: float = DEFAULT_MIN_SCORE) -> Any:
        """Return the objects of one image, highest score first, or a list of them for several images."""
        if not 0 <= min_score <= 1:
            raise UsageError(f"min_score is {min_score}, expected a number from 0 to 1")
        one = is_single_image(pictures)
        read = ((each.name, each.read()) for each in iterate_images(pictures))
        detections = [list(answer.objects) for answer in self._answers(read, min_score)]
        return detections[0] if one else detections

    def predict_files(
        self,
        paths: Iterable[str],
        *,
        top: int = 3,
        every: int | None = None,
        out: str | Path | None = None,
        min_score: float = DEFAULT_MIN_SCORE,
    ) -> Iterator[ImageDetections]:
        """Yield one prediction per file or frame, in order; that of an unreadable file has `error`.

        With the folder `out`, each image is written with its objects drawn over it, and at the end `annotations.json`
        in COCO's format.
        """
        del top
        frames = (frame for path in list_image_files(paths) for frame in frames_or_error(path, every))
        written = DetectionFiles(Path(out), self.labels) if out is not None else None
        for answer in self._answers(frames, min_score):
            yield written.with_overlay(answer) if written else answer
        if written:
            written.close()

    def _answers(self, frames: Iterable[tuple[str, Image.Image | str]], min_score: float) -> Iterator[ImageDetections]:
        rest = iter(frames)
        while window := list(islice(rest, AT_ONCE)):
            detections = iter(self._detect([one for _, one in window if not isinstance(one, str)]))
            for name, one in window:
                if isinstance(one, str):
                    yield ImageDetections(name, error=one)
                    continue
                size, objects = next(detections)
                yield ImageDetections(name, detected_objects(objects, self.labels, min_score), size, picture=one)

    def _detect(self, pictures: Sequence[Image.Image]) -> list[tuple[tuple[int, int], Detections]]:
        if not pictures:
            return []
        samples = [on_canvas(picture, self.view) for picture in pictures]
        batch = ImageBatch.of_pixels([one["image"] for one in samples])
        batch.parts[EXTENT] = torch.from_numpy(np.stack([one[EXTENT] for one in samples]))
        return [(size, detections) for _, size, detections in find_objects(self.network, [batch])]


def detected_objects(
    detections: Detections, labels: Sequence[str], min_score: float = DEFAULT_MIN_SCORE
) -> list[DetectedObject]:
    """Return the detections with at least `min_score`, highest score first."""
    return surest_first(detections.boxes, detections.categories, detections.scores, detections.masks, labels, min_score)


def draw_detections(one: DetectedObject, labels: Sequence[str]) -> DrawnObject:
    """Return the drawing of an object."""
    return DrawnObject(object_text(one.name, one.score), one.box, labels.index(one.name), one.outline)


class DetectionFiles:
    """Writes `annotations.json` in COCO's format, and each image with its detections drawn over it."""

    def __init__(self, folder: Path, labels: Sequence[str]) -> None:
        self._folder, self._labels = folder, tuple(labels)
        self._images: list[dict[str, Any]] = []
        self._annotations: list[dict[str, Any]] = []
        make_folder(folder)

    def with_overlay(self, answer: ImageDetections) -> ImageDetections:
        """Write the overlay of a prediction, add its objects to the annotations, and return it with its files."""
        if answer.picture is None:
            return answer
        number = len(self._images) + 1
        height, width = answer.size
        self._images.append({"id": number, "file_name": answer.path, "width": width, "height": height})
        for one in answer.objects:
            annotation: dict[str, Any] = {
                "id": len(self._annotations) + 1,
                "image_id": number,
                "category_id": self._labels.index(one.name) + 1,
                "bbox": coco_box(one.box),
                "area": (one.box[2] - one.box[0]) * (one.box[3] - one.box[1]),
                "iscrowd": 0,
                "score": one.score,
            }
            if one.outline is not None:
                annotation |= {"segmentation": one.outline.to_coco(answer.size), "area": one.outline.area}
            self._annotations.append(annotation)
        drawn = draw_objects(answer.picture, [draw_detections(one, self._labels) for one in answer.objects])
        overlay = self._folder / f"{number:05d}-{printable(Path(answer.path).stem)}.jpg"
        encoded = io.BytesIO()
        drawn.save(encoded, "JPEG", quality=JPEG_QUALITY)
        atomic_write(overlay, encoded.getvalue())
        return replace(answer, written=(str(overlay), str(self._folder / ANNOTATIONS)))

    def close(self) -> None:
        """Write the annotations of all images."""
        categories = [{"id": number, "name": name} for number, name in enumerate(self._labels, 1)]
        content = {"images": self._images, "annotations": self._annotations, "categories": categories}
        atomic_write(self._folder / ANNOTATIONS, (json.dumps(content) + "\n").encode())


def view_of(files: RunFiles) -> CanvasView:
    """Return the evaluation transform of a run."""
    part = files.recipe.detect if files.recipe else None
    limits = {"short": part.short_max, "long": part.long_max} if part and part.resize == "short_side" else {}
    return CanvasView(files.preprocessing.image_size, **limits)


def load_object_detector(folder: Path, *, device: str = "auto") -> ObjectDetector:
    """Load the detector of a run folder."""
    network, files = load_detector(folder)
    return ObjectDetector(network.to(resolve_device(device)), files, folder)


class ExportedDetector(ObjectDetector):
    """An exported detector."""

    def __init__(self, artifact: ArtifactDetector) -> None:
        self.artifact, self.labels, self.folder = artifact, artifact.labels, artifact.folder

    def _answers(self, frames: Iterable[tuple[str, Image.Image | str]], min_score: float) -> Iterator[ImageDetections]:
        rest = iter(frames)
        while window := list(islice(rest, AT_ONCE)):
            images = [one for _, one in window if not isinstance(one, str)]
            objects = iter(self.artifact.predict(images, min_score=min_score) if images else [])
            for name, one in window:
                if isinstance(one, str):
                    yield ImageDetections(name, error=one)
                else:
                    yield ImageDetections(name, next(objects), (one.height, one.width), picture=one)


def open_exported_detector(folder: Path) -> ExportedDetector:
    """Load an artifact of a detector; raise UsageError for one of another task."""
    artifact = load(folder)
    if not isinstance(artifact, ArtifactDetector):
        raise UsageError(f"{folder} is an artifact of the task {artifact.about.task}, not of detection")
    return ExportedDetector(artifact)


BOX = ("left", "top", "right", "bottom")  # columns


class DetectorLoader(ModelLoader):
    """Models that detect objects."""

    writes_files = True
    threshold_option = "min_score"

    def load_network(self, folder: Path) -> Detector:
        return load_detector(folder)[0]

    def load(self, folder: Path, *, device: str = "auto") -> ObjectDetector:
        return load_object_detector(folder, device=device)

    def open_artifact(self, folder: Path) -> ObjectDetector:
        return open_exported_detector(folder)

    def columns(self, answers: int) -> dict[str, type]:
        """Return the columns of a table with one row per object; boxes are in pixels of the image."""
        del answers
        return {"path": str, "label": str, "score": float, **dict.fromkeys(BOX, float), "error": str}

    def rows(self, prediction: ImageDetections, answers: int) -> list[dict[str, Any]]:
        del answers
        objects = [
            {
                "path": prediction.path,
                "label": one["name"],
                "score": one["score"],
                **dict(zip(BOX, one["box"], strict=True)),
            }
            for one in prediction.answers
        ]
        return objects or [{"path": prediction.path, "label": None if prediction.error else NONE}]

    def readers(self, folder: Path) -> dict[str, Callable[[], object]]:
        return {"config.json": lambda: read_run_files(folder), VAL: lambda: read_val(folder)}
