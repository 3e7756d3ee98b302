"""`calibrate`: fit the temperature of a classifier and the rules by which it abstains, on images it was not trained on.

The images are divided at random. A third chooses the temperature, the distance limit and the candidate thresholds; the
others test the thresholds (`evaluation.calibration.certified_threshold`), so what is promised was tested on images that
had no part in the choice.
"""

import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.nn.functional as F

from patchloom.data.datasets import ImageSet, LabeledImages, Progress
from patchloom.data.reading_options import AS_IT_IS, Reading
from patchloom.data.sources.source import open_data
from patchloom.data.sources.specs import Data
from patchloom.disk import locked
from patchloom.evaluation.calibration import (
    LabeledLogits,
    Scored,
    certified_threshold,
    choose_temperature,
    conformal_limit,
    fewest_images,
    parts_of,
)
from patchloom.evaluation.classification import ClassificationReport
from patchloom.inference.classifier import Classifier
from patchloom.inference.evaluation_methods import EvaluationSettings
from patchloom.inference.evaluations import EvaluationData, embed_on, evaluate_on
from patchloom.options import share_of
from patchloom.runs.calibration import RunCalibration, write_calibration
from patchloom.runs.locate import run_folder
from patchloom.runs.predictions import FILE as PREDICTIONS
from patchloom.runs.predictions import Predictions, fingerprint, load_predictions, save_predictions
from patchloom.runs.run_metadata import RunMetadata, data_path, read_run_metadata
from patchloom.tasks.classification.several_runs import load_deciding
from patchloom_runtime.calibration import Calibration, DistanceRule, Promise
from patchloom_runtime.errors import DataError, PatchloomError, UsageError, nearest, with_near_options

CONFIDENCE = 0.9  # of a promise
MAX_REJECTED = 0.01  # of images like those of val, by their distance from the training images
MOST_STORED = 2048  # training images whose vectors are stored; 1.5 MB for 384 channels
NEIGHBORS = 5
NEGATIVE_NAMES = ("none", "other", "others", "background", "negative", "negatives", "nothing")


@dataclass(frozen=True)
class RuleSettings:
    """The rules to fit. Shares are from 0 to 1."""

    max_error: float | None = None
    confidence: float = CONFIDENCE
    max_rejected: float | None = MAX_REJECTED  # None: no distance rule
    negatives: tuple[str, ...] = ()

    def check(self, labels: tuple[str, ...]) -> None:
        """Raise UsageError for negatives that are not classes of the network."""
        for name in self.negatives:
            if name not in labels:
                raise UsageError(f"--negatives {name}: there is no such class.{nearest(name, labels)}")
        if len(set(self.negatives)) >= len(labels):
            raise UsageError("--negatives names all classes; leave at least one to predict")


@dataclass(frozen=True, eq=False)
class CalibrationResult:
    """The result of `calibrate`."""

    folder: Path
    calibration: RunCalibration
    predictions: Predictions | None  # for the images, calibrated; None if the images do not allow the promise
    notes: tuple[str, ...] = ()

    def store(self) -> None:
        """Write the calibration, and the predictions if they are for the images of the stored ones."""
        assert self.predictions is not None
        stored = load_predictions(self.folder) if (self.folder / PREDICTIONS).is_file() else None
        if stored is not None and stored.fingerprint == self.predictions.fingerprint:
            save_predictions(self.folder, self.predictions)
        write_calibration(self.folder, self.calibration)

    def lines(self) -> list[str]:
        """Return the result in words."""
        rules, before, after = self.calibration.rules, self.calibration.before, self.calibration.after
        assert before is not None
        assert after is not None
        errors = f"calibration error {before.calibration_error:.2f} % → {after.calibration_error:.2f} %"
        lines = [f"temperature {rules.temperature:.3g}: {errors} on {self.calibration.images:,} images"]
        if self.calibration.fit and not self.calibration.fit.helps:
            lines = [self.calibration.temperature_in_words]
        if rules.promise:
            lines.append(rules.promise.in_words())
        if rules.distance:
            share = f"{100 * rules.distance.rejects:g} %"
            lines.append(f"rejects at most {share} of such images as unlike the training images")
        if rules.negatives:
            lines.append(f"predictions of {', '.join(rules.negatives)} count as none of these")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        before, after = self.calibration.before, self.calibration.after
        return {
            "folder": str(self.folder),
            "images": self.calibration.images,
            "calibration_error_before": before.calibration_error if before else None,
            "calibration_error": after.calibration_error if after else None,
            "temperature_fit": asdict(self.calibration.fit) if self.calibration.fit else None,
            **self.calibration.rules.to_dict(),
            "notes": list(self.notes),
        }

    def __repr__(self) -> str:
        return f"CalibrationResult({self.folder}: {'; '.join(self.lines())})"


