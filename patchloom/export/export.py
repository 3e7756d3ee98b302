"""`patchloom export`: one artefact of a run, compared with it on real images before it is kept."""

import hashlib
import shutil
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from patchloom import __version__
from patchloom.disk import atomic_write, temporary_folder
from patchloom.export.card import artifact_card
from patchloom.export.parity import BATCH, TOLERANCE, Outputs, ParityRow, answers_of, speeds
from patchloom.export.subject import ExportSettings, ExportSubject
from patchloom.runs.config import read_config
from patchloom.runs.files import json_bytes
from patchloom.runs.folders import new_folder, refuse_taken
from patchloom.runs.locate import run_folder
from patchloom_runtime.artifacts.metadata import CARD, FILE, FORMAT, LABELS, PACKED, PARITY
from patchloom_runtime.engines.formats import GraphFormat, PageFormat, format_for, format_named
from patchloom_runtime.errors import NumericalError, UsageError, at_least, with_near_options
from patchloom_runtime.printable import printable
from patchloom_runtime.untrusted import own_sha256

if TYPE_CHECKING:
    from patchloom.export.single_page.page import Page

CALIBRATION, ALLOWED_LOSS = 128, 1.0
FILE_SUFFIXES = (".onnx", ".pt2", ".pt", ".xml")  # of files that formats have
_LEVEL = 6  # of zlib
# Task → what makes a subject of a run of it.
SUBJECTS = {
    "classification": "patchloom.tasks.classification.export:ClassifierSubject",
    "embedding": "patchloom.tasks.classification.export:ClassifierSubject",
    "segmentation": "patchloom.tasks.segmentation.export:SegmenterSubject",
    "detection": "patchloom.tasks.detection.export:DetectorSubject",
    "translation": "patchloom.tasks.translation.export:TranslatorSubject",
}


@dataclass(frozen=True)
class Exported:
    """What was written, and how it compares with the run."""

    folder: Path
    to: str
    precision: str
    rows: Sequence[ParityRow]  # the run first
    images: int  # that were compared
    measure: str = "accuracy"  # what the rows' `right` is
    notes: Sequence[str] = ()
    compared: str = "images"  # or sentences

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        told = {"folder": str(self.folder), "to": self.to, "precision": self.precision, "images": self.images}
        return told | {
            "compared": self.compared,
            "measure": self.measure,
            "rows": [asdict(row) for row in self.rows],
            "notes": list(self.notes),
        }

    def __repr__(self) -> str:
        kept = next(row for row in self.rows[1:] if row.kept)
        told = f"{kept.what}, {kept.agreement:.2f} % the same answers, {kept.per_second:,.1f} {self.compared}/s"
        return f"Exported({printable(str(self.folder))}: {told})"


def artifact_folder(out: str) -> str:
    """The folder of an artifact: photos-onnx for photos.onnx, since the name of a file is no name for a folder."""
    path = Path(out)
    return str(path.with_name(f"{path.stem}-{path.suffix[1:]}")) if path.suffix in FILE_SUFFIXES else out


@with_near_options
def export(
    run: str,
    out: str,
    *,
    to: str | None = None,
    data: str | None = None,
    split: str | None = None,
    size: int | None = None,
    half: bool = False,
    int8: bool = False,
    allowed_loss: float | None = None,
    tolerance: float | None = None,
    images: int | None = None,
    calibration: int | None = None,
    packed: bool = False,
) -> "Exported | Page":
    """Write a run as something that answers without patchloom: an artefact, or one HTML page.

    run           folder of a run, or published weights
    out           the artifact's folder, or the page's file; it is there whole or not at all. photos.onnx becomes the
                  folder photos-onnx
    to            onnx, torch, openvino or html; by default onnx, or html where `out` ends in .html
    data          images it is compared with the run on; by default those of the run
    split         train, val, test or all; by default val, or what the run held out
    size          of its images in pixels, where not the run's own
    half          float16 weights and sums; a page has float16 weights always
    int8          calibrated on images of train; kept if it is faster here and loses at most `allowed_loss`. Of a page
                  the weights alone
    allowed_loss  points of accuracy (without labels: of same answers) that int8 may lose; 1
    tolerance     the largest difference from the run that is accepted, as a share of its largest output
    images        most that are compared, spread over the split; 1,000, of a detector 100, of a translator 200 sentences
    calibration   images that int8 is calibrated on; 128
    packed        store the graph compressed, without loss: of a run that `patchloom prune` left, zeros take no room
    """
    given = {"data": data, "split": split, "size": size, "tolerance": tolerance, "images": images}
    given |= {"allowed_loss": allowed_loss, "calibration": calibration, "half": half or None, "packed": packed or None}
    form = format_named(to or format_for(out))
    form.refuse_missing(form.to_write)
    if isinstance(form, PageFormat):
        for name, value in given.items():
            if value is not None:
                raise UsageError(f"--{name.replace('_', '-')} is about artefacts; --to {form.name} does not read it")
        page: Page = form.write_page(run, out, int8=int8)
        return page
    assert isinstance(form, GraphFormat)
    calibration = CALIBRATION if calibration is None else calibration
    allowed_loss = ALLOWED_LOSS if allowed_loss is None else allowed_loss
    _check(form, half=half, int8=int8, images=images, calibration=calibration, allowed_loss=allowed_loss, size=size)
    named, out = out, artifact_folder(out)
    refuse_taken(Path(out))
    kind, folder_of_run = subject_type(run_folder(run)), run_folder(run)
    _check_precision(kind, "float16" if half else "int8" if int8 else "float32")
    subject = kind(folder_of_run, ExportSettings(data, split, size, images))
    with temporary_folder() as temporary, new_folder(Path(out)) as folder:
        made = _Exporter(form, subject, half=half, tolerance=tolerance)
        made.plain(folder)
        if int8:
            made.quantized(folder, temporary, subject.calibration(calibration), allowed_loss)
        sizes = made.pack(folder) if packed else {}
        renamed = [f"an artifact is a folder: it is {out}, not a file {named}"] if out != named else []
        notes = (*renamed, *subject.notes, *made.notes)
        rows, count = tuple(made.rows), len(subject.rows)
        exported = Exported(Path(out), form.name, made.precision, rows, count, subject.measure, notes, subject.compared)
        _write(folder, form, subject, made, sizes, exported)
    return exported


