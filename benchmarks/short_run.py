"""Where the seconds of a short run go: a whole `patchloom train` on small photos, alone and several at a time.

    python benchmarks/short_run.py --pictures imagenette160-train.parquet imagenette160-val.parquet
    python benchmarks/short_run.py --pictures imagenette160-*.parquet --trees before=../old after=. --rounds 3

A folder of JPEGs is made once (where the parquet files have too few, parts of their pictures are cut out), and a small
ResMLP learns from it for 44 updates at 64 pixels. Of each run the moments are taken at which its lines appear: the
first, the plan, the first news of a step, the last evaluation, the end of the report; and its processor seconds,
workers included. With `--trees` versions take turns: checkouts, each put first on the path. `first time` has an empty
cache, so every picture is looked through; `again` finds what was seen. Medians over the rounds; of several at a time,
over all runs.
"""

import argparse
import io
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

PICTURES = 2_936
NETWORK = "--model resmlp_s12 --set model.options.depth=2 --set model.options.dim=96"
TRAIN = f"{NETWORK} --size 64 --epochs 2 --batch 106 --device cpu"
MOMENTS = ("first line", "plan", "first step", "trained", "report", "end", "CPU")
# What a line begins with, or has in it, at each moment.
SIGNS = {
    "first line": "patchloom ",
    "plan": "data  ",
    "first step": " step ",
    "trained": "finished",
    "report": "Next:",
}


def write_photos(folder: Path, parquets: list[Path], count: int) -> None:
    """Class folders of JPEGs of 160 pixels."""
    import pyarrow.parquet
    from PIL import Image

    rows = [row for path in parquets for row in pyarrow.parquet.read_table(path).select(["image", "label"]).to_pylist()]
    for number in range(count):
        row = rows[number % len(rows)]
        picture = Image.open(io.BytesIO(row["image"]["bytes"] if isinstance(row["image"], dict) else row["image"]))
        if number >= len(rows):  # a part of one that is there already
            picture = picture.crop((8, 8, picture.width - 8, picture.height - 8))
        target = folder / f"{row['label']:02d}" / f"{number:05d}.jpg"
        target.parent.mkdir(parents=True, exist_ok=True)
        picture.convert("RGB").save(target, quality=90)


def run(photos: Path, tree: str, room: Path) -> dict[str, float]:
    """One training: seconds from its start to each moment."""
    environment = os.environ | {"PYTHONPATH": str(Path(tree).resolve()), "XDG_CACHE_HOME": str(room / "cache")}
    out = tempfile.mkdtemp(dir=room)
    line = [sys.executable, "-m", "patchloom.cli", "train", str(photos), *TRAIN.split(), "--out", f"{out}/run"]
    timed = ["/usr/bin/env", "python3", "-c", _CHILD, *line]
    found: dict[str, float] = {}
    begun = time.perf_counter()
    # Elsewhere than here: Python looks for packages in its working folder first.
    process = subprocess.Popen(
        timed, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=out
    )
    assert process.stdout is not None
    last = ""
    for said in process.stdout:
        last = said
        for moment, sign in SIGNS.items():
            if sign in said:
                found.setdefault(moment, time.perf_counter() - begun)
    if process.wait():
        raise SystemExit(f"the run failed; its last line: {last}")
    found["end"] = time.perf_counter() - begun
    found["CPU"] = float(last)
    return found


# Waits for a command and says how many processor seconds it and its workers took.
_CHILD = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[1:]).returncode
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime)
sys.exit(code)
"""


def at_once(count: int, photos: Path, tree: str, room: Path) -> list[dict[str, float]]:
    """So many trainings side by side."""
    found: list[dict[str, float]] = []
    threads = [threading.Thread(target=lambda: found.append(run(photos, tree, room))) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(found) < count:
        raise SystemExit(f"{count - len(found)} of {count} runs failed")
    return found


def main() -> None:
    """Make the photos, let the versions take turns, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=Path, nargs="+", required=True, help="parquet files with image and label")
    parser.add_argument("--count", type=int, default=PICTURES)
    parser.add_argument("--trees", nargs="+", default=["here=."], metavar="NAME=FOLDER", help="checkouts to compare")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4], help="runs side by side")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    trees = dict(tree.split("=", 1) for tree in given.trees)
    room = Path(tempfile.mkdtemp(prefix="short_run"))
    try:
        photos = room / "photos"
        write_photos(photos, given.pictures, given.count)
        print(f"{given.count:,} photos; load before: {os.getloadavg()[0]:.1f}; {TRAIN}", flush=True)
        print("| seconds | " + " | ".join(MOMENTS) + " |\n|---" + "|---" * len(MOMENTS) + "|", flush=True)
        for count in given.at_once:
            for state in ("first time", "again") if count == 1 else ("again",):
                taken: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
                for _ in range(given.rounds):
                    for name, tree in trees.items():
                        if state == "first time":
                            shutil.rmtree(room / "cache", ignore_errors=True)
                        taken[name] += at_once(count, photos, tree, room)
                for name, runs in taken.items():
                    medians = [statistics.median(one[moment] for one in runs) for moment in MOMENTS]
                    title = f"{name}, {state}" if count == 1 else f"{name}, {count} at a time"
                    print(f"| {title} | " + " | ".join(f"{value:.1f}" for value in medians) + " |", flush=True)
    finally:
        shutil.rmtree(room)


if __name__ == "__main__":
    main()
