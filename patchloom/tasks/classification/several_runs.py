"""Evaluations of classifiers on the same images with comparisons between them, and `probe`."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, Unpack

from patchloom.data.sources.specs import Data
from patchloom.evaluation.agreement import DisagreementTable, disagreement
from patchloom.evaluation.comparison import Comparison
from patchloom.evaluation.comparison import compare as compare_reports
from patchloom.inference.classifier import Classifier, load
from patchloom.inference.evaluation_methods import (
    NOT_OF_PROBES,
    EvaluationKeywords,
    EvaluationSettings,
    ProbeKeywords,
)
from patchloom.inference.evaluations import Evaluation, EvaluationData, calibration_notes, evaluate_on
from patchloom.inference.probes import Probes
from patchloom.models.cost import Tradeoff, tradeoffs
from patchloom.options import keywords_of
from patchloom.recipes.schema import difference
from patchloom.report.notebook import html_card, number_texts, numbers_line
from patchloom.runs.config import is_run, read_run_files
from patchloom.runs.locate import find_run, local_copy
from patchloom.runs.predictions import FILE, Predictions, load_predictions
from patchloom.runs.run_metadata import RunMetadata, read_run_metadata
from patchloom.tasks.classification.exported import open_exported_classifier
from patchloom.tasks.classification.seeds import (
    EarlyEpochs,
    SeedCloud,
    SeedSpread,
    cloud,
    early_and_last,
    final_values,
    spread_by_epoch,
    spreads,
)
from patchloom.tasks.table import check_classifies
from patchloom_runtime.artifacts.artifact import is_artifact
from patchloom_runtime.errors import UsageError, with_near_options
from patchloom_runtime.printable import printable

Runs: TypeAlias = str | os.PathLike[str] | Sequence[str] | Sequence[os.PathLike[str]]  # run folders, or a single one
GROUNDTRUTH = "groundtruth"
# Values of the dataset, or of its sampling error, rather than of a run.
_NOT_SPREAD = ("images", "top1_low", "top1_high")


@dataclass(frozen=True)
class RunEvaluations:
    """Evaluations of runs on the same images, and comparisons between the runs."""

    folders: dict[str, Path]
    evaluations: dict[str, Evaluation]  # same names and order

    def __repr__(self) -> str:
        runs = "; ".join(f"{printable(name)} {numbers_line(values, 1)}" for name, values in self.values().items())
        return f"RunEvaluations({len(next(iter(self.evaluations.values())).report.index):,} images: {runs})"

    def _repr_html_(self) -> str:
        texts = {name: number_texts(values) for name, values in self.values().items()}
        columns = list(dict.fromkeys(column for values in texts.values() for column in values))
        rows = [[printable(name), *(values.get(column, "–") for column in columns)] for name, values in texts.items()]
        notes = [f"{name}: {note}" for name, result in self.evaluations.items() for note in result.notes]
        pairs = self.comparisons() if len(self.evaluations) > 1 else []
        return html_card("Evaluations", columns=["run", *columns], rows=rows, notes=[*map(_in_words, pairs), *notes])

    def values(self) -> dict[str, dict[str, float]]:
        """Return the metrics of each run as a dict of dicts: run name, then metric name."""
        return {name: evaluation.values() for name, evaluation in self.evaluations.items()}

    def comparisons(self) -> list[Comparison]:
        """Return the difference of every pair of runs with its significance."""
        return compare_reports({name: evaluation.report for name, evaluation in self.evaluations.items()})

    def disagreement(self) -> DisagreementTable:
        """Return how often runs, their heads and the labels disagree, pair by pair (thesis table 3.4)."""
        first = next(iter(self.evaluations.values()))
        decisions: dict[str, Any] = {GROUNDTRUTH: first.report.labels}
        for name, evaluation in self.evaluations.items():
            decisions[name] = evaluation.report.predictions
            # The run itself predicts with both heads together.
            heads = {head: chosen for head, chosen in evaluation.heads.items() if "+" not in head}
            decisions |= {f"{name}: {head}": chosen for head, chosen in heads.items()}
        return disagreement(decisions)

    def spreads(self) -> list[SeedSpread]:
        """Return mean, deviation, minimum and maximum of each measure over the runs (thesis figure 6.7)."""
        return [spread for spread in spreads(self.values()) if spread.name not in _NOT_SPREAD]

    def spreads_at_end(self) -> list[SeedSpread]:
        """Return the same statistics of the last evaluation in training, rather than of the best weights."""
        at_end = spreads({name: final_values(folder) for name, folder in self.folders.items()})
        return [spread for spread in at_end if spread.name not in _NOT_SPREAD]

    def spread_by_epoch(self) -> dict[int, SeedSpread]:
        """Return statistics of top-1 per epoch of training, from the records of the runs (thesis figure 6.9)."""
        return spread_by_epoch(list(self.folders.values()))

    def early_and_last(self) -> list[EarlyEpochs]:
        """Return top-1 at early epochs together with the final top-1 (thesis figure 6.10)."""
        return early_and_last(list(self.folders.values()))

    def cloud(self) -> SeedCloud:
        """Return top-1 on the val split of each run's training and on these images; skip runs without predictions."""
        stored = {name: folder for name, folder in self.folders.items() if (folder / FILE).is_file()}
        own = {name: load_predictions(folder).report.top(1) for name, folder in stored.items()}
        return cloud(own, {name: evaluation.report.top(1) for name, evaluation in self.evaluations.items()})

    def tradeoffs(self, *, device: str = "auto", **measuring: Any) -> list[Tradeoff]:
        """Return accuracy with throughput, multiply-adds, parameters and memory, measured on this machine.

        Runs that recorded the cost of their training have that too.
        """
        classifiers = {name: load(folder, device=device) for name, folder in self.folders.items()}
        top1 = {name: evaluation.report.top(1) for name, evaluation in self.evaluations.items()}
        on_device = next(iter(classifiers.values())).device
        rows = tradeoffs({name: c.model for name, c in classifiers.items()}, top1, device=on_device, **measuring)
        return [_with_training_cost(row, read_run_metadata(self.folders[row.name])) for row in rows]

    def not_only_seeds(self) -> list[str]:
        """Return the recipe fields, except the seed, in which the runs differ."""
        recipes = [recipe for folder in self.folders.values() if (recipe := read_run_files(folder).recipe)]
        changed = [key for other in recipes[1:] for key in difference(recipes[0], other) if key != "seed"]
        return list(dict.fromkeys(changed))


