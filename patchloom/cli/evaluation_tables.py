"""Tables and JSON of `evaluate`, `compare` and `probe --levels`."""

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from patchloom.cli.output import print_json, shortened
from patchloom.cli.table import mebibytes, print_table
from patchloom.evaluation.classification import MACRO_METRICS

if TYPE_CHECKING:
    from patchloom.tasks.classification.levels import LevelEvaluation, LevelEvaluations
    from patchloom.tasks.classification.several_runs import RunEvaluations

WORST_CLASSES = 10


def print_evaluations(
    runs: "RunEvaluations",
    *,
    agreement: bool = False,
    seeds: bool = False,
    cost: bool = False,
    device: str = "auto",
    as_json: bool = False,
) -> None:
    """Print the numbers of one run or several, and the views of `compare`."""
    several = len(runs.evaluations) > 1
    comparisons = runs.comparisons() if several and not seeds else []
    tradeoffs = runs.tradeoffs(device=device, seconds=1.0) if cost else []
    if as_json:
        print_json(_as_json(runs, comparisons, tradeoffs, agreement=agreement, seeds=seeds))
        return
    for name, evaluation in runs.evaluations.items():
        for note in evaluation.notes:
            print(f"note: {name}: {note}" if several else f"note: {note}")
    if several:
        _print_runs(runs)
    else:
        _print_one(next(iter(runs.evaluations.values())))
    if comparisons:
        _print_comparisons(comparisons)
    if seeds:
        _print_seeds(runs)
    if agreement:
        _print_disagreement(runs)
    if tradeoffs:
        _print_tradeoffs(tradeoffs)


def _as_json(
    runs: "RunEvaluations", comparisons: Any, tradeoffs: Any, *, agreement: bool, seeds: bool
) -> dict[str, Any]:
    values_of = {}
    for name, evaluation in runs.evaluations.items():
        report = evaluation.report
        per_class = {c: _finite(share) for c, share in zip(report.classes, report.class_accuracy.tolist(), strict=True)}
        values_of[name] = {
            **evaluation.values(),
            "per_class": per_class,
            "confusion": report.confusion.tolist(),
            "notes": evaluation.notes,
        }
    value: dict[str, Any] = {"runs": values_of} if len(values_of) > 1 else dict(next(iter(values_of.values())))
    if comparisons:
        value["comparisons"] = [{"first": c.first, "second": c.second, **dict(c)} for c in comparisons]
    if seeds:
        cloud = runs.cloud()
        value["seeds"] = {
            "spreads": [asdict(spread) for spread in runs.spreads()],
            "spreads_at_end": [asdict(spread) for spread in runs.spreads_at_end()],
            "top1_by_epoch": {epoch: asdict(spread) for epoch, spread in runs.spread_by_epoch().items()},
            "val_and_data": {**asdict(cloud), "correlation": _finite(cloud.correlation)},
            "differ_in": runs.not_only_seeds(),
        }
    if agreement:
        table = runs.disagreement()
        value["disagreement"] = {"names": table.names, "shares": table.shares.tolist()}
    if tradeoffs:
        value["cost"] = [asdict(row) for row in tradeoffs]
    return value


def _finite(value: float) -> float | None:
    """Return None for NaN, which JSON lacks: the accuracy of a class without images is null."""
    return value if math.isfinite(value) else None


def _print_one(evaluation: Any) -> None:
    numbers, report = evaluation.values(), evaluation.report
    low, high = numbers.pop("top1_low"), numbers.pop("top1_high")
    if report.is_imbalanced:  # the metrics that count every class equally follow top-1
        numbers = {name: numbers[name] for name in ("top1", *MACRO_METRICS)} | numbers
    rows = [
        (
            name,
            f"{value:,.0f}" if name == "images" else f"{value:.2f}",
            f"{low:.2f} – {high:.2f}" if name == "top1" else "",
        )
        for name, value in numbers.items()
    ]
    print_table(["measure", "#value", "95 % interval"], rows, title=_balance_text(report))
    per_class = zip(report.classes, report.class_accuracy.tolist(), strict=True)
    worst = sorted((value, name) for name, value in per_class if value == value)[: shortened(WORST_CLASSES)]
    print_table(["worst classes", "#top-1"], [(name, f"{value:.1f}") for value, name in worst])


