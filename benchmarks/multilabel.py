"""Multi-label classification on real data: which classes are present in an image, against class frequencies.

    python benchmarks/multilabel.py ../shared/data/camvid-240x180-trainval.parquet --out runs/multilabel

Each loss is trained with the automatic recipe and validated on images of train. The loss with the higher val mAP is
then evaluated once on the images that were kept apart: the test split, or the data's own val split if there is no test.
The baseline gives every image the share of each label among the training images. Prints one JSON object.
"""

import argparse
import json
from pathlib import Path

import numpy as np

import patchloom
from patchloom.data.annotations.image_labels import of_labels
from patchloom.data.reading import Reading
from patchloom.data.sources.source import find_source
from patchloom.evaluation.multilabel import MultilabelReport
from patchloom.tasks.multilabel.evaluation import LABELS
from patchloom.tasks.multilabel.run_files import read_val_labels

METHODS = ("multilabel", "asymmetric")
NUMBERS = ("map", "macro_f1", "micro_f1")


def numbers_of(report: MultilabelReport) -> dict[str, object]:
    """Return the metrics with the interval of the mAP."""
    values = dict(report)
    numbers = {name: round(values[name], 2) for name in NUMBERS}
    return {**numbers, "interval": [round(value, 1) for value in report.map_interval()], "images": len(report.index)}


def main() -> None:
    """Train, choose a loss on val, and evaluate it once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    reading = {"val": "held-out"}
    runs = {}
    for method in METHODS:
        folder = options.out / method
        changes = {"objective.method": method, "seed": options.seed}
        patchloom.train(
            options.data, out=str(folder), task="multilabel", epochs=options.epochs, init="none", device="cpu",
            set=changes, **reading,
        )  # fmt: skip
        runs[method] = read_val_labels(folder).report
    chosen = max(runs, key=lambda method: runs[method].mean_ap)
    folder = options.out / chosen
    model = patchloom.load(folder, device="cpu")
    test = LABELS.open(options.data, model.labels, split="test", folder=folder, reading=Reading(val="held-out"))
    report = LABELS.evaluate_on(model, test)[0].report

    train = of_labels(find_source(options.data, reading=Reading(val="held-out"))).train.targets
    assert train is not None
    shares = np.nanmean(train.named(model.labels).values, axis=0)
    val = runs[chosen]
    constant = MultilabelReport(
        val.classes, val.index, val.targets, np.tile(shares, (len(val.index), 1)), val.thresholds
    )
    baseline = MultilabelReport(
        report.classes, report.index, report.targets, np.tile(shares, (len(report.index), 1)),
        constant.with_thresholds().thresholds,
    )  # fmt: skip
    print(
        json.dumps(
            {
                "data": Path(options.data).name,
                "val": {method: numbers_of(of) for method, of in runs.items()},
                "chosen": chosen,
                "test": numbers_of(report),
                "baseline": numbers_of(baseline),
                "ap": {
                    name: round(float(ap), 1) for name, ap in zip(report.classes, report.average_precision, strict=True)
                },
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
