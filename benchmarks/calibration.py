"""Calibration error, promised and actual error, and test-time augmentation of a network on test images.

    python benchmarks/calibration.py DATA --max-error 20% --out runs/calibration --seeds 3 -- --epochs 10

The network is trained with `--val held-out`: a fifth of train chooses the epoch and fits the rules, and the data's own
val or test split is looked at once, here. Options after `--` go to `patchloom train`.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from trainings import train

import patchloom
from patchloom.tasks.classification.calibrate import CalibrationResult
from patchloom_runtime.errors import DataError

STRANGE = 200  # images


def measured(data: str, folder: Path, max_error: str) -> dict[str, Any]:
    """Return the numbers of one run on the test split."""
    row: dict[str, Any] = {"run": folder.name}
    patchloom.calibrate(folder, max_rejected=0)
    model = patchloom.load(folder)
    plain = model.evaluate(data, split="test")
    row |= {"top1": plain.report.top(1), "ece": plain.report.calibration_error(), "images": len(plain.report.index)}
    row["top1_tta"] = model.evaluate(data, split="test", tta=True).report.top(1)
    temperature = model.calibration.rules.temperature
    model.calibration = type(model.calibration)()
    row |= {"ece_before": model.evaluate(data, split="test").report.calibration_error(), "temperature": temperature}
    try:
        result: CalibrationResult = patchloom.calibrate(folder, max_error=max_error)
    except DataError as error:
        return row | {"promise": str(error)}
    promise = result.calibration.rules.promise
    assert promise is not None
    values = patchloom.load(folder).evaluate(data, split="test").values()
    return (
        row | {name: values[name] for name in ("answered", "answered_error")} | {"val_answered": 100 * promise.answers}
    )


def strange(folder: Path, data: Path) -> dict[str, Any]:
    """Return what a run says about images that show none of its classes, 200 of them."""
    images = patchloom.open_data(str(data), labeled=False).train
    rows = range(0, len(images), max(1, len(images) // STRANGE))[:STRANGE]
    reasons = [scores.abstained for scores in patchloom.load(folder).predict([images.read(row) for row in rows])]
    unlike = sum(reason.startswith("unlike") for reason in reasons)
    return {"data": data.name, "images": len(reasons), "unlike": unlike, "answered": reasons.count("")}


def main() -> None:
    """Train and measure one run per seed."""
    own, _, further = (part.split() for part in " ".join(sys.argv[1:]).partition(" -- "))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max-error", default="5%")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--strange", type=Path, nargs="*", default=[], help="data with none of these classes")
    options = parser.parse_args(own)
    for seed in range(options.seeds):
        folder = options.out / f"seed-{seed}"
        train(options.data, folder, ["--val", "held-out", "--set", f"seed={seed}", *further])
        print(json.dumps(measured(str(options.data), folder, options.max_error)), flush=True)
        for data in options.strange:
            print(json.dumps(strange(folder, data)), flush=True)


if __name__ == "__main__":
    main()
