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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from patchloom.data.pictures.evaluation_transform import EvaluationTransform
from patchloom.data.pictures.given import Given, is_one, pictures_in
from patchloom.deployment.export.formats import GRAPHS, Graph, graph_format
from patchloom.errors import CheckpointError, UsageError, at_least, with_near_options
from patchloom.foreign import check_shape, own_sha256, parse_json, read_plain
from patchloom.printable import printable

FILE, LABELS, PARITY, CARD = "artefact.json", "labels.json", "parity.json", "README.md"
PACKED = ".z"
FORMAT = 1
AT_ONCE = 32
_MOST_GRAPH = 1 << 34  # bytes
_SHAPE = {
    "format": int,
    "to": str,
    "precision": str,
    "task": str,
    "network": str,
    "outputs": list[str],
    "preprocessing": {"image_size": list[int], "crop_ratio": float, "interpolation": str, "resize": str},
    "windows?": {"stride": list[int], "short_side": int},
    "packed?": dict[str, int],
    "files": dict[str, str],
    "own_sha256": str,
}
# Task → what answers.
TASKS = {
    "classification": "patchloom.deployment.artefact:ArtefactClassifier",
    "embedding": "patchloom.deployment.artefact:ArtefactClassifier",
    "segmentation": "patchloom.deployment.artefact_segmenter:ArtefactSegmenter",
}
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming")
RESIZES = ("short_side", "square")
MOST_PIXELS = 4096  # of a side


@dataclass(frozen=True)
class Windows:
    """How pictures of any size are seen by a graph for images of one size."""

    stride: tuple[int, int] = (1, 1)  # pixels from one to the next, down and right
    short_side: int = 0  # that pictures are resized to; 0: they stay as they are


@dataclass(frozen=True)
class About:
    """What `artefact.json` says."""

    to: str  # a format's name
    precision: str  # float32, float16 or int8
    task: str
    network: str
    outputs: tuple[str, ...]
    transform: EvaluationTransform
    files: Mapping[str, str]  # name → SHA-256
    windows: Windows = Windows()
    packed: Mapping[str, int] = field(default_factory=dict)  # file of the graph → its bytes where it is unpacked


