"""`run.json` of a run's folder: how it went, for whoever reports on it later; and whether `metrics.jsonl` is whole."""

import json
import os
import shlex
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from patchloom.data.reading import AS_IT_IS, Reading
from patchloom.data.splits import TEST_NAMES, VAL_NAMES
from patchloom.runs.checkpoints import lines_written
from patchloom.runs.checksums import read_checked, write_checked
from patchloom.runs.metrics import damaged_lines, read_metrics
from patchloom_runtime.errors import CheckpointError, UsageError
from patchloom_runtime.untrusted import check_shape, parse_json

FILE = "run.json"
METRICS = "metrics.jsonl"
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
    "without?": _TEXT,
    "val?": _TEXT,
    "init?": _TEXT,
    "ended?": str,
    "epochs?": int,
    "seconds?": float,
    "best_weights?": str,
    "machine?": str,
    "versions?": dict[str, str],
    "choices?": dict[str, str],
    "notes?": list[str],
}


@dataclass(frozen=True, kw_only=True)
class RunMetadata:
    """What neither the recipe nor the metrics tell."""

    data: str  # as it was given
    data_name: str
    level: str | None = None
    labels: str | None = None  # from here to `val`: how the data were read, see `Reading`
    label_column: str | None = None
    label_pattern: str | None = None
    taxonomy: str | None = None
    classes: Literal["innermost", "outermost"] | None = None
    images: str | None = None
    masks: str | None = None
    boxes: str | None = None
    ignore: int | None = None
    names: str | None = None
    without: str | None = None
    val: Literal["held-out", "test"] | None = None
    init: str | None = None  # what it started from
    ended: str = ""  # "finished", "no better", "time limit"
    epochs: int = 0
    seconds: float = 0.0
    best_weights: str = "model"  # or "ema"
    machine: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    choices: dict[str, str] = field(default_factory=dict)  # recipe field → why it has its value
    notes: list[str] = field(default_factory=list)

    @property
    def reading(self) -> Reading:
        """How the data were read."""
        return Reading.of(self)

    def command(self, folder: Path) -> str:
        """What trains such a run again."""
        given = {"level": self.level, "init": self.init}
        options = [f" --{name} {shlex.quote(value)}" for name, value in given.items() if value]
        what = f"{shlex.quote(self.data)} --recipe {shlex.quote(str(folder / 'recipe.yaml'))}"
        return "".join(["patchloom train ", what, self.reading.options(), *options, " --out NEW-FOLDER"])


def write_run_metadata(folder: Path, record: RunMetadata) -> None:
    """Write the file, whole or not at all."""
    text = json.dumps(asdict(record), indent=1, ensure_ascii=False) + "\n"
    write_checked(folder, {FILE: text.encode("utf-8", "surrogateescape")})


def recorded_reading(folder: Path, data: str) -> Reading:
    """How a run read its data, where it was trained on these; else nothing is said about them."""
    record = read_run_metadata(folder)
    return record.reading if record and is_same_data(data, record.data) else AS_IT_IS


def data_path(folder: Path | None, record: RunMetadata | None, data: str | None = None) -> str:
    """Return `data`, or else the path in the record of the run in `folder`; raise UsageError if both are missing."""
    if data is None and record is None:
        raise UsageError(f"{folder or 'the model'} does not record its data path; pass --data")
    return data if data is not None else record.data  # type: ignore[union-attr]


def is_same_data(data: str, trained_on: str) -> bool:
    """Whether both are the same data, or the first a val or test folder of the second."""
    if data == trained_on:
        return True
    one, other = (os.path.abspath(os.path.expanduser(place)) for place in (data, trained_on))
    folder, name = os.path.split(one)
    return os.path.exists(one) and (one == other or (folder == other and name.lower() in (*VAL_NAMES, *TEST_NAMES)))


def read_run_metadata(folder: Path) -> RunMetadata | None:
    """What `write_run_record` wrote; None where the run has not ended, or is of a version that kept no record."""
    path = folder / FILE
    if not os.path.lexists(path):
        return None
    try:
        values: dict[str, Any] = parse_json(read_checked(folder, FILE).decode("utf-8", "surrogateescape"))
        check_shape(values, _SHAPE)
        known = RunMetadata.__dataclass_fields__  # a newer one may have more
        record = RunMetadata(**{name: value for name, value in values.items() if name in known})
        if min(record.epochs, record.seconds) < 0:
            raise ValueError("it counts epochs or seconds below 0")
        Reading.of(record)  # which refuses words that it does not know
        return record
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}. Restore it, or remove it.") from error


def metrics_fault(folder: Path) -> str:
    """What is wrong with the lines of a run's `metrics.jsonl`, in one sentence; '' where they are as they were written.

    The last ones may be lost where they are younger than the newest checkpoint, as after a power cut.
    """
    path = folder / METRICS
    if damaged := damaged_lines(path):
        others = f" and {len(damaged) - 1} others are" if len(damaged) > 1 else " is"
        return f"{path}: line {damaged[0]}{others} not as or not where it was written"
    found, expected = len(read_metrics(path)), lines_written(folder)
    return f"{path} has {found} lines, the newest checkpoint tells of {expected}" if found < expected else ""
