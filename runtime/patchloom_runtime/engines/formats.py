"""The formats a run is exported to. A new one is a row here and a file beside it.

Most are graphs, which an artefact holds and `patchloom.load` opens; a page opens by itself. A graph takes arrays,
mostly pixels, (B, H, W, 3) uint8 of any batch B, and gives named arrays; normalisation is inside. What does not fit one
graph is several, each called a part. A file of a format imports
its own package, and torch, in the methods that need them: the light runtime has those of graphs too, and opens what
they wrote without torch.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from patchloom_runtime.errors import UsageError, nearest
from patchloom_runtime.untrusted import memory_bytes

if TYPE_CHECKING:
    from patchloom.exporters.graph import Traced

GRAPHS = {
    "onnx": "patchloom_runtime.engines.onnx_graph:Onnx",
    "torch": "patchloom_runtime.engines.torch_graph:TorchProgram",
    "openvino": "patchloom_runtime.engines.openvino_graph:OpenVino",
}
PAGES = {"html": "patchloom.exporters.html:Html"}
Graph = Callable[..., dict[str, np.ndarray]]  # arrays in order, mostly pixels (B, H, W, 3) uint8 → outputs by name
MODEL = "model"  # the part that every artefact has
RUN_SECONDS = 600.0  # that a graph may take for one batch of a new size, looked at between two operators


def run_memory() -> int:
    """Bytes that graphs may take in this process: half of what the machine, or its control group, has."""
    return memory_bytes() // 2


def size_class(arrays: Iterable[Any]) -> tuple[Any, ...]:
    """Types and sides of arrays, in powers of two: what needs about the same memory and time."""
    return tuple((each.dtype, *(side.bit_length() for side in each.shape)) for each in arrays)


class Format(ABC):
    """One form of file."""

    name: ClassVar[str]
    to_write: ClassVar[tuple[str, ...]] = ()  # packages that are imported to write it
    install: ClassVar[str] = ""  # what brings them

    def refuse_missing(self, packages: Sequence[str]) -> None:
        """A UsageError where a package is not installed, with the command that brings it."""
        missing = [package for package in packages if find_spec(package) is None]
        if missing:
            raise UsageError(f"{self.name} needs {' and '.join(missing)}, not installed here: {self.install}")


class PageFormat(Format):
    """A file that runs the model by itself and is not opened from here."""

    @abstractmethod
    def write_page(self, run: str, out: str, *, int8: bool) -> Any:
        """Write the page of a run; what is known of it."""


class GraphFormat(Format):
    """A graph: written from a torch module, opened without its code."""

    endings: ClassVar[tuple[str, ...]]  # of the files that make up a part; that of the one to open first
    to_open: ClassVar[tuple[str, ...]]  # packages that are imported to open it
    int8_ways: ClassVar[tuple[str, ...]] = ()  # in which it can be quantised, the fastest first

    def files(self, parts: Iterable[str] = (MODEL,)) -> tuple[str, ...]:
        """Names of the files of some parts."""
        return tuple(f"{part}{ending}" for part in parts for ending in self.endings)

    @abstractmethod
    def write(self, traced: "Traced", folder: Path) -> None:
        """Write one part."""

    @abstractmethod
    def open(self, folder: Path, threads: int | None = None, part: str = MODEL) -> Graph:
        """A part of the graph in a folder, ready to answer."""

    @abstractmethod
    def operators(self, folder: Path, part: str = MODEL) -> Counter[str]:
        """What a part is made of: kind of operator → how many."""

    def quantize(self, folder: Path, out: Path, way: str, batches: Iterable[np.ndarray]) -> None:
        """Write the graph of `folder` in int8 into `out`, calibrated on batches of pixels."""
        raise NotImplementedError


def format_named(name: str) -> Format:
    """The row of that name; a UsageError where there is none."""
    known = GRAPHS | PAGES
    if name not in known:
        raise UsageError(f"There is no format {name!r}, expected one of {', '.join(known)}.{nearest(name, [*known])}")
    module, _, attribute = known[name].partition(":")
    found: Format = getattr(import_module(module), attribute)()
    return found


def graph_format(name: str) -> GraphFormat:
    """The row of a graph."""
    found = format_named(name)
    assert isinstance(found, GraphFormat), name
    return found


def format_for(out: str) -> str:
    """The name of the format that a file or folder of that name is written in, where none was asked for."""
    return "html" if out.lower().endswith((".html", ".htm")) else "onnx"
