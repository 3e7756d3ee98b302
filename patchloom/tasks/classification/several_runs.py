"""Several runs on the same images: the numbers of each, and what they say together."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from patchloom.data.datasets import Progress
from patchloom.data.reading import AS_IT_IS, Reading
from patchloom.evaluation.agreement import DisagreementTable, disagreement
from patchloom.evaluation.comparison import Comparison, compare
from patchloom.inference.classifier import load
from patchloom.inference.evaluations import Evaluation, EvaluationData, EvaluationSettings, evaluate_on
from patchloom.models.cost import Tradeoff, tradeoffs
from patchloom.recipes.schema import difference
from patchloom.report.notebook import html_card, number_texts, numbers_line
from patchloom.runs.config import is_run, read_run_files
from patchloom.runs.locate import find_run
from patchloom.runs.predictions import FILE, Predictions, load_predictions
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
from patchloom_runtime.artifacts.artifact import is_artifact
from patchloom_runtime.errors import UsageError, with_near_options
from patchloom_runtime.printable import printable

Runs: TypeAlias = str | os.PathLike[str] | Sequence[str] | Sequence[os.PathLike[str]]  # folders; one may stand alone
GROUNDTRUTH = "groundtruth"
# Of a set, or of chance in it, rather than of a run.
_NOT_SPREAD = ("images", "top1_low", "top1_high")


@dataclass(frozen=True)
class RunEvaluations:
    """Several runs on the same images: numbers of each, and what they say together."""

    folders: dict[str, Path]
    evaluations: dict[str, Evaluation]  # in the order given, under the same names

    def __repr__(self) -> str:
        runs = "; ".join(f"{printable(name)} {numbers_line(values, 1)}" for name, values in self.values().items())
        return f"RunEvaluations({len(next(iter(self.evaluations.values())).report.index):,} images: {runs})"

    def _repr_html_(self) -> str:
        told = {name: number_texts(values) for name, values in self.values().items()}
        columns = list(dict.fromkeys(column for values in told.values() for column in values))
        rows = [[printable(name), *(values.get(column, "–") for column in columns)] for name, values in told.items()]
        notes = [f"{name}: {note}" for name, of in self.evaluations.items() for note in of.notes]
        pairs = self.comparisons() if len(self.evaluations) > 1 else []
        return html_card("Evaluations", columns=["run", *columns], rows=rows, notes=[*map(_in_words, pairs), *notes])

    def values(self) -> dict[str, dict[str, float]]:
        """Run → its numbers."""
        return {name: evaluation.values() for name, evaluation in self.evaluations.items()}

    def comparisons(self) -> list[Comparison]:
        """All pairs, with the significance of their difference."""
        return compare({name: evaluation.report for name, evaluation in self.evaluations.items()})

    def disagreement(self) -> DisagreementTable:
        """How often any two of them, their heads and the labels decide differently (thesis table 3.4)."""
        first = next(iter(self.evaluations.values()))
        decisions: dict[str, Any] = {GROUNDTRUTH: first.report.labels}
        for name, evaluation in self.evaluations.items():
            decisions[name] = evaluation.report.predictions
            # Both heads together are what the run itself decides by.
            heads = {head: chosen for head, chosen in evaluation.heads.items() if "+" not in head}
            decisions |= {f"{name}: {head}": chosen for head, chosen in heads.items()}
        return disagreement(decisions)

    def spreads(self) -> list[SeedSpread]:
        """Mean, deviation, least and most of each number (thesis figure 6.7)."""
        return [spread for spread in spreads(self.values()) if spread.name not in _NOT_SPREAD]

    def spreads_at_end(self) -> list[SeedSpread]:
        """The same of what the runs' last evaluation said on their val split, rather than of their best weights."""
        found = spreads({name: final_values(folder) for name, folder in self.folders.items()})
        return [spread for spread in found if spread.name not in _NOT_SPREAD]

    def spread_by_epoch(self) -> dict[int, SeedSpread]:
        """Top-1 while the runs were trained, from their records (thesis figure 6.9)."""
        return spread_by_epoch(list(self.folders.values()))

    def early_and_last(self) -> list[EarlyEpochs]:
        """Top-1 early in the training beside that at its end (thesis figure 6.10)."""
        return early_and_last(list(self.folders.values()))

    def cloud(self) -> SeedCloud:
        """Top-1 on the val split each run was trained with, and here; runs that kept no decisions are left out."""
        kept = {name: folder for name, folder in self.folders.items() if (folder / FILE).is_file()}
        own = {name: load_predictions(folder).report.top(1) for name, folder in kept.items()}
        return cloud(own, {name: evaluation.report.top(1) for name, evaluation in self.evaluations.items()})

    def tradeoffs(self, *, device: str = "auto", **measuring: Any) -> list[Tradeoff]:
        """Accuracy beside throughput, multiply-adds, parameters and memory, measured here and now."""
        classifiers = {name: load(folder, device=device) for name, folder in self.folders.items()}
        top1 = {name: evaluation.report.top(1) for name, evaluation in self.evaluations.items()}
        where = next(iter(classifiers.values())).device
        return tradeoffs({name: c.model for name, c in classifiers.items()}, top1, device=where, **measuring)

    def not_only_seeds(self) -> list[str]:
        """Recipe fields other than the seed in which the runs differ."""
        recipes = [recipe for folder in self.folders.values() if (recipe := read_run_files(folder).recipe)]
        changed = [key for other in recipes[1:] for key in difference(recipes[0], other) if key != "seed"]
        return list(dict.fromkeys(changed))


