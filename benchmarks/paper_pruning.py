"""Sparsity of a ResMLP's matrices and accuracy after pruning them: figure 3 and section 3.3 of the ResMLP paper.

    for seed in 0 1 2; do
        patchloom train digits --out runs/digits_$seed --epochs 30 --set augment.crop=resize --set augment.mixup=0 \\
            --set optim.lr=3e-3 --set seed=$seed
    done
    python benchmarks/paper_pruning.py digits runs/digits_0 runs/digits_1 runs/digits_2 --charts docs/papers
    python benchmarks/paper_pruning.py --table-only --charts docs/papers

The runs are one network with several seeds. A matrix is pruned by setting its smallest weights to zero; nothing is
trained again. Writes pruning.csv, one line per seed and matrix, and two charts. Prints the verdicts.
"""

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from paper_tables import Claim
from papers import by_seed, judge, read

import patchloom
from patchloom.report.charts import Series, line_chart, svg_file
from patchloom.report.pictures.weights import sparsity
from patchloom.runs.config import read_recipe
from patchloom.tasks.classification.pruning import prune

SHARES = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
UNPRUNED = "as trained"
COLUMNS = ("variant", "seed", "small", *(f"top1_at_{share:g}" for share in SHARES), "layers")
MATRICES = {"A": "A", "B": "B", "C": "C", "ABC": "A, B and C"}
CLAIMS = (
    Claim("The matrices over patches are sparser than those of the MLPs", ("A",), ("B", "C"), "small"),
    Claim("Half of the weights of all matrices can be set to zero", ("ABC",), (UNPRUNED,), "top1_at_0.5", within=1.0),
    Claim("Pruning nine tenths costs less in the matrices over patches", ("A",), ("B", "C"), "top1_at_0.9"),
)


def measured(run: str, data: str, seed: int) -> list[dict[str, object]]:
    """Return the lines of a run: as trained, and per matrix the small weights in percent and top-1 by pruned share."""
    points = sparsity(patchloom.load(run).model)
    pruning = prune(run, data, shares=SHARES)
    lines: list[dict[str, object]] = []
    for letters in (UNPRUNED, *MATRICES):
        layers = [round(100 * point.share, 1) for point in points if point.matrix == letters]
        scores = {point.share: point.values["top1"] for point in pruning.points if point.letters == letters}
        line: dict[str, object] = {"variant": letters, "seed": seed, "layers": " ".join(map(str, layers))}
        line["small"] = round(fmean(layers), 2) if layers else ""
        for share in SHARES:
            line[f"top1_at_{share:g}"] = round(scores.get(share, pruning.whole.values["top1"]), 2)
        lines.append(line)
    return lines


def means(lines: Sequence[dict[str, str]], variant: str, measure: str) -> float:
    """Return the mean of a measure over seeds."""
    return fmean(by_seed(lines, variant, measure).values())


def write_charts(lines: Sequence[dict[str, str]], folder: Path) -> None:
    """Draw figure 3 and the curves of accuracy, as means over seeds."""
    layers: dict[str, list[list[float]]] = {}
    for line in lines:
        if line["layers"]:
            layers.setdefault(line["variant"], []).append([float(each) for each in line["layers"].split()])
    series = [
        Series(name, [(i + 1, fmean(values)) for i, values in enumerate(zip(*seeds, strict=True))], color)
        for color, (name, seeds) in enumerate(layers.items())
    ]
    chart = line_chart(series, x_label="layer", y_label="small weights, %", from_zero=True)
    (folder / "measured_sparsity.svg").write_text(svg_file(chart), "utf-8")
    start = (0.0, means(lines, UNPRUNED, COLUMNS[3]))
    series = [
        Series(text, [start, *((100 * s, means(lines, name, f"top1_at_{s:g}")) for s in SHARES)], color)
        for color, (name, text) in enumerate(MATRICES.items())
    ]
    chart = line_chart(series, x_label="% of each matrix set to zero", y_label="top-1, %")
    (folder / "measured_pruning.svg").write_text(svg_file(chart), "utf-8")


def main() -> None:
    """Measure the runs, then write the charts and print tables and verdicts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", help="data of the runs; their held-out images are evaluated")
    parser.add_argument("runs", nargs="*", help="run folders, one per seed")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/papers"))
    parser.add_argument("--charts", type=Path, help="folder of the charts (default: that of --out)")
    parser.add_argument("--table-only", action="store_true", help="render the CSV file without measuring")
    given = parser.parse_args()
    path = given.out / "pruning.csv"
    if not given.table_only:
        if len(given.runs) < 2:
            parser.error("pass the data and at least two runs of one network, each with another seed")
        recipes = [read_recipe(Path(run)) for run in given.runs]
        rows = [
            line
            for run, recipe in zip(given.runs, recipes, strict=True)
            for line in measured(run, given.data, recipe.seed if recipe else 0)
        ]
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    lines = read(path)
    write_charts(lines, given.charts or given.out)
    print("| matrices | small weights, % |", *(f" {100 * share:g} % zero |" for share in SHARES), sep="")
    print("|---|---|" + "---|" * len(SHARES))
    for variant in (UNPRUNED, *MATRICES):
        small = f"{means(lines, variant, 'small'):.1f}" if variant in "ABC" and len(variant) == 1 else "–"
        scores = [f"{means(lines, variant, f'top1_at_{share:g}'):.1f}" for share in SHARES]
        print(f"| {MATRICES.get(variant, variant)} | {small} | {' | '.join(scores)} |")
    print()
    for claim in CLAIMS:
        verdict, differences = judge(lines, claim)
        texts = "; ".join(f"{d.name}: {d.mean:+.2f} ({d.low:+.2f} … {d.high:+.2f})" for d in differences)
        print(f"{claim.text}: {verdict}. {texts}")


if __name__ == "__main__":
    main()