@with_near_options
@keywords_of(EvaluationSettings)
def evaluate(
    runs: Runs,
    data: Data | None = None,
    *,
    device: str = "auto",
    heads: bool = False,
    **options: Unpack[EvaluationKeywords],
) -> RunEvaluations:
    """Evaluate one or several classifiers; `tasks.evaluate.evaluate`, which calls this, explains the options."""
    settings = EvaluationSettings(**options)
    folders = runs_by_name(runs)
    if data is None:
        if exported := [folder for folder in folders.values() if is_artifact(folder)]:
            path = shlex.quote(str(exported[0]))
            raise UsageError(
                f"{path} is an artifact without val predictions; pass data: patchloom evaluate {path} DATA"
            )
        if others := [folder for folder in folders.values() if not is_run(str(folder))]:
            raise UsageError(f"{others[0]} is not a run folder: it has no config.json")
        stored = {name: _stored_predictions(folder) for name, folder in folders.items()}
        evaluations = {
            name: Evaluation(each.report, None, calibration_notes(each.report.temperature), each.fingerprint)
            for name, each in stored.items()
        }
    else:
        opened = EvaluationData(data, settings, [folder for folder in folders.values() if not is_artifact(folder)])
        evaluations = {name: _evaluate_run(folder, opened, settings, device, heads) for name, folder in folders.items()}
    _check_comparable(evaluations)
    return RunEvaluations(folders, evaluations)


