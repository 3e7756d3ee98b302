"""What can be measured of one trained model on data: its decisions, its features, other crops and sizes.

`Classifier.evaluate`, `.probe` and `.sweep` come here; several runs are in `runs.py`. The names of the numbers are
those of `patchloom.evaluation`; an evaluation adds

name                 value
top1_low, top1_high  Wilson's 95 % interval of top-1, in percent
real                 top-1 by ImageNet-ReaL's labels, where they are given
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from patchloom.data.batches.decoded_dataset import DeviceLoader, make_loader
from patchloom.data.batches.evaluation_loader import make_evaluation_loader
from patchloom.data.batches.loader import Loader
from patchloom.data.datasets import ImageSet, LabeledImages, Listing, Progress
from patchloom.data.images.image_batch import ImageBatch
from patchloom.data.reading import AS_IT_IS, Reading
from patchloom.data.sources.source import open_data, open_for
from patchloom.data.splits import match
from patchloom.evaluation.agreement import head_decisions
from patchloom.evaluation.classification import ClassificationReport, evaluate
from patchloom.evaluation.embeddings import Embeddings
from patchloom.evaluation.imagenet_labels import open_v2, read_real_labels, real_accuracy, real_labels_of
from patchloom.evaluation.knn import NeighbourReport, check_neighbours, knn
from patchloom.evaluation.probe import FewShotProbe, LinearProbe, check_shots, few_shot_probe, linear_probe
from patchloom.evaluation.sgd_probe import BATCH, SgdProbe, check_epochs, sgd_probe
from patchloom.inference.embedding import check_view_settings, embed_batches
from patchloom.inference.held_out import held_out_of
from patchloom.models.network import Network
from patchloom.recipes.parts import AugmentPart
from patchloom.report.notebook import number_texts, numbers_line, piece
from patchloom.runs.predictions import fingerprint
from patchloom_runtime.errors import UsageError, at_least, not_finite
from patchloom_runtime.printable import printable

if TYPE_CHECKING:
    from patchloom.inference.classifier import Classifier

CROP_RATIOS = (0.7, 0.75, 0.8, 0.85, 0.875, 0.9, 0.95, 1.0)
# Of the size a model was made for; sizes its patches do not fill are left out.
SIZE_FACTORS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Which pictures a model is shown, and how."""

    split: str | None = None  # train, val, test or all; by default val, or what the run held out, or else all
    size: int | None = None  # in pixels; the model's own where None
    crop_ratio: float | None = None
    real: str | None = None  # path of ImageNet-ReaL's labels
    v2: bool = False  # folder names are class numbers, as in ImageNet-V2
    batch: int = 64
    workers: int = 0
    strict: bool = False
    reading: Reading = AS_IT_IS  # how the data are read
    level: str | None = None  # of the labels compared with; that of the model's classes where None
    progress: Progress | None = None  # called with the pictures done and their number

    def __post_init__(self) -> None:
        check_view_settings(self.size, self.crop_ratio, self.batch)
        at_least("workers", self.workers, 0)

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> "EvaluationSettings":
        """From the arguments of a function, `locals()` on its first line; those that are no fields here are left."""
        return cls(**{name: value for name, value in arguments.items() if name in cls.__dataclass_fields__})

    def held_out(self, folder: Path | None, data: str) -> LabeledImages | None:
        """What the run in `folder` held out of its own data, unless something else is asked for."""
        if folder is None or self.split is not None or self.level is not None or self.v2:
            return None
        return held_out_of(folder, data, self.reading)

    def open(self, data: str, classifier: "Classifier", held_out: LabeledImages | None = None) -> LabeledImages:
        """The pictures with the model's classes, matched by name; those `held_out` of the data, where that is given."""
        table = classifier.table
        if self.v2:
            return open_v2(data, table)
        if own := held_out or self.held_out(classifier.folder, data):
            listing = Listing(own.images, own.rows, own.labels, own.classes.names)
            matched = match(listing, table, strict=self.strict, what=data, known_by="the model")
            return replace(matched, notes=(*own.notes, *matched.notes))
        reading = classifier.reading_of(data, self.reading)
        return open_for(data, table, split=self.split, strict=self.strict, reading=reading, level=self.level)

    def loader(self, classifier: "Classifier", pictures: ImageSet) -> Loader | DeviceLoader:
        """Every picture once, cropped as the model expects it or as is said here."""
        own = classifier.preprocessing
        return make_evaluation_loader(
            pictures,
            self.size or own.image_size,
            self.crop_ratio or own.crop_ratio,
            own.interpolation,
            own.resize,
            batch_size=self.batch,
            device=classifier.device,
            workers=self.workers,
        )


