"""Power cuts at every write: what train, index, export, sweep and the caches leave behind is the old or the new state.

    python benchmarks/power_cuts.py [train] [index] [export] [sweep] [caches] [--resumes 12] [--chances 4]

Each trial runs once under strace. Its record is cut after every operation, and what may be left of it by then (see
tests/reliability/power_cuts.py) is read by the readers of patchloom; of runs and indexes some are also continued and
compared with an undisturbed one, byte by byte. Prints one line per trial, then what is wrong; the exit code is 1 where
anything is. Needs strace. See docs/reliability.md.
"""

import argparse
import os
import random
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

sys.path.append(str(Path(__file__).parent.parent))

from patchloom.data.checking.check import check as check_data
from patchloom.data.checking.scan_cache import ScanCache
from patchloom.data.trees.compressed_tar import plain_tar
from patchloom.inference import index_build as indexing
from patchloom.inference.index_files import StoredVectors, read_about
from patchloom.tasks.export import export
from patchloom.tasks.verify import verify
from patchloom.training.sweeps import sweep as sweeping
from patchloom.training.sweeps.record import read_results
from patchloom_runtime.artifacts.artifact import load as load_artifact
from patchloom_runtime.errors import PatchloomError
from tests.forked import Forked
from tests.reliability.cut_runs import DATA, TINY, check_run, left_by, train_tiny
from tests.reliability.power_cuts import Replayed, mark, materialized, recorded, replayed, why_not_here

EMBEDDED = 4  # files per part of the index


def main() -> int:
    known = {"train": train, "index": index, "export": exported, "sweep": sweep, "caches": caches}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trials", nargs="*", choices=[[], *known], default=[])
    parser.add_argument("--resumes", type=int, default=12, help="states that are continued to the end")
    parser.add_argument("--chances", type=int, default=4, help="random states per cut")
    given = parser.parse_args()
    if reason := why_not_here():
        raise SystemExit(reason)
    torch.set_num_threads(1)
    wrong = 0
    for name in given.trials or known:
        with tempfile.TemporaryDirectory() as scratch:
            started = time.perf_counter()
            found, (good, tried) = known[name](Path(scratch), given.chances, given.resumes)
            more = f"; continued {good} of {tried} to the same bytes" if tried else ""
            print(f"{name:8} {found}{more}   {time.perf_counter() - started:.0f} s", flush=True)
            for fault in list(found.faults.values())[:8]:
                print(f"         {fault}", flush=True)
            wrong += bool(found.faults) or good < tried
    return int(wrong > 0)


Trial = tuple[Replayed, tuple[int, int]]


def in_a_copy(work: Callable[[], object]) -> str:
    """Do it in a copy of this process; '' or what it said where it failed."""
    process = Forked(work)
    _, said = process.communicate(300)
    return said[-500:] if process.returncode else ""


def fault_of(check: Callable[[], str]) -> str:
    """What a check says, or the reader of patchloom in it; '' where nothing is wrong."""
    try:
        return check()
    except (PatchloomError, OSError) as error:
        return f"{type(error).__name__}: {error}"


# train --------------------------------------------------------------------------------------------------------------


def train(scratch: Path, chances: int, resumes: int) -> Trial:
    """A run, killed anywhere; it continues to the same bytes."""
    root, out = scratch / "root", Path("runs", "a")
    root.mkdir()
    operations = recorded(root, lambda: train_tiny(root / out))
    found = replayed({}, operations, lambda folder, marks: check_run(folder / out, marks), chances=chances)
    return found, continued(found, lambda at: train_tiny(at / out), lambda at: left_by(at / out), root, resumes)


def continued(
    found: Replayed, work: Callable[[Path], object], left: Callable[[Path], Any], whole: Path, count: int
) -> tuple[int, int]:
    """Continue states spread over the whole record; how many of how many end as the undisturbed one."""
    states, good = list(found.states.values()), 0
    chosen = np.linspace(0, len(states) - 1, min(count, len(states))).astype(int)
    for at in chosen:
        with materialized(states[at][0]) as folder:
            said = in_a_copy(lambda folder=folder: work(folder))
            good += (is_same := not said and left(folder) == left(whole))
            if not is_same:
                print(f"         not continued to the same bytes: {said or 'another result'}", flush=True)
    return good, len(chosen)


# index --------------------------------------------------------------------------------------------------------------


def make_images(folder: Path, count: int = 16) -> None:
    """Noise in two classes."""
    rng = np.random.default_rng(0)
    for number in range(count):
        path = folder / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(path)


