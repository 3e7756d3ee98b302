"""`report.html` of a run, from what its folder holds. What is missing or damaged is a note, and the rest is shown."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchloom.data.reading import AS_IT_IS, Reading
from patchloom.report.run_report import Report, Summary, recipe_rows, write_report
from patchloom.runs.config import is_run, read_recipe, read_run_files
from patchloom.runs.metrics import metrics_fault, read_metrics
from patchloom.runs.run_metadata import RunMetadata, read_run_metadata
from patchloom.tasks.plan import Plan
from patchloom.tasks.table import task_of_run
from patchloom.tasks.task import TaskPage
from patchloom_runtime.errors import UsageError, attempted


@dataclass(frozen=True, kw_only=True)
class ReportSettings:
    """What a user asks of the page of a run; and what the training that ends with it still has."""

    data: str | None = None  # where the data lie now
    split: str | None = None  # evaluate it now, and report on it
    reading: Reading = AS_IT_IS
    level: str | None = None
    v2: bool = False  # evaluate all of the data now, whose folders are class numbers, as in ImageNet-V2
    plan: Plan | None = None
    network: Any = None  # with the best weights

    @property
    def part(self) -> str:
        """What is evaluated now; '' where the page is about what was decided when the run was trained."""
        return "v2" if self.v2 else self.split or ""


def report_run(
    folder: Path,
    *,
    data: str | None = None,
    out: Path | None = None,
    split: str | None = None,
    reading: Reading = AS_IT_IS,
    level: str | None = None,
    v2: bool = False,
    plan: Plan | None = None,
    network: Any = None,
) -> Path:
    """Write the report of a run and return its path.

    `data` say where the data lie now. With a `split` such as test the page is about those examples, evaluated now;
    `reading` and `level` say how they are read, `v2` that their folders are class numbers, as in ImageNet-V2. A
    training hands over its `plan` and its best `network`.
    """
    if not is_run(folder):
        raise UsageError(f"{folder} is not the folder of a run: it has no config.json")
    notes: list[str] = []
    record = attempted(lambda: read_run_metadata(folder), notes)
    if record is None and not notes:
        notes.append(f"{folder} has no run.json: how it went, where and on what is not shown")
    asked = ReportSettings(data=data, split=split, reading=reading, level=level, v2=v2, plan=plan, network=network)
    task = task_of_run(folder)
    if v2 and not task.whole_images:
        raise UsageError(f"--v2 {task.refusal}")
    found = task.report.page(folder, asked)
    metrics = attempted(lambda: read_metrics(folder / "metrics.jsonl"), notes) or []
    if fault := attempted(lambda: metrics_fault(folder), notes):
        notes.append(f"{fault}; the curves show the others")
    if not metrics:
        notes.append(f"{folder / 'metrics.jsonl'} has no records: there are no curves")
    recipe = read_recipe(folder)
    if recipe is None:
        notes.append(f"{folder} kept no recipe.yaml: its settings are not shown")
    name = recipe.model.name if recipe else read_run_files(folder).model
    page = out or folder / page_name(asked.part)
    write_report(
        page,
        Report(
            title=(f"{name} on {record.data_name}" if record else f"{name}, {folder.name}")
            + (f": {asked.part} of {data or 'its data'}" if asked.part else ""),
            summary=_summary(name, folder, record, found),
            records=metrics,
            charts=found.charts,
            trained_on=found.trained_on,
            sections=found.sections,
            recipe=recipe_rows(recipe, record.choices if record else {}) if recipe else [],
            cost=found.cost,
            notes=list(dict.fromkeys([*(record.notes if record else []), *found.notes, *notes])),
            numbers=found.numbers,
            environment=_environment(record),
        ),
    )
    return page


def page_name(part: str) -> str:
    """The file of a page about a part of some data; '' is what the run was validated on."""
    return f"report-{part}.html" if part else "report.html"


def _summary(name: str, folder: Path, record: RunMetadata | None, found: TaskPage) -> Summary:
    return Summary(
        model=name,
        data=record.data_name if record else "not recorded",
        best=found.best,
        measure=found.measure,
        interval=found.interval,
        weights=record.best_weights if record else "model",
        epochs=record.epochs if record else None,
        seconds=record.seconds if record else None,
        command=record.command(folder) if record else "",
        next_command=found.next_command,
    )


def _environment(record: RunMetadata | None) -> dict[str, str] | None:
    if record is None or not record.versions:
        return None
    return record.versions | ({"machine": record.machine} if record.machine else {})
