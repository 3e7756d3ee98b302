"""Is `auto` right about Mixup and CutMix in short runs? The grid of choices, on built-in and real sets.

    python benchmarks/short_runs.py prepare --parquet imagenette160-*.parquet cifar100-*.parquet --out sets
    python benchmarks/short_runs.py run sets/* digits shapes --out short --jobs 8 --threads 2
    python benchmarks/short_runs.py table --out short

`prepare` (needs pyarrow) writes class folders, so that a machine without pyarrow can run the rest: a part of train is
held out as val/, and files called test or val become test/, at which only `table --test` looks. `--most` images per set
are taken, spread over its classes. `run` trains every choice on every set and for every seed, several at a time, each
on cores of its own; what is there already is not trained again. One JSON line per run goes to OUT/runs.jsonl, and the
table is printed at the end.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

# What is set beside auto's other choices.
CHOICES: dict[str, dict[str, float]] = {
    "auto": {},
    "none": {"augment.mixup": 0.0, "augment.cutmix": 0.0},
    "mixup 0.2": {"augment.mixup": 0.2, "augment.cutmix": 0.0},
    "mixup 0.8": {"augment.mixup": 0.8, "augment.cutmix": 0.0},
    "mixup 0.8 + cutmix 1.0": {"augment.mixup": 0.8, "augment.cutmix": 1.0},
}
EPOCHS = 6
HELD_OUT = 5  # every so many images of a class is val
LABELS = ("fine_label", "label")  # columns, the first that there is


@dataclass(frozen=True)
class Job:
    """One training."""

    data: str
    length: str  # "epochs 6" or "time 2m"
    choice: str
    seed: int

    @property
    def name(self) -> str:
        """Of its folder."""
        parts = (Path(self.data).name, self.length, self.choice, f"seed {self.seed}")
        return "-".join(part.replace(" ", "_").replace("+", "and") for part in parts)


def main() -> None:
    """Prepare, run or print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    prepare = verbs.add_parser("prepare")
    prepare.add_argument("--parquet", nargs="+", type=Path, required=True)
    prepare.add_argument("--out", type=Path, required=True)
    prepare.add_argument("--most", type=int, default=10_000)
    run = verbs.add_parser("run")
    run.add_argument("data", nargs="+", help="class folders, tar shards, parquet files, digits, shapes")
    run.add_argument("--out", type=Path, required=True)
    run.add_argument("--only", nargs="+", default=[], help="words a run's name must have one of")
    run.add_argument("--lengths", nargs="+", choices=["epochs", "time"], default=["epochs", "time"])
    run.add_argument("--time", default="2m")
    run.add_argument("--epochs", type=int, default=EPOCHS)
    run.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    run.add_argument("--jobs", type=int, default=1)
    run.add_argument("--threads", type=int, default=2)
    run.add_argument("--set", nargs="*", default=[], dest="changes", help="further fields, such as optim.lr=2e-3")
    shown = verbs.add_parser("table")
    shown.add_argument("--out", type=Path, required=True)
    shown.add_argument("--test", action="store_true", help="on the test images of the sets that have some")
    given = parser.parse_args()
    if given.verb == "prepare":
        write_folders(given.parquet, given.out, given.most)
    else:
        if given.verb == "run":
            run_all(given)
        print(table(given.out / "runs.jsonl", "test_top1" if getattr(given, "test", False) else "top1"))


# Sets -----------------------------------------------------------------------------------------------------------------


def write_folders(files: list[Path], out: Path, most: int) -> None:
    """Files whose names begin alike are one set; its images go, byte for byte, to OUT/SET/{train,val}/CLASS/."""
    import pyarrow.parquet

    sets: dict[str, list[Path]] = defaultdict(list)
    for file in files:
        sets[file.stem.split("-")[0]].append(file)
    for name, parts in sets.items():
        tables = [pyarrow.parquet.read_table(file) for file in parts]
        tested = [any(word in file.stem for word in ("test", "val")) for file in parts]
        share = min(1.0, most / sum(len(rows) for rows, test in zip(tables, tested, strict=True) if not test))
        taken: dict[str, int] = defaultdict(int)
        size = 0
        for part, (rows, test) in enumerate(zip(tables, tested, strict=True)):
            label = next(column for column in LABELS if column in rows.column_names)
            for row in (int(number / share) for number in range(int(len(rows) * share))):
                image, named = rows["image"][row].as_py(), f"class_{rows[label][row].as_py()}"
                image = image["bytes"] if isinstance(image, dict) else image
                split = "test" if test else "val" if taken[named] % HELD_OUT == HELD_OUT - 1 else "train"
                folder = out / name / split / named
                folder.mkdir(parents=True, exist_ok=True)
                ending = "png" if image.startswith(b"\x89PNG") else "jpg"
                (folder / f"{part}-{row}.{ending}").write_bytes(image)
                taken[named] += 1
                size += len(image)
        print(f"{out / name}: {sum(taken.values()):,} images of {len(taken)} classes, {size / 2**20:.1f} MiB")


# Runs -----------------------------------------------------------------------------------------------------------------


