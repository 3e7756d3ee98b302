"""Regression on real images: the number of blood cells per image of BCCD, against always predicting the mean.

    python benchmarks/regression.py bccd.parquet --out runs/bccd-cells --seeds 3 \
        --init timm:tf_efficientnet_lite0@lite0.safetensors

The red cells, white cells and platelets of each image are counted by their boxes. Epochs are selected on images held
out of train; the test images are evaluated once per seed. Prints mean absolute error and R² per count. Without
`--init`, a small ResMLP learns from random weights. `lite0_weights.py` makes the weights.
"""

import argparse
import csv
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

import patchloom

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("parquet", type=Path)
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--seeds", type=int, default=3)
parser.add_argument("--init", default="none", help="weights to start from")
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--size", type=int, default=160)
parser.add_argument("--workers", type=int, default=0)


def write_images(parquet: Path, folder: Path) -> dict[str, Path]:
    """Write images and one labels file per split, and return these files."""
    table = pq.read_table(parquet)
    names = _names(table)
    folder.mkdir(parents=True, exist_ok=True)
    rows: dict[str, list[list[object]]] = {}
    for number, row in enumerate(table.to_pylist()):
        path = folder / f"{number:04}.jpg"
        path.write_bytes(row["image"])
        classes = row["labels"]
        rows.setdefault(row["split"], []).append([path.name, *(classes.count(k) for k in range(len(names)))])
    files = {split: folder / f"{split}.csv" for split in rows}
    for split, lines in rows.items():
        with open(files[split], "w", newline="") as file:
            csv.writer(file).writerows([["path", *names], *lines])
    return files


def _names(table: object) -> list[str]:
    info = json.loads(table.schema.metadata[b"dataset_info"])  # type: ignore[attr-defined]
    return [str(name) for name in info["label_names"]]


def main() -> None:
    options = parser.parse_args()
    files = write_images(options.parquet, options.out / "images")
    names = files["train"].read_text().splitlines()[0].split(",")[1:]
    train, test = (np.genfromtxt(files[split], delimiter=",", skip_header=1)[:, 1:] for split in ("train", "test"))
    baseline = np.abs(test - train.mean(axis=0)).mean(axis=0)
    network, changes = {}, {}
    if options.init == "none":
        network = {"model": "resmlp_s12"}
        changes = {"model.options.depth": 4, "model.options.dim": 128, "model.options.patch_size": 8, "optim.lr": 2e-3}
    results = []
    for seed in range(options.seeds):
        run = patchloom.train(
            str(files["train"]), out=str(options.out / f"seed{seed}"), label_column=",".join(names), init=options.init,
            size=options.size, batch=16, epochs=options.epochs, workers=options.workers,
            **network, set={"seed": seed, **changes},
        )  # fmt: skip
        model = patchloom.load(run.folder)
        rows = [line.split(",")[0] for line in files["test"].read_text().splitlines()[1:]]
        predicted = np.array([[n for _, n in model.predict(str(options.out / "images" / name))] for name in rows])
        error = np.abs(predicted - test).mean(axis=0)
        r2 = 1 - ((predicted - test) ** 2).sum(axis=0) / ((test - test.mean(axis=0)) ** 2).sum(axis=0)
        results.append((error, r2))
        print(f"seed {seed}: MAE {error.round(3)}, R² {r2.round(3)}", flush=True)
    for number, name in enumerate(names):
        errors, shares = ([result[part][number] for result in results] for part in (0, 1))
        print(
            f"{name}: MAE {np.mean(errors):.2f} ± {np.std(errors):.2f}, mean of train {baseline[number]:.2f}, "
            f"R² {np.mean(shares):.2f} ± {np.std(shares):.2f}"
        )


if __name__ == "__main__":
    main()