def _print_runs(runs: "RunEvaluations") -> None:
    values = runs.values()
    names = [name for name in next(iter(values.values())) if not name.startswith("top1") and name != "images"]
    rows = [
        (
            run,
            f"{of['top1']:.2f}",
            f"{of['top1_low']:.2f} – {of['top1_high']:.2f}",
            *(f"{of[name]:.2f}" for name in names),
        )
        for run, of in values.items()
    ]
    images = next(iter(values.values()))["images"]
    uneven = _balance_text(next(iter(runs.evaluations.values())).report)
    title = f"{images:,.0f} images" + (f"; {uneven}" if uneven else "")
    print_table(["run", "#top1", "95 %", *(f"#{name}" for name in names)], rows, title=title)


def _balance_text(report: Any) -> str | None:
    """Return a line on uneven classes; None if they are even."""
    if not report.is_imbalanced:
        return None
    counts = np.unique(report.labels, return_counts=True)[1]
    return f"uneven classes ({counts.min():,} … {counts.max():,} images): compare by {' and '.join(MACRO_METRICS)}"


def _print_comparisons(comparisons: Any) -> None:
    rows = [
        (
            c.first,
            c.second,
            f"{c.difference:+.2f}",
            f"{c.low:+.2f} … {c.high:+.2f}",
            str(c.only_first),
            str(c.only_second),
            f"{c.p_value:.3f}" if c.p_value >= 0.001 else f"{c.p_value:.0e}",
            "yes" if c.significant else "no",
        )
        for c in comparisons
    ]
    columns = ["first", "second", "#top-1 points", "95 %", "#only first", "#only second", "#McNemar p", "significant"]
    print_table(columns, rows, title="pairs, on the same images; significant after Holm's correction at 5 %")


def _print_seeds(runs: "RunEvaluations") -> None:
    if other := runs.not_only_seeds():
        print(f"note: the runs differ in more than the seed: {', '.join(other)}")
    columns = ["#mean", "#std", "#min", "#max"]

    def cells(spread: Any) -> list[str]:
        return [f"{value:.2f}" for value in (spread.mean, spread.std, spread.min, spread.max)]

    spreads = runs.spreads()
    title = f"{spreads[0].runs} runs"
    print_table(["measure", *columns], [(s.name, *cells(s)) for s in spreads], title=title)
    by_epoch = runs.spread_by_epoch()
    rows = [(str(epoch), *cells(spread)) for epoch, spread in by_epoch.items()]
    print_table(["#epoch", *columns], rows, title="top1 on val while training (weights, not their average)")
    cloud = runs.cloud()
    if cloud.runs and cloud.first != cloud.second:
        points = zip(cloud.runs, cloud.first, cloud.second, strict=True)
        rows = [(run, f"{first:.2f}", f"{second:.2f}") for run, first, second in points]
        title = f"top-1 on each run's val and on these images, correlation {cloud.correlation:.2f}"
        print_table(["run", "#val", "#here"], rows, title=title)


def _print_disagreement(runs: "RunEvaluations") -> None:
    table = runs.disagreement()
    rows = [(name, *(f"{share:.3f}" for share in row)) for name, row in zip(table.names, table.shares, strict=True)]
    print_table(["", *(f"#{name}" for name in table.names)], rows, title="share of images decided differently")


