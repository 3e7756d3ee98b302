"""Pictures a second of `patchloom check` on JPEGs of 256 pixels, beside a plain Pillow loop over the same files.

    python benchmarks/check.py --count 10000
    python benchmarks/check.py --join 10000000 --scratch /tmp    # the join of a check in parts
    python benchmarks/check.py --photos imagenette160-train.parquet    # pairs of different photos with near hashes

The loop decodes every file to RGB, in one process or shared out between several, and does nothing else. `check` also
hashes, compares and remembers. The second check finds everything in its cache. Best of the rounds, which alternate.

`--join` writes parts of made thumbnails (smooth noise, so that many hashes are close) without any images, with planted
copies: equal ones, near ones, and a long run of frames of one camera. A process of its own joins them; its time, its
memory and what it found are printed.
"""

import argparse
import multiprocessing
import os
import re
import resource
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from patchloom.data.checking.check import check
from patchloom.data.checking.duplicates import (
    CHOICES,
    keys_of,
    levels_of,
    may_be_similar,
    near_pairs,
    textured_hashes,
    thumbnail,
)
from patchloom.data.checking.joined_check import SCRATCH_BYTES, join_parts
from patchloom.data.checking.part_sources import PartSources, ShardSource
from patchloom.data.checking.scan_parts import ROW, PartHeader, file_of, key_of, part_content
from patchloom.data.sources.source import find_source


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


def print_rates(files: list[str]) -> None:
    """Print how many pairs of photos have hashes that are compared, and that are near, by chance."""
    sources = [find_source(file) for file in files]
    stores = [(source.train.images, row) for source in sources for row in source.train.rows.tolist()]
    colors = np.frombuffer(b"".join(thumbnail(images.read(row)) for images, row in stores), np.uint8).reshape(-1, 216)
    textured, hashes = textured_hashes(colors)
    count, levels = len(hashes), levels_of(colors[textured])
    runs = [np.unique(keys_of(hashes, choice), return_counts=True)[1] for choice in CHOICES]
    shared = [float((run * (run - 1)).sum()) / (count * (count - 1)) for run in runs]
    pairs = near_pairs(hashes)
    likely = may_be_similar(levels[pairs[:, 0]], levels[pairs[:, 1]])
    print(f"{count:,} photos: share half of a hash {np.mean(shared):.1e} of all pairs (at most {max(shared):.1e}),")
    print(f"hashes near {2 * len(pairs) / count / (count - 1):.1e}, of which colors may be similar {likely.mean():.3f}")


IMAGES_PER_PART, FRAMES = 100_000, 20_000
COPIES = 0.01  # of the images


def made_thumbnails(count: int, noise: np.random.Generator) -> np.ndarray:
    """Noise of 5×5 pixels, enlarged, of different contrast: as many hashes are near by chance as those of photos."""
    rows, columns = (np.stack([np.interp(np.linspace(0, 4, n), range(5), line) for line in np.eye(5)]) for n in (8, 9))
    contrast = 255 * noise.uniform(0.25, 1, (count, 1, 1, 1)).astype(np.float32)
    small = 127 + contrast * (noise.random((count, 5, 5, 3), np.float32) - 0.5)
    return np.einsum("nijc,ir,jk->nrkc", small, rows, columns, optimize=True).astype(np.uint8).reshape(count, 216)


