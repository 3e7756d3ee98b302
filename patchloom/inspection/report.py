"""The report of a run: one HTML file with everything in it, to be opened without a network, mailed, or kept.

Charts are SVG and pictures data URIs; what it looks like is in `report.html.j2`. What stands in it is gathered by
`deployment.report`.
"""

import math
import platform
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from markupsafe import Markup
from PIL import Image

from patchloom import __version__
from patchloom.engine.display import duration
from patchloom.evaluation.classification import Mistake
from patchloom.inspection.charts import Series, bars, heat_map, line_chart
from patchloom.inspection.cost import Cost, human
from patchloom.inspection.page import data_uri, write_page
from patchloom.recipes.auto import Reason
from patchloom.recipes.parts import GROUPS, ModelPart, OptimPart, SchedulePart
from patchloom.recipes.schema import Recipe, difference, flatten

LABELLED_CLASSES = 30  # up to here every cell of the confusion matrix has room for its count
UNFOLDED_BARS = 20
CONFUSED_PAIRS = 20
CURVE_POINTS = 300  # more are averaged: a line is no wider than that
THUMBNAIL = 112  # pixels
RIGHT, WRONG = (37, 99, 235), (220, 38, 38)  # as in the style sheet
PACKAGES = ("torch", "torchvision", "timm", "numpy", "pillow")


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The head of the report; what is left out is not shown."""

    model: str
    data: str
    top1: float | None = None  # best, in percent
    measure: str = "best top-1"  # what it is called
    interval: tuple[float, float] | None = None  # of it, in percent
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


def write_report(
    path: str | Path,
    *,
    title: str,
    summary: Summary,
    curves: Sequence[Mapping[str, Any]] = (),
    confusion: np.ndarray | None = None,
    class_names: Sequence[str] = (),
    per_class: Sequence[float] | np.ndarray | None = None,
    mistakes: Sequence[tuple[Image.Image, Mistake]] = (),
    pictures: Sequence[tuple[str, Image.Image | Markup, str]] = (),
    recipe: Sequence[tuple[str, Any, str]] = (),
    cost: Cost | None = None,
    notes: Sequence[str] = (),
    numbers: Sequence[tuple[str, str, str]] = (),
    environment: Mapping[str, str] | None = None,
    samples: Sequence[tuple[str, str, str]] = (),
) -> None:
    """Write the report, whole or not at all; a part that is not given has no section.

    `curves` are the records of metrics.jsonl; `confusion` counts images of class [row] put in class [column];
    `per_class` is in percent, NaN without images; `pictures` are (title, picture or chart, caption);
    `recipe` are rows as `recipe_rows` makes them; `numbers` are (name, value, what it is); `environment` is what the
    run was made with, by default what is installed here; `samples` are (source, reference, translation).
    """
    write_page(
        Path(path),
        "report.html.j2",
        title=title,
        summary=summary,
        facts=_facts(summary),
        curves=_curve_charts(curves),
        confusion=None if confusion is None else _confusion(confusion, class_names),
        per_class=None if per_class is None else _class_bars(per_class, class_names, confusion),
        mistakes=[
            (data_uri(_thumbnail(image)), m, class_names[m.label], class_names[m.prediction]) for image, m in mistakes
        ],
        pictures=[(name, p if isinstance(p, Markup) else data_uri(p), text) for name, p, text in pictures],
        chosen=_grouped([RecipeRow(*row) for row in recipe if row[2] != "default"]),
        defaults=_grouped([RecipeRow(*row) for row in recipe if row[2] == "default"]),
        cost=None if cost is None else _cost_rows(cost),
        notes=notes,
        numbers=numbers,
        samples=samples,
        environment=installed_versions() if environment is None else environment,
    )


def recipe_rows(recipe: Recipe, *, auto: Sequence[Reason] = (), user: Collection[str] = ()) -> list[RecipeRow]:
    """Every field of a resolved recipe with its provenance; `user` are the keys somebody typed."""
    plain = Recipe(
        name=recipe.name,
        source=recipe.source,
        model=ModelPart(name=recipe.model.name),
        optim=OptimPart(lr=recipe.optim.lr, batch_size=recipe.optim.batch_size),
        schedule=SchedulePart(epochs=recipe.schedule.epochs),
    )
    asked = {"name", "source", "model.name", "optim.lr", "optim.batch_size", "schedule.epochs"}
    set_by_recipe = asked | set(difference(recipe, plain))
    reasons = {reason.field: f"auto: {reason.why}" for reason in auto}

    def why(key: str) -> str:
        if key in user:
            return "user"
        return reasons.get(key, f"recipe {recipe.name}" if key in set_by_recipe else "default")

    return [RecipeRow(key, value, why(key)) for key, value in flatten(recipe).items()]


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


def _curve_charts(records: Sequence[Mapping[str, Any]]) -> list[tuple[str, Markup]]:
    """Loss and its terms, validation, learning rate and what tells of a collapse, as far as the records have them."""
    unit, steps = steps_per_unit(records)
    neighbours = neighbours_of(records)

    def line(label: str, color: int, kind: str, weights: str, value: str) -> Series:
        return Series(label, curve(records, steps, kind, weights, value), color)

    charts = {
        "Loss": [
            line("training", 0, "train", "model", "loss"),
            line("validation", 1, "evaluation", "model", "loss"),
            line("validation, EMA", 2, "evaluation", "ema", "loss"),
            line("validation, average of epochs", 2, "evaluation", "average", "loss"),
        ],
        "Validation top-1, %": [
            line("model", 1, "evaluation", "model", "top1"),
            line("EMA", 2, "evaluation", "ema", "top1"),
        ],
        "Validation BLEU, greedy": [
            line("model", 1, "evaluation", "model", "bleu_greedy"),
            line("average of epochs", 2, "evaluation", "average", "bleu_greedy"),
        ],
        "Exact translations, greedy, %": [
            line("model", 1, "evaluation", "model", "exact_greedy"),
            line("average of epochs", 2, "evaluation", "average", "exact_greedy"),
        ],
        f"Top-1 of the {neighbours} nearest, %": [
            line("model", 1, "evaluation", "model", f"knn{neighbours}_top1"),
            line("EMA", 2, "evaluation", "ema", f"knn{neighbours}_top1"),
        ],
        "Terms of the loss": [
            line("labels", 0, "train", "model", "label_loss"),
            line("instances", 1, "train", "model", "instance_loss"),
        ],
        "Teacher and student, nats": [
            line("teacher's entropy", 0, "train", "model", "teacher_entropy"),
            line("what it tells of an image", 1, "train", "model", "teacher_spread"),
            line("student's distance (KL)", 2, "train", "model", "kl"),
        ],
        "Norm of the centre": [line("centre", 0, "train", "model", "centre_norm")],
        "Learning rate": [line("learning rate", 0, "train", "model", "lr")],
    }
    drawn = {name: [s for s in lines if any(math.isfinite(y) for _, y in s.points)] for name, lines in charts.items()}
    return [(name, line_chart(lines, x_label=unit)) for name, lines in drawn.items() if lines]


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


def _confusion(counts: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    wrong = counts - np.diag(np.diag(counts))
    images = counts.sum(axis=1)
    worst = np.argsort(-wrong, axis=None, kind="stable")[:CONFUSED_PAIRS]
    places = [divmod(int(place), len(names)) for place in worst]
    pairs = [(names[i], names[j], int(wrong[i, j]), int(images[i])) for i, j in places if wrong[i, j]]
    largest = 100 * float(np.max(wrong / np.maximum(images, 1)[:, None]))
    if len(names) <= LABELLED_CLASSES:
        return {
            "chart": heat_map(counts, _strengths(counts), names),
            "image": None,
            "pairs": pairs[:3],
            "largest": largest,
        }
    return {"chart": None, "image": data_uri(_compact(counts)), "pairs": pairs, "largest": largest}


def _strengths(counts: np.ndarray) -> np.ndarray:
    """Colour of each cell, 0…1: its share of the row; off the diagonal, that over the largest there."""
    share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    right = np.diag(np.diag(share))
    wrong = share - right
    return right + wrong / (wrong.max() or 1.0)


def _compact(counts: np.ndarray) -> Image.Image:
    """A pixel a cell, transparent where it is empty, so that it stands on a light or a dark page."""
    alpha = np.where(counts > 0, np.maximum(np.rint(255 * _strengths(counts)), 40), 0).astype(np.uint8)
    color = np.where(np.eye(len(counts), dtype=bool)[..., None], RIGHT, WRONG).astype(np.uint8)
    return _enlarged(Image.fromarray(np.dstack([color, alpha]), "RGBA"), 500)


def _class_bars(
    per_class: Sequence[float] | np.ndarray, names: Sequence[str], confusion: np.ndarray | None
) -> tuple[Markup, Markup | None, int]:
    """The worst classes, the others, and how many others."""

    def text(i: int) -> str:
        of = "" if confusion is None else f" of {confusion[i].sum()}"
        return f"{per_class[i]:.1f} %{of}" if math.isfinite(per_class[i]) else "no images"

    order = sorted(range(len(names)), key=lambda i: per_class[i] if math.isfinite(per_class[i]) else math.inf)
    rows = [(names[i], float(per_class[i]), text(i)) for i in order]
    first, rest = rows[:UNFOLDED_BARS], rows[UNFOLDED_BARS:]
    return bars(first), bars(rest) if rest else None, len(rest)


def _thumbnail(image: Image.Image) -> Image.Image:
    small = image.convert("RGB")
    small.thumbnail((2 * THUMBNAIL, 2 * THUMBNAIL))
    return _enlarged(small, THUMBNAIL)


def _enlarged(image: Image.Image, least: int) -> Image.Image:
    """By a whole factor, pixels kept crisp, to at least so many pixels a side where it is smaller."""
    factor = -(-least // max(image.size))
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)


def _grouped(rows: Sequence[RecipeRow]) -> list[tuple[str, list[RecipeRow]]]:
    """Rows by the schema's groups, in its order; keys of no group first."""
    groups: dict[str, list[RecipeRow]] = {name: [] for name in ("run", *GROUPS)}
    for row in rows:
        group, _, name = row.key.partition(".")
        groups.setdefault(group if name else "run", []).append(
            row._replace(key=name or group, value=shown_value(row.value))
        )
    return [(name, members) for name, members in groups.items() if members]


def shown_value(value: Any) -> str:
    """A setting as a page prints it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(shown_value, value)) or "–"
    return "–" if value is None else str(value)


def _cost_rows(cost: Cost) -> list[tuple[str, str, str]]:
    return [
        ("parameters", human(cost.parameters), f"{cost.parameters:,}"),
        ("weights as float32", f"{cost.parameters * 4 / 2**20:.1f} MiB", ""),
        ("multiply-adds per image", human(cost.multiply_adds), "matrix products and convolutions"),
        ("other operations per image", human(cost.elementwise), "norms, activations, sums, scales"),
    ]
