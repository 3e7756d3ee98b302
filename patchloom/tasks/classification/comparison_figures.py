"""Charts that compare runs, after figures of the papers: levels, two test sets, cost, seeds, residual branches."""

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
from patchloom.tasks.images.run_contents import RunContents, count_cost

LEAST_SEEDS = 3  # runs for which a spread is drawn
MAX_NAMED = 30  # points with names next to them
NO_LEVEL = "no labels"

Chart = tuple[str, Markup]  # title, SVG


def level_charts(evaluations: LevelEvaluations, contents: Mapping[str, RunContents]) -> list[Chart]:
    """Draw thesis figure 2.4: accuracy by the level of the labels, from coarse to fine, one line per recipe.

    Each measure has two charts: evaluated at the level of the training, and evaluated at the finest level.
    """
    levels, runs = list(evaluations.levels), evaluations.runs
    order = [NO_LEVEL, *levels] if any(run.trained_level is None for run in runs.values()) else levels
    charts = []
    for measure, title in MEASURES.items():
        same: dict[str, dict[int, float]] = {}
        finest: dict[str, dict[int, float]] = {}
        for name, run in runs.items():
            recipe, level = _recipe_name(contents[name]), run.trained_level
            finest.setdefault(recipe, {})[order.index(level or NO_LEVEL)] = run.at(measure, FINEST)
            if level is not None:
                same.setdefault(recipe, {})[levels.index(level)] = run.at(measure, level)
        names = [f"{level} ({count})" for level, count in evaluations.levels.items()]
        if same:
            chart = _level_chart(same, "trained and evaluated at", title, names)
            charts.append((f"{title}, %: evaluated at the level of the training", chart))
        all_names = [NO_LEVEL, *names] if order != levels else names
        charts.append(
            (f"{title}, %: evaluated at the finest level", _level_chart(finest, "trained at", title, all_names))
        )
    return charts


def _recipe_name(contents: RunContents) -> str:
    recipe = contents.files.recipe
    return recipe.name if recipe else contents.files.model


def _level_chart(
    recipes: Mapping[str, Mapping[int, float]], x_label: str, measure: str, names: Sequence[str]
) -> Markup:
    lines = [
        Series(recipe, sorted((float(place), value) for place, value in values.items()), color % LINE_COLORS)
        for color, (recipe, values) in enumerate(recipes.items())
    ]
    return line_chart(lines, x_label=x_label, y_label=f"{measure}, %", x_names=names)


def cloud_chart(
    cloud: SeedCloud, contents: Mapping[str, RunContents], first: str, second: str
) -> tuple[Markup, str] | None:
    """Draw the top-1 of each run on two datasets with a fitted line (ResMLP figure 4, thesis 6.7, 6.11).

    Networks have different colors; the second result explains the line.
    """
    if len(cloud.runs) < 2:
        return None
    networks = {name: contents[name].files.model for name in cloud.runs}
    several = len(set(networks.values())) > 1
    points = [
        Point(x, y, name, networks[name] if several else "")
        for name, x, y in zip(cloud.runs, cloud.first, cloud.second, strict=True)
    ]
    chart = scatter_chart(
        points,
        x_label=f"top-1 on {first}, %",
        y_label=f"top-1 on {second}, %",
        named=len(points) <= MAX_NAMED,
        line=cloud.line,
    )
    if cloud.line is None:
        return chart, ""
    fit = f"The dashed line fits all runs by least squares: {cloud.line[0]:.2f} points on {second} per point on {first}"
    return chart, f"{fit}, correlation {cloud.correlation:.2f}."


def cost_charts(contents: Mapping[str, RunContents], top1: Mapping[str, float]) -> list[Chart]:
    """Draw Mixer figure 2, left: top-1 against the cost of the training and of inference, with the Pareto frontier.

    A chart has the runs whose cost is known; runs of equal cost have none.
    """
    training = {name: each.record.training_multiply_adds for name, each in contents.items() if each.record}
    inference = {name: counted.multiply_adds for name, each in contents.items() if (counted := count_cost(each))}
    charts = []
    for title, costs in (("Cost of the training", training), ("Cost of inference, per image", inference)):
        points = [
            Point(costs[name] / 1e9, value, name, contents[name].files.model)
            for name, value in top1.items()
            if costs.get(name)
        ]
        if len({point.x for point in points}) < 2:
            continue
        chart = scatter_chart(
            points,
            x_label="multiply-adds, billions",
            y_label="top-1, %",
            named=len(points) <= MAX_NAMED,
            path=pareto_frontier([(point.x, point.y) for point in points]),
            log=True,
        )
        charts.append((title, chart))
    return charts


def pareto_frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the (cost, accuracy) points that no other point beats at the same or a lower cost, by rising cost."""
    frontier: list[tuple[float, float]] = []
    for cost, accuracy in sorted(points, key=lambda point: (point[0], -point[1])):
        if not frontier or accuracy > frontier[-1][1]:
            frontier.append((cost, accuracy))
    return frontier


@dataclass(frozen=True)
class SeedFigures:
    """Statistics and charts of runs that differ only in their seed."""

    rows: list[list[str]]  # measure, mean, std, min, max
    charts: list[Chart]
    early: list[Chart]  # top-1 of each run at an early epoch and at the end


def seed_figures(evaluations: RunEvaluations, data: str | None) -> SeedFigures | None:
    """Return statistics and figures 6.8, 6.9 and 6.10 of thesis 6.3.4, for three or more runs that differ in the seed.

    The histogram shows top-1 on the data named `data`, or else of the last evaluation in training.
    """
    if len(evaluations.folders) < LEAST_SEEDS or evaluations.not_only_seeds():
        return None
    spreads = evaluations.spreads() if data else evaluations.spreads_at_end()
    rows = [[s.name, *(f"{value:.2f}" for value in (s.mean, s.std, s.min, s.max))] for s in spreads]
    at_end = [final_values(folder).get("top1") for folder in evaluations.folders.values()]
    values = [value for value in at_end if value is not None]
    if data:
        values = [measures["top1"] for measures in evaluations.values().values()]
    charts: list[Chart] = []
    early: list[Chart] = []
    if len(values) >= LEAST_SEEDS:
        where = data or "val, after the last epoch"
        charts.append(("Distribution", histogram_chart(values, x_label=f"top-1 on {where}, %")))
    if by_epoch := evaluations.spread_by_epoch():
        ranges = [SeedRange(epoch, s.mean, s.std, s.min, s.max) for epoch, s in by_epoch.items()]
        charts.append(("Top-1 on val during training, %", range_chart(ranges, y_label="top-1 on val, %")))
    for at in evaluations.early_and_last():
        points = [Point(x, y, name) for name, x, y in zip(evaluations.folders, at.then, at.last, strict=True)]
        label = f"top-1 on val at epoch {at.epoch}, %"
        chart = scatter_chart(points, x_label=label, y_label="after the last epoch, %")
        early.append((f"Epoch {at.epoch} and the end: r = {at.correlation:.2f}", chart))
    return SeedFigures(rows, charts, early)


def branch_charts(contents: Mapping[str, RunContents]) -> list[Chart]:
    """Draw thesis figure 3.6: norms of residual branches by layer and epoch, for runs trained with `--pictures`."""
    stored = {name: each.attempt(partial(read_branch_norms, each.folder)) for name, each in contents.items()}
    return branch_epoch_charts({name: norms for name, norms in stored.items() if norms})
