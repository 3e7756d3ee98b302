"""The report of a run: one HTML file with everything in it, to be opened without a network, mailed, or kept.

Charts are SVG and pictures data URIs; what it looks like is in `report.html.j2`. What stands in it is gathered by
`tasks.pages`.
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

CURVE_POINTS = 300  # more are averaged: a line is no wider than that
PACKAGES = ("torch", "torchvision", "timm", "numpy", "pillow")


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The head of the report; what is left out is not shown."""

    model: str
    data: str
    best: str = ""  # its number, with its unit
    measure: str = "best"  # what it is called
    interval: tuple[float, float] | None = None  # of it
    weights: Literal["model", "ema"] = "model"  # that reached it
    epochs: int | None = None
    seconds: float | None = None
    command: str = ""  # that repeats the run
    next_command: str = ""


class RecipeRow(NamedTuple):
    """A setting, its value and where it comes from: "default", "user", a recipe, or "auto: " and the reason."""

    key: str
    value: Any
    why: str


@dataclass(frozen=True, kw_only=True)
class ChartLine:
    """A curve of a chart: which values of which records it shows."""

    label: str
    color: int
    kind: Literal["train", "evaluation"]
    value: str
    weights: str = "model"


Charts = Mapping[str, Sequence[ChartLine]]  # title → its curves

# Of every run; a task and a method have more.
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
    """The curves of a number of the evaluations: of the model and of its average."""
    return [
        ChartLine(label="model", color=1, kind="evaluation", value=value),
        ChartLine(label=name, color=2, kind="evaluation", value=value, weights=average),
    ]


def training(charts: Mapping[str, Mapping[str, str]]) -> Charts:
    """Charts of what is recorded while training: title → curve → name of the value."""
    return {
        title: [
            ChartLine(label=label, color=number, kind="train", value=value)
            for number, (label, value) in enumerate(curves.items())
        ]
        for title, curves in charts.items()
    }


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a report shows; a part that is not given has no section."""

    title: str
    summary: Summary
    records: Sequence[Mapping[str, Any]] = ()  # of metrics.jsonl
    charts: Charts = field(default_factory=dict)  # of them
    trained_on: str = "augmented images and of the targets of the objective"  # what the training loss is of
    sections: Sequence[Markup] = ()  # of the task, see `pages.sections`
    recipe: Sequence[tuple[str, Any, str]] = ()  # rows as `recipe_rows` makes them
    cost: Sequence[tuple[str, str, str]] = ()  # name, value, what it is
    notes: Sequence[str] = ()
    numbers: Sequence[tuple[str, str, str]] = ()  # name, value, what it is
    environment: Mapping[str, str] | None = None  # what the run was made with; by default what is installed here


def write_report(path: str | Path, report: Report) -> None:
    """Write the report, whole or not at all."""
    write_page(
        Path(path),
        "report.html.j2",
        title=report.title,
        summary=report.summary,
        facts=_facts(report.summary),
        curves=_curve_charts(report.records, {**LOSS, **report.charts, **RATE}),
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
    """Every field of a recipe with its provenance; `why` are reasons that are known: of the user, or of `auto`."""
    plain = Recipe(
        name=recipe.name,
        source=recipe.source,
        model=ModelPart(name=recipe.model.name),
        optim=OptimPart(lr=recipe.optim.lr, batch_size=recipe.optim.batch_size),
        schedule=SchedulePart(epochs=recipe.schedule.epochs),
    )
    asked = {"name", "source", "model.name", "optim.lr", "optim.batch_size", "schedule.epochs"}
    set_by_recipe = asked | set(difference(recipe, plain))
    usual = {key: f"recipe {recipe.name}" if key in set_by_recipe else "default" for key in flatten(recipe)}
    return [RecipeRow(key, value, why.get(key, usual[key])) for key, value in flatten(recipe).items()]


def installed_versions() -> dict[str, str]:
    """Name → version of what a result depends on."""
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


def _curve_charts(records: Sequence[Mapping[str, Any]], charts: Charts) -> list[tuple[str, Markup]]:
    """The charts, as far as the records have them."""
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
    # A line through one point is no curve: its number stands in the table.
    return [
        (name, line_chart(lines, x_label=unit))
        for name, lines in drawn.items()
        if any(len(line.points) > 1 for line in lines)
    ]


def curve(
    records: Sequence[Mapping[str, Any]], steps: float, kind: str, weights: str, value: str
) -> list[tuple[float, float]]:
    """Points (step / steps, value) of the records of one kind, no more than a chart is wide."""
    rows = [r for r in records if r.get("kind") == kind and r.get("weights", "model") == weights]
    rows = [r for r in rows if "step" in r and value in r.get("values", {})]
    return _thinned([(r["step"] / steps, _float(r["values"][value])) for r in rows])


def neighbours_of(records: Sequence[Mapping[str, Any]]) -> int:
    """How many neighbours judged the run; 0 where none did."""
    names = (name for r in records if r.get("kind") == "evaluation" for name in r.get("values", {}))
    found = (re.fullmatch(r"knn(\d{1,9})_top1", name) for name in names)
    return next((int(match[1]) for match in found if match), 0)


def steps_per_unit(records: Sequence[Mapping[str, Any]]) -> tuple[str, float]:
    """("epoch", steps in one), or ("step", 1) where no evaluation tells."""
    # An evaluation after whole epochs stands at steps · epochs; one after a part of an epoch stands further on.
    lengths = [
        r["step"] / r["epoch"] for r in records if r.get("kind") == "evaluation" and r.get("step") and r.get("epoch")
    ]
    return ("epoch", min(lengths)) if lengths else ("step", 1.0)


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    size = -(-len(points) // CURVE_POINTS)
    if size <= 1:
        return points
    runs = [points[i : i + size] for i in range(0, len(points), size)]
    return [(run[-1][0], sum(y for _, y in run) / len(run)) for run in runs]


def _float(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _grouped(rows: Sequence[RecipeRow]) -> list[tuple[str, list[RecipeRow]]]:
    """Rows by the schema's groups, in its order; keys of no group first."""
    groups: dict[str, list[RecipeRow]] = {name: [] for name in ("run", *GROUPS)}
    for row in rows:
        group, _, name = row.key.partition(".")
        groups.setdefault(group if name else "run", []).append(
            row._replace(key=name or group, value=value_text(row.value))
        )
    return [(name, members) for name, members in groups.items() if members]


def value_text(value: Any) -> str:
    """A setting as a page prints it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(value_text, value)) or "–"
    return "–" if value is None else str(value)
