"""An artefact: the folder that `patchloom export` leaves, and what answers from it, without torch.

    artefact.json        what it is, how pictures are shown to it, checksums of the other files
    model.onnx …         the graph (`export/formats.py`): pixels in, named outputs out; model.onnx.z: compressed by zlib
    labels.json          names of the classes
    parity.json          the table of the export: the run and this file on the same images
    README.md            the card

This file and those it imports need numpy, Pillow and the format's own package alone: they are `patchloom_runtime` too.
"""

import hashlib
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import numpy as np

from patchloom_runtime.artifacts.metadata import (
    FILE,
    LABELS,
    PACKED,
    TASKS,
    ArtifactMetadata,
    WindowSettings,
    is_artifact,
    read_about,
    read_whole,
)
from patchloom_runtime.engines.formats import MODEL, Graph, graph_format
from patchloom_runtime.errors import CheckpointError, UsageError, at_least, with_near_options
from patchloom_runtime.images.inputs import ImagesLike, is_single_image, iterate_images
from patchloom_runtime.printable import printable
from patchloom_runtime.untrusted import check_shape, parse_json

__all__ = ["Artifact", "ArtifactClassifier", "ArtifactMetadata", "WindowSettings", "is_artifact", "load"]
AT_ONCE = 32  # pictures


class Artifact:
    """An exported model: its graph, and how pictures are shown to it."""

    def __init__(
        self,
        folder: Path,
        about: ArtifactMetadata,
        labels: tuple[str, ...],
        graph: Graph,
        others: Mapping[str, Graph] = MappingProxyType({}),
    ) -> None:
        self.folder, self.about, self.labels = folder, about, labels
        self._graph, self._graphs = graph, {MODEL: graph, **others}  # by part

    def __repr__(self) -> str:
        height, width = self.about.transform.image_size
        what = f"{len(self.labels)} classes" if self.labels else "vectors"
        told = f"{self.about.network}, {self.about.to} {self.about.precision}, {height}×{width} pixels, {what}"
        return f"{type(self).__name__}({printable(str(self.folder))}: {told})"

    def outputs(self, pixels: np.ndarray) -> dict[str, np.ndarray]:
        """What the graph says of pixels (B, H, W, 3) uint8: arrays by name."""
        wanted = (*self.about.transform.image_size, 3)
        if pixels.dtype != np.uint8 or pixels.shape[1:] != wanted:
            raise UsageError(
                f"the graph takes uint8 pixels (B, {wanted[0]}, {wanted[1]}, 3), given {pixels.dtype} {pixels.shape}"
            )
        return self._graph(pixels)


class ArtifactClassifier(Artifact):
    """Pictures in, names or vectors out."""

    def preprocess(self, picture: Any) -> np.ndarray:
        """One picture → the pixels that the graph takes, (H, W, 3) uint8: bit for bit those of the run."""
        (named,) = iterate_images(picture)
        return self.about.transform(named.read())

    @with_near_options
    def predict(self, pictures: ImagesLike, *, top: int = 3) -> Any:
        """The `top` likeliest classes by name, with their probabilities: of one picture, or a list for many.

        A picture is a path, bytes, an open file, a PIL image or a numpy array (H, W[, channels]); many are a folder, a
        batch or any iterable. What cannot be read is a DataError that names it.
        """
        at_least("top", top, 1)
        if "logits" not in self.about.outputs:
            raise UsageError(f"{self.about.network} was trained without a classifier and names no classes; use embed")
        rows = np.concatenate([found["logits"] for found in self._answers(pictures)] or [np.empty((0, 1), np.float32)])
        named = [self._named(row, top) for row in rows]
        return named[0] if is_single_image(pictures) else named

    @with_near_options
    def embed(self, pictures: ImagesLike) -> np.ndarray:
        """What images are compared by: (C,) float32 of one picture, (N, C) of many."""
        found = [found["embedding"] for found in self._answers(pictures)]
        rows = np.concatenate(found) if found else np.empty((0, 0), np.float32)
        return rows[0] if is_single_image(pictures) else rows

    def _answers(self, pictures: ImagesLike) -> Iterator[dict[str, np.ndarray]]:
        read = (self.about.transform(each.read()) for each in iterate_images(pictures))
        while some := list(islice(read, AT_ONCE)):
            found = self._graph(np.stack(some))
            fits = all(name in found and found[name].ndim == 2 for name in self.about.outputs)
            if not fits or ("logits" in found and found["logits"].shape[1] != len(self.labels)):
                said = ", ".join(f"{name} {value.shape}" for name, value in found.items())
                raise CheckpointError(
                    f"{self.folder} is damaged: its graph gives {said}, {FILE} and {LABELS} tell of "
                    f"{', '.join(self.about.outputs)} and {len(self.labels)} classes. Export it again."
                )
            yield found

    def _named(self, logits: np.ndarray, top: int) -> list[tuple[str, float]]:
        shares = np.exp(logits - logits.max())
        shares /= shares.sum()
        best = np.argsort(-shares, kind="stable")[:top]
        return [(self.labels[number], float(shares[number])) for number in best]


def load(source: str | os.PathLike[str], *, threads: int | None = None) -> Any:
    """The model of an artefact's folder; a CheckpointError where a byte of it is not as it was written.

    `threads` it answers with; those of all cores where None.
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
    module, _, attribute = TASKS[about.task].answers.partition(":")
    made: type[Artifact] = getattr(import_module(module), attribute)
    form = graph_format(about.to)
    with _unpacked(folder, about) as place:
        graphs = {part: form.open(place, threads, part) for part in about.parts}
    return made(folder, about, tuple(labels), graphs.pop(MODEL), graphs)


def check_file(folder: Path, about: ArtifactMetadata, name: str) -> None:
    """A CheckpointError where a byte of the file is not as it was written."""
    if hashlib.sha256(read_whole(folder / name)).hexdigest() != about.files[name]:
        raise CheckpointError(f"{folder / name} is damaged: its checksum is not the one in {FILE}. Export it again.")


@contextmanager
def _unpacked(folder: Path, about: ArtifactMetadata) -> Iterator[Path]:
    """Where the files of the graph are as they are opened: the folder itself, or a temporary one."""
    if not about.packed:
        yield folder
        return
    with TemporaryDirectory() as temporary:
        for name, size in about.packed.items():
            packed = folder / f"{name}{PACKED}"
            unpacking = zlib.decompressobj()
            try:
                data = unpacking.decompress(read_whole(packed), size + 1)
            except zlib.error as error:
                raise CheckpointError(f"{packed} is damaged: {error}. Export it again.") from error
            if len(data) != size or not unpacking.eof:
                raise CheckpointError(f"{packed} is damaged: {FILE} tells {size:,} bytes of it. Export it again.")
            Path(temporary, name).write_bytes(data)
        yield Path(temporary)