_FAVORABLE_VAL = (
    "val also chose the best epoch, which makes it slightly too favorable; --split test fits the rules to images that "
    "had no part in training"
)


@with_near_options
def calibrate(
    run: str | os.PathLike[str],
    data: Data | None = None,
    *,
    max_error: float | str | None = None,
    confidence: float | str = "90%",
    max_rejected: float | str = "1%",
    negatives: Sequence[str] = (),
    split: str | None = None,
    device: str = "auto",
    batch: int = 64,
    workers: int = 0,
    reading: Reading = AS_IT_IS,
    progress: Progress | None = None,
) -> CalibrationResult:
    """Fit the temperature of a run and the rules by which it abstains, and store them in the run folder.

    Without `max_error` and `negatives`, and with `max_rejected` 0, the run answers every image. Earlier rules are
    replaced. Raises DataError if the images do not allow the promise.

    run           Run of a classifier.
    data          Images with its classes that it was not trained on. Default: the data of the run.
    max_error     Abstain from unsure predictions, so that at most this share of the others is wrong: 5%, 0.05.
    confidence    Probability that `max_error` holds for new images.
    max_rejected  Reject images unlike the training images, and at most this share of the others; 0: reject none.
    negatives     Classes that mean none of these.
    split         'val', 'test' or 'all'. Default: val, or the images the run held out.
    device        'cpu', 'cuda', 'cuda:1' or 'mps'; 'auto' uses a GPU if there is one.
    batch         Images per batch.
    workers       Processes that read images.
    reading       How to read the data. Default: as in training.
    progress      Called with the number of images done and their total.
    """
    settings = RuleSettings(
        None if max_error is None else share_of(max_error, "--max-error"),
        share_of(confidence, "--confidence"),
        None if max_rejected in (0, "0", "0%") else share_of(max_rejected, "--max-rejected"),
        tuple(dict.fromkeys([negatives] if isinstance(negatives, str) else negatives)),
    )
    if split == "train":
        raise UsageError("--split train: a network is surer of its training images than of others; use val or test")
    folder = run_folder(run)
    classifier = load_deciding("calibrate", folder, device)
    settings.check(classifier.labels)
    record = read_run_metadata(folder)
    evaluation = EvaluationSettings(split=split, batch=batch, workers=workers, reading=reading, progress=progress)
    images = EvaluationData(data_path(folder, record) if data is None else data, evaluation, [folder]).open(classifier)
    notes = list(images.notes)
    train = _training_images(classifier, record, notes) if settings.max_rejected is not None else None
    if data is None and split in (None, "val"):
        notes.append(_FAVORABLE_VAL)
    result = fit_rules(classifier, images, train, settings, evaluation)
    if result.predictions is None:
        raise DataError(result.notes[-1])
    with locked(folder):
        result.store()
    return replace(result, notes=(*notes, *result.notes))


def _training_images(classifier: Classifier, record: RunMetadata | None, notes: list[str]) -> ImageSet | None:
    """Return the images that the run was trained on, or None after adding a note if they cannot be opened."""
    try:
        path = data_path(classifier.folder, record)
        return open_data(path, level=record.level if record else None, reading=classifier.reading_of(path)).train
    except PatchloomError as error:
        notes.append(f"images unlike the training images are not rejected, since these cannot be opened: {error}")
        return None


