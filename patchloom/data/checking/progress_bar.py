"""How far a scan, or other work on many files, is, on a terminal."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from patchloom.data.datasets import Progress
from patchloom_runtime.printable import for_rich


@contextmanager
def scan_bar(*, shown: bool = True, what: str = "checking") -> Iterator[Progress | None]:
    """A bar on a terminal; elsewhere, and where nothing has to be looked at, nothing."""
    if not shown or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # No thread of its own: processes are forked while the bar is shown.
    with Bar(*columns, console=Console(file=for_rich(sys.stderr)), transient=True, auto_refresh=False) as bar:
        task = bar.add_task("", total=None, visible=False)
        last = 0.0

        def show(done: int, total: int) -> None:
            nonlocal last
            if time.monotonic() - last > 0.1 or done == total:
                last = time.monotonic()
                bar.update(task, completed=done, total=total, visible=True, refresh=True)

        yield show