@with_near_options
def evaluate(
    runs: Runs,
    data: str | None = None,
    *,
    device: str = "auto",
    heads: bool = False,
    split: str | None = None,
    size: int | None = None,
    crop_ratio: float | None = None,
    real: str | None = None,
    v2: bool = False,
    batch: int = 64,
    workers: int = 0,
    strict: bool = False,
    reading: Reading = AS_IT_IS,
    level: str | None = None,
    progress: Progress | None = None,
) -> RunEvaluations:
    """One run or several on the same data; without `data`, on what each decided about its val split in its training.

    device      'cpu', 'cuda' …; 'auto' takes a GPU if there is one
    heads       ask distilled networks what each of their heads decides
    split       train, val, test or all; by default val, or what the run held out, or else all
    size        in pixels, where not the models' own
    crop_ratio  share of the short side that is kept, where not the models' own
    real        path of ImageNet-ReaL's labels
    v2          folder names are class numbers, as in ImageNet-V2
    batch       pictures at once
    workers     processes that read pictures
    strict      classes that a model does not know are an error instead of a note
    reading     how the data are read (`patchloom.Reading`: labels file, taxonomy …), where not as in training
    level       of the labels compared with, where not that of the models' classes
    progress    called with the pictures done and their number
    """
    settings = EvaluationSettings.of(locals())
    folders = named(runs)
    if data is None:
        if exported := [folder for folder in folders.values() if is_artifact(folder)]:
            place = shlex.quote(str(exported[0]))
            raise UsageError(f"{place} is an artifact and keeps no val predictions: patchloom evaluate {place} DATA")
        if strange := [folder for folder in folders.values() if not is_run(str(folder))]:
            raise UsageError(f"{strange[0]} is not the folder of a run: it has no config.json")
        kept = {name: _kept(folder) for name, folder in folders.items()}
        found = {name: Evaluation(each.report, None, (), each.fingerprint) for name, each in kept.items()}
    else:
        opened = EvaluationData(data, settings, [folder for folder in folders.values() if not is_artifact(folder)])
        found = {name: _evaluate_run(folder, opened, settings, device, heads) for name, folder in folders.items()}
    _check_same(found)
    return RunEvaluations(folders, found)


def _in_words(pair: Comparison) -> str:
    verdict = "one is better" if pair.significant else "it may be chance"
    points = f"{pair.difference:+.2f} points ({pair.low:+.2f}…{pair.high:+.2f})".replace("-", "−")
    return f"{printable(pair.first)} against {printable(pair.second)}: {points}, p = {pair.p_value:.2g}: {verdict}"


def _kept(folder: Path) -> Predictions:
    files = read_run_files(folder)
    if not files.decides:
        raise UsageError(
            f"{folder} names no classes, so it kept no decisions. Measure its features: "
            f"patchloom probe {shlex.quote(str(folder))} DATA --knn"
        )
    return load_predictions(folder, len(files.labels))


def _evaluate_run(
    folder: Path, data: EvaluationData, settings: EvaluationSettings, device: str, heads: bool
) -> Evaluation:
    classifier = open_exported_classifier(folder) if is_artifact(folder) else load(folder, device=device)
    classifier.check_decides()
    return evaluate_on(classifier, data.open(classifier), settings, heads=heads)


def named(runs: Runs) -> dict[str, Path]:
    """Runs by the name of their folder, or by their path where two folders have the same name; fetched where named."""
    paths = [Path(run) for run in ([runs] if isinstance(runs, str | os.PathLike) else runs)]
    if not paths or len(set(paths)) < len(paths):
        raise UsageError(f"Give one or more runs, each once; given {', '.join(map(str, paths)) or 'none'}")
    unique = len({path.name for path in paths}) == len(paths)
    return {path.name if unique else str(path): find_run(path) or path for path in paths}


def _check_same(found: dict[str, Evaluation]) -> None:
    """An error where runs know other classes, or decided about other images, than the first."""
    (name, first), *others = found.items()
    for other, evaluation in others:
        if set(evaluation.report.classes) != set(first.report.classes):
            only = sorted(set(evaluation.report.classes) ^ set(first.report.classes))[:3]
            raise UsageError(
                f"{other} tells {len(evaluation.report.classes)} classes apart, {name} "
                f"{len(first.report.classes)}; only one of them knows {', '.join(only)}. Evaluate them one by one."
            )
        if evaluation.report.classes != first.report.classes:
            raise UsageError(f"{other} and {name} number the same classes differently. Evaluate them one by one.")
        if evaluation.fingerprint != first.fingerprint:
            raise UsageError(
                f"{other} and {name} kept decisions about different images. "
                "Evaluate both on the same data: patchloom compare RUN… DATA"
            )
