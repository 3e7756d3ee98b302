"""Small translation runs, which several tests look at."""

from pathlib import Path
from typing import Any

from patchloom.tasks.plan import TrainingSettings

DATA = "numbers:count=150"
SMALL = {
    "model.options.dim": 16,
    "model.options.hidden": 32,
    "model.options.layers": 1,
    "model.options.heads": 2,
    "model.dropout": 0.1,
    "text.vocabulary": 330,
    "text.max_length": 40,
    "text.averaged_epochs": 2,
    "schedule.warmup_steps": 4,
}


def settings(out: Path, data: str = DATA, **changes: Any) -> TrainingSettings:
    """A run of a few steps."""
    more = changes.pop("changes", {})
    values = {"recipe": "translation_tiny", "epochs": 3, "batch": 600, "device": "cpu"} | changes
    return TrainingSettings(data=data, out=str(out), changes=SMALL | more, **values)


def command_line(out: Path, data: str = DATA, *, epochs: int = 3) -> list[str]:
    """The same as a command."""
    line = ["train", data, "--recipe", "translation-tiny", "--epochs", str(epochs), "--batch", "600"]
    return [
        *line,
        "--device",
        "cpu",
        "--out",
        str(out),
        *(part for key, value in SMALL.items() for part in ("--set", f"{key}={value}")),
    ]
