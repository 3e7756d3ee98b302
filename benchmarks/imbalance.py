"""Remedies for uneven classes on long-tailed CIFAR-100 (factor 100): one network, fixed epochs, three seeds.

    python benchmarks/imbalance.py data --cifar data --out lt
    python benchmarks/imbalance.py train --out lt --seeds 0                # choose τ and β on the held-out images
    python benchmarks/imbalance.py train --out lt --remedies none sqrt balanced inverse "effective 0.9999" "logits 1.0"
    python benchmarks/imbalance.py test --out lt --remedies none sqrt …    # at the end, once
    python benchmarks/imbalance.py table --out lt

Class k of the train split keeps 500·100^(−k/99) of its images, 10,847 in all; patchloom holds out a fifth of each class
to choose the weights and the settings of a remedy. Test is CIFAR-100's own, with 100 images per class. Each run adds a
row to OUT/runs.csv, and `test` a row to OUT/test.csv; runs with a row are skipped, so a stopped command resumes.
"""

import argparse
import csv
import io
import math
import time
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import patchloom

FACTOR, LARGEST, CLASSES = 100, 500, 100
REMEDIES = {
    "none": {},
    "sqrt": {"balance.sampling": "sqrt"},
    "balanced": {"balance.sampling": "balanced"},
    "inverse": {"balance.class_weights": "inverse"},
    **{
        f"effective {beta}": {"balance.class_weights": "effective", "balance.effective_beta": beta}
        for beta in (0.999, 0.9999)
    },
    **{f"logits {tau}": {"balance.logit_adjustment": tau} for tau in (0.5, 1.0, 1.5)},
    "none, unsmoothed": {"objective.smoothing": 0},
    "logits 1.0, unsmoothed": {"balance.logit_adjustment": 1.0, "objective.smoothing": 0},
}
NETWORK = {"model.options.depth": 3, "model.options.dim": 64, "model.options.patch_size": 4}
METRICS = ("top1", "mean_class_accuracy", "macro_f1")
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # t of a two-sided 95 % interval, by the number of seeds
PARTS = {"many": (100, LARGEST), "medium": (20, 99), "few": (1, 19)}  # training images of a class


