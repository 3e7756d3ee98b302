"""What frozen epochs, attention-only fine-tuning, LoRA and model soups change, on scikit-learn's digits.

    python benchmarks/light_fine_tuning.py --out runs/light --seeds 3

Per seed, a small ViT learns the digits 0 to 4 and is fine-tuned on 5 to 9 with 20 images per class; 20 more per class
are val, which selects the epoch and the greedy soup, and all others are the test, looked at once. Every row has the
settings of `auto` and differs in the named fields alone. The soup is made of three runs of full fine-tuning that differ
in the order of their images. Prints the test top-1 of each row, and its difference from full fine-tuning as mean and
95 % interval (Student's t) over the seeds. Then it compares the loss and the calibration error on the test images with
and without the temperature of each run, for runs whose val says that it helps and for the others.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t as student
from sklearn.datasets import load_digits

import patchloom
from patchloom.inference.evaluation_methods import EvaluationSettings
from patchloom.inference.evaluations import EvaluationData, evaluate_on

VIT = {
    "model.options.dim": 64, "model.options.depth": 4, "model.options.heads": 2, "model.options.patch_size": 2,
    "augment.crop": "pad", "augment.crop_padding": 1, "augment.flip": 0.0, "augment.mixup": 0.0,
}  # fmt: skip
ROWS: dict[str, dict[str, Any]] = {
    "from scratch": {},
    "all weights": {},
    "the classifier": {"model.trainable": "head"},
    "classifier and attention": {"model.trainable": "attention"},
    "LoRA of rank 8": {"model.trainable": "lora"},
    "all, 10 frozen epochs": {"model.frozen_epochs": 10},
}
FULL, SOUP, SCRATCH = "all weights", "greedy soup of 3", "from scratch"
PER_CLASS = 20

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--seeds", type=int, default=3)
parser.add_argument("--pretraining", type=int, default=40, help="epochs")
parser.add_argument("--epochs", type=int, default=40)
options = parser.parse_args()


def digits(seed: int) -> tuple[Any, dict[str, Any]]:
    """Return the images of 0 to 4, and the splits of 5 to 9."""
    images, labels = load_digits(return_X_y=True)
    pixels = (images.reshape(-1, 8, 8) * 255 / 16).round().astype(np.uint8)
    order = np.random.default_rng(seed).permutation(len(labels))
    position = np.empty(len(labels), int)  # of each image among those of its class
    for label in range(10):
        own = order[labels[order] == label]
        position[own] = np.arange(len(own))
    rows = {
        "train": (labels > 4) & (position < PER_CLASS),
        "val": (labels > 4) & (position >= PER_CLASS) & (position < 2 * PER_CLASS),
        "test": (labels > 4) & (position >= 2 * PER_CLASS),
    }
    first = labels < 5
    return (pixels[first], labels[first]), {split: (pixels[of], labels[of]) for split, of in rows.items()}


def train(data: Any, name: str, seed: int, epochs: int, batch: int, init: str, **changes: Any) -> str:
    """Train, unless the run is there, and return its folder."""
    out = str(options.out / name)
    patchloom.train(
        data, out=out, model="deit_ti", size=8, epochs=epochs, batch=batch, init=init, race=False, workers=0,
        device="cpu", set={"seed": seed, **VIT, **changes},
    )  # fmt: skip
    return out


def folder_of(row: str, seed: int) -> str:
    return f"{row.replace(' ', '_').replace(',', '')}-{seed}"


def measured(seed: int) -> dict[str, float]:
    """Return the test top-1 of every row."""
    first, data = digits(seed)
    start = train(first, f"pretrained-{seed}", seed, options.pretraining, 64, "none")
    runs = {}
    for row, changes in ROWS.items():
        init = "none" if row == SCRATCH else start
        runs[row] = train(data, folder_of(row, seed), seed, options.epochs, PER_CLASS, init, **changes)
    others = [
        train(data, f"all_weights-{seed}-{other}", 100 * other + seed, options.epochs, PER_CLASS, start)
        for other in (1, 2)
    ]
    runs[SOUP] = str(options.out / f"soup-{seed}")
    if not Path(runs[SOUP]).exists():
        patchloom.soup([runs[FULL], *others], data, out=runs[SOUP], split="val", device="cpu")
    tested = {row: patchloom.evaluate(run, data, split="test", device="cpu") for row, run in runs.items()}
    return {row: next(iter(each.values().values()))["top1"] for row, each in tested.items()}


def temperature_row(row: str, seed: int) -> tuple[bool, list[float]]:
    """Return whether a run uses its temperature, and test losses and calibration errors without and with it."""
    model = patchloom.load(options.out / folder_of(row, seed), device="cpu")
    fit, model.calibration = model.calibration.fit, type(model.calibration)()
    settings = EvaluationSettings(split="test")
    images = EvaluationData(digits(seed)[1], settings).open(model)
    report = evaluate_on(model, images, settings, keep_logits=True).report
    both = [report.at_temperature(temperature) for temperature in (1.0, fit.fitted)]
    return fit.helps, [*(each.loss for each in both), *(each.calibration_error() for each in both)]


def print_temperatures() -> None:
    rows = [temperature_row(row, seed) for row in ROWS for seed in range(options.seeds)]
    for helps in (True, False):
        values = np.array([values for of, values in rows if of == helps]).reshape(-1, 4)
        lower = (values[:, [1, 3]] < values[:, [0, 2]]).sum(axis=0)
        losses, errors = values.mean(axis=0).round(3).reshape(2, 2).tolist()
        print(f"{'used' if helps else 'not used'}: {len(values)} runs, loss {losses} (lower in {lower[0]}), ", end="")
        print(f"calibration error {errors} (lower in {lower[1]})")


def main() -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for seed in range(options.seeds):
        record = options.out / f"{seed}.json"
        if not record.exists():
            record.write_text(json.dumps(measured(seed)))
        rows.append(json.loads(record.read_text()))
    width = student.ppf(0.975, max(1, len(rows) - 1)) / np.sqrt(len(rows))
    for name in rows[0]:
        values, gains = (np.array([row[name] - other for row, other in zip(rows, of, strict=True)]) for of in (
            [0.0] * len(rows), [row[FULL] for row in rows],
        ))  # fmt: skip
        spread = [each.std(ddof=1) * width if len(rows) > 1 else np.nan for each in (values, gains)]
        print(f"| {name} | {values.mean():.1f} ± {spread[0]:.1f} | {gains.mean():+.1f} ± {spread[1]:.1f} |", flush=True)
    print_temperatures()


if __name__ == "__main__":
    main()