def is_artefact(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a folder that `patchloom export` left."""
    return os.path.isfile(os.path.join(path, FILE))


class Artefact:
    """An exported model: its graph, and how pictures are shown to it."""

    def __init__(self, folder: Path, about: About, labels: tuple[str, ...], graph: Graph) -> None:
        self.folder, self.about, self.labels = folder, about, labels
        self._graph = graph

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


class ArtefactClassifier(Artefact):
    """Pictures in, names or vectors out."""

    def preprocess(self, picture: Any) -> np.ndarray:
        """One picture → the pixels that the graph takes, (H, W, 3) uint8: bit for bit those of the run."""
        (named,) = pictures_in(picture)
        return self.about.transform(named.read())

    @with_near_options
    def predict(self, pictures: Given, *, top: int = 3) -> Any:
        """The `top` likeliest classes by name, with their probabilities: of one picture, or a list for many.

        A picture is a path, bytes, an open file, a PIL image or a numpy array (H, W[, channels]); many are a folder, a
        batch or any iterable. What cannot be read is a DataError that names it.
        """
        at_least("top", top, 1)
        if "logits" not in self.about.outputs:
            raise UsageError(f"{self.about.network} was trained without a classifier and names no classes; use embed")
        rows = np.concatenate([found["logits"] for found in self._answers(pictures)] or [np.empty((0, 1), np.float32)])
        named = [self._named(row, top) for row in rows]
        return named[0] if is_one(pictures) else named

    @with_near_options
    def embed(self, pictures: Given) -> np.ndarray:
        """What images are compared by: (C,) float32 of one picture, (N, C) of many."""
        found = [found["embedding"] for found in self._answers(pictures)]
        rows = np.concatenate(found) if found else np.empty((0, 0), np.float32)
        return rows[0] if is_one(pictures) else rows

    def _answers(self, pictures: Given) -> Iterator[dict[str, np.ndarray]]:
        read = (self.about.transform(each.read()) for each in pictures_in(pictures))
        while some := list(islice(read, AT_ONCE)):
            yield self._graph(np.stack(some))

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
    for name, expected in about.files.items():
        if hashlib.sha256(_bytes(folder / name)).hexdigest() != expected:
            raise CheckpointError(
                f"{folder / name} is damaged: its checksum is not the one in {FILE}. Export it again."
            )
    try:
        labels = parse_json(_bytes(folder / LABELS))
        check_shape(labels, list[str])
    except ValueError as error:
        raise CheckpointError(f"{folder / LABELS} is damaged: {error}. Export it again.") from error
    module, _, attribute = TASKS[about.task].partition(":")
    made: type[Artefact] = getattr(import_module(module), attribute)
    with _unpacked(folder, about) as place:
        graph = graph_format(about.to).open(place, threads)
    return made(folder, about, tuple(labels), graph)


@contextmanager
def _unpacked(folder: Path, about: About) -> Iterator[Path]:
    """Where the files of the graph are as they are opened: the folder itself, or a temporary one."""
    if not about.packed:
        yield folder
        return
    with TemporaryDirectory() as temporary:
        for name, size in about.packed.items():
            packed = folder / f"{name}{PACKED}"
            unpacking = zlib.decompressobj()
            try:
                data = unpacking.decompress(_bytes(packed), size + 1)
            except zlib.error as error:
                raise CheckpointError(f"{packed} is damaged: {error}. Export it again.") from error
            if len(data) != size or not unpacking.eof:
                raise CheckpointError(f"{packed} is damaged: {FILE} tells {size:,} bytes of it. Export it again.")
            Path(temporary, name).write_bytes(data)
        yield Path(temporary)


def read_about(folder: Path) -> About:
    """What stands in `artefact.json`, checked."""
    path = folder / FILE
    if not is_artefact(folder):
        raise UsageError(
            f"{printable(str(folder))} is no artefact: it has no {FILE}. `patchloom export RUN --out FOLDER` makes one"
        )
    try:
        values = parse_json(_bytes(path))
        check_shape(values, {"format": int})
        if values["format"] > FORMAT:
            raise CheckpointError(
                f"{path} has format {values['format']}, written by a newer patchloom; this one reads up to {FORMAT}. "
                "Update it."
            )
        check_shape(values, _SHAPE)
        if values["own_sha256"] != own_sha256(values):
            raise ValueError("its checksum is not its own")
        return About(
            _one_of("to", values["to"], GRAPHS),
            values["precision"],
            _one_of("task", values["task"], TASKS),
            values["network"],
            tuple(values["outputs"]),
            _transform(values["preprocessing"]),
            {_plain(name): digest for name, digest in values["files"].items()},
            _windows(values["windows"]) if "windows" in values else Windows(),
            {_plain(name): _size(size) for name, size in values.get("packed", {}).items()},
        )
    except ValueError as error:
        if isinstance(error, UsageError):
            raise
        raise CheckpointError(f"{path} is damaged: {error}. Export it again.") from error


def _transform(values: Mapping[str, Any]) -> EvaluationTransform:
    size, ratio = values["image_size"], values["crop_ratio"]
    fits = len(size) == 2 and all(0 < side <= MOST_PIXELS for side in size)
    if not fits or not 0 < ratio <= 1 or max(size) / ratio > 2 * MOST_PIXELS:
        raise ValueError(f"pictures of {size} pixels at a crop ratio of {ratio} cannot be shown")
    return EvaluationTransform(
        (size[0], size[1]),
        ratio,
        _one_of("interpolation", values["interpolation"], INTERPOLATIONS),
        _one_of("resize", values["resize"], RESIZES),
    )


def _size(size: int) -> int:
    if not 0 < size <= _MOST_GRAPH:
        raise ValueError(f"a graph of {size:,} bytes is not opened, at most {_MOST_GRAPH:,} are")
    return size


def _windows(values: Mapping[str, Any]) -> Windows:
    stride, side = values["stride"], values["short_side"]
    if len(stride) != 2 or not all(0 < step <= MOST_PIXELS for step in stride) or not 0 <= side <= MOST_PIXELS:
        raise ValueError(f"windows {stride} pixels apart on pictures resized to {side} cannot be shown")
    return Windows((stride[0], stride[1]), side)


def _one_of(name: str, value: str, known: Iterable[str]) -> str:
    if value not in known:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(known)}")
    return value


def _plain(name: str) -> str:
    if not name or name.startswith(".") or os.sep in name or "\0" in name:
        raise ValueError(f"it names a file {name!r}, expected a plain name of its own folder")
    return name


def _bytes(path: Path) -> bytes:
    try:
        return read_plain(path, _MOST_GRAPH)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}. Export it again.") from error
