"""What `artefact.json` says of an exported model, read and checked. Without torch: it is part of the runtime."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from patchloom_runtime.artifacts.box_selection import LEVELS, BoxLimits
from patchloom_runtime.engines.formats import GRAPHS, MODEL, graph_format
from patchloom_runtime.errors import CheckpointError, UsageError
from patchloom_runtime.images.evaluation_transform import EvaluationTransform
from patchloom_runtime.printable import printable
from patchloom_runtime.untrusted import check_shape, own_sha256, parse_json, read_plain

FILE, LABELS, PARITY, CARD = "artefact.json", "labels.json", "parity.json", "README.md"
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
    "windows?": {"stride": list[int], "short_side": int},
    "detection?": {
        "anchors": list[list[list[float]]],
        "before": int,
        "proposals": int,
        "proposal_overlap": float,
        "min_score": float,
        "overlap": float,
        "most": int,
        "cut": bool,
        "short": int,
        "long": int,
    },
    "translation?": {
        "source": str,
        "target": str,
        "longest": int,
        "max_length": int,
        "kept": int,
        "beams": int,
        "length_penalty": float,
    },
    "parts?": list[str],
    "packed?": dict[str, int],
    "files": dict[str, str],
    "own_sha256": str,
}
STEP, VOCABULARY = "step", "vocabulary.model"  # of a translator


@dataclass(frozen=True)
class ArtifactTask:
    """What an artefact of a task has."""

    answers: str  # module:class
    parts: tuple[str, ...] = (MODEL,)
    fields: tuple[str, ...] = ("preprocessing",)  # of its description, that others may not have
    files: tuple[str, ...] = ()  # beside graph and labels


TASKS = {
    "classification": ArtifactTask("patchloom_runtime.artifacts.artifact:ArtifactClassifier"),
    "embedding": ArtifactTask("patchloom_runtime.artifacts.artifact:ArtifactClassifier"),
    "segmentation": ArtifactTask("patchloom_runtime.artifacts.segmenter:ArtifactSegmenter"),
    "detection": ArtifactTask(
        "patchloom_runtime.artifacts.detector:ArtifactDetector", (MODEL, "regions"), ("preprocessing", "detection")
    ),
    "translation": ArtifactTask(
        "patchloom_runtime.artifacts.translator:ArtifactTranslator", (MODEL, STEP), ("translation",), (VOCABULARY,)
    ),
}
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming")
RESIZES = ("short_side", "square")
MOST_PIXELS = 4096  # of a side
MOST_BOXES = 1 << 20


@dataclass(frozen=True)
class WindowSettings:
    """How pictures of any size are seen by a graph for images of one size."""

    stride: tuple[int, int] = (1, 1)  # pixels from one to the next, down and right
    short_side: int = 0  # that pictures are resized to; 0: they stay as they are


@dataclass(frozen=True)
class TranslationSettings:
    """What a translator is told beside its graphs."""

    source: str  # languages
    target: str
    longest: int  # subwords of the longest source that was trained on
    max_length: int  # positions of the network
    kept: int  # numbers that a layer keeps of a position
    beams: int  # where nothing else is asked for
    length_penalty: float


@dataclass(frozen=True)
class ArtifactMetadata:
    """What `artefact.json` says."""

    to: str  # a format's name
    precision: str  # float32, float16 or int8
    task: str
    network: str
    outputs: tuple[str, ...]
    shown: EvaluationTransform | None  # how pictures are shown to it; None: it sees none
    files: Mapping[str, str]  # name → SHA-256
    windows: WindowSettings = WindowSettings()
    packed: Mapping[str, int] = field(default_factory=dict)  # file of the graph → its bytes where it is unpacked
    choice: BoxLimits | None = None  # of objects
    parts: tuple[str, ...] = (MODEL,)  # of the graph
    translation: TranslationSettings | None = None

    @property
    def transform(self) -> EvaluationTransform:
        """How pictures are shown to it."""
        assert self.shown is not None
        return self.shown


def is_artifact(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a folder that `patchloom export` left."""
    return os.path.isfile(os.path.join(path, FILE))


