"""Pictures a second of `patchloom check` on JPEGs of 256 pixels, beside a plain Pillow loop over the same files.

    python benchmarks/check.py --count 10000

The loop decodes every file to RGB, in one process or shared out between several, and does nothing else. `check` also
hashes, compares and remembers. The second check finds everything in its cache. Best of the rounds, which alternate.
"""

import argparse
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from patchloom.data.checking.check import check


def write_jpegs(folder: Path, count: int) -> None:
    noise = np.random.default_rng(0)
    for number in range(count):
        target = folder / f"{number % 10:02d}" / f"{number:05d}.jpg"
        target.parent.mkdir(exist_ok=True)
        small = Image.fromarray(noise.integers(0, 256, (40, 40, 3), np.uint8))
        small.resize((256, 256), Image.Resampling.BICUBIC).save(target, quality=90)


def plain_loop(folder: Path, workers: int) -> None:
    paths = sorted(folder.rglob("*.jpg"))
    if workers == 1:
        for path in paths:
            decode(path)
        return
    with multiprocessing.Pool(workers) as pool:
        pool.map(decode, paths, chunksize=32)


def decode(path: Path) -> None:
    with Image.open(path) as image:
        image.convert("RGB")


def seconds_of(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "data")
        folder.mkdir()
        write_jpegs(folder, given.count)
        os.environ["XDG_CACHE_HOME"] = os.path.join(scratch, "cache")

        def first_check() -> None:
            shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)
            check(folder, workers=given.workers)

        ways = {
            "plain Pillow loop, one process": lambda: plain_loop(folder, 1),
            f"plain Pillow loop, {given.workers} processes": lambda: plain_loop(folder, given.workers),
            "check, one process, no cache": lambda: check(folder, workers=1, cache=False),
            f"check, {given.workers} processes, no cache": lambda: check(folder, workers=given.workers, cache=False),
            f"check, {given.workers} processes, first time": first_check,
            "check again, all cached": lambda: check(folder, workers=given.workers),
        }
        best = dict.fromkeys(ways, float("inf"))
        for _ in range(given.rounds):
            for name, work in ways.items():
                best[name] = min(best[name], seconds_of(work))
    for name, seconds in best.items():
        print(f"{name:<36}{seconds:7.2f} s{given.count / seconds:10,.0f} pictures/s")


if __name__ == "__main__":
    main()
