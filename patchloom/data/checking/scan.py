"""Scan of all images of a dataset, in several processes, with a cache (`scan_cache`).

An image is decoded again when its file has changed (`image_store.file_state`). An interrupted scan continues where it
stopped.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from patchloom.data.annotations.faults import box_faults, mask_faults
from patchloom.data.checking.duplicates import digest, thumbnail
from patchloom.data.checking.scan_cache import ImageScan, ScanCache, taking_turns
from patchloom.data.datasets import Progress
from patchloom.data.images.image_store import ImageStore, Stamp
from patchloom.machine import cores
from patchloom_runtime.errors import DataError, ResourceError
from patchloom_runtime.images.decode import decode_with_facts
from patchloom_runtime.printable import for_rich

NOT_OPENED = "cannot be read ("  # missing rights or a failing disk, which may change while the file does not
_CHUNK = 32  # images that a process takes at a time
_FEW = 4 * _CHUNK  # for so few images starting processes costs more than it saves
_WRITE_EVERY = 2_000  # images between writes of the cache


class ScanItem(NamedTuple):
    """An image to scan: the number of its store, and its row there."""

    store: int
    row: int


def scan(
    stores: Sequence[ImageStore],
    items: Sequence[ScanItem],
    *,
    workers: int | None = None,
    cache: bool = True,
    progress: Progress | None = None,
) -> tuple[list[ImageScan], int]:
    """Return the scan of each item, and the number of images that had to be decoded."""

    def report(done: int) -> None:
        if progress:
            progress(min(done, len(items)), len(items))

    caches = {store.home: ScanCache(store.home) for store in stores if store.home} if cache else {}
    stamps = _stamps(stores, items) if caches else [None] * len(items)
    homes = [stores[item.store].home for item in items]
    scans = _cached(caches, homes, stamps)
    if all(scans):
        return [one for one in scans if one], 0
    with taking_turns(list(caches.values()), waiting=report):
        scans = _cached(caches, homes, stamps) if caches else scans  # another process may have scanned meanwhile
        missing = [position for position, one in enumerate(scans) if one is None]
        report(len(items) - len(missing))
        fresh: dict[str, list[tuple[Stamp, ImageScan]]] = {home: [] for home in caches}
        try:
            with closing(_scan_all(stores, [items[i] for i in missing], workers)) as results:
                for number, (position, result) in enumerate(zip(missing, results, strict=True), start=1):
                    scans[position] = result
                    stamp, home = stamps[position], homes[position]
                    if stamp and not result.error.startswith(NOT_OPENED):
                        fresh[home].append((stamp, result))
                        if len(fresh[home]) >= _WRITE_EVERY:
                            caches[home].write(fresh[home])
                            fresh[home] = []
                    report(len(items) - len(missing) + number)
        finally:
            for home, rest in fresh.items():
                caches[home].write(rest)
    return [one for one in scans if one], len(missing)


def scan_image(images: ImageStore, row: int, *, digest_of_pixels: bool = False) -> ImageScan:
    """Decode one image, and read its mask and boxes if it has any. The digest is of the file, if there is one."""
    where = images.where(row)
    mode, rotated, animated = "", False, False
    try:
        data = images.encoded(row)
        if data is None:
            image = images.read(row)
        else:
            image, header = decode_with_facts(data, where)
            mode, rotated, animated = header.mode, header.rotated, header.animated
    except DataError as error:
        return ImageScan(error=str(error).removeprefix(f"{where}: "))
    faults = (*mask_faults(images, row, image.size), *box_faults(images, row, image.size))
    content = image if digest_of_pixels or data is None else data
    return ImageScan("", mode, *image.size, rotated, animated, digest(content), thumbnail(image), faults)


def _cached(
    caches: dict[str, ScanCache], homes: Sequence[str], stamps: Sequence[Stamp | None]
) -> list[ImageScan | None]:
    known = {home: cache.read() for home, cache in caches.items()}
    return [known[home].get(stamp) if stamp else None for home, stamp in zip(homes, stamps, strict=True)]


def _stamps(stores: Sequence[ImageStore], items: Sequence[ScanItem]) -> list[Stamp | None]:
    """Return the stamp of each item. Each store is called once, since one file may hold many images."""
    rows: list[list[int]] = [[] for _ in stores]
    for item in items:
        rows[item.store].append(item.row)
    stamps: list[Iterator[Stamp | None]] = [iter(store.stamps(own)) for store, own in zip(stores, rows, strict=True)]
    return [next(stamps[item.store]) for item in items]


def _scan_all(
    stores: Sequence[ImageStore], items: Sequence[ScanItem], workers: int | None
) -> Generator[ImageScan, None, None]:
    """Yield scans in order. Uses processes, since two threads were slower than one (benchmarks/LOG.md)."""
    workers = workers or cores()
    if workers == 1 or len(items) <= _FEW:
        yield from (scan_image(stores[item.store], item.row) for item in items)
        return
    chunks = [items[i : i + _CHUNK] for i in range(0, len(items), _CHUNK)]
    context = multiprocessing.get_context()
    pool = ProcessPoolExecutor(workers, context, initializer=_start_scan, initargs=(stores,))
    try:
        for scans in pool.map(_scan_chunk, chunks):
            yield from scans
    except BrokenProcessPool as error:
        raise ResourceError("a process that reads images was killed (out of memory?); try one worker") from error
    finally:
        pool.shutdown(cancel_futures=True)


_stores: Sequence[ImageStore] = ()  # in a worker process


def _start_scan(stores: Sequence[ImageStore]) -> None:
    global _stores
    _stores = stores
    start_worker()


def start_worker() -> None:
    """Prepare a process of a pool: it ends when its parent does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker when its parent dies; it would wait forever for the next chunk."""
    parent = multiprocessing.parent_process()
    if parent:
        parent.join()
        os._exit(1)


def _scan_chunk(items: Sequence[ScanItem]) -> list[ImageScan]:
    return [scan_image(_stores[item.store], item.row) for item in items]


@contextmanager
def scan_bar(*, enabled: bool = True, what: str = "checking") -> Iterator[Progress | None]:
    """Yield a callback that draws a progress bar on a terminal, or None if stderr is not a terminal.

    The bar appears with the first call, so nothing is drawn if there is nothing to do.
    """
    if not enabled or not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Without a refresh thread: processes are forked while the bar is visible.
    with Bar(*columns, console=Console(file=for_rich(sys.stderr)), transient=True, auto_refresh=False) as bar:
        task = bar.add_task("", total=None, visible=False)
        last = 0.0

        def update(done: int, total: int) -> None:
            nonlocal last
            if time.monotonic() - last > 0.1 or done == total:
                last = time.monotonic()
                bar.update(task, completed=done, total=total, visible=True, refresh=True)

        yield update