@dataclass(frozen=True)
class Evaluation:
    """The numbers of a classifier on a data set."""

    report: ClassificationReport
    real: float | None  # ReaL's accuracy, where it was asked for
    notes: tuple[str, ...]
    fingerprint: str  # of the images: evaluations with the same one can be compared image by image
    heads: dict[str, Any] = field(
        default_factory=dict
    )  # of a distilled network, where asked for: name → classes chosen

    def values(self) -> dict[str, float]:
        """Name → value, in the order of a table."""
        low, high = self.report.top_interval()
        numbers = {"top1": self.report.top(1), "top1_low": low, "top1_high": high} | dict(self.report)
        return numbers | ({} if self.real is None else {"real": self.real})

    def __repr__(self) -> str:
        count = f"{len(self.report.index):,} images, {len(self.report.classes)} classes"
        return f"Evaluation({count}: {numbers_line(self.values())})"

    def _repr_html_(self) -> str:
        rows = list(number_texts(self.values()).items())
        return piece("Evaluation", columns=("measure", "value"), rows=rows, notes=self.notes)


def evaluate_on(
    classifier: "Classifier", pictures: LabeledImages, shown: EvaluationSettings, *, heads: bool = False
) -> Evaluation:
    """A classifier's decisions about `pictures`."""
    model = classifier.model if shown.size is None else classifier.model.for_images_of(shown.size)
    own, loader = classifier.preprocessing, shown.loader(classifier, pictures)
    report = evaluate(
        model,
        _counted(loader.epoch(0), len(pictures), shown.progress),
        classes=classifier.labels,
        pixel_mean=own.mean,
        pixel_std=own.std,
    )
    bad = np.flatnonzero(~np.isfinite(report.confidence))
    if len(bad):
        first = printable(pictures.where(int(report.index[bad[0]])))
        raise not_finite(f"{first} and {len(bad) - 1:,} others of {len(report.index):,} images")
    right = None
    if shown.real is not None:
        names = [pictures.where(int(i)) for i in report.index]
        right = real_accuracy(report.predictions, real_labels_of(names, read_real_labels(shown.real)))
    of_heads = {}
    if heads and model.has_distillation_token:
        of_heads = head_decisions(model, loader.epoch(0))
    notes = list(pictures.notes)
    if loader.broken:
        first = next(iter(loader.broken.values()))
        notes.append(f"{len(loader.broken)} pictures cannot be read and do not count; the first: {first}")
    return Evaluation(report, right, tuple(notes), fingerprint(pictures), dict(of_heads))


def _counted(batches: Iterable[ImageBatch], total: int, progress: Progress | None) -> Iterator[ImageBatch]:
    """The batches; `progress` hears of each when the next is asked for."""
    done = 0
    for batch in batches:
        yield batch
        done += len(batch.index)
        if progress:
            progress(min(done, total), total)


@dataclass(frozen=True)
class Probes:
    """What neighbours and linear classifiers find in a model's features."""

    neighbours: NeighbourReport | None
    linear: LinearProbe | None
    linear_sgd: SgdProbe | None
    few_shot: FewShotProbe | None
    notes: tuple[str, ...]

    def __iter__(self) -> Iterator[tuple[str, float]]:
        for part in (self.neighbours, self.linear, self.linear_sgd, self.few_shot):
            yield from part or ()

    def __repr__(self) -> str:
        return f"Probes({numbers_line(dict(self))})"

    def _repr_html_(self) -> str:
        return piece(
            "Probes", columns=("measure", "value"), rows=list(number_texts(dict(self)).items()), notes=self.notes
        )


