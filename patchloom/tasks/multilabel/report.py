"""The results of a multi-label classifier in words, pages and tables."""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from markupsafe import Markup

from patchloom.data.datasets import ImageSet
from patchloom.evaluation.intervals import LEVEL
from patchloom.evaluation.multilabel import RARE, LabelMistake, MultilabelReport
from patchloom.objectives.multilabel import CHARTS
from patchloom.report.pictures.look import ImageLook
from patchloom.report.run_report import training, validation
from patchloom.report.sections import reliability_section, table_section
from patchloom.runs.calibration import read_calibration
from patchloom.tasks.images.look_page import (
    COUNT,
    LookPage,
    LookRequest,
    NamedImage,
    chosen_files,
    readable,
    write_look_page,
)
from patchloom.tasks.images.target_vectors import inputs_with_maps, worst_gallery
from patchloom.tasks.multilabel.evaluation import LABELS, evaluate_runs
from patchloom.tasks.multilabel.model import MultilabelClassifier
from patchloom.tasks.report import ReportSettings
from patchloom.tasks.task import NONE, Reporting, Scores, TaskPage
from patchloom_runtime.errors import UsageError, at_least, attempted
from patchloom_runtime.printable import plural

MISTAKES = 24


class MultilabelReporting(Reporting):
    """mAP, F1, thresholds, and images with missing and spurious labels."""

    draws_looks = True
    reading_options = ("labels", "label_column", "label_pattern")

    def metrics_text(self, metrics: Mapping[str, float]) -> str:
        return f"mAP {metrics['map']:.2f} %, micro-F1 {metrics['micro_f1']:.2f} %"

    def result_lines(self, plan: Any, report: MultilabelReport) -> Iterator[str]:
        del plan
        low, high = report.map_interval()
        yield f"           95 % interval of the mAP: {low:.1f} … {high:.1f} (bootstrap over val images)"
        shared = int((~report.thresholds.own).sum())
        rare = f"; {plural(shared, 'label')} with fewer than {RARE} images share one" if shared else ""
        yield f"           thresholds chosen on val: macro-F1 {report.macro_f1:.2f} %{rare}"
        if report.left_out:
            listed = ", ".join(report.left_out[:5]) + (" …" if len(report.left_out) > 5 else "")
            yield f"           left out, since they apply to no image of val: {listed}"

    def page(self, folder: Path, settings: ReportSettings) -> TaskPage:
        report, images, notes = LABELS.reported(self.task.model, folder, settings)
        split = settings.split or "val"
        if report is not None and report.left_out:
            listed = ", ".join(report.left_out[:8]) + (" …" if len(report.left_out) > 8 else "")
            notes.append(f"{plural(len(report.left_out), 'label')} without an image in {split} are left out: {listed}")
        return TaskPage(
            best=f"{report.mean_ap:.2f} %" if report else "",
            measure=f"mAP on {split}",
            interval=report.map_interval() if report else None,
            numbers=_numbers(report, split) if report else [],
            charts={
                "Validation mAP, %": validation("map"),
                "Validation micro-F1 at a threshold of 0.5, %": validation("micro_f1"),
                **training(CHARTS),
            },
            sections=[_label_table(report), *_reliability(folder, notes), *_mistakes(report, images)] if report else [],
            notes=notes,
            next_command=f"patchloom predict {shlex.quote(str(folder))} IMAGE",
        )

    def look(
        self,
        folder: Path,
        images: Sequence[str],
        *,
        data: str | None = None,
        out: Path,
        top: int = 5,
        count: int = COUNT,
    ) -> LookPage:
        """Write predictions with maps on image files or folders, or on the run's worst mistakes on val."""
        at_least("count", count, 1)
        notes: list[str] = []
        model = LABELS.model_to_look_at(self.task.model, folder, images, notes)
        if images:
            requests = chosen_files(images, (), count, notes)
            title = f"Labels by {folder.name} on {plural(len(requests), 'image')}"
        else:
            requests, title = _val_requests(folder, data, count), f"Mistakes of {folder.name}, worst first"
        named_images = readable(requests, notes)
        results = _label_looks(model, named_images, top)
        write_look_page(out, title, notes, [result.card(name, detail) for name, detail, result in results])
        return LookPage(out, [*results], notes)

    def evaluate(
        self, runs: Mapping[str, Path], data: str | None, *, split: str | None, device: str, **options: Any
    ) -> Scores:
        return evaluate_runs(self.task.model, runs, data, split=split, device=device, **options)


def _reliability(folder: Path, notes: list[str]) -> list[Markup]:
    calibration = attempted(lambda: read_calibration(folder), notes)
    if calibration is None or calibration.before is None or calibration.after is None:
        return []
    note = f"Every label of every val image. {calibration.temperature_in_words}"
    return [reliability_section(calibration.before, calibration.after, [note])]


