"""Building an artifact: write the graphs of a run, compare them with the run on real inputs, describe the result."""

import hashlib
import shutil
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from patchloom import __version__
from patchloom.disk import atomic_write
from patchloom.exporters.formats import GraphFormat
from patchloom.exporters.parity import BATCH, TOLERANCE, Outputs, ParityRow, columns, outputs_of, speeds
from patchloom.exporters.subject import ExportSubject
from patchloom.runs.files import json_bytes
from patchloom_runtime.artifacts.metadata import CARD, FILE, FORMAT, LABELS, PACKED, PARITY
from patchloom_runtime.errors import NumericalError, UsageError, at_least
from patchloom_runtime.printable import printable
from patchloom_runtime.untrusted import own_sha256

FILE_SUFFIXES = (".onnx", ".pt2", ".pt", ".xml")  # of graph files
_ZLIB_LEVEL = 6


@dataclass(frozen=True)
class Exported:
    """The result of an export: where it is, and how it compares with the run."""

    folder: Path
    to: str
    precision: str
    rows: Sequence[ParityRow]  # the run first
    images: int  # compared
    measure: str = "accuracy"  # metric of the rows' `accuracy`
    notes: Sequence[str] = ()
    compared: str = "images"  # or sentences

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "folder": str(self.folder),
            "to": self.to,
            "precision": self.precision,
            "images": self.images,
            "compared": self.compared,
            "measure": self.measure,
            "rows": [asdict(row) for row in self.rows],
            "notes": list(self.notes),
        }

    def __repr__(self) -> str:
        row = next(row for row in self.rows[1:] if row.kept)
        summary = f"{row.what}, {row.agreement:.2f} % the same answers, {row.per_second:,.1f} {self.compared}/s"
        return f"Exported({printable(str(self.folder))}: {summary})"


def artifact_folder(out: str) -> str:
    """Return the folder of an artifact: photos-onnx for photos.onnx, since a folder should not look like a file."""
    path = Path(out)
    return str(path.with_name(f"{path.stem}-{path.suffix[1:]}")) if path.suffix in FILE_SUFFIXES else out


class ArtifactBuilder:
    """An artifact under construction. Every graph is compared with the run on the same inputs."""

    def __init__(self, form: GraphFormat, subject: ExportSubject, *, half: bool, tolerance: float | None) -> None:
        self.form, self.subject = form, subject
        self.parts: tuple[str, ...] = ()
        self.outputs: tuple[str, ...] = ()
        self.precision = "float16" if half else "float32"
        self.tolerance = TOLERANCE[self.precision] if tolerance is None else tolerance
        self.notes: list[str] = []
        self.rows: list[ParityRow] = []
        self.packed: dict[str, int] = {}  # compressed graph file → its bytes before
        self.expected = outputs_of(subject.run, subject.rows, subject.batch)

    def write_graph(self, folder: Path) -> None:
        """Write the graph and compare it with the run. Raises NumericalError above the tolerance."""
        subject, threads = self.subject, torch.get_num_threads()
        for part in subject.parts(half=self.precision == "float16"):
            self.form.write(part, folder)
            self.parts, self.outputs = (*self.parts, part.name), (*self.outputs, *part.outputs)
        graph = subject.open(self.form, folder, threads)
        outputs = outputs_of(graph, subject.rows, subject.batch)
        row = self._compare(f"{self.form.name} {self.precision}", folder, outputs)
        if row.relative > self.tolerance:
            raise NumericalError(
                f"{row.what} differs from the run by {row.difference:.2g}, {row.relative:.2g} of its largest output, "
                f"more than the tolerance of {self.tolerance:g} ({row.agreement:.2f} % the same answers); nothing was "
                "written. Accept it with --tolerance, or use another format."
            )
        run_speed, file_speed = speeds([subject.run, graph], subject.rows, subject.batch)
        quality, mib = subject.quality(self.expected), subject.weights / 2**20
        self.rows = [
            ParityRow("the run, torch float32", 100.0, 0.0, 0.0, quality, *run_speed, mib=mib),
            replace(row, one_ms=file_speed[0], per_second=file_speed[1]),
        ]

    def quantize(self, folder: Path, temporary: Path, calibration: np.ndarray, allowed_loss: float) -> None:
        """Replace the graph by the first int8 graph that is faster and loses at most `allowed_loss`, if any."""
        threads, rows = torch.get_num_threads(), self.subject.rows
        float_graph = self.form.open(folder, threads)
        for number, mode in enumerate(self.form.int8_modes):
            attempt = temporary / str(number)
            attempt.mkdir()
            self.form.quantize(folder, attempt, mode, _batches(calibration))
            graph = self.form.open(attempt, threads)
            row = self._compare(f"{self.form.name} {mode}", attempt, outputs_of(graph, rows))
            float_speed, speed = speeds([float_graph, graph], rows)
            row = replace(row, one_ms=speed[0], per_second=speed[1])
            reason = why_not(row, self.rows[0], float_speed, allowed_loss)
            self.rows.append(replace(row, why=reason, kept=not reason))
            if not reason:
                self.rows[1] = replace(self.rows[1], kept=False)
                for name in self.form.files(self.parts):
                    shutil.copyfile(attempt / name, folder / name)
                self.precision = "int8"
                return
            self.notes.append(f"{row.what} is not kept: {reason}")
        self.notes.append(f"the artifact is {self.precision}")

    def pack(self, folder: Path) -> None:
        """Compress the graph files."""
        for name in self.form.files(self.parts):
            path = folder / name
            data = path.read_bytes()
            self.packed[name] = len(data)
            atomic_write(folder / f"{name}{PACKED}", zlib.compress(data, _ZLIB_LEVEL))
            path.unlink()
        mib = sum((folder / f"{name}{PACKED}").stat().st_size for name in self.packed) / 2**20
        self.rows[1:] = [replace(row, mib=mib) if row.kept else row for row in self.rows[1:]]

    def finish(self, folder: Path, out: Path, notes: Sequence[str] = ()) -> Exported:
        """Write the remaining files, `artifact.json` with the checksums of all others last.

        `out` is the final path of `folder`; `notes` come before those of the export.
        """
        subject, form = self.subject, self.form
        exported = Exported(
            out,
            form.name,
            self.precision,
            tuple(self.rows),
            len(subject.rows),
            subject.measure,
            (*notes, *subject.notes, *self.notes),
            subject.compared,
        )
        files = {
            LABELS: json_bytes(list(subject.labels)),
            PARITY: json_bytes(exported.to_dict()),
            CARD: artifact_card(subject, self.outputs, exported).encode(),
            **subject.files(),
        }
        for name, data in files.items():
            atomic_write(folder / name, data)
        graphs = (f"{name}{PACKED}" if name in self.packed else name for name in form.files(self.parts))
        about: dict[str, Any] = {
            "format": FORMAT,
            "patchloom": __version__,
            "to": form.name,
            "precision": self.precision,
            "task": subject.task,
            "network": subject.network,
            "outputs": list(self.outputs),
            "parts": list(self.parts),
            **_preprocessing(subject),
            **subject.metadata,
            **({"packed": self.packed} if self.packed else {}),
            "files": {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in (*graphs, *files)},
        }
        atomic_write(folder / FILE, json_bytes(about | {"own_sha256": own_sha256(about)}))
        return exported

    def _compare(self, what: str, folder: Path, outputs: Outputs) -> ParityRow:
        difference, relative = self.subject.differences(outputs, self.expected)
        counts = sum((self.form.operators(folder, part) for part in self.parts), Counter[str]())
        return ParityRow(
            what,
            self.subject.agreement(outputs, self.expected),
            difference,
            relative,
            self.subject.quality(outputs),
            one_ms=0.0,
            per_second=0.0,
            mib=sum((folder / name).stat().st_size for name in self.form.files(self.parts)) / 2**20,
            integer=sum(count for kind, count in counts.items() if is_integer(kind)),
            operators=sum(counts.values()),
        )


