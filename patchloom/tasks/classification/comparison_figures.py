"""The papers' figures of several runs, for the page that compares them: levels, two test sets, seeds, branches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from markupsafe import Markup

from patchloom.report.charts import (
    LINE_COLORS,
    Point,
    SeedRange,
    Series,
    histogram_chart,
    line_chart,
    range_chart,
    scatter_chart,
)
from patchloom.report.pictures.branches import branch_epoch_charts
from patchloom.runs.branch_norms import read_branch_norms
from patchloom.tasks.classification.levels import FINEST, MEASURES, LevelEvaluations
from patchloom.tasks.classification.seeds import SeedCloud, final_values
from patchloom.tasks.classification.several_runs import RunEvaluations
from patchloom.tasks.images.run_contents import RunParts

LEAST_SEEDS = 3  # runs from which a spread is drawn
SMALL_SCATTER = 260  # pixels of a side, so that three stand in a row
MOST_NAMED = 30  # points whose names are written beside them
NO_LEVEL = "no labels"

Chart = tuple[str, Markup]  # its title and itself


def level_charts(found: LevelEvaluations, parts: Mapping[str, RunParts]) -> list[Chart]:
    """Thesis figure 2.4: accuracy by the level of the labels; a line per recipe, from coarse to fine.

    Of each measure: judged at the level trained at, and judged at the finest whatever level was trained at.
    """
    judged = list(found.levels)
    order = [NO_LEVEL, *judged] if any(run.trained_level is None for run in found.runs.values()) else judged
    charts = []
    for measure, title in MEASURES.items():
        same: dict[str, dict[int, float]] = {}
        finest: dict[str, dict[int, float]] = {}
        for name, run in found.runs.items():
            method, level = _method(parts[name]), run.trained_level
            finest.setdefault(method, {})[order.index(level or NO_LEVEL)] = run.at(measure, FINEST)
            if level is not None:
                same.setdefault(method, {})[judged.index(level)] = run.at(measure, level)
        counts = [f"{level} ({found.levels[level]})" for level in judged]
        if same:
            charts.append(
                (f"{title}, %: judged at the level trained at", _levels(same, "trained and judged at", counts))
            )
        along = [NO_LEVEL, *counts] if order != judged else counts
        charts.append((f"{title}, %: judged at the finest level", _levels(finest, "trained at", along)))
    return charts


def _method(parts: RunParts) -> str:
    recipe = parts.files.recipe
    return recipe.name if recipe else parts.files.model


def _levels(methods: Mapping[str, Mapping[int, float]], x_label: str, names: Sequence[str]) -> Markup:
    lines = [
        Series(method, sorted((float(place), value) for place, value in of.items()), color % LINE_COLORS)
        for color, (method, of) in enumerate(methods.items())
    ]
    return line_chart(lines, x_label=x_label, x_names=names)


def cloud_chart(cloud: SeedCloud, parts: Mapping[str, RunParts], first: str, second: str) -> tuple[Markup, str] | None:
    """Each run's top-1 on two sets, with the straight line through all of them (ResMLP figure 4, thesis 6.7, 6.11).

    A colour per network; the other value says what the line is.
    """
    if len(cloud.runs) < 2:
        return None
    networks = {name: parts[name].files.model for name in cloud.runs}
    several = len(set(networks.values())) > 1
    points = [
        Point(x, y, name, networks[name] if several else "")
        for name, x, y in zip(cloud.runs, cloud.first, cloud.second, strict=True)
    ]
    chart = scatter_chart(
        points,
        x_label=f"top-1 on {first}, %",
        y_label=f"top-1 on {second}, %",
        named=len(points) <= MOST_NAMED,
        line=cloud.line,
    )
    if cloud.line is None:
        return chart, ""
    told = (
        f"The dashed line fits all runs by least squares: {cloud.line[0]:.2f} points on {second} per point on {first}"
    )
    return chart, f"{told}, correlation {cloud.correlation:.2f}."


@dataclass(frozen=True)
class SeedFigures:
    """Runs that differ in their seed alone."""

    rows: list[list[str]]  # number, mean, std, min, max
    charts: list[Chart]
    early: list[Chart]  # each run's top-1 at an epoch and at the end


def seed_figures(together: RunEvaluations, data: str | None) -> SeedFigures | None:
    """Thesis 6.3.4, where three runs or more differ in nothing but the seed: spreads and figures 6.8, 6.9, 6.10.

    On data of the name `data` the histogram is of what the runs decide there, else of their last evaluation.
    """
    if len(together.folders) < LEAST_SEEDS or together.not_only_seeds():
        return None
    found = together.spreads() if data else together.spreads_at_end()
    rows = [[s.name, *(f"{value:.2f}" for value in (s.mean, s.std, s.min, s.max))] for s in found]
    ends = {name: final_values(folder).get("top1") for name, folder in together.folders.items()}
    values = [of["top1"] for of in together.values().values()] if data else [v for v in ends.values() if v is not None]
    charts: list[Chart] = []
    early: list[Chart] = []
    if len(values) >= LEAST_SEEDS:
        where = data or "val, after the last epoch"
        charts.append(("Distribution", histogram_chart(values, x_label=f"top-1 on {where}, %")))
    if by_epoch := together.spread_by_epoch():
        ranges = [SeedRange(epoch, s.mean, s.std, s.min, s.max) for epoch, s in by_epoch.items()]
        charts.append(("Top-1 on val while they are trained, %", range_chart(ranges)))
    for at in together.early_and_last():
        points = [Point(x, y, name) for name, x, y in zip(together.folders, at.then, at.last, strict=True)]
        label = f"top-1 on val at epoch {at.epoch}, %"
        chart = scatter_chart(points, x_label=label, y_label="after the last epoch, %", side=SMALL_SCATTER)
        early.append((f"Epoch {at.epoch} and the end: r = {at.correlation:.2f}", chart))
    return SeedFigures(rows, charts, early)


def branch_charts(parts: Mapping[str, RunParts]) -> list[Chart]:
    """Thesis figure 3.6: norms of residual branches by layer and epoch, of runs trained with `--pictures`."""
    read = {name: each.attempt(partial(read_branch_norms, each.folder)) for name, each in parts.items()}
    return branch_epoch_charts({name: norms for name, norms in read.items() if norms})
