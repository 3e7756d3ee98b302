"""`run.json` of a run's folder: how it went, for whoever reports on it later."""

import json
import shlex
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from patchloom.checkpoint import atomic_write
from patchloom.errors import CheckpointError

FILE = "run.json"


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What neither the recipe nor the metrics tell."""

    data: str  # as it was given
    data_name: str
    level: str | None = None
    labels: str | None = None  # file of labels
    taxonomy: str | None = None  # file of levels
    init: str | None = None  # what it started from
    ended: str = ""  # "finished", "no better", "time limit"
    epochs: int = 0
    seconds: float = 0.0
    best_weights: str = "model"  # or "ema"
    machine: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    choices: dict[str, str] = field(default_factory=dict)  # recipe field → why it has its value
    notes: list[str] = field(default_factory=list)

    def command(self, folder: Path) -> str:
        """What trains such a run again."""
        given = {"level": self.level, "labels": self.labels, "taxonomy": self.taxonomy, "init": self.init}
        options = [f"--{name} {shlex.quote(value)}" for name, value in given.items() if value]
        what = f"{shlex.quote(self.data)} --recipe {shlex.quote(str(folder / 'recipe.yaml'))}"
        return " ".join(["patchloom train", what, *options, "--out NEW-FOLDER"])


def write_run_record(folder: Path, record: RunRecord) -> None:
    """Write the file, whole or not at all."""
    text = json.dumps(asdict(record), indent=1, ensure_ascii=False) + "\n"
    atomic_write(folder / FILE, text.encode("utf-8", "surrogateescape"))


def data_files(folder: Path, data: str) -> dict[str, str]:
    """The files of labels and levels a run was trained with, where it was on these data."""
    try:
        record = read_run_record(folder)
    except CheckpointError:
        record = None
    if record is None or record.data != data:
        return {}
    given = {"labels": record.labels, "taxonomy": record.taxonomy}
    return {name: path for name, path in given.items() if path}


def read_run_record(folder: Path) -> RunRecord | None:
    """What `write_run_record` wrote; None where the run has not ended, or is of a version that kept no record."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        values: dict[str, Any] = json.loads(path.read_text("utf-8", "surrogateescape"))
        known = RunRecord.__dataclass_fields__
        return RunRecord(
            **{name: value for name, value in values.items() if name in known}
        )  # a newer one may have more
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
