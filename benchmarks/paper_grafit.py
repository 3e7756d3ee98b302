"""Coarse labels, fine features: thesis tables 2.1, 2.2 and 2.7 and figure 2.1, with a ResNet-18 on CIFAR-100.

    python benchmarks/paper_grafit.py cifar100/ --out runs/grafit --charts docs/papers -- --epochs 60 --compile
    python benchmarks/paper_grafit.py cifar100/ --out runs/grafit --charts docs/papers --table

cifar100/ has the parquet files with both levels of labels. "both" is cross-entropy with a triplet loss. Options after
`--` go to every `patchloom train`. A run that is there already goes on or is left as it is, and what was measured
stands in RUN/measured.json. Writes grafit.csv, one line per run, and a chart beside the thesis; prints the verdicts by
the rule of docs/papers/index.md.
"""

import argparse
import csv
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from paper_tables import Claim
from papers import by_seed, judge
from papers import read as read_csv
from trainings import options_of, read, train

import patchloom
from patchloom.report.charts import Point, scatter_chart, svg_file
from patchloom.report.pictures.embeddings import pca_energy

COARSE = ("--level", "coarse")
BOTH = ("--recipe", "grafit", "--set", "objective.method=cross_entropy_triplet")
RUNS = {
    "cross_entropy_coarse": ("--recipe", "grafit_supervised", *COARSE),
    "both_coarse": (*BOTH, *COARSE),
    "triplet": ("--recipe", "triplet"),
    "cross_entropy_fine": ("--recipe", "grafit_supervised"),
    "both_fine": BOTH,
    "snca_plus": ("--recipe", "snca_plus", *COARSE),
    "grafit_fc": ("--recipe", "grafit_fc", *COARSE),
    "grafit": ("--recipe", "grafit", *COARSE),
}
NETWORK = ("--model", "timm:resnet18", "--set", "model.options.small_stem=true", "--size", "32")
COLUMNS = ("variant", "seed", "linear", "knn", "map", "separability", "components_90")
PUBLISHED = {  # table 2.1, separability; 2.2, linear; 2.7, kNN
    "separability": {"cross_entropy_coarse": 53.7, "triplet": 26.4, "both_coarse": 57.1},
    "linear": {
        "cross_entropy_coarse": 80.4,
        "triplet": 76.5,
        "both_coarse": 80.9,
        "cross_entropy_fine": 80.6,
        "both_fine": 81.3,
    },
    "knn": {"cross_entropy_coarse": 71.8, "snca_plus": 72.2, "grafit_fc": 75.6, "grafit": 77.7},
}
CLAIMS = (
    Claim(
        "A triplet loss beside cross-entropy makes arbitrary fine labels more separable",
        ("both_coarse",),
        ("cross_entropy_coarse", "triplet"),
        "separability",
    ),
    Claim(
        "Coarse labels are almost as good as fine ones for features",
        ("cross_entropy_coarse",),
        ("cross_entropy_fine",),
        "linear",
        within=1.0,
    ),
    Claim(
        "Fine labels spread the energy over more components",
        ("cross_entropy_fine",),
        ("cross_entropy_coarse",),
        "components_90",
    ),
)


def probed(folder: Path, data: Path, *options: str) -> dict[str, Any]:
    """Return the values of a run that `patchloom probe` prints."""
    command = [sys.executable, "-m", "patchloom.cli", "probe", str(folder), str(data), *options, "--json"]
    printed = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    values: dict[str, Any] = next(iter(printed.get("runs", printed).values()))  # with --levels, runs beside tables
    return values


def measured(folder: Path, data: Path) -> dict[str, Any]:
    """Return the measures of a run, from its file if they are there."""
    path = folder / "measured.json"
    if not path.is_file():
        levels = probed(folder, data, "--levels", "--linear", "--level", "coarse")
        values = {
            "linear": probed(folder, data, "--linear")["linear_top1"],
            "knn": levels[f"knn{levels['neighbours']}_top1"],
            "map": levels["map"],
            "separability": levels["separability_top1"],
        }
        splits = patchloom.open_data(str(data))
        vectors = patchloom.load(folder).embed(splits.val or splits.test).vectors
        energy = pca_energy(vectors)
        values["components_90"] = int(np.searchsorted(energy, 0.9)) + 1
        path.write_text(json.dumps({name: round(value, 2) for name, value in values.items()}), "utf-8")
    result: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return result


def tell(lines: Sequence[dict[str, str]], charts: Path) -> None:
    """Print the means and verdicts, and draw what the thesis has numbers for."""
    variants = list(dict.fromkeys(line["variant"] for line in lines))
    names = COLUMNS[2:]
    print(f"| trained with | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    for variant in variants:
        print(f"| {variant} | {' | '.join(f'{fmean(by_seed(lines, variant, m).values()):.2f}' for m in names)} |")
    points = [
        Point(value, fmean(by_seed(lines, variant, measure).values()), f"{variant}, {measure}")
        for measure, rows in PUBLISHED.items()
        for variant, value in rows.items()
        if variant in variants
    ]
    chart = scatter_chart(points, x_label="thesis, %", y_label="here, %", named=True)
    (charts / "measured_grafit.svg").write_text(svg_file(chart), "utf-8")
    for claim in CLAIMS:
        verdict, differences = judge(lines, claim)
        texts = "; ".join(f"{d.name}: {d.mean:+.2f} ({d.low:+.2f} … {d.high:+.2f})" for d in differences)
        print(f"{claim.text}: {verdict}. {texts}")


def main() -> None:
    """Train and measure what is missing, then write the CSV file, the chart and the verdicts."""
    parser: argparse.ArgumentParser = options_of(__doc__, RUNS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--csv", type=Path, default=Path("benchmarks/results/papers"))
    parser.add_argument("--charts", type=Path, help="folder of the chart (default: that of --csv)")
    given, further = read(parser)
    path = given.csv / "grafit.csv"
    lines = []
    for seed in range(given.seeds):
        for name in given.only or RUNS:
            folder = given.out / f"{name}_{seed}"
            if not given.table:
                train(given.data, folder, [*RUNS[name], *NETWORK, "--set", f"seed={seed}", *further])
            if (folder / "run.json").is_file():
                lines.append({"variant": name, "seed": seed} | measured(folder, given.data))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    tell(read_csv(path), given.charts or given.csv)


if __name__ == "__main__":
    main()
