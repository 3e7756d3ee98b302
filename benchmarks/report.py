"""How long the report of a 100-class run with 10,000 test images takes, and how large it is.

    python benchmarks/report.py [--images 10000] [--classes 100]

The pictures are coloured noise of 32 pixels, the network is the ResMLP of docs/results.md with random weights, and the
decisions are drawn: a report looks at what is kept, not at how good it is.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from patchloom.data.sources.source import open_data
from patchloom.evaluation.classification import ClassificationReport
from patchloom.models.registry import create_model
from patchloom.recipes import get_recipe
from patchloom.runs.config import Preprocessing, write_run_files
from patchloom.runs.predictions import Predictions, fingerprint, save_predictions
from patchloom.runs.run_metadata import RunMetadata, write_run_metadata
from patchloom.runs.weights import save_weights
from patchloom.tasks.report import report_run


def main() -> None:
    """Make the data and the run, then time the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--classes", type=int, default=100)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data, run = Path(folder, "data"), Path(folder, "run")
        make_data(data, given.images, given.classes)
        make_run(run, data, given.classes)
        started = time.perf_counter()
        page = report_run(run)
        seconds = time.perf_counter() - started
        print(f"{given.images:,} images of {given.classes} classes, {torch.get_num_threads()} threads")
        print(f"report.html  {seconds:.1f} s  {page.stat().st_size / 1e6:.2f} MB")


def make_data(folder: Path, images: int, classes: int) -> None:
    """Class folders with a val split; train has two pictures a class."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 2), ("val", images // classes)):
        for number in range(classes):
            place = folder / split / f"class{number:03}"
            place.mkdir(parents=True)
            for i in range(count):
                Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(place / f"{i:03}.png")


def make_run(folder: Path, data: Path, classes: int) -> None:
    """What `patchloom train` leaves, with random weights and decisions of which three in four are right."""
    splits = open_data(str(data))
    network = create_model("resmlp_s12", num_classes=classes, image_size=32, patch_size=4)
    names = splits.classes.names
    preprocessing = Preprocessing(network.pixel_mean, network.pixel_std, (32, 32), 1.0)
    folder.mkdir()
    write_run_files(folder, network, preprocessing, get_recipe("small_images"), names, task="classification")
    save_weights(folder, dict(network.state_dict()), {"weights": "model", "step": 0})
    rng = np.random.default_rng(0)
    labels = np.asarray(splits.val.labels)
    wrong = rng.random(len(labels)) < 0.25
    report = ClassificationReport(
        tuple(names),
        index=np.arange(len(labels)),
        labels=labels,
        predictions=np.where(wrong, (labels + rng.integers(1, classes, len(labels))) % classes, labels),
        ranks=np.where(wrong, rng.integers(1, classes, len(labels)), 0),
        confidence=rng.random(len(labels), dtype=np.float32),
        losses=rng.random(len(labels), dtype=np.float32),
    )
    save_predictions(folder, Predictions(report, fingerprint(splits.val)))
    write_run_metadata(folder, RunMetadata(data=str(data), data_name="noise", epochs=300, seconds=300.0))
    (folder / "metrics.jsonl").write_text("".join(f"{_record(step)}\n" for step in range(0, 13_000, 50)), "utf-8")


def _record(step: int) -> str:
    loss = 4.6 * 0.9998**step
    return f'{{"step": {step}, "epoch": {step // 48}, "kind": "train", "values": {{"loss": {loss:.4f}, "lr": 0.002}}}}'


if __name__ == "__main__":
    main()
