"""`race.json`: the candidates of a race, their trials on held-out training images, and the winner."""

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from patchloom.recipes.choices import Choice
from patchloom.runs.checksums import write_checked
from patchloom.runs.files import FORMAT, json_bytes, parsed, read_run_file, refuse_format, refuse_shape
from patchloom_runtime.errors import CheckpointError

FILE = "race.json"
_SHAPE = {
    "format": int,
    "key": str,
    "train": int,
    "held_out": int,
    "metric": str,
    "lower_is_better": bool,
    "candidates": list[dict[str, Any]],
    "trials": list[dict[str, Any]],
    "winner": str,
}
_CANDIDATE = {"name": str, "changes": dict[str, Any], "epochs": int, "steps": list[int]}
_TRIAL = {"round": int, "name": str, "steps": int, "score": float | None, "tie": float | None, "seconds": float}


@dataclass(frozen=True)
class RaceCandidate:
    """A candidate and what was measured before its first trial."""

    name: str
    changes: dict[str, Any]  # recipe fields
    epochs: int  # that fit into the time of the run
    steps: list[int]  # updates in each round


@dataclass(frozen=True)
class Trial:
    """One short training of a candidate."""

    round: int
    name: str
    steps: int
    score: float | None  # metric on the held-out images; None if the loss was not finite
    tie: float | None
    seconds: float


@dataclass
class Race:
    """A race, as far as it is."""

    key: str  # digest of everything that it depends on
    train: int  # images
    held_out: int
    metric: str
    candidates: list[RaceCandidate] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    winner: str = ""  # once it is decided
    lower_is_better: bool = False

    def row(self, name: str) -> RaceCandidate:
        """Return a candidate by name."""
        return next(row for row in self.candidates if row.name == name)

    def trial(self, number: int, name: str) -> Trial | None:
        """Return the trial of a candidate in a round, if it is done."""
        return next((trial for trial in self.trials if (trial.round, trial.name) == (number, name)), None)


def write_race(folder: Path, race: Race) -> None:
    """Write `race.json` atomically."""
    write_checked(folder, {FILE: json_bytes({"format": FORMAT, **asdict(race)})})


def read_race(folder: Path) -> Race | None:
    """Return the race of a run, or None if it had none."""
    path = folder / FILE
    if not os.path.lexists(path):
        return None
    values = parsed(read_run_file(folder, FILE), path, _SHAPE)
    refuse_format(values, path)
    for rows, shape in ((values["candidates"], _CANDIDATE), (values["trials"], _TRIAL)):
        for row in rows:
            refuse_shape(row, shape, path)
    race = Race(
        **{name: values[name] for name in ("key", "train", "held_out", "metric", "winner", "lower_is_better")},
        candidates=[RaceCandidate(**{key: row[key] for key in _CANDIDATE}) for row in values["candidates"]],
        trials=[Trial(**{key: row[key] for key in _TRIAL}) for row in values["trials"]],
    )
    if fault := _fault(race):
        raise CheckpointError(f"{path} is damaged: {fault}.")
    return race


def _fault(race: Race) -> str:
    """Return what does not fit together in a race, or ''."""
    names = [row.name for row in race.candidates]
    used = {*(trial.name for trial in race.trials), *filter(None, [race.winner])}
    rounds = {len(row.steps) for row in race.candidates}
    if len(set(names)) < len(names) or not used <= set(names):
        return "its names do not match its candidates"
    if len(rounds) > 1 or 0 in rounds or any(min(row.epochs, *row.steps) < 1 for row in race.candidates):
        return "its candidates have different rounds, or trials without updates"
    return ""


def discard_race(folder: Path) -> None:
    """Remove the race of an earlier command, so that a run without one is not taken for its winner."""
    (folder / FILE).unlink(missing_ok=True)


def race_choices(folder: Path) -> tuple[Choice, ...]:
    """Return the choices of the race that a run began with; none without a race."""
    race = read_race(folder)
    return choices_of(race) if race and race.winner else ()


def choices_of(race: Race) -> tuple[Choice, ...]:
    """Return the changes of the winner as choices with their reason."""
    why = f"auto: {race.winner} won the race on {race.held_out:,} held-out training images"
    return tuple(Choice(key, value, why) for key, value in race.row(race.winner).changes.items())
