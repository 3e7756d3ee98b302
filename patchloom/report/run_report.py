"""The report of a run as one HTML file that needs no network connection.

Charts are SVG, images are data URIs, and the layout is in `report.html.j2`. `tasks/report.py` collects the contents.
"""

import math
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

from markupsafe import Markup

from patchloom import __version__
from patchloom.engine.display import duration
from patchloom.recipes.parts import GROUPS, ModelPart, OptimPart, SchedulePart
from patchloom.recipes.schema import Recipe, difference, flatten
from patchloom.report.charts import Series, line_chart
from patchloom.report.page import write_page

CURVE_POINTS = 300  # more points are averaged, since a chart has no more pixels
PACKAGES = ("torch", "torchvision", "timm", "numpy", "pillow")


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The summary at the head of a report; fields left at their default are not shown."""

    model: str
    data: str
    best: str = ""  # best score, with its unit
    measure: str = "best"  # name of the score
    interval: tuple[float, float] | None = None  # of the score
    more_scores: Sequence[tuple[str, str]] = ()  # further scores: name, value with its unit
    weights: str = "model"  # with that score; "ema" and "average" are named in the summary
    epochs: int | None = None
    seconds: float | None = None
    command: str = ""  # command that repeats the run
    next_command: str = ""


class RecipeRow(NamedTuple):
    """A setting, its value and its origin: "default", "user", a recipe, or "auto: " and the reason."""

    key: str
    value: Any
    why: str


@dataclass(frozen=True, kw_only=True)
class ChartLine:
    """One curve of a chart: which value of which records it shows."""

    label: str
    color: int
    kind: Literal["train", "evaluation"]
    value: str
    weights: str = "model"


Charts = Mapping[str, Sequence[ChartLine]]  # title → curves

# Charts of every run; tasks and methods add more.
LOSS: Charts = {
    "Loss": [
        ChartLine(label="training", color=0, kind="train", value="loss"),
        ChartLine(label="validation", color=1, kind="evaluation", value="loss"),
        ChartLine(label="validation, EMA", color=2, kind="evaluation", value="loss", weights="ema"),
        ChartLine(label="validation, average of epochs", color=2, kind="evaluation", value="loss", weights="average"),
    ],
}
RATE: Charts = {"Learning rate": [ChartLine(label="learning rate", color=0, kind="train", value="lr")]}


def validation(value: str, *, average: str = "ema", name: str = "EMA") -> list[ChartLine]:
    """Return the curves of a value of the evaluations: of the model and of its average."""
    return [
        ChartLine(label="model", color=1, kind="evaluation", value=value),
        ChartLine(label=name, color=2, kind="evaluation", value=value, weights=average),
    ]


def training(charts: Mapping[str, Mapping[str, str]]) -> Charts:
    """Return charts of values recorded in training from title → curve → name of the value."""
    return {
        title: [
            ChartLine(label=label, color=number, kind="train", value=value)
            for number, (label, value) in enumerate(curves.items())
        ]
        for title, curves in charts.items()
    }


@dataclass(frozen=True, kw_only=True)
class Report:
    """The contents of a report; empty parts have no section."""

    title: str
    summary: Summary
    records: Sequence[Mapping[str, Any]] = ()  # from metrics.jsonl
    charts: Charts = field(default_factory=dict)  # of the records
    trained_on: str = "augmented images with the targets of the objective"  # what the training loss is computed on
    sections: Sequence[Markup] = ()  # of the task, see `sections.py`
    recipe: Sequence[tuple[str, Any, str]] = ()  # rows from `recipe_rows`
    cost: Sequence[tuple[str, str, str]] = ()  # name, value, explanation
    notes: Sequence[str] = ()
    numbers: Sequence[tuple[str, str, str]] = ()  # name, value, explanation
    environment: Mapping[str, str] | None = None  # package versions; default: those installed here


def write_report(path: str | Path, report: Report) -> None:
    """Write the report atomically."""
    write_page(
        Path(path),
        "report.html.j2",
        title=report.title,
        summary=report.summary,
        weights={"ema": "EMA weights", "average": "average of epochs"}.get(report.summary.weights, ""),
        facts=_facts(report.summary),
        curves=curve_charts(report.records, {**LOSS, **report.charts, **RATE}),
        trained_on=report.trained_on,
        sections=report.sections,
        chosen=_grouped([RecipeRow(*row) for row in report.recipe if row[2] != "default"]),
        defaults=_grouped([RecipeRow(*row) for row in report.recipe if row[2] == "default"]),
        cost=report.cost,
        notes=report.notes,
        numbers=report.numbers,
        environment=installed_versions() if report.environment is None else report.environment,
    )


def recipe_rows(recipe: Recipe, why: Mapping[str, str]) -> list[RecipeRow]:
    """Return every field of a recipe with its provenance; `why` has the reasons known from the user or from `auto`."""
    plain = Recipe(
        name=recipe.name,
        source=recipe.source,
        model=ModelPart(name=recipe.model.name),
        optim=OptimPart(lr=recipe.optim.lr, batch_size=recipe.optim.batch_size),
        schedule=SchedulePart(epochs=recipe.schedule.epochs),
    )
    required = {"name", "source", "model.name", "optim.lr", "optim.batch_size", "schedule.epochs"}
    set_by_recipe = required | set(difference(recipe, plain))
    origins = {key: f"recipe {recipe.name}" if key in set_by_recipe else "default" for key in flatten(recipe)}
    return [RecipeRow(key, value, why.get(key, origins[key])) for key, value in flatten(recipe).items()]


def installed_versions() -> dict[str, str]:
    """Return name → version of the packages that results depend on."""
    own = {"patchloom": __version__, "python": platform.python_version()}
    return own | {name: metadata.version(name) for name in PACKAGES}


def _facts(summary: Summary) -> list[tuple[str, str]]:
    facts = {
        "model": summary.model,
        "data": summary.data,
        "epochs": summary.epochs,
        "time": None if summary.seconds is None else duration(summary.seconds),
    }
    return [(name, str(value)) for name, value in facts.items() if value is not None]


def curve_charts(records: Sequence[Mapping[str, Any]], charts: Charts) -> list[tuple[str, Markup]]:
    """Return the charts (title, SVG) that the records have values for."""
    unit, steps = steps_per_unit(records)
    drawn = {
        name: [
            Series(line.label, points, line.color)
            for line in lines
            if (points := curve(records, steps, line.kind, line.weights, line.value))
            and any(math.isfinite(y) for _, y in points)
        ]
        for name, lines in charts.items()
    }
    # A single point is not a curve; its value is in the table.
    return [
        (name, line_chart(lines, x_label=unit, y_label=name))
        for name, lines in drawn.items()
        if any(len(line.points) > 1 for line in lines)
    ]


def curve(
    records: Sequence[Mapping[str, Any]], steps: float, kind: str, weights: str, value: str
) -> list[tuple[float, float]]:
    """Return points (step / steps, value) of the records of one kind, at most as many as a chart is wide."""
    rows = [r for r in records if r.get("kind") == kind and r.get("weights", "model") == weights]
    rows = [r for r in rows if "step" in r and value in r.get("values", {})]
    return _averaged([(r["step"] / steps, _float(r["values"][value])) for r in rows])


def neighbor_count(records: Sequence[Mapping[str, Any]]) -> int:
    """Return k of the k-NN classifier that evaluated the run; 0 if there was none."""
    names = (name for r in records if r.get("kind") == "evaluation" for name in r.get("values", {}))
    matches = (re.fullmatch(r"knn(\d{1,9})_top1", name) for name in names)
    return next((int(match[1]) for match in matches if match), 0)


def steps_per_unit(records: Sequence[Mapping[str, Any]]) -> tuple[str, float]:
    """Return ("epoch", steps per epoch), or ("step", 1) if there is no evaluation."""
    # An evaluation after whole epochs is at step steps · epochs; one within an epoch is at a later step.
    lengths = [
        r["step"] / r["epoch"] for r in records if r.get("kind") == "evaluation" and r.get("step") and r.get("epoch")
    ]
    return ("epoch", min(lengths)) if lengths else ("step", 1.0)


def _averaged(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    size = -(-len(points) // CURVE_POINTS)
    if size <= 1:
        return points
    runs = [points[i : i + size] for i in range(0, len(points), size)]
    return [(run[-1][0], sum(y for _, y in run) / len(run)) for run in runs]


def _float(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _grouped(rows: Sequence[RecipeRow]) -> list[tuple[str, list[RecipeRow]]]:
    """Group the rows as the schema does, in its order; keys without a group come first."""
    groups: dict[str, list[RecipeRow]] = {name: [] for name in ("run", *GROUPS)}
    for row in rows:
        group, _, name = row.key.partition(".")
        groups.setdefault(group if name else "run", []).append(
            row._replace(key=name or group, value=value_text(row.value))
        )
    return [(name, members) for name, members in groups.items() if members]


def value_text(value: Any) -> str:
    """Return the value of a setting as text for a page."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(value_text, value)) or "–"
    return "–" if value is None else str(value)