def fit_rules(
    classifier: Classifier,
    images: LabeledImages,
    train: ImageSet | None,
    settings: RuleSettings,
    evaluation: EvaluationSettings,
) -> CalibrationResult:
    """Fit the rules to labeled images.

    `train` are training images; without them there is no distance rule. If the images do not allow the promise, the
    result has no predictions, and its last note says why.
    """
    assert classifier.folder is not None
    folder = classifier.folder
    notes: list[str] = []
    distance, features = None, None
    if settings.max_rejected is not None and train is not None:
        features = _stored_vectors(classifier, train, evaluation)
        neighbors = min(NEIGHBORS, len(features))
        distance = DistanceRule(np.inf, neighbors, settings.max_rejected, 0, features.shape)
    classifier.calibration = RunCalibration(Calibration(distance=distance), features=features)
    report = evaluate_on(classifier, images, evaluation, keep_logits=True).report
    if report.logits is None:
        raise DataError(f"{len(report.index):,} images of {len(report.classes):,} classes are too many; pass fewer")
    chosen, tested = parts_of(len(report.index))
    if settings.max_error is None:
        chosen = np.arange(len(report.index))  # nothing is tested, so all can choose
    if not len(chosen):
        raise DataError(f"{len(report.index)} images are too few to calibrate on; pass more")
    if distance is not None and report.distances is not None:
        limit = conformal_limit(report.distances[chosen], distance.rejects)
        if limit is None:
            least = int(np.ceil(1 / distance.rejects)) - 1
            notes.append(
                f"images unlike the training images are not rejected: a share of {100 * distance.rejects:g} % needs "
                f"{least:,} images to choose the limit on, there are {len(chosen):,}"
            )
            distance, features = None, None
        else:
            distance = replace(distance, limit=limit, images=len(chosen))
    fit = choose_temperature(LabeledLogits(report.logits[chosen], report.labels[chosen], report.index[chosen]))
    rules = Calibration(fit.temperature, settings.negatives, None, distance)
    after = report.at_temperature(fit.temperature)
    if settings.max_error is not None:
        promise = _promise(rules, after, chosen, tested, settings.max_error, settings.confidence)
        if isinstance(promise, str):
            return CalibrationResult(folder, RunCalibration(rules), None, (*notes, promise))
        rules = replace(rules, promise=promise)
    before = report.at_temperature(1.0).reliability()
    calibration = RunCalibration(rules, len(report.index), before, after.reliability(), fit, features)
    return CalibrationResult(folder, calibration, Predictions(after, fingerprint(images)), tuple(notes))


def _stored_vectors(classifier: Classifier, train: ImageSet, evaluation: EvaluationSettings) -> np.ndarray:
    """Return unit vectors (M, C) float16 of training images drawn at random."""
    some: Any = np.sort(np.random.default_rng(0).permutation(len(train))[:MOST_STORED])
    some = replace(train, rows=train.rows[some], labels=train.labels[some])  # type: ignore[type-var, attr-defined]
    vectors = F.normalize(embed_on(classifier, some, replace(evaluation, progress=None)).vectors)
    return vectors.cpu().numpy().astype(np.float16)


def _promise(
    rules: Calibration,
    report: ClassificationReport,
    chosen: np.ndarray,
    tested: np.ndarray,
    max_error: float,
    confidence: float,
) -> Promise | str:
    """Return the promise, or the reason why there is none."""
    eligible = rules.answered(report.classes, report.predictions, report.confidence, report.distances)
    right = report.ranks == 0
    first, second = (Scored(report.confidence[rows], right[rows], eligible[rows]) for rows in (chosen, tested))
    threshold = certified_threshold(first, second, max_error=max_error, confidence=confidence)
    if threshold is None:
        least = fewest_images(max_error, confidence)
        return (
            f"an error of at most {100 * max_error:g} % cannot be promised with {100 * confidence:g} % confidence: "
            f"{len(tested):,} images were tested, of which {100 * right[tested].mean():.1f} % are right. At least "
            f"{least:,} answered images without a mistake are needed: pass more images or a larger --max-error"
        )
    answered, _ = second.above(threshold)
    return Promise(max_error, confidence, threshold, answered / len(tested), len(tested))


def negatives_note(labels: Sequence[str], negatives: Sequence[str]) -> str:
    """Return a note on a class that seems to hold negatives, or ''."""
    names = [name for name in labels if name.lower() in NEGATIVE_NAMES]
    if negatives or not names or len(names) == len(labels):
        return ""
    return (
        f"images of {names[0]!r} may be negatives: --negatives {shlex.quote(names[0])} predicts them as none of these"
    )
