"""Evaluation of one trained classifier on data: predictions, embeddings, other crop ratios and image sizes.

`Classifier.evaluate` and `.sweep` are implemented here, `.probe` in `probes.py`; `tasks/classification/several_runs.py`
evaluates several runs. The names of the measures are those of `patchloom.evaluation`; an evaluation adds

name                 value
top1_low, top1_high  Wilson's 95 % interval of top-1, in percent
real                 top-1 on the ImageNet-ReaL labels, if they are passed
answered             images that the model answers, in percent, if it abstains from some (`patchloom calibrate`)
answered_error       answered images that are wrong, in percent
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from patchloom.data.batches.decoded_dataset import DeviceLoader, make_evaluation_loader
from patchloom.data.batches.loader import Loader
from patchloom.data.datasets import ImageSet, LabeledImages, Listing, Progress, Source
from patchloom.data.images.image_batch import ImageBatch
from patchloom.data.reading_options import Reading
from patchloom.data.sources.source import check_split, find_source, match_source, split_source
from patchloom.data.sources.specs import Data, as_spec
from patchloom.data.splits import match
from patchloom.evaluation.agreement import head_decisions
from patchloom.evaluation.classification import ClassificationReport, evaluate
from patchloom.evaluation.embeddings import Embeddings
from patchloom.evaluation.imagenet_labels import open_v2, read_real_labels, real_accuracy, real_labels_of
from patchloom.inference.embedding import embed_batches
from patchloom.models.network import Network
from patchloom.report.notebook import html_card, number_texts, numbers_line
from patchloom.runs.config import read_run_files
from patchloom.runs.predictions import fingerprint
from patchloom.runs.provenance import provenance_of, read_provenance
from patchloom.runs.run_metadata import recorded_reading
from patchloom_runtime.errors import CheckpointError, UsageError, not_finite
from patchloom_runtime.printable import printable

if TYPE_CHECKING:
    from patchloom.inference.classifier import Classifier
    from patchloom.inference.evaluation_methods import EvaluationSettings

CROP_RATIOS = (0.7, 0.75, 0.8, 0.85, 0.875, 0.9, 0.95, 1.0)
SIZE_FACTORS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)  # of the model's image size


class EvaluationData:
    """A dataset that one or several classifiers are evaluated on; it is listed once per way of reading it.

    All classifiers are evaluated on the same images: those held out by the first of the runs in `folders` that was
    trained on these data, if there is one and the settings do not choose other images.
    """

    def __init__(self, data: Data, settings: "EvaluationSettings", folders: Iterable[Path | None] = ()) -> None:
        self._data, self._settings = as_spec(data), settings
        self._sources: dict[Reading, Source] = {}
        by_default = settings.split is None and settings.level is None and not settings.v2
        held_out = (self.held_out_by(folder) for folder in folders if folder is not None and by_default)
        self._held_out = next((images for images in held_out if images is not None), None)

    def open(self, classifier: "Classifier") -> LabeledImages:
        """Return the images with the classes of the model, matched by name."""
        table, settings = classifier.table, self._settings
        if settings.v2:
            return open_v2(self._data, table)
        if (own := self._held_out) is not None:
            listing = Listing(own.images, own.rows, own.labels, own.classes.names)
            matched = match(listing, table, strict=settings.strict, what=self._data, known_by="the model")
            return replace(matched, notes=(*own.notes, *matched.notes))
        check_split(settings.split)  # before the data are listed
        source = self._source(classifier.reading_of(self._data, settings.reading))
        return match_source(source, table, split=settings.split, strict=settings.strict, level=settings.level)

    def held_out_by(self, folder: Path) -> LabeledImages | None:
        """Return the images that the run in `folder` did not train on, if patchloom made its val split.

        Returns None if the data have a val split of their own, or if they are not exactly those of the run.
        """
        try:
            record, files = read_provenance(folder), read_run_files(folder)
        except CheckpointError:
            return None
        if record is None or not files.decides:
            return None
        source = self._source(self._settings.reading.filled_from(recorded_reading(folder, self._data)))
        known = source.train.levels.get(files.level or "", {})
        names = {known.get(name, name) for name in source.train.names}
        # Most other datasets are told apart here, before any image is read.
        if source.val is not None or record.train + record.val > len(source.train) or not names >= {*record.classes}:
            return None
        splits = split_source(source, level=files.level)
        if provenance_of(splits).rows != record.rows:
            return None
        assert isinstance(splits.val, LabeledImages)
        note = (
            f"these are the data of the run: evaluating the {len(splits.val):,} images it held out "
            "(use --split all for all images)"
        )
        return replace(splits.val, notes=(*source.notes, note))

    def _source(self, reading: Reading) -> Source:
        if reading not in self._sources:
            self._sources[reading] = find_source(self._data, reading=reading)
        return self._sources[reading]


def loader_of(classifier: "Classifier", images: ImageSet, settings: "EvaluationSettings") -> Loader | DeviceLoader:
    """Return a loader over all images at the size and crop ratio of the settings, else at the model's."""
    own = classifier.preprocessing
    return make_evaluation_loader(
        images,
        settings.size or own.image_size,
        settings.crop_ratio or own.crop_ratio,
        own.interpolation,
        own.resize,
        batch_size=settings.batch,
        device=classifier.device,
        workers=settings.workers,
    )


