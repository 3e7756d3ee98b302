"""Plant wrong labels, and measure how well `patchloom audit` lists them and what correcting them is worth.

    python benchmarks/audit.py plant digits --out planted/digits
    python benchmarks/audit.py plant flowers102-136.parquet --classes 20 --out planted/flowers
    python benchmarks/audit.py measure planted/digits --folds 3 --epochs 20
    python benchmarks/audit.py cleanlab planted/digits             # where cleanlab is installed; patchloom need not be

`plant` writes class folders in which 5 % of the training images lie in the folder of another class; test images are not
touched. `measure` audits them and writes the out-of-fold probabilities for `cleanlab`, then trains with the labels as
they are, with the suggested corrections, and with the true labels, and evaluates each once on test.
"""

import argparse
import csv
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

PROBABILITIES, LABELS, PLANTED = "probabilities.npy", "labels.npy", "planted.npy"


def plant(arguments: argparse.Namespace) -> None:
    """Write data with planted labels, and planted.csv, the corrections that undo them."""
    from patchloom.data.reading_options import Reading
    from patchloom.data.sources.source import open_data

    splits = open_data(arguments.data, reading=Reading(val=None))
    test = splits.test if splits.test is not None else splits.val
    names = splits.classes.names
    counts = np.bincount(splits.train.labels, minlength=len(names))
    chosen = sorted(np.argsort(-counts, kind="stable")[: arguments.classes or len(names)].tolist())
    rng = np.random.default_rng(arguments.seed)
    corrections = []
    for split, images in (("train", splits.train), ("test", test)):
        positions = np.flatnonzero(np.isin(images.labels, chosen))
        wrong = set(rng.choice(positions, round(arguments.wrong * len(positions)), replace=False).tolist())
        for position in positions.tolist():
            truth = label = int(images.labels[position])
            if split == "train" and position in wrong:
                label = int(rng.choice([other for other in chosen if other != truth]))
            folder = arguments.out / "data" / split / str(names[label])
            folder.mkdir(parents=True, exist_ok=True)
            images.read(position).save(folder / f"{position}.png")
            if label != truth:
                corrections.append([f"{split}/{names[label]}/{position}.png", "relabel", str(names[truth])])
    with (arguments.out / "planted.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["path", "action", "label"], *corrections])
    print(f"{arguments.out}: {len(corrections)} wrong labels planted in {len(chosen)} classes")


def measure(arguments: argparse.Namespace) -> None:
    """Audit the planted data, then train with each set of labels."""
    import patchloom

    place, data = arguments.place, str(arguments.place / "data")
    options: dict[str, Any] = {"device": "cpu", "epochs": arguments.epochs, "init": arguments.init}
    options |= {"size": arguments.size, "set": dict(change.split("=", 1) for change in arguments.set)}
    report = patchloom.audit(data, folds=arguments.folds, out=str(place / "folds"), **options)
    truth = {row[0]: row[2] for row in csv.reader((place / "planted.csv").open(newline=""))}
    keys = report.predictions.keys
    np.save(place / PROBABILITIES, report.predictions.probabilities)
    np.save(place / LABELS, report.predictions.labels)
    np.save(place / PLANTED, np.array([key in truth for key in keys]))
    listed = {one.image.key: one.suggestion for one in report.wrong_labels}
    result = scores(np.array([key in listed for key in keys]), np.load(place / PLANTED))
    right = sum(truth.get(key) == suggestion for key, suggestion in listed.items())
    result |= {"suggestions_right": 100 * right / max(1, len(listed)), "estimated_wrong": report.estimated_wrong}
    result |= {"top1_out_of_fold": report.top1, "predicted_top1": report.predicted_top1}
    report.save_corrections(place / "suggested.csv")
    for name in ("given", "suggested", "planted"):
        file = None if name == "given" else str(place / f"{name}.csv")
        out = str(place / f"run-{name}")
        patchloom.train(data, corrections=file, val="held-out", out=out, **options)
        evaluation = patchloom.evaluate(out, data, split="test", device="cpu").evaluations[f"run-{name}"]
        result[f"test_top1_{name}"] = evaluation.report.top(1)
    print(json.dumps(result, indent=1))
    (place / "result.json").write_text(json.dumps(result, indent=1) + "\n")


def compare(arguments: argparse.Namespace) -> None:
    """List label issues with cleanlab on the same probabilities."""
    import cleanlab
    from cleanlab.filter import find_label_issues

    place = arguments.place
    labels, probabilities = np.load(place / LABELS), np.load(place / PROBABILITIES)
    for method in ("prune_by_noise_rate", "both", "confident_learning"):
        issues = find_label_issues(labels, probabilities, filter_by=method, n_jobs=1)
        print(f"cleanlab {cleanlab.__version__}, {method}: {json.dumps(scores(issues, np.load(place / PLANTED)))}")


def scores(listed: np.ndarray, planted: np.ndarray) -> dict[str, float]:
    """Return size, precision and recall, in percent, of a list."""
    hits = int((listed & planted).sum())
    return {
        "planted": int(planted.sum()),
        "listed": int(listed.sum()),
        "precision": 100 * hits / max(1, int(listed.sum())),
        "recall": 100 * hits / max(1, int(planted.sum())),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    make = verbs.add_parser("plant")
    make.add_argument("data")
    make.add_argument("--out", type=Path, required=True)
    make.add_argument("--wrong", type=float, default=0.05, help="share of the training images")
    make.add_argument("--classes", type=int, help="the largest ones; all by default")
    make.add_argument("--seed", type=int, default=0)
    make.set_defaults(do=plant)
    audit = verbs.add_parser("measure")
    audit.add_argument("place", type=Path)
    audit.add_argument("--folds", type=int, default=5)
    audit.add_argument("--epochs", type=int)
    audit.add_argument("--size", type=int)
    audit.add_argument("--init", default="none")
    audit.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    audit.set_defaults(do=measure)
    other = verbs.add_parser("cleanlab")
    other.add_argument("place", type=Path)
    other.set_defaults(do=compare)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    chosen = parser.parse_args()
    chosen.do(chosen)