def main() -> None:
    """Run one of the steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("data", "train", "test", "table"))
    parser.add_argument("--cifar", type=Path, help="folder with cifar100-*.parquet")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--remedies", nargs="+", choices=REMEDIES, default=list(REMEDIES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--most-s", type=float, default=math.inf, help="begin no run after this many seconds")
    options = parser.parse_args()
    if options.step == "data":
        make_data(options.cifar, options.out / "cifar100-lt")
    elif options.step == "table":
        print(table(rows_of(options.out / "runs.csv"), rows_of(options.out / "test.csv")))
    else:
        started = time.monotonic()
        for seed in options.seeds:
            for remedy in options.remedies:
                if time.monotonic() - started < options.most_s:
                    (train if options.step == "train" else test)(options, remedy, seed)


def class_sizes() -> np.ndarray:
    """Return the images per class of the long-tailed train split."""
    return (LARGEST * FACTOR ** (-np.arange(CLASSES) / (CLASSES - 1))).astype(int)


def make_data(cifar: Path, out: Path) -> None:
    """Write train.parquet, long-tailed, and test.parquet, as it is. Which class is rare is random, with seed 0."""
    out.mkdir(parents=True, exist_ok=True)
    whole = pa.concat_tables([pq.read_table(path) for path in sorted(cifar.glob("cifar100-train-*.parquet"))])
    labels, rng = whole["label"].to_numpy(), np.random.default_rng(0)
    sizes = dict(zip(rng.permutation(CLASSES).tolist(), class_sizes().tolist(), strict=True))
    chosen = [rng.permutation(np.flatnonzero(labels == label))[:size] for label, size in sizes.items()]
    pq.write_table(whole.take(np.sort(np.concatenate(chosen))), out / "train.parquet")
    pq.write_table(pq.read_table(cifar / "cifar100-test.parquet"), out / "test.parquet")
    print(
        f"{out}: {sum(map(len, chosen)):,} images to train on, {min(sizes.values())} to {max(sizes.values())} per class"
    )


def train(options: argparse.Namespace, remedy: str, seed: int) -> None:
    """Train one network; its row has the metrics of the best weights on the held-out images."""
    if is_done(options.out / "runs.csv", remedy, seed):
        return
    started = time.process_time()
    run = patchloom.train(
        str(options.out / "cifar100-lt"),
        model="resmlp_s12",
        epochs=options.epochs,
        batch=128,
        val="held-out",
        device="cpu",
        workers=0,
        out=str(folder_of(options.out, remedy, seed)),
        set={**NETWORK, "balance.sampling": "none", **REMEDIES[remedy], "seed": seed},
    )
    seconds = time.process_time() - started
    add_row(options.out / "runs.csv", remedy, seed, {name: run.metrics[name] for name in METRICS} | {"cpu_s": seconds})


def test(options: argparse.Namespace, remedy: str, seed: int) -> None:
    """Evaluate a trained run on the test images, in all and by the training images of the classes."""
    folder = folder_of(options.out, remedy, seed)
    if is_done(options.out / "test.csv", remedy, seed) or not is_done(options.out / "runs.csv", remedy, seed):
        return
    data = str(options.out / "cifar100-lt")
    report = patchloom.load(folder, device="cpu").evaluate(data, split="test").report
    names = pq.read_table(options.out / "cifar100-lt" / "train.parquet", columns=["label"])["label"].to_pylist()
    sizes = np.array([names.count(label) for label in range(CLASSES)])
    values = {name: dict(report)[name] for name in METRICS}
    for part, (low, high) in PARTS.items():
        values[part] = float(report.class_accuracy[(sizes >= low) & (sizes <= high)].mean())
    add_row(options.out / "test.csv", remedy, seed, values)


def folder_of(out: Path, remedy: str, seed: int) -> Path:
    """Return the folder of a run."""
    return out / f"{remedy.replace(',', '').replace(' ', '-')}-{seed}"


def rows_of(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file; none if it does not exist."""
    return list(csv.DictReader(io.StringIO(path.read_text()))) if path.is_file() else []


def is_done(path: Path, remedy: str, seed: int) -> bool:
    """Return whether a run has its row."""
    return any((row["remedy"], row["seed"]) == (remedy, str(seed)) for row in rows_of(path))


def add_row(path: Path, remedy: str, seed: int, values: dict[str, float]) -> None:
    """Append one row, after the header if it is the first."""
    begins = not path.is_file()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if begins:
            writer.writerow(["remedy", "seed", *values])
        writer.writerow([remedy, seed, *(f"{value:.3f}" for value in values.values())])
    print(f"{path.stem}: {remedy}, seed {seed}: {values}", flush=True)


def table(runs: list[dict[str, str]], tests: list[dict[str, str]]) -> str:
    """Return mean ± 95 % interval over seeds per remedy: held-out mean class accuracy, and the metrics of test."""
    names = [name for name in (tests[0] if tests else {}) if name not in ("remedy", "seed", "top1")]
    lines = [f"| remedy | seeds | held-out | {' | '.join(names)} |", "|---" * (3 + len(names)) + "|"]
    for remedy in dict.fromkeys(row["remedy"] for row in runs):
        held_out = [row["mean_class_accuracy"] for row in runs if row["remedy"] == remedy]
        tested = [row for row in tests if row["remedy"] == remedy]
        cells = [spread([row[name] for row in tested]) for name in names]
        lines.append(f"| {remedy} | {len(held_out)} | {spread(held_out)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(texts: list[str]) -> str:
    """Return mean ± half the 95 % interval of the mean, by Student's t."""
    values = [float(text) for text in texts]
    if len(values) < 2:
        return "–" if not values else f"{values[0]:.1f}"
    return f"{mean(values):.1f} ± {STUDENT[len(values)] * stdev(values) / math.sqrt(len(values)):.1f}"


if __name__ == "__main__":
    main()
