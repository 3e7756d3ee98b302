"""`patchloom evaluate` and `compare` of multi-label runs: on data or by their val scores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from patchloom.data.annotations.image_labels import of_labels
from patchloom.data.batches.decoded_dataset import make_evaluation_loader
from patchloom.data.datasets import LabeledImages
from patchloom.data.reading import AS_IT_IS, Reading
from patchloom.evaluation.multilabel import MultilabelReport, Thresholds, evaluate
from patchloom.runs.predictions import fingerprint
from patchloom.tasks.images.data import open_targets
from patchloom.tasks.multilabel.classifier import MultilabelClassifier
from patchloom.tasks.multilabel.run_files import ValLabels, read_val_labels
from patchloom.tasks.task import ModelLoader, Scores
from patchloom_runtime.artifacts.artifact import is_artifact
from patchloom_runtime.errors import UsageError

BATCH = 64
LISTED_LABELS = 40  # whose AP is printed


@dataclass(frozen=True)
class MultilabelComparison:
    """Comparison of two runs on the same images."""

    first: str
    second: str
    difference: float  # in points of mAP, first − second
    interval: tuple[float, float]
    p: float  # two-sided, by bootstrap over images

    def in_words(self) -> str:
        """Return the comparison as one line."""
        low, high = self.interval
        points = f"{self.difference:+.2f} points of mAP ({low:+.2f} … {high:+.2f}, 95 %)"
        return f"{self.first} − {self.second}: {points}, p {self.p:.3f}"


def open_labels(
    data: str, labels: Sequence[str], *, split: str | None, folder: Path | None, reading: Reading = AS_IT_IS
) -> LabeledImages:
    """Open the images of a split with their labels, matched by name with those of a model (`open_targets`)."""
    return open_targets(data, labels, of_labels, split=split, folder=folder, reading=reading)


def evaluate_runs(
    loader: ModelLoader,
    runs: Mapping[str, Path],
    data: str | None,
    *,
    split: str | None = None,
    device: str = "auto",
    reading: Reading = AS_IT_IS,
) -> Scores:
    """Evaluate runs, one row per run, and compare those with the same images."""
    results: dict[str, ValLabels] = {}
    notes: list[str] = []
    for name, folder in runs.items():
        if data is None:
            if split or is_artifact(folder):
                what = "--split needs images" if split else f"{folder} is an artifact and keeps no val scores"
                raise UsageError(f"{what}: patchloom evaluate {folder} DATA{' --split ' + split if split else ''}")
            results[name] = read_val_labels(folder)
            continue
        is_run = not is_artifact(folder)
        model = loader.load(folder, device=device) if is_run else loader.open_artifact(folder)
        images = open_labels(data, model.labels, split=split, folder=folder if is_run else None, reading=reading)
        results[name], broken = evaluate_on(model, images)
        notes += [*images.notes, *broken]
    compared = [
        compare(one, results[one].report, other, results[other].report)
        for one, other in combinations(results, 2)
        if results[one].fingerprint == results[other].fingerprint
        and results[one].report.classes == results[other].report.classes
    ]
    if len(results) > 1 and not compared:
        notes.append("the runs have different images or labels, so they are not compared")
    reports = {name: result.report for name, result in results.items()}
    for name, report in reports.items():
        if report.left_out:
            listed = ", ".join(report.left_out[:5]) + (" …" if len(report.left_out) > 5 else "")
            notes.append(f"{name}: {len(report.left_out)} labels apply to no image and are left out: {listed}")
    return _scores(reports, compared, list(dict.fromkeys(notes)))


def evaluate_on(model: MultilabelClassifier, images: LabeledImages) -> tuple[ValLabels, list[str]]:
    """Evaluate a model on images with its labels; return notes on images that cannot be read."""
    own = model.preprocessing
    loader = make_evaluation_loader(
        images,
        own.image_size,
        own.crop_ratio,
        own.interpolation,
        own.resize,
        batch_size=BATCH,
        device=model.device,
        workers=0,
    )
    labels = len(model.labels)
    report = evaluate(
        model.model,
        loader.epoch(0),
        classes=model.labels,
        pixel_mean=own.mean,
        pixel_std=own.std,
        temperature=model.classifier.calibration.rules.temperature,
        thresholds=Thresholds(model.thresholds, np.ones(labels, bool), float(np.median(model.thresholds))),
    )
    broken = loader.broken
    notes = [f"{len(broken)} images cannot be read and do not count: {next(iter(broken.values()))}"] if broken else []
    return ValLabels(report, fingerprint(images)), notes


def compare(first: str, a: MultilabelReport, second: str, b: MultilabelReport) -> MultilabelComparison:
    """Compare two reports on the same images by a bootstrap over these."""
    differences = a.resampled_map - b.resampled_map
    share = min(float((differences <= 0).mean()), float((differences >= 0).mean()))
    low, high = np.quantile(differences, [0.025, 0.975])
    return MultilabelComparison(first, second, a.mean_ap - b.mean_ap, (float(low), float(high)), min(1.0, 2 * share))


def _scores(
    reports: Mapping[str, MultilabelReport], compared: Sequence[MultilabelComparison], notes: Sequence[str]
) -> Scores:
    columns = ["run", "#mAP", "95 %", "#macro-F1", "#micro-F1", "#loss", "#images"]
    rows: list[tuple[str, ...]] = []
    values: dict[str, Any] = {}
    lines = []
    for name, report in reports.items():
        (low, high), metrics = report.map_interval(), dict(report)
        shares = (f"{metrics[key]:.2f}" for key in ("macro_f1", "micro_f1"))
        images = f"{len(report.index):,}"
        rows.append(
            (name, f"{metrics['map']:.2f}", f"{low:.1f} … {high:.1f}", *shares, f"{metrics['loss']:.4f}", images)
        )
        of_labels = zip(report.classes, report.average_precision, report.precision_recall_f1, strict=True)
        values[name] = {
            **metrics,
            "interval": [low, high],
            "labels": {each: {"ap": _number(ap), "f1": _number(three[2])} for each, ap, three in of_labels},
        }
        if len(report.classes) <= LISTED_LABELS:
            order = np.argsort(np.nan_to_num(report.average_precision, nan=np.inf), kind="stable")
            texts = [f"{report.classes[k]} {report.average_precision[k]:.1f}" for k in order if report.counts[k]]
            lines.append(f"AP of {name}: {', '.join(texts)}")
    lines += [each.in_words() for each in compared]
    if compared:
        values["comparisons"] = [vars(each) for each in compared]
    return Scores(columns=columns, rows=rows, values=values, notes=notes, lines=lines)


def _number(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