@dataclass(frozen=True)
class Evaluation:
    """The result of evaluating a classifier on a dataset."""

    report: ClassificationReport
    real: float | None  # accuracy on the ReaL labels, if they were passed
    notes: tuple[str, ...]
    fingerprint: str  # identifies the images: evaluations with the same one can be compared image by image
    heads: dict[str, Any] = field(default_factory=dict)  # head → predicted classes, for a distilled network
    answered: np.ndarray | None = None  # (N,) bool: images that a model answers which abstains from some

    def values(self) -> dict[str, float]:
        """Return the metrics by name, in the order of a table."""
        low, high = self.report.top_interval()
        numbers = {"top1": self.report.top(1), "top1_low": low, "top1_high": high} | dict(self.report)
        numbers |= {} if self.real is None else {"real": self.real}
        if self.answered is None:
            return numbers
        wrong = self.report.ranks[self.answered] > 0
        answered = {"answered": 100 * float(self.answered.mean())}
        return numbers | answered | ({"answered_error": 100 * float(wrong.mean())} if len(wrong) else {})

    def __repr__(self) -> str:
        count = f"{len(self.report.index):,} images, {len(self.report.classes)} classes"
        return f"Evaluation({count}: {numbers_line(self.values())})"

    def _repr_html_(self) -> str:
        rows = list(number_texts(self.values()).items())
        return html_card("Evaluation", columns=("measure", "value"), rows=rows, notes=self.notes)


def evaluate_on(
    classifier: "Classifier",
    images: LabeledImages,
    settings: "EvaluationSettings",
    *,
    heads: bool = False,
    keep_logits: bool = False,
) -> Evaluation:
    """Evaluate a classifier on opened images; with `heads`, record what each head of a distilled network predicts.

    Probabilities are calibrated. The rules of a model that abstains are applied, unless `settings` change how images
    are classified: a promise holds for the images it was tested on.
    """
    model, own, loader = settings.network(classifier), classifier.preprocessing, loader_of(classifier, images, settings)
    rules = classifier.calibration.rules
    report = evaluate(
        model,
        _with_progress(loader.epoch(0), len(images), settings.progress),
        classes=classifier.labels,
        pixel_mean=own.mean,
        pixel_std=own.std,
        classify=partial(classifier.classify, model=model, tta=settings.tta),
        temperature=rules.temperature,
        keep_logits=keep_logits,
    )
    bad = np.flatnonzero(~np.isfinite(report.confidence))
    if len(bad):
        first = printable(images.where(int(report.index[bad[0]])))
        raise not_finite(f"{first} and {len(bad) - 1:,} others of {len(report.index):,} images")
    real = None
    if settings.real is not None:
        names = [images.where(int(i)) for i in report.index]
        real = real_accuracy(report.predictions, real_labels_of(names, read_real_labels(settings.real)))
    by_head = head_decisions(model, loader.epoch(0)) if heads and model.has_distillation_token else {}
    notes = [*images.notes, *calibration_notes(rules.temperature)]
    answered = None
    if rules.abstains and not (settings.tta or settings.size or settings.crop_ratio):
        answered = rules.answered(classifier.labels, report.predictions, report.confidence, report.distances)
    if rules.promise and answered is not None:
        notes.append(f"promise: {rules.promise.in_words()}")
    if loader.broken:
        first = next(iter(loader.broken.values()))
        notes.append(f"{len(loader.broken)} images cannot be read and are not evaluated; the first: {first}")
    return Evaluation(report, real, tuple(notes), fingerprint(images), dict(by_head), answered)


