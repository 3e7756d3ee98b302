"""Artifacts: the folders that `patchloom export` writes, and `load`, which opens them without torch.

artifact.json        the model, its preprocessing, and checksums of the other files (`metadata.py`)
model.onnx …         the graph: pixels in, named outputs out (`engines/engine.py`); model.onnx.z: zlib-compressed
labels.json          class names
training_features.f16  vectors of training images, if the model rejects images unlike them
parity.json          comparison of the run and this artifact on the same images
README.md            the model card
"""

import hashlib
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from patchloom_runtime.artifacts.metadata import (
    FEATURES,
    FILE,
    LABELS,
    PACKED,
    ArtifactMetadata,
    is_artifact,
    predictor_of,
    read_about,
    read_whole,
)
from patchloom_runtime.calibration import UNCALIBRATED, Calibration, ClassScores
from patchloom_runtime.engines.engine import ENGINES, MODEL, Graph
from patchloom_runtime.errors import CheckpointError, UsageError, at_least, with_near_options
from patchloom_runtime.images.inputs import ImagesLike, is_single_image, iterate_images
from patchloom_runtime.printable import printable
from patchloom_runtime.untrusted import check_shape, parse_json

__all__ = ["Artifact", "ArtifactClassifier", "ArtifactMetadata", "is_artifact", "load"]
BATCH = 32  # images


class Artifact:
    """An exported model: its graphs and its preprocessing.

    A subclass states what the artifacts of its tasks consist of. `artifacts.PREDICTORS` lists the classes by task.
    """

    required_parts: ClassVar[tuple[str, ...]] = (MODEL,)  # graphs
    required_files: ClassVar[tuple[str, ...]] = ()  # in addition to graphs and labels
    takes_images: ClassVar[bool] = True  # whether `artifact.json` must have preprocessing
    settings_shape: ClassVar[Mapping[str, Any]] = {}  # further fields of `artifact.json`, as `check_shape` takes them

    def __init__(
        self,
        folder: Path,
        about: ArtifactMetadata,
        labels: tuple[str, ...],
        graph: Graph,
        other_graphs: Mapping[str, Graph] = MappingProxyType({}),
    ) -> None:
        self.folder, self.about, self.labels = folder, about, labels
        self._graph, self._graphs = graph, {MODEL: graph, **other_graphs}  # by part

    @classmethod
    def read_settings(cls, values: Mapping[str, Any]) -> Any:
        """Return the fields of `settings_shape` as one value. Raises ValueError if they are out of bounds."""
        del values

    def __repr__(self) -> str:
        height, width = self.about.transform.image_size
        output = f"{len(self.labels)} classes" if self.labels else "vectors"
        summary = f"{self.about.network}, {self.about.to} {self.about.precision}, {height}×{width} pixels, {output}"
        return f"{type(self).__name__}({printable(str(self.folder))}: {summary})"

    def outputs(self, pixels: np.ndarray) -> dict[str, np.ndarray]:
        """Run the graph on pixels (B, H, W, 3) uint8 and return its outputs by name."""
        expected = (*self.about.transform.image_size, 3)
        if pixels.dtype != np.uint8 or pixels.shape[1:] != expected:
            raise UsageError(
                f"the graph takes uint8 pixels (B, {expected[0]}, {expected[1]}, 3), got {pixels.dtype} {pixels.shape}"
            )
        return self._graph(pixels)


