"""What pruning or rounding a network's matrices costs: accuracy against zeros and bits; and the network that is left.

The network is not trained again. `report/pictures/matrices.py` defines its matrices A, B and C.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from patchloom.data.datasets import LabeledImages
from patchloom.data.reading import AS_IT_IS, Reading
from patchloom.inference.classifier import Classifier, load
from patchloom.inference.evaluations import Evaluation, EvaluationSettings, evaluate_on
from patchloom.report.charts import Series, line_chart
from patchloom.report.notebook import html_card
from patchloom.report.page import write_page
from patchloom.report.pictures.matrices import LETTERS, Matrix, matrices_of, prune_, quantize_
from patchloom.runs.folders import write_modified_run
from patchloom.runs.locate import run_folder
from patchloom.runs.predictions import FILE as PREDICTIONS
from patchloom.runs.predictions import Predictions, load_predictions
from patchloom_runtime.errors import UsageError, with_near_options
from patchloom_runtime.printable import printable

if TYPE_CHECKING:
    from markupsafe import Markup

SHARES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
BITS = (8, 6, 5, 4, 3, 2)
WHOLE_BITS = 32  # of the weights as they are


@dataclass(frozen=True)
class MatrixZeros:
    """How much of one matrix is exactly zero."""

    layer: int
    letter: str
    name: str
    weights: int
    zeros: int

    @property
    def share(self) -> float:
        """In percent."""
        return 100 * self.zeros / self.weights


@dataclass(frozen=True)
class Pruned:
    """The network with some matrices pruned, rounded, or both."""

    letters: str
    share: float | None  # asked for, of each of these matrices; None: not pruned
    bits: int | None  # None: not rounded
    matrices: tuple[MatrixZeros, ...]
    values: Mapping[str, float] = field(default_factory=dict)  # what it scores; empty where it was not evaluated

    @property
    def zeros(self) -> float:
        """Of all weights of these matrices, in percent."""
        return 100 * sum(each.zeros for each in self.matrices) / sum(each.weights for each in self.matrices)

    def zeros_of(self, letter: str) -> tuple[float, float] | None:
        """Least and most of a matrix of this letter, in percent."""
        shares = [each.share for each in self.matrices if each.letter == letter]
        return (min(shares), max(shares)) if shares else None


@dataclass(frozen=True)
class Pruning:
    """Points of both curves; `out` is the run that was saved, where one was."""

    run: str
    data: str | None
    whole: Pruned
    points: list[Pruned]
    notes: tuple[str, ...] = ()
    out: Path | None = None

    @property
    def groups(self) -> list[str]:
        """The letters that were changed together."""
        return list(dict.fromkeys(point.letters for point in self.points))

    def table(self, kind: str) -> tuple[list[str], list[list[str]]]:
        """Top-1 by 'share' or 'bits', a column per group of matrices; for bits also the zeros that rounding makes."""
        chosen = [point for point in self.points if getattr(point, kind) is not None]
        steps = list(dict.fromkeys(getattr(point, kind) for point in chosen))
        cells = {(getattr(point, kind), point.letters): point for point in chosen}
        groups = [group for group in self.groups if any(point.letters == group for point in chosen)]
        columns = ["#zeros, %" if kind == "share" else "#bits", *(f"#top-1, {_told(group)}" for group in groups)]
        zeros = [group for group in groups if len(group) == 1] if kind == "bits" else []
        columns += [f"#zeros in {group}, %" for group in zeros]
        whole = f"{self.whole.values.get('top1', 0):.2f}"
        of_whole = {letter: self.whole.zeros_of(letter) for letter in zeros}
        first = ["0" if kind == "share" else str(WHOLE_BITS), *[whole] * len(groups)]
        rows = [first + [_range(of_whole[letter]) for letter in zeros]]
        for step in steps:
            label = f"{100 * step:g}" if kind == "share" else str(step)
            scores = [f"{cells[step, group].values['top1']:.2f}" for group in groups]
            rows.append([label, *scores, *(_range(cells[step, letter].zeros_of(letter)) for letter in zeros)])
        return columns, rows

    def chart(self, kind: str) -> "Markup":
        """The same as lines."""
        start = 0.0 if kind == "share" else float(max((p.bits or 0 for p in self.points), default=8))
        lines = []
        for number, group in enumerate(self.groups):
            points = [p for p in self.points if p.letters == group and getattr(p, kind) is not None]
            xs = [(100 * (p.share or 0) if kind == "share" else float(p.bits or 0), p.values["top1"]) for p in points]
            first = [(start, self.whole.values["top1"])] if kind == "share" else []
            lines.append(Series(_told(group), sorted([*first, *xs]), number))
        label = "% of each matrix set to zero" if kind == "share" else "bits per weight"
        return line_chart(lines, x_label=label)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
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
    data: str | None = None,
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
    """Accuracy of a run with its matrices A, B and C pruned and rounded, alone and together; nothing is trained.

    run       folder of a run that names classes, or published weights
    data      images with its classes; only where the network is saved may they be left out
    shares    of each matrix that are set to zero, the smallest weights first: 0.5, 0.9 …
    bits      that each weight is rounded to: 8, 4, 2 …
    matrices  letters: A mixes patches, B and C are the layers of the channel MLP
    out       save the network with the one share, the one number of bits, or both, as a run; prune first, then round
    split     train, val, test or all; by default val, or what the run held out
    batch     images at once
    workers   processes that read images
    device    'cpu', 'cuda' …; 'auto' takes a GPU if there is one
    reading   how the data are read, where not as in training
    """
    letters = "".join(dict.fromkeys(matrices))
    if not letters or set(letters) - set(LETTERS):
        raise UsageError(f"--matrices is {matrices!r}, expected some of A, B and C, such as A or ABC")
    saved = _saved_point(shares, bits) if out is not None else None
    asked = [] if saved else _points(shares, bits)
    for share, depth in [saved] if saved else asked:
        _check_point(share, depth)
    folder = run_folder(run)
    if data is None and not saved:
        raise UsageError("Give the data to measure accuracy on, or --out to save the network")
    classifier = load(folder, device=device)
    classifier.check_decides()
    found = matrices_of(classifier.model, letters)
    kept = {matrix.name: matrix.weight.detach().clone() for matrix in found}
    shown = EvaluationSettings(split=split, batch=batch, workers=workers, reading=reading)
    pictures = shown.open(data, classifier) if data is not None else None
    whole, _ = _judged(classifier, found, pictures, shown, None, None)
    if saved:
        _alter(found, *saved)
        point, evaluation = _judged(classifier, found, pictures, shown, *saved)
        _save(classifier, folder, Path(str(out)), point, evaluation)
        notes = tuple(pictures.notes) if pictures else ()
        return Pruning(run, data, whole, [point], notes, Path(str(out)))
    points = []
    for group in [*letters, letters] if len(letters) > 1 else [letters]:
        chosen = [matrix for matrix in found if matrix.letter in group]
        for share, depth in asked:
            _alter(chosen, share, depth)
            points.append(_judged(classifier, chosen, pictures, shown, share, depth)[0])
            _restore(chosen, kept)
    return Pruning(run, data, whole, points, tuple(pictures.notes) if pictures else ())


def write_pruning_page(found: Pruning, path: Path) -> None:
    """The curves and tables as one HTML file."""
    kinds = {
        "share": ("Pruned", "The smallest weights of each matrix are set to zero; the others stay as trained."),
        "bits": ("Rounded", "Each weight is rounded to n bits: 2ⁿ equal steps up to the largest weight of its matrix."),
    }
    sections = []
    for kind, (title, told) in kinds.items():
        if any(getattr(point, kind) is not None for point in found.points):
            columns, rows = found.table(kind)
            named = [column.removeprefix("#").removeprefix("top-1, ") for column in columns]
            sections.append((title, told, found.chart(kind), named, rows))
    write_page(
        path,
        "prune.html.j2",
        title=f"{Path(found.run).name}: fewer weights, fewer bits",
        sections=sections,
        facts=[("data", found.data or "–"), ("top-1 as trained", f"{found.whole.values['top1']:.2f} %")],
        matrices=[(each.layer, each.letter, each.name, each.weights) for each in found.whole.matrices],
        notes=found.notes,
    )


def _points(shares: Sequence[float] | None, bits: Sequence[int] | None) -> list[tuple[float | None, int | None]]:
    """Each share, then each number of bits; the usual of both where neither was asked for."""
    if shares is None and bits is None:
        shares, bits = SHARES, BITS
    return [*((share, None) for share in shares or ()), *((None, depth) for depth in bits or ())]


def _saved_point(shares: Sequence[float] | None, bits: Sequence[int] | None) -> tuple[float | None, int | None]:
    many = [values for values in (shares or (), bits or ()) if len(values) > 1]
    if many or not (shares or bits):
        given = ", ".join(map(str, many[0])) if many else "nothing"
        raise UsageError(f"--out saves one network; give one of --shares, one of --bits, or one of both, given {given}")
    return (shares[0] if shares else None), (bits[0] if bits else None)


def _check_point(share: float | None, bits: int | None) -> None:
    if share is not None and not 0 <= share < 1:
        raise UsageError(f"--shares has {share:g}, expected shares from 0 to below 1, such as 0.5,0.9")
    if bits is not None and not 2 <= bits <= 16:
        raise UsageError(f"--bits has {bits}, expected whole numbers from 2 to 16, such as 8,4,2")


def _alter(matrices: Sequence[Matrix], share: float | None, bits: int | None) -> None:
    for matrix in matrices:
        if share is not None:
            prune_(matrix.weight, share)
        if bits is not None:
            quantize_(matrix.weight, bits)


def _restore(matrices: Sequence[Matrix], kept: Mapping[str, Tensor]) -> None:
    for matrix in matrices:
        matrix.weight.data.copy_(kept[matrix.name])


def _judged(
    classifier: Classifier,
    matrices: Sequence[Matrix],
    pictures: LabeledImages | None,
    shown: EvaluationSettings,
    share: float | None,
    bits: int | None,
) -> tuple[Pruned, Evaluation | None]:
    zeros = tuple(MatrixZeros(m.layer, m.letter, m.name, m.weight.numel(), m.zeros) for m in matrices)
    letters = "".join(dict.fromkeys(sorted(matrix.letter for matrix in matrices)))
    point = Pruned(letters, share, bits, zeros)
    if pictures is None:
        return point, None
    evaluation = evaluate_on(classifier, pictures, shown)
    return replace(point, values=evaluation.values()), evaluation


def _save(classifier: Classifier, folder: Path, out: Path, point: Pruned, evaluation: Evaluation | None) -> None:
    """As a run; with its decisions where they are about the very images that the whole run decided about."""
    done = [f"{100 * point.share:g} % of each matrix set to zero"] if point.share is not None else []
    done += [f"rounded to {point.bits} bits"] if point.bits is not None else []
    note = f"{folder.name}, matrices {_told(point.letters)}: {', then '.join(done)} ({point.zeros:.2f} % are zero)"
    decided = None
    if evaluation is not None and (folder / PREDICTIONS).is_file():
        decided = Predictions(evaluation.report, evaluation.fingerprint)
        decided = decided if load_predictions(folder).fingerprint == decided.fingerprint else None
    write_modified_run(folder, out, classifier.save_pretrained, note, decided)


def _told(letters: str) -> str:
    return letters if len(letters) == 1 else f"{', '.join(letters[:-1])} and {letters[-1]}"


def _range(found: tuple[float, float] | None) -> str:
    if found is None:
        return "–"
    low, high = found
    return f"{low:.1f}" if f"{low:.1f}" == f"{high:.1f}" else f"{low:.1f} … {high:.1f}"


def _point_dict(point: Pruned) -> dict[str, Any]:
    matrices = [
        {"layer": m.layer, "matrix": m.letter, "name": m.name, "weights": m.weights, "zeros": m.zeros, "share": m.share}
        for m in point.matrices
    ]
    own = {"matrices": point.letters, "share": point.share, "bits": point.bits, "zeros": point.zeros}
    return own | {"values": dict(point.values), "each": matrices}
