"""What `patchloom evaluate` says of one run or several, as tables or JSON."""

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from patchloom.tasks.classification.several_runs import RunEvaluations

WORST_CLASSES = 10


def show(found: "RunEvaluations", *, agreement: bool, seeds: bool, costs: bool, device: str, as_json: bool) -> None:
    """Print the numbers of the runs and what was asked for beside them."""
    several = len(found.evaluations) > 1
    comparisons = found.comparisons() if several and not seeds else []
    tradeoffs = found.tradeoffs(device=device, seconds=1.0) if costs else []
    if as_json:
        _print_json(found, comparisons, tradeoffs, agreement=agreement, seeds=seeds)
        return
    for name, evaluation in found.evaluations.items():
        for note in evaluation.notes:
            print(f"note: {name}: {note}" if several else f"note: {note}")
    if several:
        _print_runs(found)
    else:
        _print_one(next(iter(found.evaluations.values())))
    if comparisons:
        _print_comparisons(comparisons)
    if seeds:
        _print_seeds(found)
    if agreement:
        _print_disagreement(found)
    if tradeoffs:
        _print_tradeoffs(tradeoffs)


def _print_json(found: "RunEvaluations", comparisons: Any, tradeoffs: Any, *, agreement: bool, seeds: bool) -> None:
    from dataclasses import asdict

    from patchloom.cli.output import print_json

    runs = {}
    for name, evaluation in found.evaluations.items():
        report = evaluation.report
        per_class = {c: _finite(share) for c, share in zip(report.classes, report.class_accuracy.tolist(), strict=True)}
        confusion = report.confusion.tolist()
        runs[name] = {
            **evaluation.values(), "per_class": per_class, "confusion": confusion, "notes": evaluation.notes,
        }  # fmt: skip
    answer: dict[str, Any] = {"runs": runs} if len(runs) > 1 else dict(next(iter(runs.values())))
    if comparisons:
        answer["comparisons"] = [{"first": c.first, "second": c.second, **dict(c)} for c in comparisons]
    if seeds:
        cloud = found.cloud()
        answer["seeds"] = {
            "spreads": [asdict(spread) for spread in found.spreads()],
            "spreads_at_end": [asdict(spread) for spread in found.spreads_at_end()],
            "top1_by_epoch": {epoch: asdict(spread) for epoch, spread in found.spread_by_epoch().items()},
            "val_and_data": {**asdict(cloud), "correlation": _finite(cloud.correlation)},
            "differ_in": found.not_only_seeds(),
        }
    if agreement:
        table = found.disagreement()
        answer["disagreement"] = {"names": table.names, "shares": table.shares.tolist()}
    if tradeoffs:
        answer["cost"] = [asdict(row) for row in tradeoffs]
    print_json(answer)


def _finite(value: float) -> float | None:
    """JSON has no NaN: the accuracy of a class without images is null."""
    return value if math.isfinite(value) else None


def _print_one(evaluation: Any) -> None:
    from patchloom.cli.output import shortened
    from patchloom.cli.table import print_table

    numbers, report = evaluation.values(), evaluation.report
    low, high = numbers.pop("top1_low"), numbers.pop("top1_high")
    rows = [
        (
            name,
            f"{value:.0f}" if name == "images" else f"{value:.2f}",
            f"{low:.2f} – {high:.2f}" if name == "top1" else "",
        )
        for name, value in numbers.items()
    ]
    print_table(["measure", "#value", "95 % interval"], rows)
    per_class = zip(report.classes, report.class_accuracy.tolist(), strict=True)
    worst = sorted((value, name) for name, value in per_class if value == value)[: shortened(WORST_CLASSES)]
    print_table(["worst classes", "#top-1"], [(name, f"{value:.1f}") for value, name in worst])


def _print_runs(found: "RunEvaluations") -> None:
    from patchloom.cli.table import print_table

    values = found.values()
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
    print_table(["run", "#top1", "95 %", *(f"#{name}" for name in names)], rows, title=f"{images:.0f} images")


def _print_comparisons(comparisons: Any) -> None:
    from patchloom.cli.table import print_table

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


def _print_seeds(found: "RunEvaluations") -> None:
    from patchloom.cli.table import print_table

    if other := found.not_only_seeds():
        print(f"note: the runs differ in more than the seed: {', '.join(other)}")
    columns = ["#mean", "#std", "#min", "#max"]

    def cells(spread: Any) -> list[str]:
        return [f"{value:.2f}" for value in (spread.mean, spread.std, spread.min, spread.max)]

    spreads = found.spreads()
    title = f"{spreads[0].runs} runs"
    print_table(["measure", *columns], [(s.name, *cells(s)) for s in spreads], title=title)
    by_epoch = found.spread_by_epoch()
    rows = [(str(epoch), *cells(spread)) for epoch, spread in by_epoch.items()]
    print_table(["#epoch", *columns], rows, title="top1 on val while training (weights, not their average)")
    cloud = found.cloud()
    if cloud.runs and cloud.first != cloud.second:
        points = zip(cloud.runs, cloud.first, cloud.second, strict=True)
        rows = [(run, f"{first:.2f}", f"{second:.2f}") for run, first, second in points]
        title = f"top-1 on each run's val and on these images, correlation {cloud.correlation:.2f}"
        print_table(["run", "#val", "#here"], rows, title=title)


def _print_disagreement(found: "RunEvaluations") -> None:
    from patchloom.cli.table import print_table

    table = found.disagreement()
    rows = [(name, *(f"{share:.3f}" for share in row)) for name, row in zip(table.names, table.shares, strict=True)]
    print_table(["", *(f"#{name}" for name in table.names)], rows, title="share of images decided differently")


def _print_tradeoffs(tradeoffs: Any) -> None:
    from patchloom.cli.table import mebibytes, print_table
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
