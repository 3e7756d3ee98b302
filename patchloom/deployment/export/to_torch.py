"""torch's own: a program of torch.export, which runs without the code it was made from."""

import io
import warnings
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from patchloom.deployment.export.formats import MODEL, Graph, GraphFormat
from patchloom.errors import CheckpointError

if TYPE_CHECKING:
    from patchloom.deployment.export.graph import Traced

ENDING = ".pt2"


class TorchProgram(GraphFormat):
    """One file; for CPUs."""

    name = "torch"
    endings = (ENDING,)
    to_write = ("torch",)
    to_open = ("torch",)
    install = "pip install torch"

    def write(self, traced: "Traced", folder: Path) -> None:
        """The module gives a dict of outputs, whose names the program keeps."""
        import torch

        from patchloom.disk import write_new  # which the light runtime does without

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            inputs = tuple(traced.inputs.values())
            program = torch.export.export(traced.module, inputs, dynamic_shapes=traced.dynamic_shapes())
            packed = io.BytesIO()  # onto a full disk torch's own writer ends the process
            torch.export.save(program, packed)
        write_new(folder / f"{traced.part}{ENDING}", packed.getvalue())

    def open(self, folder: Path, threads: int | None = None, part: str = MODEL) -> Graph:
        """The program as a module; the number of threads is torch's, which all of the process shares."""
        self.refuse_missing(self.to_open)
        import torch

        del threads
        path = folder / f"{part}{ENDING}"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                program = torch.export.load(path).module(check_guards=False)
        except Exception as error:  # of a damaged archive it raises nearly anything
            raise CheckpointError(
                f"{path} cannot be opened: {(str(error).splitlines() or [type(error).__name__])[0]}"
            ) from error

        def answer(*arrays: np.ndarray) -> dict[str, np.ndarray]:
            with torch.inference_mode():
                found = program(*(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays))
            return {name: value.numpy() for name, value in found.items()}

        return answer

    def operators(self, folder: Path, part: str = MODEL) -> Counter[str]:
        """Of torch.export's graph."""
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nodes = torch.export.load(folder / f"{part}{ENDING}").graph.nodes
        return Counter(str(node.target) for node in nodes if node.op == "call_function")
