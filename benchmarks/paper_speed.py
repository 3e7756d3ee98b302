"""Order of speed and memory of the networks beside the papers' V100: ResMLP table 1 and thesis table 5.1.

    python benchmarks/speed.py --warm 6 --kind forward --forms "peer compiled" patchloom --rounds 5 --out speed.json
    python benchmarks/paper_speed.py --speeds speed.json --memory --charts docs/papers
    python benchmarks/paper_speed.py --charts docs/papers      # render speed.csv without measuring

Speed is that of one GPU in bfloat16 with batches of 256. The papers have float32 and batches of 32 (ResMLP), and
mixed precision and batches of 256 (thesis), so only the order is compared: by Spearman's correlation of ranks, and by
the pairs of networks that change places. `--memory` counts the tensors that are alive in a forward pass of patchloom
in float32 on a CPU, with one image and with two; what the second one adds is added for every further image.
"""

import argparse
import csv
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
from papers import read

from patchloom.evaluation.regression import rank_correlation
from patchloom.models.bench import bench_memory
from patchloom.report.charts import Point, scatter_chart, svg_file

# Table → batch, and network → images per second and peak memory in MB on a V100.
PUBLISHED: dict[str, tuple[int, dict[str, tuple[float, float]]]] = {
    "ResMLP table 1": (
        32,
        {
            "deit_s": (940.4, 217.2),
            "deit_b": (292.3, 573.7),
            "cait_xs24": (447.6, 245.5),
            "resmlp_s12": (1415.1, 179.5),
            "resmlp_s24": (715.4, 235.3),
            "resmlp_b24": (231.3, 663.0),
        },
    ),
    "Thesis table 5.1": (
        256,
        {
            "deit_s": (1891, 987),
            "deit_b": (831, 2078),
            "mixer_b16": (993, 1448),
            "resmlp_s24": (1681, 844),
            "resmlp_b24": (1120, 930),
            "patchconvnet_s60": (1125, 1321),
            "patchconvnet_s120": (580, 1450),
            "patchconvnet_b60": (541, 2790),
            "timm:resnet50": (2587, 2182),
            "timm:swin_tiny_patch4_window7_224": (1109, 3345),
            "timm:swin_small_patch4_window7_224": (718, 3470),
        },
    ),
}
SPEED = {"patchloom": "images_per_s", "peer compiled": "peer_images_per_s"}  # form in speed.json → column
COLUMNS = (
    "network",
    *(f"{column}{end}" for column in SPEED.values() for end in ("", "_low", "_high")),
    *(f"mib_batch_{batch}" for batch, _ in PUBLISHED.values()),
)


def speeds(path: Path) -> dict[str, dict[str, Any]]:
    """Return the columns of speed by network: median, least and most of the rounds."""
    found: dict[str, dict[str, Any]] = {}
    for row in json.loads(path.read_text("utf-8"))["rows"]:
        if row["kind"] == "forward" and row["form"] in SPEED:
            column = SPEED[row["form"]]
            values = {
                column: row["images_per_s"],
                f"{column}_low": row["spread"][0],
                f"{column}_high": row["spread"][1],
            }
            found.setdefault(row["network"], {}).update({name: round(value) for name, value in values.items()})
    return found


def memories() -> dict[str, dict[str, Any]]:
    """Return the columns of memory by network."""
    names = list(dict.fromkeys(name for _, rows in PUBLISHED.values() for name in rows))
    one, two = ({n: mib[224] for n, mib in bench_memory(names, [224], batch=b, device="cpu").items()} for b in (1, 2))
    return {
        name: {f"mib_batch_{b}": round(one[name] + (b - 1) * (two[name] - one[name])) for b, _ in PUBLISHED.values()}
        for name in names
    }


def exchanged(published: dict[str, float], here: dict[str, float]) -> list[str]:
    """Return the pairs of networks whose order differs."""
    return [
        f"{a} and {b}"
        for a, b in itertools.combinations(published, 2)
        if (published[a] - published[b]) * (here[a] - here[b]) < 0
    ]


def compare(place: str, lines: dict[str, dict[str, str]], charts: Path) -> None:
    """Print the table of one paper with its rank correlations, and write its charts."""
    batch, rows = PUBLISHED[place]
    memory = f"mib_batch_{batch}"
    print(f"## {place}\n\n| network | V100, images/s | H200, images/s | timm there | V100, MB | here, MiB |")
    print("|---|---|---|---|---|---|")
    for name, published in sorted(rows.items(), key=lambda row: -row[1][0]):
        line = lines[name]
        own, peer = (_measured(line, column) for column in SPEED.values())
        print(f"| `{name}` | {published[0]:,} | {own} | {peer} | {published[1]:,} | {int(line[memory]):,} |")
    print()
    for what, column, number in (
        ("speed", "images_per_s", 0),
        ("speed of timm", "peer_images_per_s", 0),
        ("memory", memory, 1),
    ):
        here = {name: float(lines[name][column]) for name in rows if lines[name][column]}
        published = {name: rows[name][number] for name in here}
        rho = rank_correlation(np.array(list(here.values())), np.array(list(published.values())))
        pairs = len(here) * (len(here) - 1) // 2
        changed = exchanged(published, here)
        print(
            f"{what}, {len(here)} networks: rank correlation {rho:.2f}; {len(changed)} of {pairs} pairs change places"
        )
        print(f"    {', '.join(changed) or 'none'}")
        if what != "speed of timm":
            points = [Point(published[name], here[name], name.removeprefix("timm:")) for name in here]
            units = ("images/s", "images/s") if number == 0 else ("MB", "MiB")
            chart = scatter_chart(points, x_label=f"{place}, V100, {units[0]}", y_label=f"here, {units[1]}", named=True)
            file = f"measured_{what}_{place.split()[0].lower()}.svg"
            (charts / file).write_text(svg_file(chart), "utf-8")
    print()


def _measured(line: dict[str, str], column: str) -> str:
    if not line[column]:
        return "–"
    median, low, high = (int(line[f"{column}{end}"]) for end in ("", "_low", "_high"))
    return f"{median:,} ({low:,} … {high:,})"


def main() -> None:
    """Add what was measured to speed.csv, then print tables and write charts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speeds", type=Path, help="results of speed.py --out")
    parser.add_argument("--memory", action="store_true", help="count the memory of a forward pass")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/papers"))
    parser.add_argument("--charts", type=Path, help="folder of the charts (default: that of --out)")
    given = parser.parse_args()
    path = given.out / "speed.csv"
    lines: dict[str, dict[str, Any]] = {line["network"]: dict(line) for line in read(path)}
    measured = [speeds(given.speeds)] if given.speeds else []
    measured += [memories()] if given.memory else []
    for name, columns in (item for each in measured for item in each.items()):
        lines.setdefault(name, dict.fromkeys(COLUMNS, "") | {"network": name}).update(columns)
    if measured:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(lines.values())
    for place in PUBLISHED:
        compare(place, lines, given.charts or given.out)


if __name__ == "__main__":
    main()