def _numbers(report: MultilabelReport, split: str) -> list[tuple[str, str, str]]:
    (low, high), metrics = report.map_interval(), dict(report)
    precision, recall = (np.nanmean(report.precision_recall_f1[:, column]) for column in (0, 1))
    interval = f"{low:.2f} … {high:.2f}, the {100 * LEVEL:.0f} % interval over images"
    chosen = "at the thresholds in the table, which were chosen on val"
    return [
        ("mAP", f"{metrics['map']:.2f} %", f"mean over {plural(int(metrics['labels']), 'label')}; {interval}"),
        ("macro-F1", f"{metrics['macro_f1']:.2f} %", f"mean over labels, {chosen}"),
        ("micro-F1", f"{metrics['micro_f1']:.2f} %", "of all decisions together, at the same thresholds"),
        ("precision and recall", f"{precision:.1f} % and {recall:.1f} %", "means over labels"),
        ("loss", f"{metrics['loss']:.4f}", "binary cross-entropy, in nats"),
        ("images", f"{len(report.index):,}", f"of the {split} split"),
    ]


def _label_table(report: MultilabelReport) -> Markup:
    order = np.argsort(np.nan_to_num(report.average_precision, nan=np.inf), kind="stable")
    thresholds = report.thresholds
    known = (~np.isnan(report.targets)).sum(axis=0)
    rows = [
        (
            report.classes[k],
            _percent(report.average_precision[k]),
            *map(_percent, report.precision_recall_f1[k]),
            f"{thresholds.values[k]:.3f}{'' if thresholds.own[k] else ' (shared)'}",
            f"{report.counts[k]:,} of {known[k]:,}",
        )
        for k in order.tolist()
    ]
    columns = ["label", "AP", "precision", "recall", "F1", "threshold", "images"]
    title = f"Labels, worst first (shared: fewer than {RARE} images to choose a threshold on)"
    return table_section(title, columns, rows)


def _mistakes(report: MultilabelReport, images: ImageSet | None) -> list[Markup]:
    text = "Labels that apply and were not predicted (missing) and the reverse (spurious), with their scores."
    worst = [(mistake.index, _in_words(mistake)) for mistake in report.worst(MISTAKES)] if images is not None else []
    return worst_gallery(images, worst, "Worst mistakes", text)


def _in_words(mistake: LabelMistake) -> str:
    parts = {"missing": mistake.missing, "spurious": mistake.spurious}
    return "; ".join(
        f"{what} {', '.join(f'{name} {score:.0%}' for name, score in labels)}"
        for what, labels in parts.items()
        if labels
    )


def _percent(value: float) -> str:
    return "–" if np.isnan(value) else f"{value:.1f} %"


@dataclass(frozen=True, eq=False)
class LabelLook(ImageLook):
    """The predicted labels and the maps of one image; `truth` lists its labels in order."""

    truth_name: ClassVar[str] = "true labels"

    @property
    def right(self) -> bool | None:
        """Whether exactly the labels that apply are predicted; None if they are unknown."""
        return _listed(name for name, _ in self.answers) == self.truth if self.truth else None

    def in_words(self) -> str:
        """Return all predicted labels."""
        return "  ".join(f"{label} {score:.1%}" for label, score in self.answers) or NONE


def _label_looks(
    model: MultilabelClassifier, named_images: Sequence[NamedImage], top: int
) -> list[tuple[str, str, LabelLook]]:
    """Return the look at each image: the labels that apply and, for a run, the maps of its most likely ones."""
    images = [one.image for one in named_images]
    scores = model.scores(images)
    drawn = inputs_with_maps(model, images, scores)
    result = []
    for one, row, (seen, maps) in zip(named_images, scores, drawn, strict=True):
        answers = model.answers(row, top)
        best = model.answers(row, 1, threshold=0.0)[0]
        detail = "" if answers else f"no label reaches its threshold; the highest score is {best[1]:.1%} of {best[0]}"
        result.append((one.name, detail, LabelLook(seen, answers, maps, one.truth)))
    return result


def _val_requests(folder: Path, data: str | None, count: int) -> list[LookRequest]:
    """Return the run's worst mistakes on val."""
    report, images = LABELS.kept_val(folder, data)
    worst = report.worst(count)
    if not worst:
        raise UsageError(f"{folder} made no mistake on its val split; pass images to look at")
    return [LookRequest(images.where(one.index), _listed(one.labels), partial(images.read, one.index)) for one in worst]


def _listed(labels: Iterable[str]) -> str:
    return ", ".join(sorted(labels)) or NONE
