"""An index of random unit vectors written and searched, beside plain torch and faiss: time and peak memory.

Every version answers the same queries in a process of its own, one after another, so that its peak is its own.
'index' reads from disk and compares every part with its checksum; the second answer of an open index does not.

python benchmarks/index.py                       # 1,000,000 × 256, 1,000 queries, top 10, two threads
python benchmarks/index.py --spread 0.5          # around 10,000 centers, as features are
python benchmarks/index.py --spread 0.5 --count 10000000 --dim 384 --part 65536 --versions index lists

The last one takes long. With `--folder DIR` its vectors and lists stay, and are used by the next command. In steps:

python benchmarks/index.py --spread 0.5 --count 10000000 --dim 384 --part 65536 --folder DIR --only build
python benchmarks/index.py --spread 0.5 --count 10000000 --dim 384 --part 65536 --folder DIR --only index
python benchmarks/index.py --spread 0.5 --count 10000000 --dim 384 --part 65536 --folder DIR --only lists

The files of the hits of one query, and an update that finds all files as they were (without asking the disk for them):

python benchmarks/index.py --count 5000000 --dim 16 --queries 1 --versions hits update
python benchmarks/index.py --count 5000000 --dim 16 --queries 1 --part 65536 --shards --versions hits update
python benchmarks/index.py --count 300000 --only listing --folder DIR
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

# Threads that wait for others sleep: their waiting is no work, and on shared cores most of the processor's seconds.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch
import torch.nn.functional as F
from peak import peak_mib

from patchloom.evaluation.approximate_search import measure_recall
from patchloom.evaluation.exact_search import exact_nearest
from patchloom.inference import index_build
from patchloom.inference.index_files import (
    IndexMetadata,
    StoredVectors,
    read_about,
    write_about,
    write_part,
    write_stored_lists,
)
from patchloom.inference.index_rows import IndexRow
from patchloom.inference.row_table import RowTable

parser = argparse.ArgumentParser()
parser.add_argument("--count", type=int, default=1_000_000)
parser.add_argument("--dim", type=int, default=256)
parser.add_argument("--queries", type=int, default=1000)
parser.add_argument("--top", type=int, default=10)
parser.add_argument("--part", type=int, default=4096, help="rows of a part of the index")
parser.add_argument("--shards", action="store_true", help="parts as those of shards are written")
parser.add_argument("--rows", type=int, default=100, help="queries at a time of the plain version")
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--spread", type=float, help="vectors around 10,000 centers, this far; else all over")
parser.add_argument("--probes", type=int, default=64, help="lists that a query of ivf is compared with")
parser.add_argument("--versions", nargs="+", default=["index", "plain", "flat", "lists"], help="also: ivf hnsw usearch")
parser.add_argument("--only", help="one version, for its memory")
parser.add_argument("--folder", type=Path, help="where to keep vectors and lists; a temporary folder by default")
options = parser.parse_args()
torch.set_num_threads(options.threads)


def vectors(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(count, options.dim, generator=generator)
    if options.spread is not None:
        centers = torch.randn(10_000, options.dim, generator=torch.Generator().manual_seed(9))
        drawn = centers[torch.randint(10_000, (count,), generator=generator)] + options.spread * drawn
    return F.normalize(drawn)


def path_of(number: int) -> str:
    return f"/photos/{number // 1000:06d}/{number:09d}.jpg"


def build() -> dict[str, float]:
    parts = []
    start = time.perf_counter()
    for number, begin in enumerate(range(0, options.count, options.part)):
        # Each part from its own seed: all of them at once would be the peak.
        some = vectors(min(options.part, options.count - begin), number)
        rows = [IndexRow(path_of(begin + i), "", 0, 0) for i in range(len(some))]
        parts.append(write_part(options.folder, f"part-{number:05d}", some.numpy(), rows, of_shard=options.shards))
    write_about(options.folder, IndexMetadata("random", "", {}, options.dim, parts=tuple(parts)))
    return {"written_s": time.perf_counter() - start}


def all_vectors() -> torch.Tensor:
    stored = StoredVectors(options.folder, read_about(options.folder))
    drawn = torch.empty(len(stored), options.dim)
    start = 0
    for part in stored:
        drawn[start : start + len(part)] = part
        start += len(part)
    return drawn


def answered(search) -> dict[str, float]:
    """Twice: an index that is open already has compared its checksums."""
    queries = vectors(options.queries, 10**6)
    taken = []
    for _ in range(2):
        begin, used = time.perf_counter(), time.process_time()
        _, positions = search(queries)
        taken.append((time.perf_counter() - begin, time.process_time() - used))
    path = options.folder / "expected.pt"
    if not path.exists():
        torch.save(positions, path)
    recall = measure_recall(positions, torch.load(path))
    (first, _), (again, processor) = taken
    return {"first_s": first, "again_s": again, "again_processor_s": processor, "recall": recall}


def index() -> dict[str, float]:
    stored = StoredVectors(options.folder, read_about(options.folder))
    return answered(lambda queries: exact_nearest(stored, queries, options.top))


def hits() -> dict[str, float]:
    """Open the index, search, and name the files that were found; the second time with everything open."""
    start = time.perf_counter()
    stored = StoredVectors(options.folder, read_about(options.folder))
    opened, queries, numbers = time.perf_counter() - start, vectors(options.queries, 10**6), {}
    for name in ("first", "again"):
        start = time.perf_counter()
        _, positions = exact_nearest(stored, queries, options.top)
        searched = time.perf_counter()
        stored.files(positions.flatten())
        numbers[f"{name}_s"], numbers[f"{name}_files_s"] = searched - start, time.perf_counter() - searched
    return {"opened_s": opened} | numbers


class MadeFiles:
    """Lists the files of the index without holding them in memory."""

    def __iter__(self):
        return ((path_of(number), "") for number in range(options.count))


def update() -> dict[str, float]:
    """Time an update of the index with unchanged files."""
    index_build.file_state = lambda _: (0, 0)
    start, used = time.perf_counter(), time.process_time()
    with RowTable() as stored, RowTable() as expected:
        build = index_build._Build(options.folder, read_about(options.folder), stored, expected)
        read = time.perf_counter()
        missing = build.missing(index_build.Collection(MadeFiles(), {}, "", {}))
    assert not missing
    numbers = {"read_s": read - start, "compared_s": time.perf_counter() - read}
    return numbers | {"processor_s": time.process_time() - used}


def listing() -> dict[str, float]:
    """Time the listing of a folder, with which an update begins."""
    for number in range(10):
        (options.folder / "images" / f"class-{number}").mkdir(parents=True)
    for number in range(options.count):
        (options.folder / "images" / f"class-{number % 10}" / f"{number:09d}.jpg").touch()
    unlabeled = SimpleNamespace(labels=(), reading_of=lambda _, reading: reading)
    before, start = peak_mib(), time.perf_counter()
    index_build.collect([str(options.folder / "images")], unlabeled)
    bytes_per_file = (peak_mib() - before) * 2**20 / options.count
    return {"listed_s": time.perf_counter() - start, "bytes_per_file": bytes_per_file}


def plain() -> dict[str, float]:
    known = all_vectors()

    def search(queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = [(part @ known.T).topk(options.top, dim=1) for part in queries.split(options.rows)]
        return torch.cat([one.values for one in drawn]), torch.cat([one.indices for one in drawn])

    return answered(search)


def flat() -> dict[str, float]:
    import faiss

    faiss.omp_set_num_threads(options.threads)
    known = faiss.IndexFlatIP(options.dim)
    known.add(all_vectors().numpy())
    return answered(lambda queries: tuple(map(torch.from_numpy, known.search(queries.numpy(), options.top))))


def lists() -> dict[str, float]:
    import faiss

    faiss.omp_set_num_threads(options.threads)
    start, used, about = time.perf_counter(), time.process_time(), read_about(options.folder)
    if about.lists is None:  # else an earlier command wrote them
        about = write_stored_lists(options.folder, about)
    stored = StoredVectors(options.folder, about)
    stated = about.lists.settings
    numbers = {"written_s": time.perf_counter() - start, "written_processor_s": time.process_time() - used}
    numbers |= {"probes": stated.probes, "candidates": stated.candidates, "stated": stated.recall}
    numbers["built_mib"] = peak_mib()
    return numbers | answered(lambda queries: stored.nearest(queries, options.top)[:2])


def ivf() -> dict[str, float]:
    """Lists of whole vectors, in memory."""
    import faiss

    faiss.omp_set_num_threads(options.threads)
    known, start = all_vectors().numpy(), time.perf_counter()
    number = round(2 * math.sqrt(options.count))
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(options.dim), options.dim, number, faiss.METRIC_INNER_PRODUCT)
    index.cp.niter = 10
    index.train(known[:: max(1, options.count // (39 * number))])
    index.add(known)
    index.nprobe = options.probes
    written = time.perf_counter() - start
    return {"written_s": written} | answered(
        lambda queries: tuple(map(torch.from_numpy, index.search(queries.numpy(), options.top)))
    )


def hnsw() -> dict[str, float]:
    import faiss

    faiss.omp_set_num_threads(options.threads)
    known, start = all_vectors().numpy(), time.perf_counter()
    index = faiss.IndexHNSWFlat(options.dim, 32, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efSearch = 128
    index.add(known)
    written = time.perf_counter() - start
    return {"written_s": written} | answered(
        lambda queries: tuple(map(torch.from_numpy, index.search(queries.numpy(), options.top)))
    )


def usearch() -> dict[str, float]:
    from usearch.index import Index

    known, start = all_vectors().numpy(), time.perf_counter()
    index = Index(ndim=options.dim, metric="ip", dtype="f16", expansion_search=128)
    index.add(np.arange(options.count), known, threads=options.threads)
    written = time.perf_counter() - start

    def search(queries: torch.Tensor) -> tuple[None, torch.Tensor]:
        matches = index.search(queries.numpy(), options.top, threads=options.threads)
        return None, torch.from_numpy(np.asarray(matches.keys).astype(np.int64))

    return {"written_s": written} | answered(search)


if options.only:
    numbers = globals()[options.only]()
    numbers["peak_mem_mib"] = peak_mib()
    print(json.dumps(numbers))
else:
    with tempfile.TemporaryDirectory() if options.folder is None else nullcontext(options.folder) as folder:
        built = (Path(folder) / "index.json").exists()
        for name in (*(() if built else ("build",)), *options.versions):
            line = [sys.executable, *sys.argv, "--only", name, "--folder", str(folder)]
            done = subprocess.run(line, capture_output=True, text=True)
            printed = done.stdout or done.stderr.strip().splitlines()[-1]
            print(f"{name:7} {printed.strip()}", flush=True)