class ArtifactClassifier(Artifact):
    """An exported classifier or embedding model. Its settings are a `Calibration`."""

    settings_shape: ClassVar[Mapping[str, Any]] = {"calibration?": dict}

    @classmethod
    def read_settings(cls, values: Mapping[str, Any]) -> Calibration:
        if not (section := values.get("calibration")):
            return UNCALIBRATED
        rules = Calibration.from_dict(section)
        if rules.distance and (FEATURES not in values["files"] or "embedding" not in values["outputs"]):
            raise ValueError(f"its distance rule needs the file {FEATURES} and the output embedding")
        return rules

    @property
    def calibration(self) -> Calibration:
        """The temperature and the rules by which the model abstains."""
        rules: Calibration = self.about.settings
        return rules

    @cached_property
    def features(self) -> np.ndarray | None:
        """The stored vectors (M, C) of the distance rule, or None without one."""
        if self.calibration.distance is None:
            return None
        shape, data = self.calibration.distance.stored, read_whole(self.folder / FEATURES)
        if len(data) != 2 * shape[0] * shape[1]:
            raise CheckpointError(f"{self.folder / FEATURES} is damaged: it has {len(data):,} bytes. Export it again.")
        return np.frombuffer(data, "<f2").reshape(shape)

    def preprocess(self, image: Any) -> np.ndarray:
        """Return the pixels (H, W, 3) uint8 that the graph takes for one image, bit for bit those of the run."""
        (only,) = iterate_images(image)
        return self.about.transform(only.read())

    @with_near_options
    def predict(self, images: ImagesLike, *, top: int = 3) -> Any:
        """Return the `top` most likely classes with their probabilities; for several images, one list per image.

        An image is a path, bytes, an open file, a PIL image or a numpy array (H, W[, channels]). Several are a folder,
        a batch or any iterable. Raises DataError with the name of an image that cannot be read.

        A list has an attribute `abstained`: the reason why the model does not answer, or "".
        """
        at_least("top", top, 1)
        if "logits" not in self.about.outputs:
            raise UsageError(f"{self.about.network} was trained without a classifier and names no classes; use embed")
        predictions = [scores for outputs in self._outputs(images) for scores in self._scores(outputs, top)]
        return predictions[0] if is_single_image(images) else predictions

    @with_near_options
    def embed(self, images: ImagesLike) -> np.ndarray:
        """Return the embedding (C,) float32 of one image, or (N, C) for several images."""
        batches = [outputs["embedding"] for outputs in self._outputs(images)]
        rows = np.concatenate(batches) if batches else np.empty((0, 0), np.float32)
        return rows[0] if is_single_image(images) else rows

    def _outputs(self, images: ImagesLike) -> Iterator[dict[str, np.ndarray]]:
        pixels = (self.about.transform(each.read()) for each in iterate_images(images))
        while batch := list(islice(pixels, BATCH)):
            outputs = self._graph(np.stack(batch))
            fits = all(name in outputs and outputs[name].ndim == 2 for name in self.about.outputs)
            if not fits or ("logits" in outputs and outputs["logits"].shape[1] != len(self.labels)):
                shapes = ", ".join(f"{name} {value.shape}" for name, value in outputs.items())
                raise CheckpointError(
                    f"{self.folder} is damaged: its graph returns {shapes}, but {FILE} and {LABELS} list "
                    f"{', '.join(self.about.outputs)} and {len(self.labels)} classes. Export it again."
                )
            yield outputs

    def _scores(self, outputs: Mapping[str, np.ndarray], top: int) -> Iterator[ClassScores]:
        rules, logits = self.calibration, outputs["logits"]
        probabilities = rules.probabilities(logits)
        # Sorted by logits, since dividing by the temperature may make two of them equal.
        best = np.argsort(-logits, axis=1, kind="stable")[:, :top]
        distances: Any = [None] * len(logits)
        if rules.distance and self.features is not None:
            distances = rules.distance.distances(self.features, outputs["embedding"]).tolist()
        for row, numbers in enumerate(best):
            scores = ClassScores((self.labels[number], float(probabilities[row, number])) for number in numbers)
            scores.abstained = rules.reason(scores[0], distances[row])
            yield scores


def load(source: str | os.PathLike[str], *, threads: int | None = None) -> Any:
    """Load the model of an artifact folder. `threads` defaults to all cores.

    Returns an `ArtifactClassifier`, `ArtifactSegmenter`, `ArtifactDetector` or `ArtifactTranslator`. Raises
    CheckpointError if a file does not match its checksum.
    """
    folder = Path(source)
    about = read_about(folder)
    for name in about.files:
        check_file(folder, about, name)
    try:
        labels = parse_json(read_whole(folder / LABELS))
        check_shape(labels, list[str])
    except ValueError as error:
        raise CheckpointError(f"{folder / LABELS} is damaged: {error}. Export it again.") from error
    engine = ENGINES[about.to]
    with _decompressed(folder, about) as graphs_folder:
        graphs = {part: engine.open(graphs_folder, threads, part) for part in about.parts}
    return predictor_of(about.task)(folder, about, tuple(labels), graphs.pop(MODEL), graphs)


def check_file(folder: Path, about: ArtifactMetadata, name: str) -> None:
    """Raise CheckpointError if a file does not match its checksum."""
    if hashlib.sha256(read_whole(folder / name)).hexdigest() != about.files[name]:
        raise CheckpointError(f"{folder / name} is damaged: its checksum is not the one in {FILE}. Export it again.")


@contextmanager
def _decompressed(folder: Path, about: ArtifactMetadata) -> Iterator[Path]:
    """Yield the folder with the graph files: the artifact's own, or a temporary one with the decompressed files."""
    if not about.packed:
        yield folder
        return
    with TemporaryDirectory() as temporary:
        for name, size in about.packed.items():
            packed = folder / f"{name}{PACKED}"
            decompressor = zlib.decompressobj()
            try:
                data = decompressor.decompress(read_whole(packed), size + 1)
            except zlib.error as error:
                raise CheckpointError(f"{packed} is damaged: {error}. Export it again.") from error
            if len(data) != size or not decompressor.eof:
                raise CheckpointError(f"{packed} is damaged: expected {size:,} bytes, as {FILE} says. Export it again.")
            Path(temporary, name).write_bytes(data)
        yield Path(temporary)