def calibration_notes(temperature: float) -> tuple[str, ...]:
    """Return a note if loss and calibration error were measured on calibrated probabilities."""
    if temperature == 1:
        return ()
    return (f"loss and calibration_error are of calibrated probabilities (temperature {temperature:.3g})",)


def _with_progress(batches: Iterable[ImageBatch], total: int, progress: Progress | None) -> Iterator[ImageBatch]:
    """Yield the batches, and report a batch as done when the next one is requested."""
    done = 0
    for batch in batches:
        yield batch
        done += len(batch.index)
        if progress:
            progress(min(done, total), total)


def embed_on(
    classifier: "Classifier",
    images: ImageSet,
    settings: "EvaluationSettings",
    *,
    logits: bool = False,
    projected: bool = True,
) -> Embeddings:
    """Return one vector per readable image, on the model's device; with `logits`, the classifier's outputs too."""
    model, loader = settings.network(classifier), loader_of(classifier, images, settings)
    embeddings = embed_batches(classifier, loader.epoch(0), model=model, logits=logits, projected=projected)
    if not loader.broken:
        return embeddings
    # A loader of decoded images substitutes the pixels of another image for an unreadable one.
    return embeddings.rows(np.flatnonzero(~np.isin(embeddings.index.cpu().numpy(), list(loader.broken))))


@dataclass(frozen=True)
class SweepPoint:
    """The evaluation of a model at one crop ratio or image size."""

    value: float  # crop ratio, or pixels
    evaluation: Evaluation


def sweep_on(
    classifier: "Classifier",
    data: Data,
    settings: "EvaluationSettings",
    *,
    over: Literal["crop", "size"],
    values: Sequence[float] | None,
) -> list[SweepPoint]:
    """Evaluate a model on the same images at several crop ratios (thesis figure 6.6) or image sizes (figure 5.4)."""
    if over not in ("crop", "size"):
        raise UsageError(f"over is {over!r}, expected crop or size")
    images = EvaluationData(data, settings, [classifier.folder]).open(classifier)
    if values is None:
        values = CROP_RATIOS if over == "crop" else sizes_around(classifier)
    points = []
    for value in values:
        changed = replace(settings, crop_ratio=value) if over == "crop" else replace(settings, size=round(value))
        points.append(SweepPoint(value, evaluate_on(classifier, images, changed)))
    return points


def sizes_around(classifier: "Classifier") -> list[float]:
    """Return some smaller and larger image sizes that are a multiple of the model's patch size."""
    side = classifier.preprocessing.image_size[0]
    sizes = dict.fromkeys(round(factor * side) for factor in SIZE_FACTORS)
    return [float(size) for size in sizes if _fits(classifier.model, size)]


def _fits(model: Network, size: int) -> bool:
    try:
        with torch.device("meta"):
            type(model)(model.config_at(model.config, (size, size)))
    except UsageError:
        return False
    return True