def _print_tradeoffs(tradeoffs: Any) -> None:
    from patchloom.engine.display import duration
    from patchloom.models.cost import human

    rows = [
        (
            row.name,
            f"{row.top1:.2f}",
            f"{row.images_per_second:,.1f}",
            str(row.batch_size),
            human(row.multiply_adds),
            human(row.parameters),
            mebibytes(row.peak_mem_mib),
        )
        for row in tradeoffs
    ]
    columns = ["run", "#top-1", "#images/s", "#at batch", "#multiply-adds", "#parameters", "#peak memory"]
    print_table(columns, rows, title=f"accuracy and cost, measured on {tradeoffs[0].device}")
    trained = [
        (row.name, f"{row.top1:.2f}", human(row.training_multiply_adds), duration(row.training_s), row.training_device)
        for row in tradeoffs
        if row.training_multiply_adds
    ]
    if trained:
        title = "cost of the training: multiply-adds of three forward passes per image"
        print_table(["run", "#top-1", "#multiply-adds", "#time", "device"], trained, title=title)


def print_levels(levels: "LevelEvaluations", *, as_json: bool) -> None:
    """Print every number of each run; for several runs also a table of test level by train level per measure."""
    from patchloom.tasks.classification.levels import MEASURES

    if as_json:
        runs = {
            name: {"trained_level": run.trained_level, "neighbours": run.neighbours, **run.values}
            for name, run in levels.runs.items()
        }
        tables = {measure: levels.table(measure) for measure in MEASURES}
        print_json({"levels": levels.levels, "runs": runs, "tables": tables, "notes": levels.notes})
        return
    for note in levels.notes:
        print(f"note: {note}")
    for name, run in levels.runs.items():
        _print_run_levels(levels, run, name)
    if len(levels.runs) > 1:
        for measure, title in MEASURES.items():
            _print_level_table(levels, measure, title)
        print(
            "* evaluated at the level it was trained at; finer levels below are coarse-to-fine, coarser fine-to-coarse"
        )


def _print_run_levels(levels: "LevelEvaluations", run: "LevelEvaluation", name: str) -> None:
    """Print a table with a row per measure and a column per level."""
    ends = {level: "" if level == list(levels.levels)[-1] else f"_{level}" for level in levels.levels}
    of_levels = {
        level: {key.removesuffix(end): value for key, value in run.values.items() if _level_of(key, ends) == level}
        for level, end in ends.items()
    }
    trained = f"trained at level {run.trained_level}" if run.trained_level else "trained at no level of these data"
    names = dict.fromkeys(key for values in reversed(of_levels.values()) for key in values)
    print_table(
        ["measure", *(f"#{level} ({count})" for level, count in levels.levels.items())],
        [
            (key, *(_cell(key, of_levels[level]) for level in levels.levels))
            for key in names
            if not key.startswith("separability")
        ],
        title=f"{name}: {trained}; k = {run.neighbours}, chosen within train",
    )
    apart = [(key, f"{value:.2f}") for key, value in run.values.items() if key.startswith("separability")]
    if apart:
        print_table(["random halves of its classes", "#value"], apart)


def _level_of(key: str, ends: dict[str, str]) -> str:
    """Return the level of a number: the one with the longest ending that its name has."""
    return max((level for level, end in ends.items() if key.endswith(end)), key=lambda level: len(ends[level]))


def _cell(key: str, values: dict[str, float]) -> str:
    if key not in values:
        return "–"
    return f"{values[key]:.0f}" if key == "map_queries" else f"{values[key]:.2f}"


def _print_level_table(levels: "LevelEvaluations", measure: str, title: str) -> None:
    rows = [
        (
            f"{level} ({levels.levels[level]})",
            *(f"{value:.2f}{'*' if levels.runs[name].trained_level == level else ' '}" for name, value in of.items()),
        )
        for level, of in levels.table(measure).items()
    ]
    columns = [f"#{name} ({run.trained_level or 'no level'})" for name, run in levels.runs.items()]
    print_table(["evaluated at", *columns], rows, title=f"{title}, %; columns by the level trained at, coarse to fine")
