"""What many seeds of one network say about measurements: figures 6.7 to 6.10 of the thesis, at small scale.

    python benchmarks/papers.py seeds --seeds 50 --epochs 1 --data FOLDER
    python benchmarks/paper_seeds.py --charts docs/papers

The statistics are those of test accuracy over seeds: its standard deviation after each quarter of the epochs, the
correlation of the final accuracy with an earlier one, and that of the two halves of the test images. The 95 % intervals
are bootstrapped over seeds. The limits of a verdict were set before the runs. Writes seeds_statistics.csv and a chart.
"""

import argparse
import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
from paper_tables import HALVES, QUARTERS
from papers import read

from patchloom.evaluation.intervals import bootstrap_weights, central
from patchloom.report.charts import Point, scatter_chart, svg_file

ACCURACIES = (*QUARTERS, "top1")
SMALL_SPREAD = (0.1, 0.5)  # points; the thesis has 0.10 on 50,000 images and 0.23 on 10,000
HALF_SHARED = 0.5**0.5  # a correlation of less explains less than half of the variance


def interval(statistic: Callable[[np.ndarray], float], seeds: int) -> tuple[float, float]:
    """Return the bootstrap interval of a statistic of the seeds with these indices."""
    weights = bootstrap_weights(seeds).astype(int)
    return central(np.array([statistic(np.repeat(np.arange(seeds), drawn)) for drawn in weights]))


def verdict(low: float, high: float, least: float, most: float) -> str:
    """Return whether a statistic with this interval is between two limits."""
    if least <= low and high <= most:
        return "confirmed"
    return "contradicted" if high < least or low > most else "undecided"


def statistics(lines: list[dict[str, str]]) -> list[tuple[str, str, float, float, float, str]]:
    """Return claim, statistic, its value and interval, and the verdict."""
    values = {name: np.array([float(line[name]) for line in lines]) for name in (*ACCURACIES, *HALVES)}

    def spread(name: str) -> Callable[[np.ndarray], float]:
        return lambda rows: float(values[name][rows].std(ddof=1))

    def correlation(one: str, other: str) -> Callable[[np.ndarray], float]:
        return lambda rows: float(np.corrcoef(values[one][rows], values[other][rows])[0, 1])

    def ratio(rows: np.ndarray) -> float:
        return spread(ACCURACIES[0])(rows) / spread("top1")(rows)

    spread_claim, early = "The spread over seeds is small", "An early accuracy does not tell the best seed"
    rows = [(spread_claim, "standard deviation at the end, points", spread("top1"), *SMALL_SPREAD)]
    rows += [("", f"standard deviation, {name}, points", spread(name), -np.inf, np.inf) for name in QUARTERS]
    rows += [("The spread is larger early in training", "its ratio, first quarter to end", ratio, 1.0, np.inf)]
    rows += [(early, f"correlation of {name} with the end", correlation(name, "top1"), -1.0, HALF_SHARED)
             for name in QUARTERS]  # fmt: skip
    rows += [("A good seed on some images is not one on others", "correlation of the halves", correlation(*HALVES),
              -1.0, HALF_SHARED)]  # fmt: skip
    everything = np.arange(len(lines))
    results = []
    for claim, text, statistic, least, most in rows:
        low, high = interval(statistic, len(lines))
        decision = verdict(low, high, least, most) if claim else "–"
        results.append((claim or "–", text, statistic(everything), low, high, decision))
    return results


def main() -> None:
    """Print the table and write the chart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, default=Path("benchmarks/results/papers/seeds.csv"))
    parser.add_argument("--charts", type=Path, help="folder of the chart (default: that of the file)")
    given = parser.parse_args()
    path = given.file
    lines = read(path)
    top1 = [float(line["top1"]) for line in lines]
    print(f"{len(lines)} seeds: mean {np.mean(top1):.2f}, least {min(top1):.2f}, most {max(top1):.2f} %\n")
    table = statistics(lines)
    with path.with_name("seeds_statistics.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(
            [("claim", "statistic", "value", "low", "high", "verdict")]
            + [(claim, text, *(f"{each:.3f}" for each in values), last) for claim, text, *values, last in table]
        )
    print("| claim | statistic | value, with the 95 % interval | verdict |\n|---|---|---|---|")
    for claim, text, value, low, high, decision in table:
        print(f"| {claim} | {text} | {value:.2f} ({low:.2f} … {high:.2f}) | *{decision}* |")
    points = [Point(float(line[HALVES[0]]), float(line[HALVES[1]]), f"seed {line['seed']}") for line in lines]
    chart = scatter_chart(points, x_label="top-1 of one half of the test images, %", y_label="of the other half, %")
    (given.charts or path.parent).joinpath("measured_seeds.svg").write_text(svg_file(chart), "utf-8")


if __name__ == "__main__":
    main()
