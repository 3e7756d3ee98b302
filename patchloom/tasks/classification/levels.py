"""`evaluate_levels`: runs evaluated at every level of a taxonomy (thesis tables 2.5, 2.6, 2.13, 2.14).

Val images are the queries and train is the collection; the measures and their names are those of
`evaluation.retrieval`. `LevelEvaluations.table` compares runs trained at several levels: a run is evaluated
coarse-to-fine at levels finer than its own, and fine-to-coarse at coarser ones.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

import numpy as np
import torch
from torch import Tensor

from patchloom.data.datasets import ClassTable, ImageSet, Splits, name_some
from patchloom.data.labels.taxonomy import FINEST, level_named
from patchloom.data.reading_options import AS_IT_IS, Reading
from patchloom.data.sources.source import open_data
from patchloom.data.sources.specs import Data, as_spec
from patchloom.data.splits import level_of
from patchloom.evaluation.embeddings import Embeddings
from patchloom.evaluation.retrieval import at_level, choose_neighbors, retrieval
from patchloom.evaluation.separability import separability
from patchloom.inference.classifier import Classifier, load
from patchloom.inference.evaluation_methods import NOT_OF_PROBES, EvaluationSettings, ViewKeywords
from patchloom.inference.evaluations import embed_on
from patchloom.options import keywords_of
from patchloom.recipes.methods import method_of
from patchloom.runs.config import read_recipe
from patchloom.runs.run_metadata import recorded_reading
from patchloom.tasks.classification.several_runs import Runs, runs_by_name
from patchloom_runtime.errors import UsageError, with_near_options

# Names of measures end in these, so a level of the same name would be ambiguous.
TAKEN = (FINEST, "all", "softmax", "oracle", "conditioned", "queries", "top1", "top5")
BY_TRUNK = "images are compared by the input vectors of the projector"
MEASURES = {"knn_top1": "kNN top-1", "map": "mAP"}


@dataclass(frozen=True)
class LevelEvaluation:
    """The results of one network at every level."""

    trained_level: str | None  # FINEST for the classes themselves; None: not a level of these data
    neighbours: int  # k of the k-NN classifier, chosen within train
    values: dict[str, float]

    def at(self, measure: str, level: str) -> float:
        """Return one of MEASURES at a level."""
        name = measure.replace("knn", f"knn{self.neighbours}")
        return self.values[name if level == FINEST else f"{name}_{level}"]


@dataclass(frozen=True)
class LevelEvaluations:
    """The results of runs at every level of the same data."""

    levels: dict[str, int]  # name → number of classes, from coarse to fine
    runs: dict[str, LevelEvaluation]  # ordered by the level of their training, from coarse to fine
    notes: tuple[str, ...]

    def table(self, measure: str) -> dict[str, dict[str, float]]:
        """Return level → run → value, for one of MEASURES."""
        return {level: {name: run.at(measure, level) for name, run in self.runs.items()} for level in self.levels}


@dataclass(frozen=True)
class LevelData:
    """Data with levels to evaluate at, and notes on what cannot be evaluated."""

    splits: Splits
    classes: ClassTable  # without levels of one class
    notes: tuple[str, ...]


@with_near_options
@keywords_of(EvaluationSettings, omit=(*NOT_OF_PROBES, "level"))
def evaluate_levels(
    runs: Runs,
    data: Data,
    *,
    device: str = "auto",
    halves: bool = False,
    halves_level: str | None = None,
    trunk: bool = False,
    **options: Unpack[ViewKeywords],
) -> LevelEvaluations:
    """Evaluate runs at every level of `data`: val images are the queries, train is the collection.

    runs          Run folders or published weights; one or several.
    data          Images with a train and a val split, and a taxonomy.
    device        'cpu', 'cuda', 'cuda:1' or 'mps'; 'auto' uses a GPU if there is one.
    halves        Measure separability too.
    halves_level  Level whose classes are halved. Default: that of the run's training, else the finest.
    trunk         Use the vectors before the projector of a run that has one.
    size          Image size in pixels. Default: the run's.
    crop_ratio    Share of the short side that is kept. Default: the run's.
    batch         Images per batch.
    workers       Processes that read images.
    strict        Treat warnings about the data as errors: stray classes.
    reading       How to read the data. Default: as in training.
    """
    settings, folders = EvaluationSettings(**options), runs_by_name(runs)
    leveled = open_leveled(data, runs, strict=settings.strict, reading=settings.reading)
    halved = (
        None if not halves else "trained" if halves_level is None else level_named(halves_level, leveled.classes.levels)
    )
    results, notes = {}, [*leveled.notes, *([BY_TRUNK] if trunk else [])]
    for name, folder in folders.items():
        classifier = load(folder, device=device, trunk=trunk)
        results[name] = _evaluate_run(classifier, leveled, settings, halved, name if len(folders) > 1 else "", notes)
    order = [None, *reversed(leveled.classes.levels), FINEST]
    ordered = sorted(results, key=lambda name: order.index(results[name].trained_level))
    counts = {FINEST: len(leveled.classes)}
    counts |= {level: len(names) for level, (names, _) in leveled.classes.levels.items()}
    levels = dict(reversed(counts.items()))
    return LevelEvaluations(levels, {name: results[name] for name in ordered}, tuple(dict.fromkeys(notes)))


def open_leveled(
    data: Data, runs: Runs, *, strict: bool = False, needed: bool = True, reading: Reading = AS_IT_IS
) -> LevelData:
    """Open data with its own levels or those of a run's taxonomy file; raise UsageError without levels, if `needed`."""
    data = as_spec(data)
    remembered = (recorded_reading(folder, data) for folder in runs_by_name(runs).values())
    own = next((each for each in remembered if each.chosen()), AS_IT_IS)
    splits = open_data(data, strict=strict, reading=reading.filled_from(own))
    if needed and not splits.classes.levels:
        raise UsageError(
            f"{data} has no levels above its {len(splits.classes)} classes; put a taxonomy.csv (class,coarse …) "
            "into it, or nest its class folders in folders of coarser classes"
        )
    notes, levels = list(splits.notes), {}
    for level, (names, numbers) in splits.classes.levels.items():
        if level in TAKEN:
            raise UsageError(
                f"a level cannot have the name {level!r}: names of measures end in {', '.join(TAKEN)}; rename it"
            )
        if len(names) > 1:
            levels[level] = (names, numbers)
        else:
            notes.append(f"level {level!r} has one class ({names[0]!r}), so it is not evaluated")
    return LevelData(splits, replace(splits.classes, levels=levels), (*notes, *_missing(splits)))