def subject_type(folder: Path) -> Any:
    """What makes a subject of a run and of what was asked for; a UsageError where its task is not exported."""
    config = read_config(folder)
    # Runs of before tasks were kept are told by what they have.
    task = str(config.get("task") or ("translation" if "vocabulary" in config else "classification"))
    if task not in SUBJECTS:
        raise UsageError(
            f"{printable(str(folder))} is a run of {printable(task)}, which is not exported; {', '.join(SUBJECTS)} are"
        )
    module, _, attribute = SUBJECTS[task].partition(":")
    return getattr(import_module(module), attribute)


class _Exporter:
    """The graphs of one run, each measured beside it on the same pixels."""

    def __init__(self, form: GraphFormat, subject: ExportSubject, *, half: bool, tolerance: float | None) -> None:
        self.form, self.subject, self.shown = form, subject, subject.rows
        self.parts: tuple[str, ...] = ()
        self.outputs: tuple[str, ...] = ()
        self.precision = "float16" if half else "float32"
        self.tolerance = TOLERANCE[self.precision] if tolerance is None else tolerance
        self.notes: list[str] = []
        self.rows: list[ParityRow] = []
        self.expected = answers_of(subject.run, self.shown, subject.batch)

    def plain(self, folder: Path) -> None:
        """Write the graph and compare it; a NumericalError above the tolerance."""
        for part in self.subject.traced(half=self.precision == "float16"):
            self.form.write(part, folder)
            self.parts, self.outputs = (*self.parts, part.part), (*self.outputs, *part.outputs)
        graph = self.subject.opened(self.form, folder, torch.get_num_threads())
        answers = answers_of(graph, self.shown, self.subject.batch)
        row = self._compared(f"{self.form.name} {self.precision}", folder, answers)
        if row.relative > self.tolerance:
            raise NumericalError(
                f"{row.what} differs from the run by {row.difference:.2g}, {row.relative:.2g} of its largest output, "
                f"more than the tolerance of {self.tolerance:g} ({row.agreement:.2f} % the same answers); nothing was "
                "written. Accept it with --tolerance, or use another format."
            )
        of_run, of_file = speeds([self.subject.run, graph], self.shown, self.subject.batch)
        right = self.subject.right(self.expected)
        self.rows = [
            ParityRow("the run, torch float32", 100.0, 0.0, 0.0, right, *of_run, mib=self.subject.weights / 2**20),
            replace(row, one_ms=of_file[0], per_second=of_file[1]),
        ]

    def quantized(self, folder: Path, temporary: Path, calibration: np.ndarray, allowed_loss: float) -> None:
        """Put an int8 graph into the place of the plain one, if there is one that is faster and loses little."""
        plain = self.form.open(folder, torch.get_num_threads())
        for number, way in enumerate(self.form.int8_ways):
            place = temporary / str(number)
            place.mkdir()
            self.form.quantize(folder, place, way, _batches(calibration))
            graph = self.form.open(place, torch.get_num_threads())
            row = self._compared(f"{self.form.name} {way}", place, answers_of(graph, self.shown))
            before, now = speeds([plain, graph], self.shown)
            row = replace(row, one_ms=now[0], per_second=now[1])
            row = replace(row, why=why_not(row, self.rows[0], before, allowed_loss))
            row = replace(row, kept=not row.why)
            self.rows.append(row)
            if row.kept:
                self.rows = [replace(r, kept=False) if r is self.rows[1] else r for r in self.rows]
                for name in self.form.files(self.parts):
                    shutil.copyfile(place / name, folder / name)
                self.precision = "int8"
                return
            self.notes.append(f"{row.what} is not kept: {row.why}")
        self.notes.append(f"the artefact is {self.precision}")

    def pack(self, folder: Path) -> dict[str, int]:
        """Compress the graph where it lies; name of each file → its bytes before."""
        sizes = {}
        for name in self.form.files(self.parts):
            path = folder / name
            data = path.read_bytes()
            sizes[name] = len(data)
            atomic_write(folder / f"{name}{PACKED}", zlib.compress(data, _LEVEL))
            path.unlink()
        mib = sum((folder / f"{name}{PACKED}").stat().st_size for name in sizes) / 2**20
        self.rows[1:] = [replace(row, mib=mib) if row.kept else row for row in self.rows[1:]]
        return sizes

    def _compared(self, what: str, folder: Path, found: Outputs) -> ParityRow:
        gap, share = self.subject.differences(found, self.expected)
        counts = sum((self.form.operators(folder, part) for part in self.parts), Counter[str]())
        integer = sum(count for kind, count in counts.items() if is_integer(kind))
        size = sum((folder / name).stat().st_size for name in self.form.files(self.parts)) / 2**20
        same, right = self.subject.same(found, self.expected), self.subject.right(found)
        return ParityRow(what, same, gap, share, right, 0.0, 0.0, size, integer, sum(counts.values()))


