"""The page of `patchloom watch`: one file that a browser loads again every few seconds, with curves and numbers."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from patchloom.report.page import data_uri, inline_policy, page_script, write_page
from patchloom.report.run_report import LOSS, RATE, ChartLine, Charts, curve_charts, validation
from patchloom.runs.watched import RunState
from patchloom_runtime.errors import DataError
from patchloom_runtime.images.inputs import thumbnail_of

PICTURE_PIXELS = 1200  # of the longer side
CHARTED_METRICS = 3
_SPEED = "images per second"
_NOT_CHARTED = ("loss", "images", "objects")


def write_watch_page(
    path: Path, runs: Sequence[tuple[RunState, Sequence[Mapping[str, Any]]]], *, every_s: float
) -> None:
    """Write the page of runs with their records. It is loaded again every `every_s` seconds until all runs are over."""
    is_over = all(state.is_over for state, _ in runs)
    sections = [
        {
            "state": state,
            "share": min(1.0, state.step / state.total_steps) if state.total_steps else 0.0,
            "charts": curve_charts(*_with_speed(records)),
            "evaluation": _evaluation_rows(state),
            "picture": _picture(state.picture),
        }
        for state, records in runs
    ]
    title = runs[0][0].run if len(runs) == 1 else f"{len(runs)} runs"
    refresh = None if is_over else max(1, round(every_s))
    written = time.strftime("%Y-%m-%d %H:%M:%S")
    script = Markup("\n" + page_script("watch.js"))
    write_page(
        path,
        "watch.html.j2",
        title=title,
        sections=sections,
        refresh_s=refresh,
        written=written,
        script=script,
        policy=Markup(inline_policy(script)),
    )


def main_metrics(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the evaluated values that are worth a chart, the main one first."""
    names = dict.fromkeys(name for r in records if r.get("kind") == "evaluation" for name in r.get("values", {}))
    return [name for name in names if name not in _NOT_CHARTED][:CHARTED_METRICS]


def _with_speed(records: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], Charts]:
    """Return the records with their speed as a value, and the charts of the page."""
    charts: dict[str, Sequence[ChartLine]] = {**LOSS}
    for name in main_metrics(records):
        charts[name] = [*validation(name), validation(name, average="average", name="average of epochs")[1]]
    charts |= {**RATE, "Speed in training, images/s": [ChartLine(label=_SPEED, color=0, kind="train", value=_SPEED)]}
    speeds = [record.get("time", {}).get("images_per_s") for record in records]
    timed = [
        {**record, "values": {**record["values"], _SPEED: speed}} if speed else record
        for record, speed in zip(records, speeds, strict=True)
    ]
    return timed, charts


def _evaluation_rows(state: RunState) -> list[tuple[str, str]]:
    values = state.evaluation["values"] if state.evaluation else {}
    return [(name, f"{value:.4g}") for name, value in values.items() if value is not None]


def _picture(path: str | None) -> str | None:
    """Return the last picture of the run for the page; None if it cannot be read, such as while it is replaced."""
    if path is None:
        return None
    try:
        return data_uri(thumbnail_of(path, PICTURE_PIXELS), "JPEG", quality=85)
    except DataError:
        return None
