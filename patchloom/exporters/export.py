"""An artifact of a run: its graphs, compared with the run on real images before they are kept."""

import hashlib
import shutil
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from patchloom import __version__
from patchloom.disk import atomic_write
from patchloom.exporters.card import artifact_card
from patchloom.exporters.parity import BATCH, TOLERANCE, Outputs, ParityRow, answers_of, speeds
from patchloom.exporters.subject import ExportSubject
from patchloom.runs.files import json_bytes
from patchloom_runtime.artifacts.metadata import CARD, FILE, FORMAT, LABELS, PACKED, PARITY
from patchloom_runtime.engines.formats import GraphFormat
from patchloom_runtime.errors import NumericalError, UsageError, at_least
from patchloom_runtime.printable import printable
from patchloom_runtime.untrusted import own_sha256

FILE_SUFFIXES = (".onnx", ".pt2", ".pt", ".xml")  # of files that formats have
_LEVEL = 6  # of zlib


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


class ArtifactBuilder:
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


def check_precision(kind: type[ExportSubject], precision: str) -> None:
    """Raise UsageError if the task cannot be exported in this precision."""
    if precision not in kind.precisions:
        option = "--half" if precision == "float16" else "--int8"
        raise UsageError(f"{option} is for runs of classes, vectors and masks; one of {kind.task} is float32")


def check_options(
    form: GraphFormat, *, half: bool, int8: bool, allowed_loss: float, size: int | None, **counts: int | None
) -> None:
    """Raise UsageError for options that are out of range or do not fit together."""
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


def write_artifact_files(
    folder: Path,
    form: GraphFormat,
    subject: ExportSubject,
    made: ArtifactBuilder,
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
