"""An index of random unit vectors written and searched, beside plain torch and faiss: time and peak memory.

Every version answers the same queries in a process of its own, one after another, so that its peak is its own.
'index' reads from disk and compares every part with its checksum; the second answer of an open index does not.

python benchmarks/index.py                       # 1,000,000 × 256, 1,000 queries, top 10, two threads
python benchmarks/index.py --spread 0.5          # around 10,000 centres, as features are
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from peak import peak_mib

from patchloom.evaluation.exact_search import exact_nearest, faiss_nearest
from patchloom.inference.index_files import (
    IndexMetadata,
    IndexRow,
    StoredVectors,
    read_about,
    write_about,
    write_lists,
    write_part,
)

parser = argparse.ArgumentParser()
parser.add_argument("--count", type=int, default=1_000_000)
parser.add_argument("--dim", type=int, default=256)
parser.add_argument("--queries", type=int, default=1000)
parser.add_argument("--top", type=int, default=10)
parser.add_argument("--part", type=int, default=4096, help="rows of a part of the index")
parser.add_argument("--rows", type=int, default=100, help="queries at a time of the plain version")
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--spread", type=float, help="vectors around 10,000 centres, this far; else all over")
parser.add_argument("--only", choices=("build", "index", "plain", "flat", "lists"), help="one version, for its memory")
parser.add_argument("--folder", type=Path)
options = parser.parse_args()
torch.set_num_threads(options.threads)


def vectors(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(count, options.dim, generator=generator)
    if options.spread is not None:
        centres = torch.randn(10_000, options.dim, generator=torch.Generator().manual_seed(9))
        found = centres[torch.randint(10_000, (count,), generator=generator)] + options.spread * found
    return F.normalize(found)


def build() -> dict[str, float]:
    parts = []
    start = time.perf_counter()
    for number, begin in enumerate(range(0, options.count, options.part)):
        # Each part from its own seed: all of them at once would be the peak.
        some = vectors(min(options.part, options.count - begin), number)
        rows = [IndexRow(f"/photos/{begin + i:09d}.jpg", "", 0, 0) for i in range(len(some))]
        parts.append(write_part(options.folder, number, some.numpy(), rows))
    write_about(options.folder, IndexMetadata("random", "", {}, options.dim, parts=tuple(parts)))
    return {"written_s": time.perf_counter() - start}


def all_vectors() -> torch.Tensor:
    stored = StoredVectors(options.folder, read_about(options.folder))
    found = torch.empty(len(stored), options.dim)
    start = 0
    for part in stored:
        found[start : start + len(part)] = part
        start += len(part)
    return found


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
    same = (positions == torch.load(path)).float().mean().item()
    (first, _), (again, processor) = taken
    return {"first_s": first, "again_s": again, "again_processor_s": processor, "same_as_index": same}


def index() -> dict[str, float]:
    stored = StoredVectors(options.folder, read_about(options.folder))
    return answered(lambda queries: exact_nearest(stored, queries, options.top))


def plain() -> dict[str, float]:
    known = all_vectors()

    def search(queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = [(part @ known.T).topk(options.top, dim=1) for part in queries.split(options.rows)]
        return torch.cat([one.values for one in found]), torch.cat([one.indices for one in found])

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
    start = time.perf_counter()
    stored = StoredVectors(options.folder, write_lists(options.folder, read_about(options.folder)))
    written = time.perf_counter() - start
    path = stored.faiss_file()
    return {"written_s": written} | answered(lambda queries: faiss_nearest(path, stored, queries, options.top))


if options.only:
    numbers = globals()[options.only]()
    numbers["peak_mem_mib"] = peak_mib()
    print(json.dumps(numbers))
else:
    with tempfile.TemporaryDirectory() as folder:
        for name in ("build", "index", "plain", "flat", "lists"):
            line = [sys.executable, *sys.argv, "--only", name, "--folder", folder]
            done = subprocess.run(line, capture_output=True, text=True)
            said = done.stdout or done.stderr.strip().splitlines()[-1]
            print(f"{name:6} {said.strip()}", flush=True)
