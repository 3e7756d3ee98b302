"""Probes: how well k-NN, linear and few-shot classifiers work on the features of a trained model."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from patchloom.data.batches.decoded_dataset import make_loader
from patchloom.data.datasets import ImageSet
from patchloom.data.sources.source import open_data
from patchloom.data.sources.specs import Data, as_spec
from patchloom.evaluation.embeddings import Embeddings
from patchloom.evaluation.knn import NeighborReport, check_neighbors, knn
from patchloom.evaluation.probe import FewShotProbe, LinearProbe, check_shots, few_shot_probe, linear_probe
from patchloom.evaluation.sgd_probe import BATCH, SgdProbe, check_epochs, sgd_probe
from patchloom.inference.embedding import embed_batches
from patchloom.inference.evaluations import embed_on
from patchloom.recipes.parts import AugmentPart
from patchloom.report.notebook import html_card, number_texts, numbers_line
from patchloom_runtime.errors import UsageError

if TYPE_CHECKING:
    from patchloom.inference.classifier import Classifier
    from patchloom.inference.evaluation_methods import EvaluationSettings


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """Which probes to fit."""

    neighbors: tuple[int, ...] = ()  # numbers of neighbors of k-NN classifiers
    linear: bool = False
    linear_sgd: int | None = None  # epochs
    few_shot: int | None = None  # images per class


@dataclass(frozen=True)
class Probes:
    """The results of probes; None for a probe that was not requested."""

    neighbours: NeighborReport | None
    linear: LinearProbe | None
    linear_sgd: SgdProbe | None
    few_shot: FewShotProbe | None
    notes: tuple[str, ...]

    def __iter__(self) -> Iterator[tuple[str, float]]:
        for probe in (self.neighbours, self.linear, self.linear_sgd, self.few_shot):
            yield from probe or ()

    def __repr__(self) -> str:
        return f"Probes({numbers_line(dict(self))})"

    def _repr_html_(self) -> str:
        rows = list(number_texts(dict(self)).items())
        return html_card("Probes", columns=("measure", "value"), rows=rows, notes=self.notes)


def probe_on(classifier: "Classifier", data: Data, settings: "EvaluationSettings", probes: ProbeSettings) -> Probes:
    """Fit probes to the train split of `data` and test them on val; the classes are those of the data."""
    neighbors, epochs, shots = probes.neighbors, probes.linear_sgd, probes.few_shot
    if not neighbors and not probes.linear and epochs is None and shots is None:
        raise UsageError("no probe is chosen; pass knn, linear, linear_sgd or few_shot")
    data = as_spec(data)
    reading = classifier.reading_of(data, settings.reading)
    splits = open_data(data, strict=settings.strict, reading=reading, level=settings.level)
    names = splits.classes.names
    # Check the settings before the features are computed, which may take long.
    if neighbors:
        check_neighbors(neighbors, int(np.sum(splits.train.labels >= 0)))
    if epochs is not None:
        check_epochs(epochs)
    if shots is not None:
        check_shots(splits.train.labels, splits.val.labels, names, shots)
    train, val = (embed_on(classifier, images, settings, projected=False) for images in (splits.train, splits.val))
    projected = [images.projected(classifier.model) for images in (train, val)] if neighbors else []
    return Probes(
        knn(*projected, classes=len(names), k=neighbors) if neighbors else None,
        linear_probe(train, val, classes=len(names)) if probes.linear else None,
        _sgd_probe(classifier, splits.train, (train, val), settings, len(names), epochs) if epochs else None,
        few_shot_probe(train, val, classes=names, shots=shots) if shots is not None else None,
        tuple(splits.notes),
    )


def _sgd_probe(
    classifier: "Classifier",
    images: ImageSet,
    embeddings: tuple[Embeddings, Embeddings],
    settings: "EvaluationSettings",
    classes: int,
    epochs: int,
) -> SgdProbe:
    """Run DINO's linear evaluation: the train images are cropped and mirrored at random in every epoch."""
    model = settings.network(classifier)
    loader, _ = make_loader(
        images,
        AugmentPart(),
        settings.size or classifier.preprocessing.image_size,
        batch_size=min(BATCH, len(images)),
        seed=0,
        device=classifier.device,
        workers=settings.workers,
        skip_broken=True,
    )

    def augmented(epoch: int) -> Iterator[Embeddings]:
        for batch in loader.epoch(epoch):
            yield embed_batches(classifier, [batch], model=model, projected=False)

    return sgd_probe(augmented, *embeddings, classes=classes, steps_per_epoch=loader.steps_per_epoch, epochs=epochs)
