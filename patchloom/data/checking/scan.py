"""Every picture of a data set decoded once, in several processes; what was seen is kept (`seen`).

A picture is decoded again when its file has changed (`sets.file_state`). A scan that was interrupted goes on where it
stopped.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from typing import NamedTuple

from patchloom.data.checking.duplicates import digest, thumbnail
from patchloom.data.checking.scan_cache import ImageScan, ScanCache, taking_turns
from patchloom.data.datasets import ImageStore, Progress, Stamp
from patchloom.data.images.box_faults import box_faults
from patchloom.data.images.mask_faults import mask_faults
from patchloom.machine import cores
from patchloom_runtime.errors import DataError, ResourceError
from patchloom_runtime.images.decode import decode_with_facts

NOT_OPENED = "cannot be read ("  # rights or a failing disk, which may change while the file does not
_CHUNK = 32  # pictures a process takes at a time
_FEW = 4 * _CHUNK  # up to here starting processes costs more than it saves
_KEPT_EVERY = 2_000  # pictures between writes of the cache


class ScanItem(NamedTuple):
    """A picture to look at: the number of its store, and its row there."""

    store: int
    row: int


def scan(
    stores: Sequence[ImageStore],
    tasks: Sequence[ScanItem],
    *,
    workers: int | None = None,
    cache: bool = True,
    progress: Progress | None = None,
) -> tuple[list[ImageScan], int]:
    """What each task shows, and how many pictures had to be decoded for it."""

    def done(number: int) -> None:
        if progress:
            progress(min(number, len(tasks)), len(tasks))

    kept = {store.home: ScanCache(store.home) for store in stores if store.home} if cache else {}
    stamps = _stamps(stores, tasks) if kept else [None] * len(tasks)
    homes = [stores[task.store].home for task in tasks]
    sights = _known(kept, homes, stamps)
    if all(sights):
        return [sight for sight in sights if sight], 0
    with taking_turns(list(kept.values()), waiting=done):
        sights = _known(kept, homes, stamps) if kept else sights  # another process may have looked meanwhile
        missing = [position for position, sight in enumerate(sights) if sight is None]
        done(len(tasks) - len(missing))
        fresh: dict[str, list[tuple[Stamp, ImageScan]]] = {home: [] for home in kept}
        try:
            with closing(_look_at(stores, [tasks[i] for i in missing], workers)) as seen:
                for number, (position, sight) in enumerate(zip(missing, seen, strict=True), start=1):
                    sights[position] = sight
                    stamp, home = stamps[position], homes[position]
                    if stamp and not sight.error.startswith(NOT_OPENED):
                        fresh[home].append((stamp, sight))
                        if len(fresh[home]) >= _KEPT_EVERY:
                            kept[home].write(fresh[home])
                            fresh[home] = []
                    done(len(tasks) - len(missing) + number)
        finally:
            for home, rest in fresh.items():
                kept[home].write(rest)
    return [sight for sight in sights if sight], len(missing)


def look(images: ImageStore, row: int) -> ImageScan:
    """Decode one picture, and its mask and boxes where it has any."""
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
    faults = [*mask_faults(images, row, image.size), *box_faults(images, row, image.size)]
    lines = "\n".join(f"{kind}\t{detail}" for kind, detail in faults)
    return ImageScan("", mode, *image.size, rotated, animated, digest(data or image), thumbnail(image), lines)


def _known(kept: dict[str, ScanCache], homes: Sequence[str], stamps: Sequence[Stamp | None]) -> list[ImageScan | None]:
    known = {home: seen.read() for home, seen in kept.items()}
    return [known[home].get(stamp) if stamp else None for home, stamp in zip(homes, stamps, strict=True)]


def _stamps(stores: Sequence[ImageStore], tasks: Sequence[ScanItem]) -> list[Stamp | None]:
    """Of each task; a store is asked once, since many pictures may lie in one file."""
    rows: list[list[int]] = [[] for _ in stores]
    for task in tasks:
        rows[task.store].append(task.row)
    found: list[Iterator[Stamp | None]] = [iter(store.stamps(asked)) for store, asked in zip(stores, rows, strict=True)]
    return [next(found[task.store]) for task in tasks]


def _look_at(
    stores: Sequence[ImageStore], tasks: Sequence[ScanItem], workers: int | None
) -> Generator[ImageScan, None, None]:
    """In order. Processes, since two threads were slower than one (benchmarks/LOG.md)."""
    workers = workers or cores()
    if workers == 1 or len(tasks) <= _FEW:
        yield from (look(stores[task.store], task.row) for task in tasks)
        return
    chunks = [tasks[i : i + _CHUNK] for i in range(0, len(tasks), _CHUNK)]
    context = multiprocessing.get_context()
    pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(stores,))
    try:
        for sights in pool.map(_look_at_chunk, chunks):
            yield from sights
    except BrokenProcessPool as error:
        raise ResourceError("a process that reads pictures was killed (out of memory?); try one worker") from error
    finally:
        pool.shutdown(cancel_futures=True)


_stores: Sequence[ImageStore] = ()  # of a worker process


def _start_worker(stores: Sequence[ImageStore]) -> None:
    global _stores
    _stores = stores
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for ever for its next pictures."""
    parent = multiprocessing.parent_process()
    if parent:
        parent.join()
        os._exit(1)


def _look_at_chunk(tasks: Sequence[ScanItem]) -> list[ImageScan]:
    return [look(_stores[task.store], task.row) for task in tasks]
