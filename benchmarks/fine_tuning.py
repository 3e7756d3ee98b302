"""Fine-tuning against training from scratch in the same time, and a ResMLP with and without a fine-tuned teacher.

    python benchmarks/fine_tuning.py imagenette cifar100 --init timm:tf_efficientnet_lite0@lite0.safetensors \\
        --time 100s --epochs 40 --seeds 0 1 2 --jobs 12 --out tuned

DATA has train, val and test (`short_runs.py prepare` makes such folders); best weights are chosen on val, and test is
looked at once per run, at the end. A run is a command of `KINDS` with a seed. The teacher of a set is its fine-tuned
network of seed 0. `--jobs` runs share one device: the same time is the same share of it.
One JSON line per run goes to OUT/runs.jsonl.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, stdev

KINDS = {
    "fine-tuned": ("--init", "{init}", "--time", "{time}"),
    "from scratch": ("--init", "none", "--model", "{network}", "--size", "160", "--time", "{time}"),
    "resmlp_s12": ("--init", "none", "--model", "resmlp_s12", "--time", "{time}"),
    "resmlp_s12 by epochs": ("--init", "none", "--model", "resmlp_s12", "--epochs", "{epochs}"),
    "resmlp_s12 distilled": ("--model", "resmlp_s12", "--epochs", "{epochs}", "--teacher", "{teacher}"),
}
TEACHER = "fine-tuned"


def main() -> None:
    """Teachers first, then everything else."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="+")
    parser.add_argument("--init", required=True)
    parser.add_argument("--time", default="100s")
    parser.add_argument("--epochs", default="40")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    jobs = [(data, kind, seed) for kind in KINDS for seed in given.seeds for data in given.data]
    with ThreadPoolExecutor(given.jobs) as pool:
        for is_teacher in (True, False):
            now = [job for job in jobs if (job[1] == TEACHER) is is_teacher]
            list(pool.map(lambda job: measured(given, *job), now))
    print(table(given.out / "runs.jsonl"))


def measured(given: argparse.Namespace, data: str, kind: str, seed: int) -> None:
    """Train one by the command line, look at its test images, and note what they say."""
    folder = folder_of(given, data, kind, seed)
    named = {"init": given.init, "network": given.init.partition("@")[0], "time": given.time, "epochs": given.epochs}
    named["teacher"] = str(folder_of(given, data, TEACHER, given.seeds[0]))
    options = [part.format(**named) for part in KINDS[kind]]
    patchloom(
        ["train", data, *options, "--set", f"seed={seed}", "--workers", "1", "--out", str(folder)],
        folder.with_suffix(".log"),
    )
    said = patchloom(["evaluate", str(folder), data, "--split", "test", "--json"], folder.with_suffix(".test.log"))
    line = {"data": data, "kind": kind, "seed": seed, "top1": json.loads(said)["top1"] if said else None}
    print(line, flush=True)
    with (given.out / "runs.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def folder_of(given: argparse.Namespace, data: str, kind: str, seed: int) -> Path:
    """Of a run."""
    return Path(given.out, f"{Path(data).stem}-{kind.replace(' ', '_')}-{seed}")


def patchloom(arguments: list[str], log: Path) -> str:
    """What a command prints; what it says goes to `log`."""
    command = [sys.executable, "-m", "patchloom.cli", *arguments]
    with log.open("w") as said:
        alone = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=alone, text=True, stdout=subprocess.PIPE, stderr=said, check=False)
        said.write(done.stdout)
    return done.stdout if done.returncode == 0 else ""


def table(path: Path) -> str:
    """Test top-1 by set and kind: mean ± std over seeds."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for line in map(json.loads, path.read_text().splitlines()):
        if line["top1"] is not None:
            found[Path(line["data"]).stem, line["kind"]].append(line["top1"])
    rows = ["| set | network | test top-1 | seeds |", "|---|---|---|---|"]
    for (data, kind), values in sorted(found.items()):
        spread = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
        rows.append(f"| {data} | {kind} | {mean(values):.1f}{spread} | {len(values)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
