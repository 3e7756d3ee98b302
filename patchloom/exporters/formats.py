"""The export formats. A new one is a row of `FORMATS` and a file next to this one.

Most formats are graphs: a file that `patchloom_runtime` opens without the code it was made from. A page is
self-contained and opens in a browser. The file of a format imports optional packages inside the methods that need them.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np

from patchloom_runtime.engines.engine import ENGINES, MODEL, Engine, Graph, check_installed
from patchloom_runtime.errors import UsageError, nearest

if TYPE_CHECKING:
    from patchloom.exporters.graph import GraphPart
    from patchloom.exporters.single_page.page import Page

FORMATS = {
    "onnx": "patchloom.exporters.onnx:OnnxFormat",
    "torch": "patchloom.exporters.torch:TorchFormat",
    "openvino": "patchloom.exporters.openvino:OpenVinoFormat",
    "html": "patchloom.exporters.html:HtmlFormat",
}


class Format(ABC):
    """One file format."""

    name: ClassVar[str]
    packages: ClassVar[tuple[str, ...]] = ()  # needed to write it
    install: ClassVar[str] = ""  # command that installs them

    def check_installed(self) -> None:
        """Raise UsageError with the install command if a package is missing."""
        check_installed(self.name, self.packages, self.install)


class PageFormat(Format):
    """A self-contained file that runs the model."""

    @abstractmethod
    def write_page(self, model: Any, out: str, *, int8: bool) -> "Page":
        """Write the page of a loaded model."""


class GraphFormat(Format):
    """A graph, written from a torch module. The engine of the same name opens it."""

    int8_modes: ClassVar[tuple[str, ...]] = ()  # quantization modes, the fastest first

    @property
    def engine(self) -> Engine:
        """The engine that opens the format."""
        return ENGINES[self.name]

    def files(self, parts: Iterable[str] = (MODEL,)) -> tuple[str, ...]:
        """Return the file names of the given parts."""
        return self.engine.files(parts)

    def open(self, folder: Path, threads: int | None = None, part: str = MODEL) -> Graph:
        """Open one part with the engine."""
        return self.engine.open(folder, threads, part)

    @abstractmethod
    def write(self, part: "GraphPart", folder: Path) -> None:
        """Write one part."""

    @abstractmethod
    def operators(self, folder: Path, part: str = MODEL) -> Counter[str]:
        """Count the operators of a part by kind."""

    def quantize(self, folder: Path, out: Path, mode: str, batches: Iterable[np.ndarray]) -> None:
        """Write the graph of `folder` in int8 to `out`, calibrated on batches of pixels."""
        raise NotImplementedError


def format_named(name: str) -> Format:
    """Return the format with this name. Raises UsageError if there is none."""
    if name not in FORMATS:
        expected = ", ".join(FORMATS)
        raise UsageError(f"There is no format {name!r}, expected one of {expected}.{nearest(name, [*FORMATS])}")
    module, _, attribute = FORMATS[name].partition(":")
    return cast(Format, getattr(import_module(module), attribute)())


def format_for(out: str) -> str:
    """Return the default format for an output path: html for .html and .htm, else onnx."""
    return "html" if out.lower().endswith((".html", ".htm")) else "onnx"
