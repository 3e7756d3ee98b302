"""Model soups: the mean of the weights of several runs as one network (Wortsman et al. 2022, arXiv 2203.05482)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from patchloom.data.datasets import LabeledImages
from patchloom.data.reading_options import AS_IT_IS, Reading
from patchloom.data.sources.specs import Data
from patchloom.inference.classifier import Classifier, load
from patchloom.inference.evaluation_methods import EvaluationSettings
from patchloom.inference.evaluations import EvaluationData, evaluate_on
from patchloom.runs.calibration import RunCalibration
from patchloom.runs.folders import refuse_taken, write_modified_run
from patchloom.runs.predictions import Predictions
from patchloom.tasks.classification.several_runs import Runs, load_deciding, runs_by_name
from patchloom_runtime.errors import UsageError, with_near_options

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Soup:
    """The accuracy of runs and of the mean of their weights, on the same images."""

    top1: dict[str, float]  # run → percent, best first
    used: tuple[str, ...]  # runs of the saved soup
    uniform_top1: float  # of the mean of all runs
    soup_top1: float  # of the saved soup
    images: int
    out: Path
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**vars(self), "used": list(self.used), "notes": list(self.notes), "out": str(self.out)}


@with_near_options
def soup(
    runs: Runs,
    data: Data,
    *,
    out: str,
    uniform: bool = False,
    split: str | None = None,
    batch: int = 64,
    workers: int = 0,
    device: str = "auto",
    reading: Reading = AS_IT_IS,
) -> Soup:
    """Average the weights of runs of one network and save the result as a run.

    The greedy soup starts with the best run and adds each of the others, best first, if that does not lower top-1 on
    the images. It helps runs that were fine-tuned from the same weights; those from different random weights do not
    average to anything.

    runs     Runs of one network, fine-tuned from the same weights.
    data     Images on which runs are selected. Do not use the final test set.
    out      Run folder to write.
    uniform  Save the mean of all runs instead of the greedy soup.
    split    'train', 'val', 'test' or 'all'. Default: val, or the images the run held out.
    batch    Images per batch.
    workers  Processes that read images.
    device   'cpu', 'cuda', 'cuda:1' or 'mps'; 'auto' uses a GPU if there is one.
    reading  How to read the data. Default: as in training.
    """
    refuse_taken(Path(out))
    folders = runs_by_name(runs)
    if len(folders) < 2:
        raise UsageError("a soup needs two or more runs")
    classifiers = {name: load_deciding("soup", folder, device) for name, folder in folders.items()}
    _check_same(classifiers)
    settings = EvaluationSettings(split=split, batch=batch, workers=workers, reading=reading)
    for each in classifiers.values():
        each.calibration = RunCalibration()  # a temperature holds for the weights it was fitted to
    first = next(iter(classifiers.values()))
    images = EvaluationData(data, settings, folders.values()).open(first)
    scores = {name: _top1(each, images, settings) for name, each in classifiers.items()}
    ranked = sorted(scores, key=lambda name: -scores[name])
    weights = {name: dict(each.model.state_dict()) for name, each in classifiers.items()}
    tasted = load(folders[ranked[0]], device=device)

    def top1_of(names: Sequence[str]) -> float:
        tasted.model.load_state_dict(mean_weights([weights[name] for name in names]))
        return _top1(tasted, images, settings)

    uniform_top1 = top1_of(ranked)
    used, best = (ranked, uniform_top1) if uniform else ([ranked[0]], scores[ranked[0]])
    for name in ranked[1:] if not uniform else ():
        if (together := top1_of([*used, name])) >= best:
            used, best = [*used, name], together
    top1_of(used)
    evaluation = evaluate_on(tasted, images, settings)
    note = f"mean of the weights of {', '.join(used)}, selected on {len(images):,} images"
    predictions = Predictions(evaluation.report, evaluation.fingerprint)
    write_modified_run(folders[ranked[0]], Path(out), tasted.save_pretrained, note, predictions)
    ordered = {name: scores[name] for name in ranked}
    return Soup(ordered, tuple(used), uniform_top1, best, len(images), Path(out), tuple(images.notes))


def mean_weights(weights: Sequence[Weights]) -> Weights:
    """Return the mean of each tensor. Counters, which are integers, are those of the first."""
    first, count = weights[0], len(weights)
    return {
        name: sum((each[name] for each in weights[1:]), tensor) / count if tensor.is_floating_point() else tensor
        for name, tensor in first.items()
    }


def _top1(classifier: Classifier, images: LabeledImages, settings: EvaluationSettings) -> float:
    return evaluate_on(classifier, images, settings).values()["top1"]


def _check_same(classifiers: dict[str, Classifier]) -> None:
    """Raise UsageError if runs differ in network, classes or preprocessing, so that their weights have no mean."""
    (name, first), *others = classifiers.items()
    shapes = {key: tensor.shape for key, tensor in first.model.state_dict().items()}
    for other, each in others:
        differs = {
            "networks": each.model.config != first.model.config,
            "classes": each.labels != first.labels,
            "preprocessing": each.preprocessing != first.preprocessing,
            "weights": {key: tensor.shape for key, tensor in each.model.state_dict().items()} != shapes,
        }
        if what := next((what for what, is_different in differs.items() if is_different), None):
            raise UsageError(f"{other} and {name} have different {what}, so their weights cannot be averaged")
