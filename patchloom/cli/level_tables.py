"""What `patchloom evaluate --levels` says, as tables or JSON."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from patchloom.tasks.classification.levels import LevelEvaluation, LevelEvaluations


def show_levels(found: "LevelEvaluations", *, as_json: bool) -> None:
    """Print every number of one run; of several, a table of test level by train level for each measure."""
    from patchloom.cli.output import print_json
    from patchloom.tasks.classification.levels import MEASURES

    if as_json:
        runs = {
            name: {"trained_level": run.trained_level, "neighbours": run.neighbours, **run.values}
            for name, run in found.runs.items()
        }
        tables = {measure: found.table(measure) for measure in MEASURES}
        answer = {"levels": found.levels, "runs": runs, "tables": tables, "notes": found.notes}
        print_json(answer)
        return
    for note in found.notes:
        print(f"note: {note}")
    for name, run in found.runs.items():
        _print_run(found, run, name)
    if len(found.runs) > 1:
        for measure, title in MEASURES.items():
            _print_table(found, measure, title)
        print("* judged at the level it was trained at; finer levels below are coarse-to-fine, coarser fine-to-coarse")


def _print_run(found: "LevelEvaluations", run: "LevelEvaluation", name: str) -> None:
    """Numbers by level: a row each, a column per level."""
    from patchloom.cli.table import print_table

    ends = {level: "" if level == _finest(found) else f"_{level}" for level in found.levels}
    of_levels = {
        level: {key.removesuffix(end): value for key, value in run.values.items() if _level_of(key, ends) == level}
        for level, end in ends.items()
    }
    names = dict.fromkeys(key for values in reversed(of_levels.values()) for key in values)
    print_table(
        ["measure", *(f"#{level} ({count})" for level, count in found.levels.items())],
        [
            (key, *(_cell(key, of_levels[level]) for level in found.levels))
            for key in names
            if not key.startswith("separability")
        ],
        title=f"{name}: {_trained_at(run.trained_level)}; k = {run.neighbours}, chosen within train",
    )
    apart = [(key, f"{value:.2f}") for key, value in run.values.items() if key.startswith("separability")]
    if apart:
        print_table(["random halves of its classes", "#value"], apart)


def _trained_at(level: str | None) -> str:
    """'trained at level coarse', or that it was trained at none of these."""
    return f"trained at level {level}" if level else "trained at no level of these data"


def _finest(found: "LevelEvaluations") -> str:
    """The last: levels go from coarse to fine."""
    return list(found.levels)[-1]


def _level_of(key: str, ends: dict[str, str]) -> str:
    """The level a number is of: the longest ending that its name has."""
    return max((level for level, end in ends.items() if key.endswith(end)), key=lambda level: len(ends[level]))


def _cell(key: str, values: dict[str, float]) -> str:
    if key not in values:
        return "–"
    return f"{values[key]:.0f}" if key == "map_queries" else f"{values[key]:.2f}"


def _print_table(found: "LevelEvaluations", measure: str, title: str) -> None:
    from patchloom.cli.table import print_table

    rows = [
        (
            f"{level} ({found.levels[level]})",
            *(f"{value:.2f}{'*' if found.runs[name].trained_level == level else ' '}" for name, value in of.items()),
        )
        for level, of in found.table(measure).items()
    ]
    columns = [f"#{name} ({run.trained_level or 'no level'})" for name, run in found.runs.items()]
    print_table(["judged at", *columns], rows, title=f"{title}, %; columns by the level trained at, coarse to fine")
