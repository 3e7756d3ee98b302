"""Multi-label classification on real data: which classes are present in an image, against class frequencies.

    python benchmarks/multilabel.py ../shared/data/camvid-240x180-trainval.parquet --tiles 60 --epochs 6 --seeds 3 \
        --size 48 --network depth=4 dim=96 patch_size=8 --out runs/camvid
    python benchmarks/multilabel.py ../shared/data/bccd.parquet --epochs 15 --out runs/bccd

Each loss is trained with the automatic recipe and validated on images of train. The loss with the higher val mAP is
then evaluated once per seed on the images that were kept apart. With `--tiles`, masked frames of a parquet file are
cut into squares; a class is present in a tile if it covers more than `PRESENT` of it. The last fifth of the training
frames of each drive is val, and the frames of the data's own val split are the test. Without it, val is held out at
random, and the test is the test split. The baseline gives every image the share of each label among the training
images. Prints one JSON object.
"""

import argparse
import io
import json
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from PIL import Image

import patchloom
from patchloom.data.annotations.image_labels import of_labels
from patchloom.data.reading_options import Reading
from patchloom.data.sources.source import find_source
from patchloom.data.sources.specs import as_spec
from patchloom.evaluation.multilabel import MultilabelReport
from patchloom.tasks.multilabel.evaluation import LABELS
from patchloom.tasks.multilabel.run_files import read_val_labels

METHODS = ("multilabel", "asymmetric")
NUMBERS = ("map", "macro_f1", "micro_f1")
PRESENT = 0.01  # share of the pixels of a tile
HELD_OUT = 5  # one in so many training frames of a drive


def tiles_of(path: str, side: int) -> dict[str, tuple[np.ndarray, list[list[str]]]]:
    """Return the tiles of the frames and the classes present in each, by split."""
    table = pq.read_table(path)
    names = json.loads(table.schema.metadata[b"dataset_info"])["label_names"][:-1]  # the last is unlabeled
    rows = table.to_pylist()
    frames: dict[str, list[Any]] = {"train": [], "val": [], "test": [row for row in rows if row["split"] == "val"]}
    drives = groupby((row for row in rows if row["split"] == "train"), key=lambda row: row["name"].partition("_")[0])
    for _, drive in drives:
        of_drive = list(drive)
        first = len(of_drive) - len(of_drive) // HELD_OUT
        frames["train"] += of_drive[:first]
        frames["val"] += of_drive[first:]
    return {split: _tiles(of_split, side, names) for split, of_split in frames.items()}


def _tiles(frames: list[Any], side: int, names: list[str]) -> tuple[np.ndarray, list[list[str]]]:
    tiles, present = [], []
    for frame in frames:
        image, mask = (np.asarray(Image.open(io.BytesIO(frame[part]))) for part in ("image", "mask"))
        for top in range(0, mask.shape[0] - side + 1, side):
            for left in range(0, mask.shape[1] - side + 1, side):
                square = slice(top, top + side), slice(left, left + side)
                tiles.append(image[square])
                shares = np.bincount(mask[square].ravel(), minlength=len(names)) / side**2
                present.append([name for name, share in zip(names, shares, strict=False) if share > PRESENT])
    return np.stack(tiles), present


def numbers_of(report: MultilabelReport) -> dict[str, object]:
    """Return the metrics with the interval of the mAP."""
    values = dict(report)
    numbers = {name: round(values[name], 2) for name in NUMBERS}
    return {**numbers, "interval": [round(value, 1) for value in report.map_interval()], "images": len(report.index)}


def main() -> None:
    """Train, choose a loss on val, and evaluate it once per seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--size", type=int)
    parser.add_argument("--network", nargs="+", default=[], help="model options of resmlp_s12, such as depth=4")
    parser.add_argument("--tiles", type=int, help="side in pixels")
    options = parser.parse_args()
    data = as_spec(tiles_of(options.data, options.tiles) if options.tiles else options.data)
    reading = Reading() if options.tiles else Reading(val="held-out")
    network = {
        f"model.options.{key}": int(value) for key, _, value in (each.partition("=") for each in options.network)
    }

    def trained(method: str, seed: int) -> Path:
        folder = options.out / f"{method}-{seed}"
        patchloom.train(
            data, out=str(folder), task="multilabel", epochs=options.epochs, init="none", device="cpu",
            size=options.size, model="resmlp_s12" if network else None, val=reading.val, workers=0,
            set={"objective.method": method, "seed": seed, **network},
        )  # fmt: skip
        return folder

    runs = {method: read_val_labels(trained(method, 0)).report for method in METHODS}
    chosen = max(runs, key=lambda method: runs[method].mean_ap)
    folders = [trained(chosen, seed) for seed in range(options.seeds)]
    reports = []
    for folder in folders:
        model = patchloom.load(folder, device="cpu")
        test = LABELS.open(data, model.labels, split="test", folder=folder, reading=reading)
        reports.append(LABELS.evaluate_on(model, test)[0].report)
    report, val = reports[0], runs[chosen]
    train = of_labels(find_source(data, reading=reading)).train.targets
    assert train is not None
    shares = np.nanmean(train.named(report.classes).values, axis=0)
    constant = MultilabelReport(
        val.classes, val.index, val.targets, np.tile(shares, (len(val.index), 1)), val.thresholds
    )
    baseline = MultilabelReport(
        report.classes, report.index, report.targets, np.tile(shares, (len(report.index), 1)),
        constant.with_thresholds().thresholds,
    )  # fmt: skip
    precisions = np.mean([of.average_precision for of in reports], axis=0)
    values = {
        "data": Path(options.data).name,
        "val": {method: numbers_of(of) for method, of in runs.items()},
        "chosen": chosen,
        "test": [numbers_of(of) for of in reports],
        "baseline": numbers_of(baseline),
        "ap": {name: round(float(ap), 1) for name, ap in zip(report.classes, precisions, strict=True)},
        "ap of the baseline": {
            name: round(float(ap), 1) for name, ap in zip(report.classes, baseline.average_precision, strict=True)
        },
    }
    print(json.dumps(values, indent=1))


if __name__ == "__main__":
    main()