def read_about(folder: Path) -> ArtifactMetadata:
    """What stands in `artefact.json`, checked."""
    path = folder / FILE
    if not is_artifact(folder):
        raise UsageError(
            f"{printable(str(folder))} is no artefact: it has no {FILE}. `patchloom export RUN --out FOLDER` makes one"
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
            raise ValueError("its checksum is not its own")
        about = ArtifactMetadata(
            _one_of("to", values["to"], GRAPHS),
            values["precision"],
            _one_of("task", values["task"], TASKS),
            values["network"],
            tuple(values["outputs"]),
            _transform(told) if (told := values.get("preprocessing")) else None,
            {_plain(name): digest for name, digest in values["files"].items()},
            _windows(values["windows"]) if "windows" in values else WindowSettings(),
            {_plain(name): _size(size) for name, size in values.get("packed", {}).items()},
            _choice(told) if (told := values.get("detection")) else None,
            tuple(map(_plain, values.get("parts", [MODEL]))),
            _translation(told) if (told := values.get("translation")) else None,
        )
        _check(about)
        return about
    except ValueError as error:
        if isinstance(error, UsageError):
            raise
        raise CheckpointError(f"{path} is damaged: {error}. Export it again.") from error


def _check(about: ArtifactMetadata) -> None:
    """A ValueError where it does not say all that its task needs."""
    files = [f"{name}{PACKED}" if name in about.packed else name for name in graph_format(about.to).files(about.parts)]
    kind = TASKS[about.task]
    needed = (*files, LABELS, *kind.files)
    if missing := [name for name in needed if name not in about.files]:
        raise ValueError(f"it has no checksum of {', '.join(missing)}")
    if not set(kind.parts) <= set(about.parts):
        raise ValueError(f"its parts are {', '.join(about.parts)}, expected {', '.join(kind.parts)}")
    told = {"preprocessing": about.shown, "detection": about.choice, "translation": about.translation}
    if absent := [field for field in kind.fields if told[field] is None]:
        raise ValueError(f"it has no field {absent[0]!r}")


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
    if not 0 < size <= MOST_GRAPH:
        raise ValueError(f"a graph of {size:,} bytes is not opened, at most {MOST_GRAPH:,} are")
    return size


def _windows(values: Mapping[str, Any]) -> WindowSettings:
    stride, side = values["stride"], values["short_side"]
    if len(stride) != 2 or not all(0 < step <= MOST_PIXELS for step in stride) or not 0 <= side <= MOST_PIXELS:
        raise ValueError(f"windows {stride} pixels apart on pictures resized to {side} cannot be shown")
    return WindowSettings((stride[0], stride[1]), side)


def _choice(values: Mapping[str, Any]) -> BoxLimits:
    told = {name: values[name] for name in BoxLimits.__dataclass_fields__}
    anchors = told.pop("anchors")
    shares = [told[name] for name in ("proposal_overlap", "min_score", "overlap")]
    counts = [told[name] for name in ("before", "proposals", "most", "short", "long")]
    fits = len(anchors) == LEVELS + 1 and all(len(box) == 4 for around in anchors for box in around) and all(anchors)
    if not fits or not all(0 <= share <= 1 for share in shares) or not all(0 <= n <= MOST_BOXES for n in counts):
        raise ValueError(f"objects cannot be chosen by {told} and anchors of {len(anchors)} maps")
    return BoxLimits(tuple(tuple(tuple(map(float, box)) for box in around) for around in anchors), **told)


def _translation(values: Mapping[str, Any]) -> TranslationSettings:
    told = TranslationSettings(**{name: values[name] for name in TranslationSettings.__dataclass_fields__})
    counts = (told.longest, told.max_length, told.kept, told.beams)
    if not all(0 < count <= MOST_BOXES for count in counts):
        raise ValueError(f"words cannot be searched with longest, max_length, kept and beams of {counts}")
    return told


def _one_of(name: str, value: str, known: Iterable[str]) -> str:
    if value not in known:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(known)}")
    return value


def _plain(name: str) -> str:
    if not name or name.startswith(".") or os.sep in name or "\0" in name:
        raise ValueError(f"it names a file {name!r}, expected a plain name of its own folder")
    return name


def read_whole(path: Path) -> bytes:
    """A file of an artefact; a CheckpointError where it cannot be read."""
    try:
        return read_plain(path, MOST_GRAPH)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}. Export it again.") from error
