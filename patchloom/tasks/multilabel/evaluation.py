"""`patchloom evaluate` and `compare` of multi-label runs: on data or by their val scores."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from patchloom.data.annotations.image_labels import of_labels
from patchloom.data.images.image_batch import ImageBatch
from patchloom.evaluation.multilabel import MultilabelReport, Thresholds, evaluate
from patchloom.tasks.images.target_vectors import TargetVectors, p_value
from patchloom.tasks.multilabel.model import MultilabelClassifier
from patchloom.tasks.multilabel.run_files import read_val_labels
from patchloom.tasks.task import ModelLoader, Scores

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


def _evaluate(model: MultilabelClassifier, batches: Iterable[ImageBatch], **pixels: Any) -> MultilabelReport:
    """Evaluate a model with its own temperature and thresholds."""
    thresholds = Thresholds(model.thresholds, np.ones(len(model.labels), bool), float(np.median(model.thresholds)))
    temperature = model.classifier.calibration.rules.temperature
    return evaluate(
        model.model, batches, classes=model.labels, temperature=temperature, thresholds=thresholds, **pixels
    )


LABELS = TargetVectors("labels", "val scores", of_labels, _evaluate, read_val_labels, lambda report: report.classes)


def evaluate_runs(loader: ModelLoader, runs: Mapping[str, Path], data: str | None, **options: Any) -> Scores:
    """Evaluate runs, one row per run, and compare those with the same images; see `TargetVectors.evaluate_runs`."""
    reports, pairs, notes = LABELS.evaluate_runs(loader, runs, data, **options)
    for name, report in reports.items():
        if report.left_out:
            listed = ", ".join(report.left_out[:5]) + (" …" if len(report.left_out) > 5 else "")
            notes.append(f"{name}: {len(report.left_out)} labels apply to no image and are left out: {listed}")
    return _scores(reports, [compare(one, reports[one], other, reports[other]) for one, other in pairs], notes)


def compare(first: str, a: MultilabelReport, second: str, b: MultilabelReport) -> MultilabelComparison:
    """Compare two reports on the same images by a bootstrap over these."""
    interval, p = p_value(a.resampled_map - b.resampled_map)
    return MultilabelComparison(first, second, a.mean_ap - b.mean_ap, interval, p)


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
