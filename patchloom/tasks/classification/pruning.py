"""`prune`: the accuracy of a network with pruned or quantized matrices, and such a network as a run.

The network is not retrained. `layers/matrices.py` defines its matrices A, B and C.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from markupsafe import Markup
from torch import Tensor

from patchloom.data.datasets import LabeledImages
from patchloom.data.reading_options import AS_IT_IS, Reading
from patchloom.data.sources.specs import Data, as_spec
from patchloom.inference.classifier import Classifier
from patchloom.inference.evaluation_methods import EvaluationSettings
from patchloom.inference.evaluations import Evaluation, EvaluationData, evaluate_on
from patchloom.layers.matrices import LETTERS, Matrix, matrices_of, prune_, quantized
from patchloom.report.charts import Series, line_chart
from patchloom.report.notebook import html_card
from patchloom.report.page import write_page
from patchloom.runs.calibration import RunCalibration
from patchloom.runs.folders import write_modified_run
from patchloom.runs.locate import run_folder
from patchloom.runs.predictions import FILE as PREDICTIONS
from patchloom.runs.predictions import Predictions, load_predictions
from patchloom.tasks.classification.several_runs import load_deciding
from patchloom_runtime.errors import UsageError, with_near_options
from patchloom_runtime.printable import printable

SHARES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
BITS = (8, 6, 5, 4, 3, 2)
FULL_BITS = 32  # of the trained weights


@dataclass(frozen=True)
class MatrixZeros:
    """The number of zeros in one matrix."""

    layer: int
    letter: str
    name: str
    weights: int
    zeros: int

    @property
    def share(self) -> float:
        """Zeros in percent."""
        return 100 * self.zeros / self.weights


@dataclass(frozen=True)
class Pruned:
    """The network with some matrices pruned, quantized, or both."""

    letters: str
    share: float | None  # of each of these matrices that is set to zero; None: not pruned
    bits: int | None  # None: not quantized
    matrices: tuple[MatrixZeros, ...]
    values: Mapping[str, float] = field(default_factory=dict)  # measures; empty if it was not evaluated

    @property
    def zeros(self) -> float:
        """Zeros among all weights of these matrices, in percent."""
        return 100 * sum(each.zeros for each in self.matrices) / sum(each.weights for each in self.matrices)

    def zeros_of(self, letter: str) -> tuple[float, float] | None:
        """Return the smallest and largest share of zeros of a matrix of this letter, in percent."""
        shares = [each.share for each in self.matrices if each.letter == letter]
        return (min(shares), max(shares)) if shares else None


@dataclass(frozen=True)
class Pruning:
    """The results of `prune`; `out` is the run that was saved, if any."""

    run: str
    data: str | None
    whole: Pruned
    points: list[Pruned]
    notes: tuple[str, ...] = ()
    out: Path | None = None

    @property
    def groups(self) -> list[str]:
        """Letters of the matrices that were changed together."""
        return list(dict.fromkeys(point.letters for point in self.points))

    def table(self, kind: str) -> tuple[list[str], list[list[str]]]:
        """Return columns and rows of top-1 by 'share' or 'bits', one column per group; for bits, the zeros too."""
        chosen = [point for point in self.points if getattr(point, kind) is not None]
        steps = list(dict.fromkeys(getattr(point, kind) for point in chosen))
        cells = {(getattr(point, kind), point.letters): point for point in chosen}
        groups = [group for group in self.groups if any(point.letters == group for point in chosen)]
        columns = [
            "#zeros, %" if kind == "share" else "#bits",
            *(f"#top-1, {_letters_text(group)}" for group in groups),
        ]
        zeros = [group for group in groups if len(group) == 1] if kind == "bits" else []
        columns += [f"#zeros in {group}, %" for group in zeros]
        unchanged = f"{self.whole.values.get('top1', 0):.2f}"
        first = ["0" if kind == "share" else str(FULL_BITS), *[unchanged] * len(groups)]
        rows = [first + [_range_text(self.whole.zeros_of(letter)) for letter in zeros]]
        for step in steps:
            label = f"{100 * step:g}" if kind == "share" else str(step)
            scores = [f"{cells[step, group].values['top1']:.2f}" for group in groups]
            rows.append([label, *scores, *(_range_text(cells[step, letter].zeros_of(letter)) for letter in zeros)])
        return columns, rows

    def chart(self, kind: str) -> Markup:
        """Draw top-1 by 'share' or 'bits' as lines."""
        start = 0.0 if kind == "share" else float(max((p.bits or 0 for p in self.points), default=8))
        lines = []
        for number, group in enumerate(self.groups):
            points = [p for p in self.points if p.letters == group and getattr(p, kind) is not None]
            xs = [(100 * (p.share or 0) if kind == "share" else float(p.bits or 0), p.values["top1"]) for p in points]
            first = [(start, self.whole.values["top1"])] if kind == "share" else []
            lines.append(Series(_letters_text(group), sorted([*first, *xs]), number))
        label = "% of each matrix set to zero" if kind == "share" else "bits per weight"
        return line_chart(lines, x_label=label, y_label="top-1, %")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "run": self.run,
            "data": self.data,
            "whole": dict(self.whole.values),
            "points": [_point_dict(point) for point in self.points],
            "notes": list(self.notes),
            "out": str(self.out) if self.out else None,
        }

    def __repr__(self) -> str:
        return f"Pruning({printable(self.run)}: {len(self.points)} points{f', saved as {self.out}' * bool(self.out)})"

    def _repr_html_(self) -> str:
        columns, rows = self.table("share")
        return html_card(self.run, columns=[c.removeprefix("#") for c in columns], rows=rows, notes=self.notes)


@with_near_options
def prune(
    run: str,
    data: Data | None = None,
    *,
    shares: Sequence[float] | None = None,
    bits: Sequence[int] | None = None,
    matrices: str = LETTERS,
    out: str | None = None,
    split: str | None = None,
    batch: int = 64,
    workers: int = 0,
    device: str = "auto",
    reading: Reading = AS_IT_IS,
) -> Pruning:
    """Evaluate a run with its matrices A, B and C pruned and quantized, separately and together; nothing is trained.

    run       Run of a classifier.
    data      Images to evaluate on, with the classes of the run. Optional with `out`.
    shares    Shares of each matrix to set to zero, smallest weights first: 0.5,0.9.
    bits      Bits to round each weight to: 8,4,2.
    matrices  Matrices to change: A mixes patches, B and C are the layers of the channel MLP.
    out       Run folder to save the network to, with one share, one number of bits or both. Pruned first, then rounded.
    split     'train', 'val', 'test' or 'all'. Default: val, or the images the run held out.
    batch     Images per batch.
    workers   Processes that read images.
    device    'cpu', 'cuda', 'cuda:1' or 'mps'; 'auto' uses a GPU if there is one.
    reading   How to read the data. Default: as in training.
    """
    data = None if data is None else as_spec(data)
    letters = _checked_letters(matrices)
    saved = _saved_point(shares, bits) if out is not None else None
    requested = [saved] if saved else _points(shares, bits)
    for share, depth in requested:
        _check_point(share, depth)
    folder = run_folder(run)
    if data is None and not saved:
        raise UsageError("pass the data to measure accuracy on, or --out to save the network")
    classifier = load_deciding("prune", folder, device)
    classifier.calibration = RunCalibration()  # that of the trained weights does not hold for changed ones
    every = matrices_of(classifier.model, letters)
    settings = EvaluationSettings(split=split, batch=batch, workers=workers, reading=reading)
    images = EvaluationData(data, settings, [classifier.folder]).open(classifier) if data is not None else None
    notes = tuple(images.notes) if images else ()
    evaluated = partial(_evaluated, classifier, images=images, settings=settings)
    whole, _ = evaluated(every, None, None)
    if saved:
        _change(every, *saved)
        point, evaluation = evaluated(every, *saved)
        _save(classifier, folder, Path(str(out)), point, evaluation)
        return Pruning(run, data, whole, [point], notes, Path(str(out)))
    trained = {matrix.name: matrix.weight.detach().clone() for matrix in every}
    points = []
    for group in [*letters, letters] if len(letters) > 1 else [letters]:
        chosen = [matrix for matrix in every if matrix.letter in group]
        for share, depth in requested:
            _change(chosen, share, depth)
            points.append(evaluated(chosen, share, depth)[0])
            _restore(chosen, trained)
    return Pruning(run, data, whole, points, notes)


def _checked_letters(matrices: str) -> str:
    letters = "".join(dict.fromkeys(matrices))
    if not letters or set(letters) - set(LETTERS):
        raise UsageError(f"--matrices is {matrices!r}, expected some of A, B and C, such as A or ABC")
    return letters


def write_pruning_page(pruning: Pruning, path: Path) -> None:
    """Write the curves and tables as one HTML file."""
    kinds = {
        "share": ("Pruned", "The smallest weights of each matrix are set to zero; the others stay as trained."),
        "bits": (
            "Quantized",
            "Each weight is rounded to n bits: 2ⁿ equal steps up to the largest weight of its matrix.",
        ),
    }
    sections = []
    for kind, (title, text) in kinds.items():
        if any(getattr(point, kind) is not None for point in pruning.points):
            columns, rows = pruning.table(kind)
            names = [column.removeprefix("#").removeprefix("top-1, ") for column in columns]
            sections.append((title, text, pruning.chart(kind), names, rows))
    write_page(
        path,
        "prune.html.j2",
        title=f"{Path(pruning.run).name}: fewer weights, fewer bits",
        sections=sections,
        facts=[("data", pruning.data or "–"), ("top-1 as trained", f"{pruning.whole.values['top1']:.2f} %")],
        matrices=[(each.layer, each.letter, each.name, each.weights) for each in pruning.whole.matrices],
        notes=pruning.notes,
    )


def _points(shares: Sequence[float] | None, bits: Sequence[int] | None) -> list[tuple[float | None, int | None]]:
    """Return the requested points: each share, then each number of bits; the defaults of both if neither is passed."""
    if shares is None and bits is None:
        shares, bits = SHARES, BITS
    return [*((share, None) for share in shares or ()), *((None, depth) for depth in bits or ())]


def _saved_point(shares: Sequence[float] | None, bits: Sequence[int] | None) -> tuple[float | None, int | None]:
    many = [values for values in (shares or (), bits or ()) if len(values) > 1]
    if many or not (shares or bits):
        values = ", ".join(map(str, many[0])) if many else "nothing"
        raise UsageError(f"--out saves one network; pass one value of --shares, of --bits, or of both, got {values}")
    return (shares[0] if shares else None), (bits[0] if bits else None)


def _check_point(share: float | None, bits: int | None) -> None:
    if share is not None and not 0 <= share < 1:
        raise UsageError(f"--shares has {share:g}, expected shares from 0 to below 1, such as 0.5,0.9")
    if bits is not None and not 2 <= bits <= 16:
        raise UsageError(f"--bits has {bits}, expected whole numbers from 2 to 16, such as 8,4,2")


def _change(matrices: Sequence[Matrix], share: float | None, bits: int | None) -> None:
    for matrix in matrices:
        if share is not None:
            prune_(matrix.weight, share)
        if bits is not None:
            matrix.weight.data.copy_(quantized(matrix.weight, bits))


def _restore(matrices: Sequence[Matrix], trained: Mapping[str, Tensor]) -> None:
    for matrix in matrices:
        matrix.weight.data.copy_(trained[matrix.name])


def _evaluated(
    classifier: Classifier,
    matrices: Sequence[Matrix],
    share: float | None,
    bits: int | None,
    *,
    images: LabeledImages | None,
    settings: EvaluationSettings,
) -> tuple[Pruned, Evaluation | None]:
    zeros = tuple(MatrixZeros(m.layer, m.letter, m.name, m.weight.numel(), m.zeros) for m in matrices)
    letters = "".join(dict.fromkeys(sorted(matrix.letter for matrix in matrices)))
    point = Pruned(letters, share, bits, zeros)
    if images is None:
        return point, None
    evaluation = evaluate_on(classifier, images, settings)
    return replace(point, values=evaluation.values()), evaluation


def _save(classifier: Classifier, folder: Path, out: Path, point: Pruned, evaluation: Evaluation | None) -> None:
    """Save the network as a run, with its predictions if they are on the images of the run's stored predictions."""
    steps = [f"{100 * point.share:g} % of each matrix set to zero"] if point.share is not None else []
    steps += [f"rounded to {point.bits} bits"] if point.bits is not None else []
    letters = _letters_text(point.letters)
    note = f"{folder.name}, matrices {letters}: {', then '.join(steps)} ({point.zeros:.2f} % are zero)"
    predictions = None
    stored = load_predictions(folder) if evaluation is not None and (folder / PREDICTIONS).is_file() else None
    if evaluation is not None and stored is not None and stored.fingerprint == evaluation.fingerprint:
        predictions = Predictions(evaluation.report, evaluation.fingerprint)
    write_modified_run(folder, out, classifier.save_pretrained, note, predictions)


def _letters_text(letters: str) -> str:
    return letters if len(letters) == 1 else f"{', '.join(letters[:-1])} and {letters[-1]}"


def _range_text(shares: tuple[float, float] | None) -> str:
    if shares is None:
        return "–"
    low, high = shares
    return f"{low:.1f}" if f"{low:.1f}" == f"{high:.1f}" else f"{low:.1f} … {high:.1f}"


def _point_dict(point: Pruned) -> dict[str, Any]:
    matrices = [
        {"layer": m.layer, "matrix": m.letter, "name": m.name, "weights": m.weights, "zeros": m.zeros, "share": m.share}
        for m in point.matrices
    ]
    own = {"matrices": point.letters, "share": point.share, "bits": point.bits, "zeros": point.zeros}
    return own | {"values": dict(point.values), "each": matrices}