def why_not(row: ParityRow, run: ParityRow, float_speed: tuple[float, float], allowed_loss: float) -> str:
    """Return why an int8 graph is not worth keeping, or ''. `float_speed` is that of the graph it was made from."""
    if not row.integer:
        return "the quantizer left no operator that computes with integers"
    labeled = row.accuracy is not None and run.accuracy is not None
    lost = (run.accuracy or 0.0) - (row.accuracy or 0.0) if labeled else 100 - row.agreement
    if lost > allowed_loss:
        measure = "accuracy" if labeled else "same answers"
        return f"it loses {lost:.2f} points of {measure}, allowed are {allowed_loss:g} (--allowed-loss)"
    if row.per_second <= float_speed[1]:
        return f"it is not faster here: {row.per_second:,.1f} images/s against {float_speed[1]:,.1f}"
    return ""


def is_integer(kind: str) -> bool:
    """Return whether an operator of onnxruntime multiplies or adds integers. Conversions do not count."""
    known = ("QLinear", "QGemm", "QAttention", "MatMulInteger", "ConvInteger", "DynamicQuantizeMatMul")
    return kind.startswith(known)


def check_precision(kind: type[ExportSubject], precision: str) -> None:
    """Raise UsageError if the task cannot be exported in this precision."""
    if precision not in kind.precisions:
        option = "--half" if precision == "float16" else "--int8"
        raise UsageError(
            f"{option} does not apply to {kind.task}, which is exported as {', '.join(kind.precisions)} only"
        )


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
        raise UsageError("--half and --int8 exclude each other; use one of them")
    if int8 and not form.int8_modes:
        raise UsageError(f"--int8 needs --to onnx; {form.name} cannot be quantized")
    if not 0 <= allowed_loss <= 100:
        raise UsageError(f"--allowed-loss is {allowed_loss:g}, expected points from 0 to 100")


def _preprocessing(subject: ExportSubject) -> dict[str, Any]:
    if subject.preprocessing is None:
        return {}
    takes = subject.takes.format("height", "width")
    return {
        "preprocessing": asdict(subject.preprocessing),
        "input": f"pixels, {takes}; mean and std are inside the graph",
    }


def _batches(pixels: np.ndarray) -> Iterator[np.ndarray]:
    return (pixels[start : start + BATCH] for start in range(0, len(pixels), BATCH))


def artifact_card(subject: ExportSubject, outputs: tuple[str, ...], exported: Exported) -> str:
    """Return the text of the card: the model, its comparison with the run, and how to use it."""
    head = [column.removeprefix("#") for column in columns(exported.measure, exported.compared)]
    table = [head, ["---", *["---:"] * (len(head) - 2), "---"], *(row.cells() for row in exported.rows)]
    lines = "\n".join(f"| {' | '.join(cells)} |" for cells in table)
    return f"""---
library_name: patchloom
tags: [patchloom, {exported.to}]
---

# {subject.network}, {exported.to} {exported.precision}

{subject.summary}

Compared with the run on {exported.images:,} {exported.compared}, on the machine that exported it:

{lines}

{subject.describe_graphs(outputs)}

```python
import patchloom_runtime  # needs numpy, Pillow and the engine; patchloom.load does the same

model = patchloom_runtime.load("this/folder")
{subject.usage}
```
"""
