"""`artifact.json`, the description of an exported model: read, checked, and turned into settings."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from patchloom_runtime.engines.engine import ENGINES, MODEL
from patchloom_runtime.errors import CheckpointError, UsageError
from patchloom_runtime.images.evaluation_transform import EvaluationTransform
from patchloom_runtime.printable import printable
from patchloom_runtime.untrusted import check_shape, own_sha256, parse_json, read_plain

FILE, LABELS, PARITY, CARD = "artifact.json", "labels.json", "parity.json", "README.md"
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
STEP, VOCABULARY = "step", "vocabulary.model"  # part and file of a translator
LEVELS = 4  # feature maps that a detector pools regions from


@dataclass(frozen=True)
class ArtifactTask:
    """What an artifact for one task consists of."""

    predictor: str  # module:class
    parts: tuple[str, ...] = (MODEL,)
    fields: tuple[str, ...] = ("preprocessing",)  # optional fields of artifact.json that the task requires
    files: tuple[str, ...] = ()  # in addition to graphs and labels


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
MOST_PIXELS = 4096  # per side
MOST_BOXES = 1 << 20


@dataclass(frozen=True)
class WindowSettings:
    """How a graph with a fixed input size is applied to images of any size."""

    stride: tuple[int, int] = (1, 1)  # pixels between windows, down and right
    short_side: int = 0  # to which images are resized; 0: not resized


@dataclass(frozen=True)
class BoxLimits:
    """How a detector selects boxes: thresholds and counts of the exported network."""

    anchors: tuple[tuple[tuple[float, ...], ...], ...]  # per feature map, centered on (0, 0)
    before: int  # proposals per map before overlapping ones are removed
    proposals: int  # per image
    proposal_overlap: float  # IoU above which the less likely of two proposals is removed
    min_score: float
    overlap: float  # the same for objects of one class
    most: int  # objects per image
    cut: bool  # whether the canvas is cropped to its largest image
    short: int = 0  # limit on the short side of an image in pixels; 0: only the canvas limits it
    long: int = 0


@dataclass(frozen=True)
class TranslationSettings:
    """Languages, limits and search settings of a translator."""

    source: str  # language
    target: str
    longest: int  # subwords of the longest source sentence in training
    max_length: int  # positions of the network
    kept: int  # numbers that a decoder layer stores per position
    beams: int  # default
    length_penalty: float


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
    windows: WindowSettings = WindowSettings()
    packed: Mapping[str, int] = field(default_factory=dict)  # compressed graph file → its bytes when decompressed
    detection: BoxLimits | None = None
    parts: tuple[str, ...] = (MODEL,)
    translation: TranslationSettings | None = None

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
        about = ArtifactMetadata(
            _one_of("to", values["to"], ENGINES),
            values["precision"],
            _one_of("task", values["task"], TASKS),
            values["network"],
            tuple(values["outputs"]),
            _transform(section) if (section := values.get("preprocessing")) else None,
            {_plain(name): digest for name, digest in values["files"].items()},
            _windows(values["windows"]) if "windows" in values else WindowSettings(),
            {_plain(name): _size(size) for name, size in values.get("packed", {}).items()},
            _box_limits(section) if (section := values.get("detection")) else None,
            tuple(map(_plain, values.get("parts", [MODEL]))),
            _translation(section) if (section := values.get("translation")) else None,
        )
        _check_complete(about)
        return about
    except ValueError as error:
        if isinstance(error, UsageError):
            raise
        raise CheckpointError(f"{path} is damaged: {error}. Export it again.") from error


def _check_complete(about: ArtifactMetadata) -> None:
    """Raise ValueError if a file, part or field that the task requires is missing."""
    files = [f"{name}{PACKED}" if name in about.packed else name for name in ENGINES[about.to].files(about.parts)]
    task = TASKS[about.task]
    if missing := [name for name in (*files, LABELS, *task.files) if name not in about.files]:
        raise ValueError(f"it has no checksum of {', '.join(missing)}")
    if not set(task.parts) <= set(about.parts):
        raise ValueError(f"its parts are {', '.join(about.parts)}, expected {', '.join(task.parts)}")
    if absent := [field for field in task.fields if getattr(about, field) is None]:
        raise ValueError(f"it has no field {absent[0]!r}")


def _transform(values: Mapping[str, Any]) -> EvaluationTransform:
    size, ratio = values["image_size"], values["crop_ratio"]
    fits = len(size) == 2 and all(0 < side <= MOST_PIXELS for side in size)
    if not fits or not 0 < ratio <= 1 or max(size) / ratio > 2 * MOST_PIXELS:
        raise ValueError(f"preprocessing has an image size of {size} pixels and a crop ratio of {ratio}")
    return EvaluationTransform(
        (size[0], size[1]),
        ratio,
        _one_of("interpolation", values["interpolation"], INTERPOLATIONS),
        _one_of("resize", values["resize"], RESIZES),
    )


def _size(size: int) -> int:
    if not 0 < size <= MOST_GRAPH:
        raise ValueError(f"a graph has {size:,} bytes, expected at most {MOST_GRAPH:,}")
    return size


def _windows(values: Mapping[str, Any]) -> WindowSettings:
    stride, side = values["stride"], values["short_side"]
    if len(stride) != 2 or not all(0 < step <= MOST_PIXELS for step in stride) or not 0 <= side <= MOST_PIXELS:
        raise ValueError(f"windows have a stride of {stride} pixels and a short side of {side}")
    return WindowSettings((stride[0], stride[1]), side)


def _box_limits(values: Mapping[str, Any]) -> BoxLimits:
    settings = {name: values[name] for name in BoxLimits.__dataclass_fields__}
    anchors = settings.pop("anchors")
    shares = [settings[name] for name in ("proposal_overlap", "min_score", "overlap")]
    counts = [settings[name] for name in ("before", "proposals", "most", "short", "long")]
    fits = len(anchors) == LEVELS + 1 and all(len(box) == 4 for around in anchors for box in around) and all(anchors)
    if not fits or not all(0 <= share <= 1 for share in shares) or not all(0 <= n <= MOST_BOXES for n in counts):
        raise ValueError(f"detection has anchors for {len(anchors)} maps and the settings {settings}")
    return BoxLimits(tuple(tuple(tuple(map(float, box)) for box in around) for around in anchors), **settings)


def _translation(values: Mapping[str, Any]) -> TranslationSettings:
    settings = TranslationSettings(**{name: values[name] for name in TranslationSettings.__dataclass_fields__})
    counts = (settings.longest, settings.max_length, settings.kept, settings.beams)
    if not all(0 < count <= MOST_BOXES for count in counts):
        raise ValueError(f"translation has longest, max_length, kept and beams of {counts}")
    return settings


def _one_of(name: str, value: str, known: Iterable[str]) -> str:
    if value not in known:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(known)}")
    return value


def _plain(name: str) -> str:
    if not name or name.startswith(".") or os.sep in name or "\0" in name:
        raise ValueError(f"it names a file {name!r}, expected a plain name of its own folder")
    return name


def read_whole(path: Path) -> bytes:
    """Read a file of an artifact. Raises CheckpointError if it cannot be read."""
    try:
        return read_plain(path, MOST_GRAPH)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}. Export it again.") from error
