"""`patchloom.audit`: cross-validate a classifier and list what is likely wrong with the labels."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from patchloom.data.checking.check import check
from patchloom.data.checking.check_report import CheckReport
from patchloom.data.checking.check_report import Group as Places
from patchloom.data.checking.scan import scan_bar
from patchloom.data.checking.survey import ImageLocation
from patchloom.data.datasets import ClassTable, LabeledImages
from patchloom.data.reading_options import AS_IT_IS, Reading
from patchloom.data.sources.corrections import listed_names, read_corrections
from patchloom.data.sources.source import find_source
from patchloom.data.sources.specs import Spec, split_specs
from patchloom.evaluation.feature_distances import entropies, uncertain_and_diverse
from patchloom.evaluation.label_errors import find_label_errors
from patchloom.inference.classifier import load
from patchloom.inference.evaluation_methods import EvaluationSettings
from patchloom.inference.evaluations import embed_on
from patchloom.machine import resolve_device
from patchloom.recipes.schema import Recipe
from patchloom.runs.out_of_fold import OutOfFold, load_out_of_fold
from patchloom.tasks.plan import refuse_unread
from patchloom.tasks.settings import TrainingSettings
from patchloom.training.auditing.audit_report import (
    AuditedImage,
    AuditReport,
    Group,
    Outlier,
    WorthLabeling,
    WrongLabel,
)
from patchloom.training.sweeps.folds import fold_folders, train_folds
from patchloom_runtime.errors import DataError, UsageError, at_least, with_near_options
from patchloom_runtime.images.samples import UNLABELED
from patchloom_runtime.printable import plural, printable

FOLDS = 5
OUTLIER_DEVIATIONS = 3.5  # robust standard deviations of the log distance (Iglewicz and Hoaglin, 1993)
MAX_OUTLIERS = 50
_TRAINED = ("model", "recipe", "init", "epochs", "time", "size", "batch", "out")  # settings of new runs
MUCH_NOISE = 0.25  # estimated share of wrong labels from which the models are to blame


@with_near_options
def audit(
    data: Spec | Sequence[Spec],
    *,
    folds: int = FOLDS,
    folds_run: str | None = None,
    unlabeled: str | None = None,
    most: int = 20,
    model: str | None = None,
    recipe: str | Recipe = "auto",
    init: str | None = "auto",
    epochs: int | None = None,
    time: str | None = None,
    size: int | None = None,
    batch: int | None = None,
    set: Mapping[str, Any] | None = None,  # noqa: A002
    out: str | None = None,
    device: str = "auto",
    workers: int | None = None,
    reading: Reading = AS_IT_IS,
    say: Callable[[str], None] = print,
) -> AuditReport:
    """List likely wrong labels, conflicting copies, leaks and outliers, as `patchloom audit` does.

    Labels are compared with the predictions of runs that did not train on the image (`train --folds`). The same call
    again resumes these runs, or uses them if they have finished. The data is never changed.

    data       Folder of class folders, or other classification data that `train` reads.
    folds      Number of runs; each predicts the images it was not trained on.
    folds_run  Use the finished runs of `train --folds` in this folder.
    unlabeled  Folder of unlabeled images; `most` of them are proposed for labeling.
    most       Number of unlabeled images to choose.
    model      Network. Default: chosen for the data.
    recipe     Published recipe, a recipe.yaml, or 'auto'. Also a `Recipe`.
    init       Start from a run, published weights or a file; 'none': random.
    epochs     Passes over the data per run.
    time       Fit all runs into 30m, 2h …
    size       Image size in pixels.
    batch      Images per update.
    set        Recipe fields to change: augment.mixup=0. As a dict: {"augment.mixup": 0}.
    out        Folder of the runs. Default: runs/NAME-folds-K.
    device     'cpu', 'cuda', 'cuda:1' or 'mps'; 'auto' uses a GPU if there is one.
    workers    Processes that read images.
    reading    How to read the data (`patchloom.Reading`). Images that its corrections mention are not listed again.
    say        Called with each line of progress.
    """
    at_least("--most", most, 1)
    if reading.val is not None:
        raise UsageError(f"audit divides train into folds; drop --val {reading.val}")
    settings = TrainingSettings(
        data=tuple(split_specs(data)), folds=folds, model=model, recipe=recipe, init=init, epochs=epochs, time=time,
        size=size, batch=batch, changes=dict(set or {}), out=out, device=resolve_device(device), workers=workers,
        **reading.chosen(),  # type: ignore[arg-type]
    )  # fmt: skip
    if folds_run is not None:
        _refuse_for_finished_runs(settings)
    if unlabeled is not None:
        find_source(unlabeled)  # raises before the runs are trained
    with scan_bar() as progress:
        checked = check(settings.data_text, reading=reading, workers=workers, progress=progress)
    if checked.task != "classify" or len(checked.classes) < 2:
        has = f"suggest --task {checked.task} and have {plural(len(checked.classes), 'class')}"
        raise DataError(f"{checked.name}: audit compares one class per image, of two or more; these data {has}")
    folder = _finished_folds(settings, say) if folds_run is None else Path(folds_run)
    predictions = load_out_of_fold(folder)
    report = make_report(settings.data_text, folder, predictions, checked, _reviewed(reading))
    if unlabeled is None:
        return report
    say(f"unlabeled  {unlabeled}: predicting with {plural(len(predictions.weights), 'run')}")
    worth, notes = _most_worth_labeling(folder, predictions, unlabeled, most, settings.device, workers or 0)
    return replace(report, unlabeled=worth, notes=(*report.notes, *notes))


def _refuse_for_finished_runs(settings: TrainingSettings) -> None:
    """Raise UsageError for settings of new runs, if finished runs are used."""
    why = "is for new runs, and --folds-run takes finished ones; drop one of the two"
    refuse_unread(settings, _TRAINED, why)
    if settings.changes or settings.folds != FOLDS:
        raise UsageError(f"--{'set' if settings.changes else 'folds'} {why}")


def _finished_folds(settings: TrainingSettings, say: Callable[[str], None]) -> Path:
    """Train the runs of a cross-validation that have not finished, and return their folder."""
    result = train_folds(settings, say=say)
    if result.failed:
        name, reason = next(iter(result.failed.items()))
        raise UsageError(f"{result.folder / name} failed: {reason}; the same command tries it again")
    return result.folder


def make_report(
    data: str, folder: Path, predictions: OutOfFold, checked: CheckReport, reviewed: frozenset[str]
) -> AuditReport:
    """Return what out-of-fold predictions and a check say about the labels, except for the images in `reviewed`."""

    def is_reviewed(image: AuditedImage) -> bool:
        return not reviewed.isdisjoint(listed_names(image.key, image.place.where))

    images = _matched(folder, predictions, checked)
    errors = find_label_errors(predictions.labels, predictions.probabilities)
    classes = predictions.classes
    wrong = [
        WrongLabel(
            images[position],
            classes[suggestion],
            float(predictions.probabilities[position, suggestion]),
            float(predictions.probabilities[position, predictions.labels[position]]),
        )
        for position, suggestion in zip(errors.positions.tolist(), errors.suggestions.tolist(), strict=True)
        if not is_reviewed(images[position])
    ]
    outliers = [
        Outlier(images[position], float(predictions.distances[position]))
        for position in _outlying(predictions.distances)
        if not is_reviewed(images[position])
    ]

    def groups(kinds: Sequence[Places]) -> tuple[Group, ...]:
        made = [tuple(_audited(checked, place) for place in group) for group in kinds]
        return tuple(group for group in made if not all(map(is_reviewed, group)))

    return AuditReport(
        data=data,
        folds_run=folder,
        predictions=predictions,
        estimated_wrong=errors.noise * len(predictions),
        wrong_labels=tuple(wrong),
        conflicts=groups([*checked.conflicts(), *checked.conflicts(near=True)]),
        leaks=groups([*checked.leaks(), *checked.leaks(near=True)]),
        outliers=tuple(outliers[:MAX_OUTLIERS]),
        reviewed=len(reviewed),
        notes=(*checked.notes, *_too_weak(errors.noise, predictions)),
        check=checked,
    )


def _too_weak(noise: float, predictions: OutOfFold) -> list[str]:
    if noise <= MUCH_NOISE:
        return []
    return [
        f"{100 * noise:.0f} % of the labels would be wrong, at {predictions.top1:.0f} % top-1: the models are probably "
        "too weak to judge labels; train longer, or start from published weights with --init in1k"
    ]


def _audited(checked: CheckReport, place: ImageLocation) -> AuditedImage:
    listing = checked.listing_of(place)
    assert listing is not None  # images, not sentences
    return AuditedImage(listing.images.key(place.row), place)


def _matched(folder: Path, predictions: OutOfFold, checked: CheckReport) -> list[AuditedImage]:
    """Return the image of each prediction. Raise UsageError if the runs saw other images or labels."""
    train = checked.listings["train"]
    images = {}
    for row, label in zip(train.rows.tolist(), train.labels.tolist(), strict=True):
        key = train.images.key(row)
        name = "" if label == UNLABELED else train.names[label]
        images[key] = AuditedImage(key, ImageLocation(train.images.where(row), "train", name, row))
    again = "cross-validate again: patchloom train DATA --folds 5"
    if missing := [key for key in predictions.keys if key not in images]:
        raise UsageError(
            f"{folder} has predictions for {plural(len(missing), 'image')} that {checked.name} does not have, such as "
            f"{printable(missing[0])!r}; {again}"
        )
    labels = [predictions.classes[label] for label in predictions.labels.tolist()]
    changed = [key for key, label in zip(predictions.keys, labels, strict=True) if images[key].label != label]
    if changed:
        raise UsageError(
            f"the labels of {plural(len(changed), 'image')}, such as {printable(changed[0])!r}, changed since the runs "
            f"in {folder}; {again}"
        )
    return [images[key] for key in predictions.keys]


def _reviewed(reading: Reading) -> frozenset[str]:
    """Return the images that the corrections mention: somebody looked at them."""
    if reading.corrections is None:
        return frozenset()
    return frozenset(read_corrections(Path(os.path.expanduser(reading.corrections))))


def _outlying(distances: np.ndarray) -> list[int]:
    """Return positions of outliers, farthest first: many robust deviations of the log above the median."""
    logs = np.log(np.maximum(distances.astype(np.float64), 1e-6))
    center = np.median(logs)
    deviation = 1.4826 * np.median(np.abs(logs - center))  # of a normal distribution
    outlying = np.flatnonzero(logs - center > OUTLIER_DEVIATIONS * max(float(deviation), 1e-3))
    return [int(position) for position in outlying[np.argsort(-distances[outlying], kind="stable")]]


def _most_worth_labeling(
    folder: Path, predictions: OutOfFold, unlabeled: str, most: int, device: str, workers: int
) -> tuple[tuple[WorthLabeling, ...], list[str]]:
    """Return the images that the runs are unsure about and that differ from one another, best first, and notes."""
    listing = find_source(unlabeled).train
    labels = np.full(len(listing), UNLABELED)
    images = LabeledImages(listing.images, listing.rows, labels, ClassTable(predictions.classes))
    settings = EvaluationSettings(workers=workers)
    embedded = [
        embed_on(load(run, device=device), images, settings, logits=True)
        for run in fold_folders(folder, len(predictions.weights))
    ]
    probabilities = np.mean([one.logits.softmax(dim=1).cpu().numpy() for one in embedded if one.logits is not None], 0)
    uncertainty = entropies(probabilities)
    index = embedded[0].index.cpu().numpy()
    worth = [
        WorthLabeling(
            images.where(int(index[position])),
            predictions.classes[int(probabilities[position].argmax())],
            float(probabilities[position].max()),
            float(uncertainty[position]),
        )
        for position in uncertain_and_diverse(uncertainty, embedded[0].vectors.cpu().numpy(), most)
    ]
    lost = len(images) - len(index)
    return tuple(worth), [f"{plural(lost, 'unlabeled image')} cannot be read"] if lost else []
