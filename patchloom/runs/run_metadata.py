"""`run.json`: how a run went, for reports: its data, when and why it ended, machine, versions, and choices."""

import json
import os
import shlex
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from patchloom.data.reading_options import AS_IT_IS, Reading
from patchloom.data.splits import TEST_NAMES, VAL_NAMES
from patchloom.runs.checksums import read_checked, write_checked
from patchloom_runtime.errors import CheckpointError, UsageError
from patchloom_runtime.untrusted import check_shape, parse_json

FILE = "run.json"
_TEXT = str | None
_SHAPE = {
    "data": str,
    "data_name": str,
    "level?": _TEXT,
    "labels?": _TEXT,
    "label_column?": _TEXT,
    "label_pattern?": _TEXT,
    "taxonomy?": _TEXT,
    "classes?": _TEXT,
    "images?": _TEXT,
    "masks?": _TEXT,
    "boxes?": _TEXT,
    "ignore?": int | None,
    "names?": _TEXT,
    "exclude?": _TEXT,
    "corrections?": _TEXT,
    "val?": _TEXT,
    "init?": _TEXT,
    "ended?": str,
    "epochs?": int,
    "seconds?": float,
    "images_seen?": int,
    "training_multiply_adds?": int,
    "best_weights?": str,
    "machine?": str,
    "versions?": dict[str, str],
    "choices?": dict[str, str],
    "notes?": list[str],
}


@dataclass(frozen=True, kw_only=True)
class RunMetadata:
    """Facts about a finished run that neither its recipe nor its metrics contain."""

    data: str  # as the command named it
    data_name: str
    level: str | None = None
    labels: str | None = None  # from here to `val`: the fields of `Reading`
    label_column: str | None = None
    label_pattern: str | None = None
    taxonomy: str | None = None
    classes: Literal["innermost", "outermost"] | None = None
    images: str | None = None
    masks: str | None = None
    boxes: str | None = None
    ignore: int | None = None
    names: str | None = None
    exclude: str | None = None
    corrections: str | None = None
    val: str | None = None
    init: str | None = None  # value of --init
    ended: str = ""  # "finished", "no better", "time limit"
    epochs: int = 0
    seconds: float = 0.0
    images_seen: int = 0  # in training, every view of an image and every epoch; 0 if unknown
    training_multiply_adds: int = 0  # of the whole training; 0 if unknown
    best_weights: str = "model"  # or "ema"
    machine: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    choices: dict[str, str] = field(default_factory=dict)  # recipe field → why it has its value
    notes: list[str] = field(default_factory=list)

    @property
    def reading(self) -> Reading:
        """How the data were read."""
        return Reading.from_settings(self)

    def command(self, folder: Path) -> str:
        """Return the command that trains the same run into a new folder."""
        values = {"level": self.level, "init": self.init}
        options = [f" --{name} {shlex.quote(value)}" for name, value in values.items() if value]
        what = f"{shlex.quote(self.data)} --recipe {shlex.quote(str(folder / 'recipe.yaml'))}"
        return "".join(["patchloom train ", what, self.reading.options(), *options, " --out NEW-FOLDER"])


def write_run_metadata(folder: Path, metadata: RunMetadata) -> None:
    """Write `run.json` atomically."""
    text = json.dumps(asdict(metadata), indent=1, ensure_ascii=False) + "\n"
    write_checked(folder, {FILE: text.encode("utf-8", "surrogateescape")})


def read_run_metadata(folder: Path) -> RunMetadata | None:
    """Return the metadata, or None if the run has not ended or is of a version that wrote none."""
    path = folder / FILE
    if not os.path.lexists(path):
        return None
    try:
        values: dict[str, Any] = parse_json(read_checked(folder, FILE).decode("utf-8", "surrogateescape"))
        if isinstance(values, dict) and "without" in values:  # its name until version 0.1
            values["exclude"] = values.pop("without")
        check_shape(values, _SHAPE)
        known = RunMetadata.__dataclass_fields__  # newer versions may have more
        metadata = RunMetadata(**{name: value for name, value in values.items() if name in known})
        if min(metadata.epochs, metadata.seconds, metadata.images_seen, metadata.training_multiply_adds) < 0:
            raise ValueError("it counts epochs, seconds, images or multiply-adds below 0")
        Reading.from_settings(metadata)  # raises ValueError for unknown words
        return metadata
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}. Restore it, or remove it.") from error


def recorded_reading(folder: Path, data: str) -> Reading:
    """Return how a run read `data` if it was trained on them, else a `Reading` without settings."""
    metadata = read_run_metadata(folder)
    return metadata.reading if metadata and is_same_data(data, metadata.data) else AS_IT_IS


def data_path(folder: Path | None, metadata: RunMetadata | None, data: str | None = None) -> str:
    """Return `data`, or else the data path that the run recorded. Raise UsageError if both are missing."""
    if data is None and metadata is None:
        raise UsageError(f"{folder or 'the model'} does not record its data path; pass --data")
    return data if data is not None else metadata.data  # type: ignore[union-attr]


def is_same_data(data: str, trained_on: str) -> bool:
    """Return whether both are the same place, or the first is a val or test folder of the second."""
    if data == trained_on:
        return True
    one, other = (os.path.abspath(os.path.expanduser(place)) for place in (data, trained_on))
    folder, name = os.path.split(one)
    return os.path.exists(one) and (one == other or (folder == other and name.lower() in (*VAL_NAMES, *TEST_NAMES)))
