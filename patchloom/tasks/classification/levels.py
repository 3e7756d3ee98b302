"""Networks trained at levels of a taxonomy, judged at all of them (thesis tables 2.5, 2.6, 2.13, 2.14).

Val images are the queries, train is the collection; the numbers and their names are those of `evaluation.retrieval`.
`LevelEvaluations.table` puts runs trained at several levels side by side: at levels finer than its own a run is judged
coarse-to-fine, at coarser ones fine-to-coarse.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from patchloom.data.datasets import ClassTable, ImageSet, Splits, name_some
from patchloom.data.labels.taxonomy import FINEST
from patchloom.data.reading import AS_IT_IS, Reading
from patchloom.data.sources.source import open_data
from patchloom.data.splits import level_of
from patchloom.evaluation.embeddings import Embeddings
from patchloom.evaluation.retrieval import at_level, choose_neighbors, retrieval
from patchloom.evaluation.separability import separability
from patchloom.inference.classifier import load
from patchloom.inference.evaluations import EvaluationSettings, embed_on
from patchloom.runs.run_metadata import recorded_reading
from patchloom.tasks.classification.several_runs import Runs, named
from patchloom_runtime.errors import UsageError, with_near_options

if TYPE_CHECKING:
    from patchloom.inference.classifier import Classifier

# Names of numbers end in these too, so that a level of the name could not be told from them.
TAKEN = (FINEST, "all", "softmax", "oracle", "conditioned", "queries", "top1", "top5")
BY_TRUNK = "images are compared by the vectors before the projector"
MEASURES = {"knn_top1": "kNN top-1", "map": "mAP"}


@dataclass(frozen=True)
class LevelEvaluation:
    """One network at every level."""

    trained_level: str | None  # FINEST for the classes themselves; None: no level of these data
    neighbours: int  # chosen within train
    values: dict[str, float]

    def at(self, measure: str, level: str) -> float:
        """One of MEASURES at a level."""
        name = measure.replace("knn", f"knn{self.neighbours}")
        return self.values[name if level == FINEST else f"{name}_{level}"]


@dataclass(frozen=True)
class LevelEvaluations:
    """Runs judged at every level of the same data."""

    levels: dict[str, int]  # name → classes, from coarse to fine
    runs: dict[str, LevelEvaluation]  # in the order of the level they were trained at, from coarse to fine
    notes: tuple[str, ...]

    def table(self, measure: str) -> dict[str, dict[str, float]]:
        """Level judged at → run → value, for a measure of MEASURES."""
        return {level: {name: run.at(measure, level) for name, run in self.runs.items()} for level in self.levels}


@dataclass(frozen=True)
class LevelData:
    """Data with levels to judge at, and notes on what cannot be judged."""

    splits: Splits
    classes: ClassTable  # without levels of one class
    notes: tuple[str, ...]


@with_near_options
def evaluate_levels(
    runs: Runs,
    data: str,
    *,
    device: str = "auto",
    halves: bool = False,
    trunk: bool = False,
    size: int | None = None,
    crop_ratio: float | None = None,
    batch: int = 64,
    workers: int = 0,
    strict: bool = False,
    reading: Reading = AS_IT_IS,
) -> LevelEvaluations:
    """Runs judged at every level of `data`: val images are the queries, train is the collection.

    device      'cpu', 'cuda' …; 'auto' takes a GPU if there is one
    halves      separability too
    trunk       compare by the vectors before the projectors
    size        in pixels, where not the models' own
    crop_ratio  share of the short side that is kept, where not the models' own
    batch       pictures at once
    workers     processes that read pictures
    strict      stray classes are an error instead of a note
    reading     how the data are read (`patchloom.Reading`: labels file, taxonomy …), where not as in training
    """
    settings, folders = EvaluationSettings.of(locals()), named(runs)
    given = open_leveled(data, runs, strict=settings.strict, reading=settings.reading)
    found, notes = {}, [*given.notes, *([BY_TRUNK] if trunk else [])]
    for name, folder in folders.items():
        classifier = load(folder, device=device, trunk=trunk)
        found[name] = _judge(classifier, given, settings, halves, name if len(folders) > 1 else "", notes)
    order = [None, *reversed(given.classes.levels), FINEST]
    ordered = sorted(found, key=lambda name: order.index(found[name].trained_level))
    counts = {FINEST: len(given.classes)} | {level: len(names) for level, (names, _) in given.classes.levels.items()}
    levels = dict(reversed(counts.items()))
    return LevelEvaluations(levels, {name: found[name] for name in ordered}, tuple(dict.fromkeys(notes)))


def open_leveled(
    data: str, runs: Runs, *, strict: bool = False, needed: bool = True, reading: Reading = AS_IT_IS
) -> LevelData:
    """Data with levels of their own, or of the file one of the runs had on them; without any an error, if `needed`."""
    remembered = (recorded_reading(folder, data) for folder in named(runs).values())
    own = next((each for each in remembered if each.given()), AS_IT_IS)
    splits = open_data(data, strict=strict, reading=reading.filled_from(own))
    if needed and not splits.classes.levels:
        raise UsageError(
            f"{data} has no levels above its {len(splits.classes)} classes; put a taxonomy.csv (class,coarse …) "
            "into it, or nest its class folders in folders of coarser classes"
        )
    notes, kept = list(splits.notes), {}
    for level, (names, numbers) in splits.classes.levels.items():
        if level in TAKEN:
            raise UsageError(f"a level cannot be called {level!r}, as numbers end in {', '.join(TAKEN)}; rename it")
        if len(names) > 1:
            kept[level] = (names, numbers)
        else:
            notes.append(f"level {level!r} has one class ({names[0]!r}): nothing can be judged there; left out")
    return LevelData(splits, replace(splits.classes, levels=kept), (*notes, *_missing(splits)))


def trained_level(classifier: "Classifier", classes: ClassTable) -> str | None:
    """The level whose classes the network was trained with: '' the finest, None where it is none of these.

    By the names of its classes; the level it was trained at may have another name here.
    """
    names = {"": classes.names} | {level: of for level, (of, _) in classes.levels.items()}
    own = {classifier.level: names.pop(classifier.level)} if classifier.level in names else {}
    return level_of(classifier.labels, own | names)


def _judge(
    classifier: "Classifier", given: LevelData, shown: EvaluationSettings, halves: bool, name: str, notes: list[str]
) -> LevelEvaluation:
    level, classes = trained_level(classifier, given.classes), given.classes
    decides = level is not None and classifier.model.config.num_classes == len(classifier.labels) > 0
    splits = {"train": given.splits.train, "val": given.splits.val}
    train, val = (
        embed_on(classifier, pictures, shown, logits=decides and (halves or which == "val"))
        for which, pictures in splits.items()
    )
    for which, found in (("train", train), ("val", val)):
        if lost := len(splits[which]) - len(found):
            notes.append(f"{f'{name}: ' if name else ''}{lost} pictures of {which} cannot be read and do not count")
    own = at_level(train.labeled("train"), classes, level or "")
    count = len(classes.levels[level][0]) if level else len(classes)
    k = choose_neighbors(own, classes=count)
    by_softmax = _posterior(classifier, val, classes, level) if level and decides else None
    values = dict(retrieval(train, val, classes=classes, trained_level=level or None, k=(k,), softmax=by_softmax))
    if halves:
        posterior = _posterior(classifier, own, classes, level or "") if decides else None
        values |= dict(separability(own, classes=count, posterior=posterior))
    return LevelEvaluation(None if level is None else level or FINEST, k, values)


def _posterior(classifier: "Classifier", images: Embeddings, classes: ClassTable, level: str) -> Tensor:
    """(N, K) probabilities of the level's classes, in their order; 0 for one the network does not know."""
    assert images.logits is not None
    place = {label: i for i, label in enumerate(classifier.labels)}
    names = classes.levels[level][0] if level else classes.names
    columns = torch.tensor([place.get(name, -1) for name in names], device=images.logits.device)
    return images.logits.softmax(dim=1)[:, columns.clamp(min=0)] * (columns >= 0)


def _missing(splits: Splits) -> list[str]:
    """Notes on images without a label, and on classes that no query has."""
    notes = []
    bare = np.flatnonzero(splits.val.labels < 0)
    if len(bare):
        first = splits.val.where(int(bare[0]))
        notes.append(f"{len(bare)} pictures of val have no label, the first is {first}; left out")
    counts = np.bincount(_labels(splits.train), minlength=len(splits.classes))
    absent = np.setdiff1d(_labels(splits.train), _labels(splits.val)).tolist()
    if absent:
        named_some = name_some([splits.classes.names[i] for i in absent], [int(counts[i]) for i in absent])
        notes.append(f"no query in val for {named_some}: only the others are judged, among all of train")
    return notes


def _labels(pictures: ImageSet) -> np.ndarray:
    return pictures.labels[pictures.labels >= 0]