def run_all(given: argparse.Namespace) -> None:
    """Every run that is not there yet, `--jobs` at a time."""
    given.out.mkdir(parents=True, exist_ok=True)
    lengths = [f"time {given.time}" if length == "time" else f"epochs {given.epochs}" for length in given.lengths]
    done = {name for name, _ in lines_of(given.out / "runs.jsonl")}
    jobs = [
        job
        for seed in given.seeds
        for data in given.data
        for length in lengths
        for choice in CHOICES
        if (job := Job(data, length, choice, seed)).name not in done
        and (not given.only or any(word in job.name for word in given.only))
    ]
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores[i * given.threads : (i + 1) * given.threads] for i in range(given.jobs)]
    if not all(len(share) == given.threads for share in shares):
        sys.exit(f"{given.jobs} jobs of {given.threads} threads are more than the {len(cores)} cores")
    # "spawn": a child must be on its cores before torch starts its threads.
    context = multiprocessing.get_context("spawn")
    free: Any = context.Queue()
    for share in shares:
        free.put(share)
    # An executor's processes, unlike a pool's, may have the workers of a loader as children.
    with ProcessPoolExecutor(given.jobs, mp_context=context, initializer=_begin, initargs=(free,)) as pool:
        waiting = [pool.submit(_train, job, str(given.out), given.changes) for job in jobs]
        for number, ended in enumerate(as_completed(waiting), 1):
            line = ended.result()
            with (given.out / "runs.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(f"{number}/{len(jobs)} {line['name']}: {line.get('top1', line.get('error'))}", flush=True)


def _begin(free: Any) -> None:
    """This process and all it starts stay on cores of their own."""
    share = free.get()
    os.sched_setaffinity(0, share)
    os.environ["OMP_NUM_THREADS"] = str(len(share))


def _train(job: Job, out: str, changes: list[str]) -> dict[str, Any]:
    import torch

    import patchloom
    from patchloom.recipes import Recipe
    from patchloom_runtime.errors import PatchloomError

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    kind, _, value = job.length.partition(" ")
    fields: dict[str, Any] = CHOICES[job.choice] | {"seed": job.seed} | dict(text.split("=", 1) for text in changes)
    folder = Path(out) / job.name
    shutil.rmtree(folder, ignore_errors=True)
    begun = time.perf_counter()
    line: dict[str, Any] = {"name": job.name, **asdict(job)}
    sys.stdout = (Path(out) / f"{job.name}.log").open("w")
    try:
        trained = patchloom.train(
            job.data,
            out=str(folder),
            device="cpu",
            init="none",
            set=fields,
            **({"time": value} if kind == "time" else {"epochs": int(value)}),
        )
        line |= {"top1": round(trained.metrics["top1"], 3), "ended": trained.outcome.ended if trained.outcome else ""}
        if Path(job.data, "test").is_dir():
            tested = trained.classifier.evaluate(job.data, split="test").values()
            line["test_top1"] = round(tested["top1"], 3)
        recipe = Recipe.from_yaml((folder / "recipe.yaml").read_text())
        line |= {
            "epochs": recipe.schedule.epochs,
            "mixup": recipe.augment.mixup,
            "cutmix": recipe.augment.cutmix,
            "policy": recipe.augment.policy,
            "lr": recipe.optim.peak_lr,
            "batch": recipe.optim.batch_size,
        }
    except PatchloomError as error:
        line["error"] = str(error)
    finally:
        sys.stdout.close()
        sys.stdout = sys.__stdout__
    shutil.rmtree(folder, ignore_errors=True)
    return line | {"seconds": round(time.perf_counter() - begun, 1)}


# Table ----------------------------------------------------------------------------------------------------------------


def lines_of(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and line of each run that ended well."""
    for text in path.read_text().splitlines() if path.exists() else ():
        line = json.loads(text)
        if "top1" in line:
            yield line["name"], line


def table(path: Path, number: str = "top1") -> str:
    """Top-1 by set and length (rows) and choice (columns): mean ± std over seeds; the best with *."""
    found: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for line in (line for _, line in lines_of(path) if number in line):
        found[Path(line["data"]).name, line["length"]][line["choice"]].append(line)
    rows = ["| set | length | epochs | longest | " + " | ".join(CHOICES) + " |", "|---" * (4 + len(CHOICES)) + "|"]
    for (data, length), choices in sorted(found.items()):
        means = {choice: mean(line[number] for line in lines) for choice, lines in choices.items()}
        best = max(means.values())
        every = [line for lines in choices.values() for line in lines]
        cells = [
            _cell([line[number] for line in choices.get(choice, [])], means.get(choice) == best) for choice in CHOICES
        ]
        epochs = sorted({line["epochs"] for line in every})
        longest = f"{max(line['seconds'] for line in every):.0f} s"
        rows.append(f"| {data} | {length} | {_range(epochs)} | {longest} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _range(values: Iterable[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}–{high}"


def _cell(values: list[float], is_best: bool) -> str:
    if not values:
        return ""
    spread = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
    return f"{mean(values):.2f}{spread}{'*' if is_best else ''}"


if __name__ == "__main__":
    main()
