"""torch's own: a program of torch.export, which runs without the code it was made from."""

import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from patchloom.deployment.export.formats import Graph, GraphFormat
from patchloom.errors import CheckpointError

MODEL = "model.pt2"


class TorchProgram(GraphFormat):
    """One file; for CPUs."""

    name = "torch"
    files = (MODEL,)
    to_write = ("torch",)
    to_open = ("torch",)
    install = "pip install torch"

    def write(self, module: Any, pixels: Any, folder: Path, outputs: Sequence[str]) -> None:
        """The module gives a dict of outputs, whose names the program keeps."""
        import torch

        del outputs
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(module, (pixels,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
            torch.export.save(program, folder / MODEL)

    def open(self, folder: Path, threads: int | None = None) -> Graph:
        """The program as a module; the number of threads is torch's, which all of the process shares."""
        self.refuse_missing(self.to_open)
        import torch

        del threads
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                program = torch.export.load(folder / MODEL).module()
        except Exception as error:  # of a damaged archive it raises nearly anything
            raise CheckpointError(
                f"{folder / MODEL} cannot be opened: {(str(error).splitlines() or [type(error).__name__])[0]}"
            ) from error

        def answer(pixels: np.ndarray) -> dict[str, np.ndarray]:
            with torch.inference_mode():
                found = program(torch.from_numpy(np.ascontiguousarray(pixels)))
            return {name: value.numpy() for name, value in found.items()}

        return answer

    def operators(self, folder: Path) -> Counter[str]:
        """Of torch.export's graph."""
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nodes = torch.export.load(folder / MODEL).graph.nodes
        return Counter(str(node.target) for node in nodes if node.op == "call_function")