@with_near_options
@keywords_of(EvaluationSettings, omit=NOT_OF_PROBES)
def probe(
    runs: Runs,
    data: Data,
    *,
    knn: Sequence[int] = (20,),
    linear: bool = False,
    linear_sgd: int | None = None,
    few_shot: int | None = None,
    trunk: bool = False,
    device: str = "auto",
    **options: Unpack[ProbeKeywords],
) -> dict[str, Probes]:
    """Return the probes of each run by its name: classifiers on frozen features, trained on train, evaluated on val.

    runs        Run folders or published weights; one or several.
    data        Images with a train and a val split, of any classes.
    knn         k nearest neighbors: 10,20. The default probe. As a sequence of numbers.
    linear      Linear probe.
    linear_sgd  Epochs of a linear probe trained with SGD on augmented images, as in DINO.
    few_shot    Linear probe trained on N images per class, such as 5.
    trunk       Use the vectors before the projector of a run that has one.
    device      'cpu', 'cuda', 'cuda:1' or 'mps'; 'auto' uses a GPU if there is one.
    size        Image size in pixels. Default: the run's.
    crop_ratio  Share of the short side that is kept. Default: the run's.
    batch       Images per batch.
    workers     Processes that read images.
    strict      Treat warnings about the data as errors: stray classes.
    reading     How to read the data. Default: as in training.
    level       Label level to compare with. Default: that of the model's classes.
    """
    probes = {}
    for name, folder in runs_by_name(runs).items():
        classifier = load(folder, device=device, trunk=trunk)
        probes[name] = classifier.probe(
            data, knn=knn, linear=linear, linear_sgd=linear_sgd, few_shot=few_shot, **options
        )
    return probes


def _with_training_cost(row: Tradeoff, record: RunMetadata | None) -> Tradeoff:
    if record is None or not record.training_multiply_adds:
        return row
    return replace(
        row,
        training_multiply_adds=record.training_multiply_adds,
        training_s=record.seconds,
        training_device=record.machine,
    )


def _in_words(pair: Comparison) -> str:
    better = pair.first if pair.difference > 0 else pair.second
    verdict = f"{printable(better)} is better" if pair.significant else "it may be chance"
    points = f"{pair.difference:+.2f} points ({pair.low:+.2f}…{pair.high:+.2f})".replace("-", "−")
    return f"{printable(pair.first)} against {printable(pair.second)}: {points}, p = {pair.p_value:.2g}: {verdict}"


def _stored_predictions(folder: Path) -> Predictions:
    files = read_run_files(folder)
    if not files.decides:
        raise UsageError(
            f"{folder} has no classifier, so it has no predictions. Measure its features: "
            f"patchloom probe {shlex.quote(str(folder))} DATA --knn"
        )
    return load_predictions(folder, len(files.labels))


def _evaluate_run(
    folder: Path, data: EvaluationData, settings: EvaluationSettings, device: str, heads: bool
) -> Evaluation:
    classifier = open_exported_classifier(folder) if is_artifact(folder) else load(folder, device=device)
    classifier.check_decides()
    return evaluate_on(classifier, data.open(classifier), settings, heads=heads)


def load_deciding(verb: str, folder: Path, device: str) -> Classifier:
    """Load the classifier of a run; raise UsageError if the run predicts no class per image."""
    check_classifies(verb, folder)
    classifier = load(folder, device=device)
    classifier.check_decides()
    return classifier


def runs_by_name(runs: Runs) -> dict[str, Path]:
    """Return name → run folder; the name is the path if two folders share a name. Named weights are downloaded."""
    paths = [Path(local_copy(os.fspath(run))) for run in ([runs] if isinstance(runs, str | os.PathLike) else runs)]
    if not paths or len(set(paths)) < len(paths):
        raise UsageError(f"expected one or more different runs, got {', '.join(map(str, paths)) or 'none'}")
    unique = len({path.name for path in paths}) == len(paths)
    return {path.name if unique else str(path): find_run(path) or path for path in paths}


def _check_comparable(evaluations: dict[str, Evaluation]) -> None:
    """Raise UsageError if a run has other classes or other images than the first."""
    (name, first), *others = evaluations.items()
    for other, evaluation in others:
        if set(evaluation.report.classes) != set(first.report.classes):
            only = sorted(set(evaluation.report.classes) ^ set(first.report.classes))[:3]
            raise UsageError(
                f"{other} has {len(evaluation.report.classes)} classes and {name} has {len(first.report.classes)}; "
                f"only one of them has {', '.join(only)}. Evaluate them one by one."
            )
        if evaluation.report.classes != first.report.classes:
            raise UsageError(f"{other} and {name} have the same classes in different orders. Evaluate them one by one.")
        if evaluation.fingerprint != first.fingerprint:
            raise UsageError(
                f"{other} and {name} have predictions for different images. "
                "Evaluate both on the same data: patchloom compare RUN… DATA"
            )
