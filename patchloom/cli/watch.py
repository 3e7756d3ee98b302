"""`patchloom watch RUN…`: what runs are doing now, in the terminal or on a page."""

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchloom.cli.options import Json
from patchloom.options import Argument, Option

if TYPE_CHECKING:
    from rich.console import Group

    from patchloom.runs.watched import RunState, WatchedRun

SECONDS_BETWEEN_LINES = 10.0
CHART_ROWS, CHART_COLUMNS = 6, 36  # characters
BAR_COLUMNS = 2 * CHART_COLUMNS + 3
_NO_DOTS = 0x2800  # Braille
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a Braille character, by row and column

States = list[tuple["WatchedRun", "RunState"]]


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    runs: Annotated[list[str], Argument("Run folders, which need not exist yet.", complete="run")]
    page: Annotated[str | None, Option("Write an HTML page with curves and pictures that reloads itself.")] = None
    every: Annotated[float, Option("Seconds between updates.", minimum=0.2, metavar="SECONDS")] = 2.0
    once: Annotated[bool, Option("Print the state now and exit.")] = False
    as_json: Json = False


def watch(options: WatchOptions) -> None:
    """Watch training runs: what they are doing, curves, speed and the last evaluation.

    patchloom watch runs/photos

    It only reads the run folders, ends when all runs have ended, and can be stopped at any time with Ctrl-C.
    """
    from patchloom.cli.streams import StopRequested
    from patchloom.runs.watched import WatchedRun
    from patchloom_runtime.errors import UsageError

    for path in map(Path, options.runs):
        if options.once and not path.is_dir():
            raise UsageError(f"{path}: no such run folder")
        if path.exists() and not path.is_dir():
            raise UsageError(f"{path} is a file, expected a run folder")
    runs = [WatchedRun(Path(run)) for run in options.runs]
    view = _view(options)
    try:
        with view:
            while True:
                states = [(run, run.update()) for run in runs]
                view.show(states)
                if options.page:
                    _write_page(options, states)
                if options.once or all(state.is_over for _, state in states):
                    return
                time.sleep(options.every)
    except StopRequested as stop:  # the usual way to end it
        raise typer.Exit(stop.exit_code) from None


class _Lines:
    """One line per run: at the start, when its state or evaluation changes, and every ten seconds of progress."""

    def __init__(self) -> None:
        self._printed: dict[str, tuple[Any, int, float]] = {}

    def __enter__(self) -> "_Lines":
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: there is nothing to close."""

    def show(self, states: States) -> None:
        for _, state in states:
            news = state.state, state.activity, state.evaluation
            before, step, at = self._printed.get(state.run, (None, -1, 0.0))
            is_due = time.monotonic() - at >= SECONDS_BETWEEN_LINES and state.step != step
            if news != before or is_due:
                self._printed[state.run] = news, state.step, time.monotonic()
                self.print(state)

    def print(self, state: "RunState") -> None:
        from patchloom.cli.output import print_result
        from patchloom_runtime.printable import printable

        print_result(printable("  ".join(filter(None, (state.run, state.headline(), state.numbers())))))


class _JsonLines(_Lines):
    """The same as items of a JSON list."""

    def __init__(self) -> None:
        from patchloom.cli.output import JsonList

        super().__init__()
        self._list = JsonList()

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self._list.close()

    def print(self, state: "RunState") -> None:
        self._list.add(asdict(state))


class _Screen:
    """All runs with their curves, redrawn in place."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        from patchloom_runtime.printable import for_rich

        self._live = Live(console=Console(file=for_rich(sys.stdout)), auto_refresh=False, vertical_overflow="crop")

    def __enter__(self) -> "_Screen":
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, states: States) -> None:
        self._live.update(drawn(states), refresh=True)


def _view(options: WatchOptions) -> "_Lines | _Screen":
    from patchloom.cli.output import is_quiet, results

    if options.as_json:
        return _JsonLines()
    return _Screen() if results().isatty() and not is_quiet() else _Lines()


def drawn(states: States) -> "Group":
    """Return the runs as rich draws them: state, progress, numbers, curves."""
    from rich.console import Group
    from rich.text import Text

    from patchloom.engine.display import evaluation_line
    from patchloom_runtime.printable import printable

    parts: list[Any] = []
    for run, state in states:
        parts.append(Text.assemble((printable(state.run), "bold"), "  ", printable(state.headline())))
        if state.total_steps:
            done = min(BAR_COLUMNS, BAR_COLUMNS * state.step // state.total_steps)
            parts.append(Text.assemble(("━" * done, "cyan"), ("━" * (BAR_COLUMNS - done), "bright_black")))
        parts += [Text(printable(line)) for line in (state.numbers(),) if line]
        parts += [Text(line) for line in _charts(run.records)]
        if state.evaluation:
            parts.append(Text(printable(evaluation_line(state.evaluation))))
        if state.picture:
            parts.append(Text(printable(f"pictures: {state.picture}")))
        parts.append(Text())
    return Group(*parts)


def _charts(records: Sequence[dict[str, Any]]) -> list[str]:
    """Return the loss and the main metric side by side as lines of text."""
    from patchloom.report.run_report import curve
    from patchloom.report.watch_page import main_metrics

    metric = [("evaluation", name) for name in main_metrics(records)[:1]]
    curves = [(name, curve(records, 1.0, kind, "model", name)) for kind, name in [("train", "loss"), *metric]]
    blocks = [text_chart(name, points) for name, points in curves if len(points) > 1]
    return ["   ".join(line) for line in zip(*blocks, strict=True)]


def text_chart(name: str, points: Sequence[tuple[float, float]]) -> list[str]:
    """Return a curve in Braille characters below a line with its name, range and last value."""
    import numpy as np

    xs, ys = np.array(points).T
    xs, ys = xs[np.isfinite(ys)], ys[np.isfinite(ys)]
    if not len(ys):
        return [f"{name}: no finite values"[:CHART_COLUMNS].ljust(CHART_COLUMNS), *[" " * CHART_COLUMNS] * CHART_ROWS]
    low, high = ys.min(), ys.max()
    heights = np.interp(np.linspace(xs[0], xs[-1], 2 * CHART_COLUMNS), xs, ys)
    rows = np.rint((high - heights) / (high - low or 1.0) * (4 * CHART_ROWS - 1)).astype(int)
    cells = [[_NO_DOTS] * CHART_COLUMNS for _ in range(CHART_ROWS)]
    for column, row in enumerate(rows):
        cells[row // 4][column // 2] |= _DOTS[row % 4][column % 2]
    title = f"{name} {ys[-1]:.4g}  ({low:.4g} … {high:.4g})"
    return [title[:CHART_COLUMNS].ljust(CHART_COLUMNS), *("".join(map(chr, row)) for row in cells)]


def _write_page(options: WatchOptions, states: States) -> None:
    from patchloom.report.watch_page import write_watch_page

    assert options.page is not None
    records = [(state, run.records) for run, state in states]
    write_watch_page(Path(options.page), records, every_s=max(options.every, 2.0))
