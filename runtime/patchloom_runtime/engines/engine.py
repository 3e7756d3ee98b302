"""The table of engines. A new one is a row here and a file next to this one.

A graph takes arrays, usually pixels (B, H, W, 3) uint8 for any batch size B, and returns named arrays; normalization is
inside it. A model that does not fit into one graph consists of several, called parts. Files come from anyone, so each
engine checks a graph before the inference library sees it. `patchloom/exporters/` writes these files.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np

from patchloom_runtime.errors import UsageError
from patchloom_runtime.untrusted import memory_bytes

Graph = Callable[..., dict[str, np.ndarray]]  # arrays by position → outputs by name
MODEL = "model"  # the part that every artifact has
RUN_SECONDS = 600.0  # limit for the first batch of each size, checked between operators
MOST_VALUES = 1 << 27  # values that an operator may create from a size stored in the file


@dataclass(frozen=True)
class Engine:
    """One row of the table: how graphs of a format are opened."""

    name: str
    suffixes: tuple[str, ...]  # of the files of one part; the first is the one to open
    package: str  # that runs it
    install: str  # command that installs the package
    opener: str  # module:function of (path, threads)

    def files(self, parts: Iterable[str] = (MODEL,)) -> tuple[str, ...]:
        """Return the file names of the given parts."""
        return tuple(f"{part}{suffix}" for part in parts for suffix in self.suffixes)

    def path(self, folder: Path, part: str = MODEL) -> Path:
        """Return the path of the file to open."""
        return folder / f"{part}{self.suffixes[0]}"

    def open(self, folder: Path, threads: int | None = None, part: str = MODEL) -> Graph:
        """Check and open one part. `threads` defaults to all cores.

        Raises UsageError if the engine's package is not installed and CheckpointError if the file is damaged.
        """
        check_installed(self.name, (self.package,), self.install)
        module, _, function = self.opener.partition(":")
        return cast(Graph, getattr(import_module(module), function)(self.path(folder, part), threads))


ENGINES = {
    engine.name: engine
    for engine in (
        Engine(
            "onnx",
            (".onnx",),
            "onnxruntime",
            "pip install 'patchloom-runtime[onnx]'",
            "patchloom_runtime.engines.onnx:open_onnx",
        ),
        Engine(
            "torch",
            (".pt2",),
            "torch",
            "pip install torch",
            "patchloom_runtime.engines.torch_program:open_torch_program",
        ),
        Engine(
            "openvino",
            (".xml", ".bin"),
            "openvino",
            "pip install 'patchloom-runtime[openvino]'",
            "patchloom_runtime.engines.openvino:open_openvino",
        ),
    )
}


def check_installed(name: str, packages: Iterable[str], install: str) -> None:
    """Raise UsageError with the install command if a package that a format needs is missing."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise UsageError(f"{name} needs {' and '.join(missing)} (not installed): {install}")


def run_memory() -> int:
    """Return the bytes that graphs may use in this process: half of the machine's or container's memory."""
    return memory_bytes() // 2


def size_class(arrays: Iterable[Any]) -> tuple[Any, ...]:
    """Return dtypes and sides rounded to powers of two. Inputs of one class need about the same memory and time."""
    return tuple((each.dtype, *(side.bit_length() for side in each.shape)) for each in arrays)
