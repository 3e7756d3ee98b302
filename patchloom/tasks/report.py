"""`patchloom.report`: the page about a run, or about several. Missing or damaged files become notes on it."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from patchloom.data.reading_options import AS_IT_IS, Reading
from patchloom.data.sources.specs import Data, as_spec
from patchloom.engine.records import Record
from patchloom.report.run_report import Report, Summary, recipe_rows, write_report
from patchloom.report.sections import table_section
from patchloom.runs.config import is_run, read_recipe, read_run_files
from patchloom.runs.locate import find_run
from patchloom.runs.metrics import metrics_fault, read_metrics
from patchloom.runs.race import Race, Trial, read_race
from patchloom.runs.run_metadata import RunMetadata, read_run_metadata
from patchloom.tasks.classification.comparison_page import report_runs
from patchloom.tasks.plan import Plan
from patchloom.tasks.table import task_of_run
from patchloom.tasks.task import TaskPage
from patchloom_runtime.errors import UsageError, attempted, with_near_options


@dataclass(frozen=True, kw_only=True)
class ReportSettings:
    """Settings of a report, and the plan and network of the training that ends with it."""

    data: str | None = None  # path of the data, if not the recorded one
    split: str | None = None  # to evaluate now and report on
    reading: Reading = AS_IT_IS
    level: str | None = None
    v2: bool = False  # evaluate data whose folders are class numbers, as in ImageNet-V2
    plan: Plan | None = None
    network: Any = None  # with the best weights loaded

    @property
    def part(self) -> str:
        """The split to evaluate now; '' for a page on the val predictions of the training."""
        return "v2" if self.v2 else self.split or ""


@with_near_options
def report(
    runs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    data: Data | None = None,
    split: str | None = None,
    level: str | None = None,
    v2: bool = False,
    val: str | None = None,
    page: str | None = None,
    reading: Reading = AS_IT_IS,
) -> Path:
    """Write one self-contained HTML page about a run, or about several side by side, and return its path.

    runs     Run folders; two or more are compared.
    data     Where the data are now. Several runs are evaluated on it.
    split    Evaluate this split of the data now and report on it. One of 'train', 'val', 'test' or 'all'.
    level    Label level to compare with. Default: that of the model's classes.
    v2       Folder names of `data` are class numbers, as in ImageNet-V2.
    val      With several runs: data whose top-1 is plotted against that of `data`. Default: each run's val.
    page     HTML page. Default: RUN/report.html, RUN/report-SPLIT.html, or comparison.html here.
    reading  How to read the data. Default: as in training.
    """
    names = [os.fspath(run) for run in ([runs] if isinstance(runs, str | os.PathLike) else runs)]
    _check(names, data, split, level, v2=v2, val=val, reading=reading)
    shared: dict[str, Any] = {"split": split, "reading": reading, "level": level, "v2": v2}
    shared["data"] = None if data is None else as_spec(data)
    if len(names) > 1:
        return report_runs(names, val=val, out=Path(page or "comparison.html"), **shared)
    (run,) = names
    # A page about published weights goes here, not into their cache.
    default = None if Path(run).exists() else Path(page_name("v2" if v2 else split or ""))
    return report_run(find_run(run) or Path(run), out=Path(page) if page else default, **shared)


def _check(
    runs: Sequence[str],
    data: Any,
    split: str | None,
    level: str | None,
    *,
    v2: bool,
    val: str | None,
    reading: Reading,
) -> None:
    """Raise UsageError for options that exclude each other."""
    reads = split or level or reading.chosen()
    is_one = len(runs) == 1
    if not is_one and data is None and reads:
        raise UsageError("--split, --level and how data are read need data: several runs are evaluated on --data DATA")
    if (v2 or val) and data is None:
        raise UsageError(f"{'--v2' if v2 else '--val'} needs images to evaluate on now: pass --data DATA")
    if v2 and reads:
        raise UsageError("--v2 reads all of --data by its folders' numbers; drop --split, --level and labels")
    if val and is_one:
        raise UsageError("--val is plotted against --data for several runs; for one run, pass --data DATA --split val")
    if is_one and level and split is None:
        raise UsageError("--level chooses the labels that a split is compared with; pass --split too")


def report_run(
    folder: Path,
    *,
    data: Data | None = None,
    out: Path | None = None,
    split: str | None = None,
    reading: Reading = AS_IT_IS,
    level: str | None = None,
    v2: bool = False,
    plan: Plan | None = None,
    network: Any = None,
) -> Path:
    """Write the report of a run and return its path.

    data      path of the data, if not the recorded one
    split     evaluate this split now and report on it
    reading   how the data are read
    level     label level
    v2        the folders of the data are class numbers, as in ImageNet-V2
    plan      plan of the training that ends with this report
    network   network with the best weights
    """
    if not is_run(folder):
        raise UsageError(f"{folder} is not a run folder: it has no config.json")
    notes: list[str] = []
    record = attempted(lambda: read_run_metadata(folder), notes)
    if record is None and not notes:
        notes.append(f"{folder} has no run.json: data, time and machine of the training are unknown")
    data = None if data is None else as_spec(data)
    settings = ReportSettings(data=data, split=split, reading=reading, level=level, v2=v2, plan=plan, network=network)
    task = task_of_run(folder)
    if v2 and not task.whole_images:
        raise UsageError(f"--v2 {task.refusal}")
    task_page = task.report.page(folder, settings)
    records = _records(folder, notes)
    race = attempted(lambda: read_race(folder), notes)
    recipe = read_recipe(folder)
    if recipe is None:
        notes.append(f"{folder} kept no recipe.yaml: its settings are not shown")
    name = recipe.model.name if recipe else read_run_files(folder).model
    page = out or folder / page_name(settings.part)
    write_report(
        page,
        Report(
            title=_title(name, folder, record, settings),
            summary=_summary(name, folder, record, task_page),
            records=records,
            charts=task_page.charts,
            trained_on=task_page.trained_on,
            sections=[*task_page.sections, *([race_section(race)] if race else [])],
            recipe=recipe_rows(recipe, record.choices if record else {}) if recipe else [],
            cost=task_page.cost,
            notes=list(dict.fromkeys([*(record.notes if record else []), *task_page.notes, *notes])),
            numbers=task_page.numbers,
            environment=_environment(record),
        ),
    )
    return page


def page_name(part: str) -> str:
    """Return the file name of the report on a split; '' is the val split of the training."""
    return f"report-{part}.html" if part else "report.html"


def race_section(race: Race) -> Markup:
    """Return the table of a race, one row per candidate."""
    rounds = range(1 + max((trial.round for trial in race.trials), default=0))
    columns = ["candidate", *(f"{race.metric}, round {number + 1}" for number in rounds), "changes"]
    rows = []
    for row in race.candidates:
        trials = [race.trial(number, row.name) for number in rounds]
        scores = [_score_text(trial) for trial in trials]
        changes = ", ".join(f"{key} = {value}" for key, value in row.changes.items()) or "none"
        rows.append([f"{row.name} (winner)" if row.name == race.winner else row.name, *scores, changes])
    title = f"Race on {race.held_out:,} held-out of {race.train + race.held_out:,} training images"
    return table_section(title, columns, rows)


def _score_text(trial: Trial | None) -> str:
    if trial is None:
        return ""
    return "diverged" if trial.score is None else f"{trial.score:.1f} after {trial.steps:,} steps"


def _records(folder: Path, notes: list[str]) -> list[Record]:
    """Return the records of metrics.jsonl; add a note if they are damaged or missing."""
    records = attempted(lambda: read_metrics(folder / "metrics.jsonl"), notes) or []
    if fault := attempted(lambda: metrics_fault(folder), notes):
        notes.append(f"{fault}; the curves are drawn without it")
    if not records:
        notes.append(f"{folder / 'metrics.jsonl'} has no records: there are no curves")
    return records


def _title(name: str, folder: Path, record: RunMetadata | None, settings: ReportSettings) -> str:
    title = f"{name} on {record.data_name}" if record else f"{name}, {folder.name}"
    return f"{title}: {settings.part} of {settings.data or 'its data'}" if settings.part else title


def _summary(name: str, folder: Path, record: RunMetadata | None, page: TaskPage) -> Summary:
    return Summary(
        model=name,
        data=record.data_name if record else "not recorded",
        best=page.best,
        measure=page.measure,
        interval=page.interval,
        more_scores=page.more_scores,
        weights=record.best_weights if record else "model",
        epochs=record.epochs if record else None,
        seconds=record.seconds if record else None,
        command=record.command(folder) if record else "",
        next_command=page.next_command,
    )


def _environment(record: RunMetadata | None) -> dict[str, str] | None:
    if record is None or not record.versions:
        return None
    return record.versions | ({"machine": record.machine} if record.machine else {})