def write_parts(folder: Path, count: int) -> list[ShardSource]:
    """Write parts of made images, with copies anywhere in the dataset, and print how many groups they are."""
    noise, sources = np.random.default_rng(0), []
    equal, similar = set[int](), set[int]()
    earlier = made_thumbnails(int(count * COPIES), noise)  # originals, in the first parts
    frame, digests = made_thumbnails(1, noise), noise.integers(0, 1 << 63, (len(earlier), 2), dtype=np.uint64)
    for start in range(0, count, IMAGES_PER_PART):
        size = min(IMAGES_PER_PART, count - start)
        split = "val" if start >= 0.9 * count else "train"
        source = ShardSource(Path(f"/made/{split}-{start:010d}.tar"), split)
        rows = np.zeros(size, ROW)
        rows["thumbnail"], rows["digest"] = made_thumbnails(size, noise), noise.integers(0, 1 << 63, (size, 2))
        step = round(1 / COPIES)
        chosen = np.arange(0, size, step)[: max(0, len(earlier) - start // step)]
        own = chosen // step + start // step
        rows["thumbnail"][chosen], rows["digest"][chosen] = earlier[own], digests[own]
        copied = noise.integers(0, len(earlier), len(chosen))
        rows["thumbnail"][chosen + 1], rows["digest"][chosen + 1] = earlier[copied], digests[copied]  # equal
        changed_ones = noise.integers(0, len(earlier), len(chosen))
        equal.update(copied.tolist())
        similar.update(changed_ones.tolist())
        near = earlier[changed_ones]
        changed = noise.integers(-1, 2, near.shape) * (noise.random(near.shape) < 0.1)
        rows["thumbnail"][chosen + 2] = np.clip(near + changed, 0, 255)
        if start == IMAGES_PER_PART:  # frames
            frames = np.clip(frame + noise.integers(-1, 2, (FRAMES, 216)), 0, 255)
            rows["thumbnail"][3 : 3 + FRAMES * 4 : 4] = frames
        rows["width"], rows["height"] = noise.integers(200, 2000, (2, size))
        rows["row"] = np.arange(size)
        write_part(folder, source, rows)
        sources.append(source)
    frames = count > IMAGES_PER_PART
    print(f"planted: {len(equal):,} groups of equal images, {len(similar) + frames:,} of nearly equal ones", flush=True)
    return sources


def write_part(folder: Path, source: ShardSource, rows: np.ndarray) -> None:
    labels = tuple(f"class {number}" for number in range(1000))
    header = PartHeader(
        key=key_of(source), rows=len(rows), text_bytes=0, prefix=f"{source.file}, ", splits={"": len(rows)},
        kind="classes", counts={"": dict.fromkeys(labels, len(rows) // 1000)}, empty_classes=(),
        task="classify", annotated=(), notes=(), modes=("RGB",), errors={}, faults={},
    )  # fmt: skip
    names = [f"{header.prefix}{number:09d}.jpg" for number in range(len(rows))]
    (folder / file_of(header.key)).write_bytes(
        part_content(header, rows, [labels[number % 1000] for number in range(len(rows))], names)
    )


def join_made(folder: Path, sources: list[ShardSource]) -> None:
    """Join the parts and print what it took, in a process of its own."""
    scratch, anonymous, ended = [0], [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.2):
            status = Path("/proc/self/status").read_text()
            anonymous[0] = max(anonymous[0], int(re.search(r"RssAnon:\s+(\d+)", status)[1]))
            files = [file.stat().st_size for hidden in folder.glob(".join*") for file in hidden.glob("*")]
            scratch[0] = max(scratch[0], sum(files))

    before = int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1])
    threading.Thread(target=watch, daemon=True).start()
    begun = time.perf_counter()
    report = join_parts(PartSources("made", sources, None), folder)
    seconds = time.perf_counter() - begun
    ended.set()
    images = sum(report.splits.values())
    print(f"{images:,} images in {len(sources):,} parts joined in {seconds:.0f} s ({images / seconds:,.0f}/s)")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(
        f"memory: {anonymous[0] / 1024:.0f} MiB ({before / 1024:.0f} before), {peak / 1024:.0f} MiB with mapped files"
    )
    print(f"scratch: {scratch[0] / 1e9:.2f} GB, estimated {images * SCRATCH_BYTES / 1e9:.2f} GB")
    print(f"{report.to_dict()['counts']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--join", type=int, metavar="COUNT", help="generate parts of COUNT images and time the join")
    parser.add_argument("--scratch", type=Path, help="new folder for the parts; a temporary one by default")
    parser.add_argument("--photos", nargs="+", default=[], help="parquet files in which to count pairs of near hashes")
    given = parser.parse_args()
    if given.photos:
        print_rates(given.photos)
        return
    if given.join:
        with tempfile.TemporaryDirectory(dir=given.scratch) as folder:
            sources = write_parts(Path(folder), given.join)
            joining = multiprocessing.get_context("spawn").Process(target=join_made, args=(Path(folder), sources))
            joining.start()
            joining.join()
        return
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
