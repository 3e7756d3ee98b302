"""`patchloom report RUN…`: one page on a run, or on several side by side."""

from typing import Annotated

import typer


def report(
    runs: Annotated[list[str], typer.Argument(help="Folders of runs; two or more are compared.")],
    data: Annotated[str | None, typer.Option(help="Where the data lie now; several runs are evaluated on it.")] = None,
    out: Annotated[
        str | None, typer.Option(help="The page; RUN/report.html, or comparison.html here when left out.")
    ] = None,
) -> None:
    """Write one HTML file that needs nothing else: numbers, curves, confusion, mistakes, pictures, recipe, cost."""
    from pathlib import Path

    from patchloom.deployment.translation_files import translates_text

    if len(runs) == 1 and translates_text(Path(runs[0])):
        from patchloom.deployment.translation_report import report_translation

        print(report_translation(Path(runs[0]), out=Path(out) if out else None))
        return
    if len(runs) == 1:
        from patchloom.deployment.report import report_run

        print(report_run(Path(runs[0]), data=data, out=Path(out) if out else None))
        return
    from patchloom.deployment.comparison_report import report_runs

    print(report_runs(runs, data=data, out=Path(out or "comparison.html")))