def trained_level(classifier: Classifier, classes: ClassTable) -> str | None:
    """Return the level whose classes the network was trained with: '' for the finest, None for none of these.

    Levels are compared by their class names, since the level of the training may have another name here. A network of
    clusters (ClusterFit) has no class names; its level is the one that its training named.
    """
    if not classifier.labels and classifier.level in classes.levels and learns_clusters(classifier.folder):
        return classifier.level
    names = {"": classes.names} | {level: names_of_level for level, (names_of_level, _) in classes.levels.items()}
    own = {classifier.level: names.pop(classifier.level)} if classifier.level in names else {}
    return level_of(classifier.labels, own | names)


def learns_clusters(folder: Path | None) -> bool:
    """Return whether a run learned the clusters of another run's features."""
    recipe = read_recipe(folder) if folder is not None else None
    return recipe is not None and method_of(recipe.objective.method).learns_from == "clusters"


def _evaluate_run(
    classifier: Classifier,
    leveled: LevelData,
    settings: EvaluationSettings,
    halved: str | None,
    name: str,
    notes: list[str],
) -> LevelEvaluation:
    """Evaluate one run; `halved` is the level of separability: "trained" for its own, '' for the finest, or None."""
    level, classes = trained_level(classifier, leveled.classes), leveled.classes
    decides = level is not None and classifier.model.config.num_classes == len(classifier.labels) > 0
    splits = {"train": leveled.splits.train, "val": leveled.splits.val}
    train, val = (
        embed_on(classifier, images, settings, logits=decides and (halved is not None or split == "val"))
        for split, images in splits.items()
    )
    for split, embeddings in (("train", train), ("val", val)):
        if lost := len(splits[split]) - len(embeddings):
            notes.append(f"{f'{name}: ' if name else ''}{lost} images of {split} cannot be read and are not evaluated")
    own = at_level(train.labeled("train"), classes, level or "")
    count = len(classes.levels[level][0]) if level else len(classes)
    k = choose_neighbors(own, classes=count)
    by_softmax = _posterior(classifier, val, classes, level) if level and decides else None
    values = dict(retrieval(train, val, classes=classes, trained_level=level or None, k=(k,), softmax=by_softmax))
    if halved is not None:
        at = (level or "") if halved == "trained" else halved
        images = at_level(train.labeled("train"), classes, at)
        posterior = _posterior(classifier, images, classes, at) if decides and at == level else None
        count = len(classes.levels[at][0]) if at else len(classes)
        values |= dict(separability(images, classes=count, posterior=posterior))
    return LevelEvaluation(None if level is None else level or FINEST, k, values)


def _posterior(classifier: Classifier, images: Embeddings, classes: ClassTable, level: str) -> Tensor:
    """Return the probabilities of the level's classes, (N, K); 0 for a class that the network does not have."""
    assert images.logits is not None
    place = {label: i for i, label in enumerate(classifier.labels)}
    names = classes.levels[level][0] if level else classes.names
    columns = torch.tensor([place.get(name, -1) for name in names], device=images.logits.device)
    return images.logits.softmax(dim=1)[:, columns.clamp(min=0)] * (columns >= 0)


def _missing(splits: Splits) -> list[str]:
    """Return notes on images without a label, and on classes without queries."""
    notes = []
    unlabeled = np.flatnonzero(splits.val.labels < 0)
    if len(unlabeled):
        first = splits.val.where(int(unlabeled[0]))
        notes.append(f"{len(unlabeled)} images of val have no label and are not evaluated; the first is {first}")
    counts = np.bincount(_labels(splits.train), minlength=len(splits.classes))
    absent = np.setdiff1d(_labels(splits.train), _labels(splits.val)).tolist()
    if absent:
        named_some = name_some([splits.classes.names[i] for i in absent], [int(counts[i]) for i in absent])
        notes.append(f"val has no query of {named_some}: only the other classes are evaluated, against all of train")
    return notes


def _labels(images: ImageSet) -> np.ndarray:
    return images.labels[images.labels >= 0]
