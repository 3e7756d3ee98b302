"""`artifact.json`, the description of an exported model: read, checked, and turned into settings."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchloom_runtime.artifacts import PREDICTORS
from patchloom_runtime.engines.engine import ENGINES, MODEL
from patchloom_runtime.errors import CheckpointError, UsageError
from patchloom_runtime.images.evaluation_transform import EvaluationTransform
from patchloom_runtime.printable import printable
from patchloom_runtime.untrusted import check_shape, own_sha256, parse_json, read_plain

if TYPE_CHECKING:
    from patchloom_runtime.artifacts.artifact import Artifact

FILE, LABELS, PARITY, CARD = "artifact.json", "labels.json", "parity.json", "README.md"
FEATURES = "training_features.f16"  # stored vectors of a distance rule: float16, little-endian, row by row
EARLIER_FILE = "artefact.json"  # name of FILE in earlier exports
PACKED = ".z"
FORMAT = 1
MOST_GRAPH = 1 << 34  # bytes
_SHAPE = {
    "format": int,
    "to": str,
    "precision": str,
    "task": str,
    "network": str,
    "outputs": list[str],
    "preprocessing?": {"image_size": list[int], "crop_ratio": float, "interpolation": str, "resize": str},
    "parts?": list[str],
    "packed?": dict[str, int],
    "files": dict[str, str],
    "own_sha256": str,
}
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming")
RESIZES = ("short_side", "square")
MOST_PIXELS = 4096  # per side


@dataclass(frozen=True)
class ArtifactMetadata:
    """The contents of `artifact.json`."""

    to: str  # name of an engine
    precision: str  # float32, float16 or int8
    task: str
    network: str
    outputs: tuple[str, ...]
    preprocessing: EvaluationTransform | None  # None if the model takes no images
    files: Mapping[str, str]  # name → SHA-256
    settings: Any = None  # what `read_settings` of the task's predictor returns
    packed: Mapping[str, int] = field(default_factory=dict)  # compressed graph file → its bytes when decompressed
    parts: tuple[str, ...] = (MODEL,)

    @property
    def transform(self) -> EvaluationTransform:
        """The preprocessing of a model that takes images."""
        assert self.preprocessing is not None
        return self.preprocessing


def is_artifact(path: str | os.PathLike[str]) -> bool:
    """Return whether `path` is a folder written by `patchloom export`."""
    return os.path.isfile(metadata_path(Path(path)))


def metadata_path(folder: Path) -> Path:
    """Return the path of `artifact.json`, or of `artefact.json` in an earlier export."""
    path, earlier = folder / FILE, folder / EARLIER_FILE
    return earlier if not path.is_file() and earlier.is_file() else path


def read_about(folder: Path) -> ArtifactMetadata:
    """Read and check `artifact.json`.

    Raises UsageError if the folder is not an artifact and CheckpointError if the file is damaged.
    """
    path = metadata_path(folder)
    if not path.is_file():
        raise UsageError(
            f"{printable(str(folder))} is not an artifact: it has no {FILE}. "
            "Create one with `patchloom export RUN --out FOLDER`"
        )
    try:
        values = parse_json(read_whole(path))
        check_shape(values, {"format": int})
        if values["format"] > FORMAT:
            raise CheckpointError(
                f"{path} has format {values['format']}, written by a newer patchloom; this one reads up to {FORMAT}. "
                "Update it."
            )
        check_shape(values, _SHAPE)
        if values["own_sha256"] != own_sha256(values):
            raise ValueError("its contents do not match its checksum")
        predictor = predictor_of(one_of("task", values["task"], PREDICTORS))
        check_shape(values, predictor.settings_shape)
        about = ArtifactMetadata(
            one_of("to", values["to"], ENGINES),
            values["precision"],
            values["task"],
            values["network"],
            tuple(values["outputs"]),
            _transform(section) if (section := values.get("preprocessing")) else None,
            {_plain(name): digest for name, digest in values["files"].items()},
            predictor.read_settings(values),
            {_plain(name): _size(size) for name, size in values.get("packed", {}).items()},
            tuple(map(_plain, values.get("parts", [MODEL]))),
        )
        _check_complete(about, predictor)
        return about
    except ValueError as error:
        if isinstance(error, UsageError):
            raise
        raise CheckpointError(f"{path} is damaged: {error}. Export it again.") from error


def predictor_of(task: str) -> "type[Artifact]":
    """Return the class of a task's exported models."""
    module, _, attribute = PREDICTORS[task].partition(":")
    return getattr(import_module(module), attribute)


def _check_complete(about: ArtifactMetadata, predictor: "type[Artifact]") -> None:
    """Raise ValueError if a file, part or field that the predictor requires is missing."""
    files = [f"{name}{PACKED}" if name in about.packed else name for name in ENGINES[about.to].files(about.parts)]
    if missing := [name for name in (*files, LABELS, *predictor.required_files) if name not in about.files]:
        raise ValueError(f"it has no checksum of {', '.join(missing)}")
    if not set(predictor.required_parts) <= set(about.parts):
        raise ValueError(f"its parts are {', '.join(about.parts)}, expected {', '.join(predictor.required_parts)}")
    if predictor.takes_images and about.preprocessing is None:
        raise ValueError("it has no field 'preprocessing'")


def _transform(values: Mapping[str, Any]) -> EvaluationTransform:
    size, ratio = values["image_size"], values["crop_ratio"]
    fits = len(size) == 2 and all(0 < side <= MOST_PIXELS for side in size)
    if not fits or not 0 < ratio <= 1 or max(size) / ratio > 2 * MOST_PIXELS:
        raise ValueError(f"preprocessing has an image size of {size} pixels and a crop ratio of {ratio}")
    return EvaluationTransform(
        (size[0], size[1]),
        ratio,
        one_of("interpolation", values["interpolation"], INTERPOLATIONS),
        one_of("resize", values["resize"], RESIZES),
    )


def _size(size: int) -> int:
    if not 0 < size <= MOST_GRAPH:
        raise ValueError(f"a graph has {size:,} bytes, expected at most {MOST_GRAPH:,}")
    return size


def one_of(name: str, value: str, known: Iterable[str]) -> str:
    """Return the value of a field. Raises ValueError if it is not a known one."""
    if value not in known:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(known)}")
    return value


def _plain(name: str) -> str:
    if not name or name.startswith(".") or os.path.basename(name) != name or "\0" in name:
        raise ValueError(f"it names a file {name!r}, expected a plain name of its own folder")
    return name


def read_whole(path: Path) -> bytes:
    """Read a file of an artifact. Raises CheckpointError if it cannot be read."""
    try:
        return read_plain(path, MOST_GRAPH)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}. Export it again.") from error