def probe_on(
    classifier: "Classifier",
    data: str,
    shown: EvaluationSettings,
    *,
    neighbours: Sequence[int],
    linear: bool,
    linear_sgd: int | None,
    few_shot: int | None,
) -> Probes:
    """Probes that learn from the train split of `data` and are judged on its val; the classes are those of the data."""
    if not neighbours and not linear and linear_sgd is None and few_shot is None:
        raise UsageError("No probe was asked for: give knn, linear, linear_sgd or few_shot")
    splits = open_data(data, strict=shown.strict, reading=classifier.reading_of(data, shown.reading), level=shown.level)
    names = splits.classes.names
    # Before the features are computed, which may take long.
    if neighbours:
        check_neighbours(neighbours, int(np.sum(splits.train.labels >= 0)))
    if linear_sgd is not None:
        check_epochs(linear_sgd)
    if few_shot is not None:
        check_shots(splits.train.labels, splits.val.labels, names, few_shot)
    train, val = (embed_on(classifier, pictures, shown, projected=False) for pictures in (splits.train, splits.val))
    searched = [part.projected(classifier.model) for part in (train, val)] if neighbours else []
    return Probes(
        knn(*searched, classes=len(names), k=neighbours) if neighbours else None,
        linear_probe(train, val, classes=len(names)) if linear else None,
        _sgd_probe(classifier, splits.train, train, val, shown, len(names), linear_sgd) if linear_sgd else None,
        few_shot_probe(train, val, classes=names, shots=few_shot) if few_shot is not None else None,
        tuple(splits.notes),
    )


def _sgd_probe(
    classifier: "Classifier",
    pictures: ImageSet,
    train: Embeddings,
    val: Embeddings,
    shown: EvaluationSettings,
    classes: int,
    epochs: int,
) -> SgdProbe:
    """DINO's linear evaluation: train's pictures are cropped and mirrored at random, anew every epoch."""
    model = classifier.model if shown.size is None else classifier.model.for_images_of(shown.size)
    size = shown.size or classifier.preprocessing.image_size
    batch = min(BATCH, len(pictures))
    loader, _ = make_loader(
        pictures,
        AugmentPart(),
        size,
        batch_size=batch,
        seed=0,
        device=classifier.device,
        workers=shown.workers,
        skip_broken=True,
    )

    def augmented(epoch: int) -> Iterator[Embeddings]:
        for each in loader.epoch(epoch):
            yield embed_batches(classifier, [each], model=model, projected=False)

    return sgd_probe(augmented, train, val, classes=classes, steps_per_epoch=loader.steps_per_epoch, epochs=epochs)


def embed_on(
    classifier: "Classifier",
    pictures: ImageSet,
    shown: EvaluationSettings,
    *,
    logits: bool = False,
    projected: bool = True,
) -> Embeddings:
    """One vector a picture that can be read, on the model's device; with `logits`, what its classifier says too."""
    model = classifier.model if shown.size is None else classifier.model.for_images_of(shown.size)
    loader = shown.loader(classifier, pictures)
    found = embed_batches(classifier, loader.epoch(0), model=model, logits=logits, projected=projected)
    if not loader.broken:
        return found
    # Where pictures are kept decoded, another's pixels stand in the place of one that cannot be read.
    return found.rows(np.flatnonzero(~np.isin(found.index.cpu().numpy(), list(loader.broken))))


@dataclass(frozen=True)
class SweepPoint:
    """A model at one crop ratio or image size."""

    value: float  # ratio, or pixels
    evaluation: Evaluation


def sweep_on(
    classifier: "Classifier",
    data: str,
    shown: EvaluationSettings,
    *,
    over: Literal["crop", "size"],
    values: Sequence[float] | None,
) -> list[SweepPoint]:
    """The same model and pictures at several crop ratios (thesis figure 6.6) or image sizes (figure 5.4)."""
    if over not in ("crop", "size"):
        raise UsageError(f"A sweep goes over crop or size, given {over!r}")
    pictures = shown.open(data, classifier)
    chosen = list(values) if values is not None else list(CROP_RATIOS) if over == "crop" else sizes_around(classifier)
    changes: list[dict[str, Any]] = [
        {"crop_ratio": value} if over == "crop" else {"size": round(value)} for value in chosen
    ]
    settings = [EvaluationSettings(**(vars(shown) | change)) for change in changes]
    return [
        SweepPoint(value, evaluate_on(classifier, pictures, setting))
        for value, setting in zip(chosen, settings, strict=True)
    ]


def sizes_around(classifier: "Classifier") -> list[float]:
    """Some smaller and larger sizes that the model's patches fill."""
    side = classifier.preprocessing.image_size[0]
    sizes = dict.fromkeys(round(factor * side) for factor in SIZE_FACTORS)
    return [float(size) for size in sizes if _fills(classifier.model, size)]


def _fills(model: Network, size: int) -> bool:
    try:
        with torch.device("meta"):
            type(model)(model.config_at(model.config, (size, size)))
    except UsageError:
        return False
    return True
