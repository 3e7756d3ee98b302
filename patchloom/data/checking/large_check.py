"""A check in parts, for data that one machine, or its memory, is too small for.

`check(DATA, out="CHECK", part="3/8")` makes a share of the scan parts (`scan_parts`), in any number of processes; parts
that exist are skipped. `check(DATA, out="CHECK")` makes what is missing and joins all (`joined_check`).
"""

import multiprocessing
import operator
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

from patchloom.data.buckets.mirror import Mirror
from patchloom.data.checking.check_report import CheckReport, FirstItems
from patchloom.data.checking.joined_check import LISTS, join_parts
from patchloom.data.checking.part_sources import PartSource, list_part_sources
from patchloom.data.checking.scan import start_worker
from patchloom.data.checking.scan_parts import PART_FILE, file_of, key_of, scan_source
from patchloom.data.datasets import Progress
from patchloom.data.sources.specs import Data, is_url
from patchloom.disk import atomic_write, make_folder
from patchloom.machine import cores
from patchloom.options import part_of
from patchloom_runtime.errors import ResourceError, UsageError
from patchloom_runtime.printable import plural

_WAITING = 2  # sources per process that wait for it; listing more would hold their paths in memory
REPORT_FILES = (*(f"{name}.csv" for name in LISTS), "check.json", "check.html")


class _MadePart(NamedTuple):
    """What was scanned for a part."""

    name: str
    images: int
    unreadable: int


def check_in_parts(
    data: Data,
    *,
    out: str,
    part: str | None = None,
    join: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
) -> CheckReport:
    """Make the missing parts of a check in `out`, or those of one share, and join all unless it is a share.

    With `join`, no part is made. The report of a share counts the images that were scanned now.
    """
    share = (1, 1) if part is None else part_of(part)
    if part is not None and join:
        raise UsageError("--part is the work of one machine: pass --join to a later command without it")
    sources = list_part_sources(data)
    bucket = Mirror(out) if is_url(out) else None
    folder = bucket.folder if bucket else Path(os.path.expanduser(out))
    make_folder(folder)
    made: list[_MadePart] = []
    if not join:
        present = set(bucket.names() if bucket else os.listdir(folder))
        missing: Iterable[PartSource] = (each for each in sources.listed(share) if file_of(key_of(each)) not in present)
        missing = [*missing] if sources.shards else missing  # few enough to be counted
        total = operator.length_hint(missing)
        for one in _made(missing, folder, workers or cores()):
            made.append(one)
            if bucket:
                bucket.push(names=[one.name], last=[])
            if progress:
                progress(len(made), max(total, len(made)))
    if part is not None:
        return _share_report(f"part {part}", sources.name, made)
    if bucket:
        bucket.pull(lambda name: PART_FILE.fullmatch(name) is not None or name in REPORT_FILES)
    report = join_parts(sources, folder, decoded=sum(one.images for one in made), progress=progress)
    publish_report(out)
    return report


def publish_report(out: str) -> None:
    """Upload the report, and its page, if `out` is in a bucket."""
    if is_url(out):
        bucket = Mirror(out)
        bucket.push(names=[name for name in REPORT_FILES if (bucket.folder / name).exists()], last=[])


def _share_report(share: str, name: str, made: list[_MadePart]) -> CheckReport:
    decoded = sum(one.images for one in made)
    return CheckReport(
        name=f"{name}, {share}",
        splits={share: decoded},
        classes={},
        widths=None,
        heights=None,
        unreadable=FirstItems((), sum(one.unreadable for one in made)),
        odd=(),
        duplicates=(),
        near_duplicates=(),
        faults=(),
        notes=(f"{plural(len(made), 'part')} made",),
        decoded=decoded,
        listings={},
    )


def _made(missing: Iterable[PartSource], folder: Path, workers: int) -> Iterator[_MadePart]:
    """Make parts in several processes and yield them as they are done."""
    if workers == 1:
        yield from (_make(source, folder) for source in missing)
        return
    running: set[Future[_MadePart]] = set()
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context(), initializer=start_worker)
    try:
        for source in missing:
            running.add(pool.submit(_make, source, folder))
            if len(running) >= _WAITING * workers:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        for future in running:
            yield future.result()
    except BrokenProcessPool as error:
        raise ResourceError("a process that reads images was killed (out of memory?); try one worker") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _make(source: PartSource, folder: Path) -> _MadePart:
    header, content = scan_source(source)
    name = file_of(header.key)
    atomic_write(folder / name, content)
    return _MadePart(name, header.rows, len(header.errors))