def why_not(row: ParityRow, run: ParityRow, plain: tuple[float, float], allowed_loss: float) -> str:
    """Why an int8 graph is not worth keeping; '' where it is. `plain` are the speeds of the graph it was made of."""
    if not row.integer:
        return "the quantiser left no operator that computes with integers"
    labeled = row.accuracy is not None and run.accuracy is not None
    lost = (run.accuracy or 0.0) - (row.accuracy or 0.0) if labeled else 100 - row.agreement
    if lost > allowed_loss:
        what = "accuracy" if labeled else "same answers"
        return f"it loses {lost:.2f} points of {what}, allowed are {allowed_loss:g} (--allowed-loss)"
    if row.per_second <= plain[1]:
        return f"it is not faster here: {row.per_second:,.1f} images/s against {plain[1]:,.1f}"
    return ""


def is_integer(kind: str) -> bool:
    """Whether an operator of onnxruntime multiplies or adds integers; converting to and from them does not count."""
    known = ("QLinear", "QGemm", "QAttention", "MatMulInteger", "ConvInteger", "DynamicQuantizeMatMul")
    return kind.startswith(known)


def _check_precision(kind: type[ExportSubject], precision: str) -> None:
    if precision not in kind.precisions:
        option = "--half" if precision == "float16" else "--int8"
        raise UsageError(f"{option} is for runs of classes, vectors and masks; one of {kind.task} is float32")


def _check(
    form: GraphFormat, *, half: bool, int8: bool, allowed_loss: float, size: int | None, **counts: int | None
) -> None:
    for name, value in counts.items():
        if value is not None:
            at_least(name, value, 2)
    if size is not None:
        at_least("size", size, 1)
    if half and int8:
        raise UsageError("--half and --int8 do not go together; leave one out")
    if int8 and not form.int8_ways:
        raise UsageError(f"--int8 is for --to onnx; {form.name} has no quantiser here")
    if not 0 <= allowed_loss <= 100:
        raise UsageError(f"--allowed-loss is {allowed_loss:g}, expected points from 0 to 100")


def _batches(pixels: np.ndarray) -> Iterator[np.ndarray]:
    return (pixels[start : start + BATCH] for start in range(0, len(pixels), BATCH))


def _write(
    folder: Path,
    form: GraphFormat,
    subject: ExportSubject,
    made: _Exporter,
    packed: Mapping[str, int],
    exported: Exported,
) -> None:
    """What stands beside the graph; artefact.json last, with the checksums of all."""
    atomic_write(folder / LABELS, json_bytes(list(subject.labels)))
    atomic_write(folder / PARITY, json_bytes(exported.to_dict()))
    atomic_write(folder / CARD, artifact_card(subject, made.outputs, exported).encode())
    names = (*(f"{name}{PACKED}" if name in packed else name for name in form.files(made.parts)), LABELS, PARITY, CARD)
    further = subject.files()
    for name, data in further.items():
        atomic_write(folder / name, data)
    about: dict[str, Any] = {
        "format": FORMAT,
        "patchloom": __version__,
        "to": form.name,
        "precision": exported.precision,
        "task": subject.task,
        "network": subject.network,
        "outputs": list(made.outputs),
        "parts": list(made.parts),
        **({"preprocessing": asdict(subject.shown), "input": _input(subject)} if subject.shown else {}),
        **subject.told,
        **({"packed": dict(packed)} if packed else {}),
        "files": {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in (*names, *further)},
    }
    atomic_write(folder / FILE, json_bytes(about | {"own_sha256": own_sha256(about)}))


def _input(subject: ExportSubject) -> str:
    return f"pixels, {subject.takes.format('height', 'width')}; mean and std are inside the graph"