def index(scratch: Path, chances: int, resumes: int) -> Trial:
    """An index built in several parts, then grown."""
    run, images, more, root = (scratch / name for name in ("run", "images", "more", "root"))
    root.mkdir()
    make_images(images)
    make_images(more, 6)
    if said := in_a_copy(lambda: train_tiny(run)):
        raise SystemExit(said)

    def build(out: Path) -> None:
        indexing.PART_FILES = EMBEDDED
        write_about = indexing.write_about

        def marking(folder: Path, about: Any) -> None:
            write_about(folder, about)
            mark(f"files {len(about)}")

        indexing.write_about = marking
        for given in ([images], [images, more]):
            indexing.index(str(run), given, out=out, batch=EMBEDDED, device="cpu")

    def check(folder: Path, marks: list[str]) -> str:
        if not (folder / "index.json").exists():
            return "the index is gone" if marks else ""
        promised = int(marks[-1].partition(" ")[2]) if marks else 0
        checked, files = verify(folder), contents_of(folder)
        return f"{len(files)} files of {promised}; {checked.wrong}" if checked.wrong or len(files) < promised else ""

    out = Path("indexes", "a")
    operations = recorded(root, lambda: build(root / out))
    found = replayed({}, operations, lambda at, marks: fault_of(lambda: check(at / out, marks)), chances=chances)
    return found, continued(found, lambda at: build(at / out), lambda at: contents_of(at / out), root, resumes)


def contents_of(folder: Path) -> dict[Any, bytes]:
    """Files of an index → their vectors."""
    about = read_about(folder)
    stored, every = StoredVectors(folder, about), torch.arange(len(about))
    return {row: vector.numpy().tobytes() for row, vector in zip(stored.files(every), stored.rows(every), strict=True)}


# export -------------------------------------------------------------------------------------------------------------


def exported(scratch: Path, chances: int, resumes: int) -> Trial:
    """An artifact of torch's own format, whose writer is not Python, and a compressed one."""
    del resumes
    run, root = scratch / "run", scratch / "root"
    root.mkdir()
    if said := in_a_copy(lambda: train_tiny(run)):
        raise SystemExit(said)

    def write() -> None:
        for name, packed in (("plain", False), ("packed", True)):
            export(str(run), str(root / "artifacts" / name), to="torch", data=DATA, images=8, packed=packed)
            mark(name)

    def check(folder: Path, marks: list[str]) -> str:
        for name in ("plain", "packed"):
            if (folder / "artifacts" / name).exists():
                load_artifact(folder / "artifacts" / name)
            elif name in marks:
                return f"{name} is gone"
        return ""

    operations = recorded(root, write)
    return replayed({}, operations, lambda at, marks: fault_of(lambda: check(at, marks)), chances=chances), (0, 0)


# sweep --------------------------------------------------------------------------------------------------------------


def sweep(scratch: Path, chances: int, resumes: int) -> Trial:
    """Two runs of a sweep and their record."""
    del resumes
    root = scratch / "root"
    root.mkdir()

    def train_all() -> None:
        write_results = sweeping.write_results

        def marking(out: Path, results: Any) -> None:
            write_results(out, results)
            mark(f"results {len(results)}")

        sweeping.write_results = marking
        random.seed(0)
        sweeping.sweep(
            DATA, {"seed": [0, 1]}, recipe="small_images", epochs=1, batch=8, size=16, workers=0, device="cpu",
            set=TINY, out=str(root / "sweeps" / "a"),
        )  # fmt: skip

    def check(folder: Path, marks: list[str]) -> str:
        out = folder / "sweeps" / "a"
        results, note = read_results(out)
        promised = int(marks[-1].partition(" ")[2]) if marks else 0
        if note or len(results) < promised or any(run.failed for run in results.values()):
            return f"{len(results)} results of {promised}; {note}"
        return "; ".join(filter(None, (check_run(path.parent, []) for path in out.rglob("checkpoints"))))

    return replayed({}, recorded(root, train_all), check, chances=chances), (0, 0)


# caches -------------------------------------------------------------------------------------------------------------


def caches(scratch: Path, chances: int, resumes: int) -> Trial:
    """What `check` has seen of pictures, and the plain copy of a compressed archive."""
    del resumes
    images, packed, root = scratch / "images", scratch / "packed.tar.gz", scratch / "root"
    root.mkdir()
    make_images(images)
    with tarfile.open(packed, "w:gz") as archive:
        archive.add(images, "images")

    def look() -> None:
        os.environ["XDG_CACHE_HOME"] = str(root)
        plain_tar(packed)
        check_data(str(images), workers=0)

    operations = recorded(root, look)
    tar, database = (next(root.rglob(pattern)) for pattern in ("*.tar", "*.sqlite"))
    whole, rows = tar.read_bytes(), rows_of(database)

    def check(folder: Path, _: list[str]) -> str:
        copy, seen = folder / tar.relative_to(root), folder / database.relative_to(root)
        if copy.exists() and copy.read_bytes() != whole:
            return f"{copy.name} has {copy.stat().st_size} bytes of {len(whole)}"
        return "" if rows_of(seen).items() <= rows.items() else "rows that nobody wrote"

    return replayed({}, operations, check, chances=chances), (0, 0)


def rows_of(database: Path) -> dict[Any, Any]:
    """What a cache of the scan holds; nothing where it is begun anew."""
    seen = ScanCache("")
    seen.path = database
    return seen.read()


if __name__ == "__main__":
    sys.exit(main())
